"""Which implementation of each operation runs: chosen once, before the run, and said once. No fallback is silent.

`Operations` is the seam: the model calls its functions and knows no kernel. XLA's are the plain ones of ops/; a GPU's
come from pallas_kernels/, from cuDNN or from Triton. `choose` picks by GPU, precision and what was asked for. Leaves
out the kernels themselves and their tile sizes (pallas_kernels/).
"""

import re
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import jax

from llmc_jax import optimizer
from llmc_jax.errors import InputError
from llmc_jax.ops import attention, classifier, embedding, gelu, layernorm

Function = Callable[..., Any]


class Operations(NamedTuple):
    """One implementation of every operation that has several. Signatures are those of the functions in ops/."""

    layernorm_forward: Function
    layernorm_backward: Function
    residual_layernorm_forward: Function
    residual_layernorm_backward: Function
    gelu_forward: Function
    gelu_backward: Function
    attention_forward: Function
    attention_backward: Function
    classifier: Function  # loss and gradient in one
    classifier_forward: Function  # loss alone
    embedding_backward: Function
    global_norm: Function
    adamw_update: Function


XLA = Operations(
    layernorm_forward=layernorm.layernorm_forward,
    layernorm_backward=layernorm.layernorm_backward,
    residual_layernorm_forward=layernorm.residual_layernorm_forward,
    residual_layernorm_backward=layernorm.residual_layernorm_backward,
    gelu_forward=gelu.gelu_forward,
    gelu_backward=gelu.gelu_backward,
    attention_forward=attention.attention_forward,
    attention_backward=attention.attention_backward,
    classifier=classifier.classifier,
    classifier_forward=classifier.classifier_forward,
    embedding_backward=embedding.embedding_backward,
    global_norm=optimizer.global_norm,
    adamw_update=optimizer.adamw_update,
)

# The rows of the table that a run prints: what is chosen together, and the functions it consists of.
GROUPS: dict[str, tuple[str, ...]] = {
    "layernorm": (
        "layernorm_forward",
        "layernorm_backward",
        "residual_layernorm_forward",
        "residual_layernorm_backward",
    ),
    "gelu": ("gelu_forward", "gelu_backward"),
    "attention": ("attention_forward", "attention_backward"),
    "classifier": ("classifier",),
    "embedding backward": ("embedding_backward",),
    "adamw": ("adamw_update",),
    "global norm": ("global_norm",),
}

# What measurement chose, by architecture and operation: the implementation, and the table that shows it. What is not
# here has not been measured on a GPU yet and follows ESTIMATED.
MEASURED: dict[tuple[str, str], tuple[str, str]] = {}
# By bytes: one kernel that reads and writes each array once, against the several passes that XLA's fusions make. The
# norm is one reading either way.
ESTIMATED = {
    "layernorm": "pallas",
    "gelu": "pallas",
    "attention": "flash",
    "classifier": "pallas",
    "embedding backward": "pallas",
    "adamw": "pallas",
    "global norm": "xla",
}


class Machine(NamedTuple):
    """What the choice depends on."""

    platform: str  # cpu, gpu
    kind: str  # as JAX names the device
    capability: str = ""  # of an NVIDIA GPU: "9.0"; of an AMD one nothing, or "gfx942"

    @property
    def version(self) -> tuple[int, int]:
        """The compute capability as numbers; (0, 0) of what is no NVIDIA GPU."""
        match = re.fullmatch(r"(\d+)\.(\d+)", self.capability)
        return (int(match[1]), int(match[2])) if match and self.platform == "gpu" else (0, 0)

    @property
    def target(self) -> str | None:
        """The architecture whose kernels run here; None where there are none."""
        major, minor = self.version
        if major == 8:
            return "sm_89" if minor >= 9 else "sm_86" if minor >= 6 else "sm_80"
        return {9: "sm_90", 10: "sm_100", 12: "sm_120"}.get(major)


class Wish(NamedTuple):
    """What the user asked for: --kernels, --attention, --strict-kernels, -ge."""

    kernels: str = "auto"
    attention: str = "auto"
    strict: bool = False
    gelu_fusion: int = -1


