"""Who solves a problem of llmc_jax/trials/problems.py: implementations by name, and which promise the same bits."""

from functools import partial
from typing import Any

from llmc_jax import kernels
from llmc_jax.config.model import CAUSAL, RELU
from llmc_jax.kernels import functions
from llmc_jax.kernels.choice import RELU_KERNEL, implementations
from llmc_jax.ops import attention as jnp_attention
from llmc_jax.trials.children import NotMeasured
from llmc_jax.trials.problems import WAYS, Function, plain_twin

# What there is a problem of: each kernel; of attention the pair of them.
FUNCTIONS = {name.rpartition("_")[0] if "attention" in name else name for name in functions.FILES}


def target() -> str:
    """The architecture that kernels are made for here; sm_90 where they are interpreted on a CPU."""
    machine = kernels.this_machine()
    if machine.platform != "gpu":
        return "sm_90"
    if machine.target is None:
        raise NotMeasured(f"no kernels for {machine.kind}")
    return machine.target


def implementation(function: str, name: str = "pallas", *, interpret: bool = False, form: str = "") -> Any:
    """A function of `function`'s signature; of attention the pair forward, backward.

    name: pallas, xla; of attention pallas, mma, wgmma, cudnn, naive.
    """
    if "attention" in function:
        return _attention_pair(function, name, interpret)
    if name == "xla":
        return plain_twin(function)
    return functions.pallas_kernel(function, target(), interpret, **({"form": form} if form else {}))


def _attention_pair(function: str, name: str, interpret: bool) -> tuple[Function, Function]:
    if name == "cudnn":
        return functions.cudnn_attention_forward, functions.cudnn_attention_backward
    if name == "naive":
        spec = RELU if function.startswith("relu") else CAUSAL
        return partial(jnp_attention.attention_forward, spec=spec), partial(jnp_attention.attention_backward, spec=spec)
    if name == "wgmma" and target() != "sm_90":
        raise NotMeasured(f"wgmma exists on Hopper alone, and this is {target()}")
    version = {} if name == "pallas" else {"version": name}
    forward, backward = (functions.pallas_kernel(f"{function}_{way}", target(), interpret, **version) for way in WAYS)
    return forward, backward


def repeats_bits(function: str, name: str) -> bool:
    """Return whether an implementation, named as in `implementation`, promises the same bits for the same inputs."""
    if function.startswith("softmax"):  # a kernel inside an attention whose products are XLA's
        return name != "xla"
    if "attention" in function:
        by = {"cudnn": "cudnn", "naive": "xla"}.get(name, "pallas")
        relu = function.startswith("relu")
        rows = [
            row for row in implementations("attention").values() if (row.name == RELU_KERNEL) == relu or row.by == "xla"
        ]
        return any(row.repeats_bits for row in rows if row.by == by)
    operation = next(group for group, functions in kernels.GROUPS.items() if function in functions)
    return any(row.repeats_bits for row in implementations(operation).values() if row.by == name)
