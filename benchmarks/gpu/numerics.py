"""Errors and a verdict of each kernel, and of the model on kernels, as llmc_jax/trials/numerics.py finds them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu import solvers
from llmc_jax import kernels
from llmc_jax.config.model import parse_descriptor
from llmc_jax.models.gpt2 import model as gpt2
from llmc_jax.training.state import DTYPES
from llmc_jax.trials import problems
from llmc_jax.trials.children import Figures
from llmc_jax.trials.numerics import judged, judged_model


def measure(
    function: str,
    dtype: str,
    sizes: list[int],
    implementation: str = "pallas",
    *,
    interpret: bool = False,
    form: str = "",
    model: str = "",
    reference: str = "fp64",
    **options: Any,
) -> Figures:
    """Errors of one function on one shape, `verdict`: right, or what is wrong; and `bits`: whether they repeat, where
    that is promised.

    reference: fp64, or fp32 where float64 would not fit into the memory.
    """
    if function == "model":
        return measure_model(model, dtype, *sizes, interpret=interpret)
    name = f"{function} {dtype} {sizes} {options}"
    given = problems.problem(function, dtype, sizes, problems.seed_of(name), **options)
    solver = solvers.implementation(function, implementation, interpret=interpret, form=form)
    promised = solvers.repeats_bits(function, implementation)
    wide, rounding = {"fp64": jnp.float64, "fp32": jnp.float32}[reference], options.get("rounding", "nearest")
    run = jax.jit(given.bind(solver)).lower(*given.arrays).compile()
    return _with_verdict(*judged(given, run, promised=promised, interpret=interpret, wide=wide, rounding=rounding))


def _with_verdict(figures: Figures, wrong: list[str]) -> Figures:
    return figures | {"verdict": f"WRONG: {'; '.join(wrong)}" if wrong else "right"}


def measure_model(model: str, dtype: str, B: int, T: int, *, interpret: bool = False) -> Figures:
    """Loss and gradients of a small model on kernels, in 16 bits, beside XLA's operations in float32 without TF32."""
    config, kind = parse_descriptor(model), DTYPES[dtype]
    rng = np.random.default_rng(0)
    flat = problems.random_weights(config)
    tokens = rng.integers(0, config.vocab_size, (B, T + 1)).astype(np.int32)
    batch = jnp.asarray(tokens[:, :-1]), jnp.asarray(tokens[:, 1:])
    scale = 128.0 if dtype == "fp16" else 1.0

    def run(weights: jax.Array, execution: gpt2.Execution) -> tuple[float, np.ndarray]:
        gradient = jax.value_and_grad(gpt2.loss_fn)
        loss, found = jax.jit(gradient, static_argnums=(3, 4))(weights, *batch, config, execution, scale)
        return float(loss) / scale, np.asarray(found, np.float64) / scale

    kernel = gpt2.Execution(kernels.assembled(kernels.pallas_functions(solvers.target(), interpret, dtype))[0])
    loss, found = run(flat.astype(kind), kernel)
    # the reference has the same rounded weights: what is compared is the computation
    with jax.default_matmul_precision("highest"):
        wanted_loss, wanted = run(flat.astype(kind).astype(jnp.float32), gpt2.PLAIN)
    return _with_verdict(*judged_model(config, dtype, (loss, found), (wanted_loss, wanted)))