class Choice(NamedTuple):
    """What runs one operation, and why."""

    operation: str  # a key of GROUPS
    implementation: str  # xla, pallas, triton; of attention: naive, flash, cudnn, relu, with what runs it
    why: str


class Selection(NamedTuple):
    """What runs everything."""

    op: Operations
    choices: tuple[Choice, ...]
    gelu_fusion: int  # 0, 1 or 2: what -ge came to


def makes_matrix(choices: Sequence[Choice]) -> bool:
    """Whether attention makes its T x T matrix, which then counts in memory."""
    attention = next(choice.implementation for choice in choices if choice.operation == "attention")
    return attention.startswith("naive") or attention == "relu, xla"


def this_machine() -> Machine:
    """The device that JAX computes on by default. Initialises JAX's backend."""
    device = jax.devices()[0]
    capability = getattr(device, "compute_capability", "") if device.platform == "gpu" else ""
    return Machine(device.platform, device.device_kind, str(capability))


def choose(wish: Wish, machine: Machine, dtype: str, head_size: int) -> Selection:
    """Picks an implementation of every operation for a model of a head size, computed in dtype (fp32, bf16, fp16).

    What was asked for and cannot run here becomes XLA's, with the reason; with wish.strict it raises InputError.
    """
    chosen = {}
    for operation in GROUPS:
        if operation == "attention":
            chosen[operation] = _attention(wish, machine, dtype, head_size)
        else:
            chosen[operation] = _other(operation, wish, machine)
    fusion = max(wish.gelu_fusion, 0)
    if fusion and chosen["gelu"][0].implementation != "xla":
        xla = [XLA.gelu_forward, XLA.gelu_backward if fusion == 2 else chosen["gelu"][1][1]]
        rest = "" if fusion == 2 else "; the backward is the kernel's"
        chosen["gelu"] = Choice("gelu", "xla", f"-ge {fusion}: inside the product{rest}"), xla
    fallen = [choice for choice, _ in chosen.values() if choice.why.startswith("not ")]
    if wish.strict and fallen:
        alike: dict[tuple[str, str], list[str]] = {}
        for each in fallen:
            alike.setdefault((each.implementation, each.why), []).append(each.operation)
        found = "; ".join(f"{', '.join(which)}: {what}, {why}" for (what, why), which in alike.items())
        raise InputError(f"--strict-kernels: {found}; without --strict-kernels they run so")
    functions = {
        name: function
        for operation, (_, found) in chosen.items()
        for name, function in zip(GROUPS[operation], found, strict=True)
    }
    return Selection(XLA._replace(**functions), tuple(choice for choice, _ in chosen.values()), fusion)


Chosen = tuple[Choice, Sequence[Function]]


def _functions(op: Operations, operation: str) -> list[Function]:
    return [getattr(op, name) for name in GROUPS[operation]]


def _other(operation: str, wish: Wish, machine: Machine) -> Chosen:
    """Any operation but attention."""

    def xla(why: str) -> Chosen:
        return Choice(operation, "xla", why), _functions(XLA, operation)

    if wish.kernels == "xla":
        return xla("as asked")
    if machine.platform != "gpu":
        return xla(f"not {wish.kernels}: there is no GPU" if wish.kernels != "auto" else "on a CPU")
    if wish.kernels == "triton":
        problem = _triton_problem(machine)
        if operation not in TRITON:
            return xla("there is no Triton kernel of this")
        if problem:
            return xla(f"not triton: {problem}")
        return Choice(operation, "triton", "as asked"), _functions(triton_operations(), operation)
    target = machine.target
    if target is None:
        return xla(f"not pallas: {_no_kernels(machine)}" if wish.kernels != "auto" else _no_kernels(machine))
    if wish.kernels == "auto":
        implementation, source = MEASURED.get((target, operation), (ESTIMATED[operation], ""))
        why = f"fastest, see {source}" if source else "by estimate: not measured on a GPU yet"
        if implementation == "xla":
            return xla(why)
    else:
        why = "as asked"
    return Choice(operation, "pallas", why), _functions(pallas_operations(target), operation)


FLASH_LARGEST_HEAD = 128  # channels of a head, which a kernel holds in registers


def _flash_problem(wish: Wish, machine: Machine, dtype: str, head_size: int) -> str:
    """Why attention cannot run without the T x T matrix in our kernels, or an empty text."""
    if machine.platform != "gpu":
        return "there is no GPU"
    if machine.target is None:
        return _no_kernels(machine)
    if dtype == "fp32":
        return "the kernels compute in bf16 or fp16, not fp32"
    if head_size > FLASH_LARGEST_HEAD:
        return f"the kernels know heads of up to {FLASH_LARGEST_HEAD} channels, not {head_size}"
    if wish.kernels == "xla" and wish.attention != "flash":
        return "--kernels xla"
    return ""


def _cudnn_problem(machine: Machine, dtype: str, head_size: int) -> str:
    """Why cuDNN's attention cannot run, or an empty text: what `jax.nn.dot_product_attention` would refuse later."""
    if machine.platform != "gpu":
        return "there is no GPU"
    if machine.version < (8, 0):
        return f"it serves NVIDIA GPUs from Ampere on, not {machine.kind}"
    if dtype == "fp32":
        return "it computes in bf16 or fp16, not fp32"
    largest = 256 if machine.version >= (9, 0) else 128
    if head_size > largest or head_size % 8:
        return f"here it knows heads of up to {largest} channels, a multiple of 8, not {head_size}"
    return ""


def _attention(wish: Wish, machine: Machine, dtype: str, head_size: int) -> Chosen:
    """Attention: with the T x T matrix or without, softmax or relu, by XLA, our kernels or cuDNN."""
    problem = _flash_problem(wish, machine, dtype, head_size)
    if wish.attention == "relu":
        return _relu(wish, machine, problem)
    wanted, why = wish.attention, "as asked"
    if wanted == "auto":
        wanted, why = _best_attention(wish, machine, problem, _cudnn_problem(machine, dtype, head_size))
    if wanted == "naive":
        return _naive(wish, machine, why)
    if wanted == "cudnn":
        problem = _cudnn_problem(machine, dtype, head_size)
        if problem:
            return _naive(wish, machine, f"not cudnn: {problem}")
        return Choice("attention", "cudnn", why), [cudnn_attention_forward, cudnn_attention_backward]
    if problem:
        return _naive(wish, machine, f"not flash: {problem}")
    return Choice("attention", "flash, pallas", why), _functions(pallas_operations(str(machine.target)), "attention")


def _best_attention(wish: Wish, machine: Machine, flash_problem: str, cudnn_problem: str) -> tuple[str, str]:
    """What --attention auto comes to, and why: the fastest of what can run."""
    if machine.platform != "gpu" and wish.kernels != "pallas":
        return "naive", "on a CPU"
    if wish.kernels == "pallas":
        return ("naive", f"not flash: {flash_problem}") if flash_problem else ("flash", "as asked")
    if wish.kernels == "xla":
        return "naive", flash_problem
    problems = {"flash": flash_problem, "cudnn": cudnn_problem}
    best, source = MEASURED.get((str(machine.target), "attention"), (ESTIMATED["attention"], ""))
    if problems.get(best):
        why = problems[best]
        return next(((name, why) for name in problems if not problems[name]), ("naive", why))
    return best, f"fastest, see {source}" if source else "by estimate: not measured on a GPU yet"


def _relu(wish: Wish, machine: Machine, flash_problem: str) -> Chosen:
    """ReLU attention; with the T x T matrix where the kernels cannot run."""
    if not flash_problem:
        return Choice("attention", "relu, pallas", "without the T x T matrix"), _relu_kernels(str(machine.target))
    unmet = "not pallas" if wish.kernels == "pallas" else "with the T x T matrix"
    functions: list[Function] = [attention.relu_attention_forward, attention.relu_attention_backward]
    return Choice("attention", "relu, xla", f"{unmet}: {flash_problem}"), functions


def _naive(wish: Wish, machine: Machine, why: str) -> Chosen:
    """Attention with the T x T matrix, its softmax by a kernel where kernels were asked for by name."""
    if wish.kernels == "pallas" and machine.target is not None:
        from pallas_kernels import softmax

        forward: Function = partial(softmax.softmax_forward, target=machine.target)
        backward: Function = partial(softmax.softmax_backward, target=machine.target)
    elif wish.kernels == "triton" and not _triton_problem(machine):
        from llmc_jax.triton import softmax as triton_softmax

        forward, backward = triton_softmax.softmax_forward, triton_softmax.softmax_backward
    else:
        return Choice("attention", "naive, xla", why), _functions(XLA, "attention")
    return Choice("attention", f"naive, softmax {wish.kernels}", why), [
        partial(attention.attention_by_softmax_forward, softmax=forward),
        partial(attention.attention_by_softmax_backward, softmax=backward),
    ]


def _no_kernels(machine: Machine) -> str:
    found = f"{machine.kind} (compute capability {machine.capability or 'unknown'})"
    return f"there are kernels for NVIDIA GPUs of compute capability 8.x, 9.x, 10.x and 12.x, not for {found}"


# ----- the implementations ------------------------------------------------------------------------------------------


@cache
def pallas_operations(target: str, interpret: bool = False) -> Operations:
    """The handwritten kernels for an architecture ("sm_90"); attention is `flash`, in bf16 and fp16 only.

    interpret: simulated on the CPU, slowly, for tests and for whoever wants to look.
    """
    from pallas_kernels import adamw as adamw_kernels
    from pallas_kernels import attention as attention_kernels
    from pallas_kernels import classifier as classifier_kernels
    from pallas_kernels import embedding as embedding_kernels
    from pallas_kernels import gelu as gelu_kernels
    from pallas_kernels import layernorm as layernorm_kernels

    modules = (layernorm_kernels, gelu_kernels, attention_kernels, classifier_kernels, embedding_kernels, adamw_kernels)
    found = {
        name: partial(getattr(module, name), target=target, interpret=interpret)
        for name in Operations._fields
        for module in modules
        if hasattr(module, name)
    }
    return XLA._replace(**found)


@cache
def _relu_kernels(target: str) -> list[Function]:
    from pallas_kernels import attention as kernels

    return [partial(f, target=target) for f in (kernels.relu_attention_forward, kernels.relu_attention_backward)]


def cudnn_attention_forward(qkv: jax.Array, num_heads: int) -> tuple[jax.Array, Any]:
    """Causal attention by cuDNN from packed qkv (B, T, 3C): out (B, T, C), and its own means for the backward."""
    B, T, C3 = qkv.shape

    def attend(qkv: jax.Array) -> jax.Array:
        q, k, v = (qkv.reshape(B, T, 3, num_heads, -1)[:, :, i] for i in range(3))  # (B, T, NH, HS) each
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
        return out.reshape(B, T, C3 // 3)

    return jax.vjp(attend, qkv)


def cudnn_attention_backward(
    dout: jax.Array, _qkv: jax.Array, _out: jax.Array, saved: Any, _num_heads: int
) -> jax.Array:
    """Gradient of `cudnn_attention_forward` with respect to packed qkv: (B, T, 3C)."""
    return saved(dout)[0]


TRITON = ("layernorm", "classifier")  # and the softmax of naive attention


@cache
def triton_operations() -> Operations:
    """layernorm and classifier as Triton kernels (the extra `[triton]`)."""
    from llmc_jax.triton import classifier as triton_classifier
    from llmc_jax.triton import layernorm as triton_layernorm

    names = (*GROUPS["layernorm"], *GROUPS["classifier"])
    return XLA._replace(
        **{
            name: getattr(module, name)
            for name in names
            for module in (triton_layernorm, triton_classifier)
            if hasattr(module, name)
        }
    )


def _triton_problem(machine: Machine) -> str | None:
    """Why Triton kernels cannot run here, or None."""
    if machine.platform != "gpu":
        return "there is no GPU"
    if machine.version == (0, 0):
        return f"its kernels are made for NVIDIA GPUs, not for {machine.kind}"
    from llmc_jax.triton import availability

    return availability()
