"""Every implementation of every operation, and which of them runs.

Each is a row: what computes it, what it supports, its functions. Rows stand in order of preference, and the first that
fits what was asked for and can run here is chosen. A new implementation is a new row.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from llmc_jax.base.errors import InputError
from llmc_jax.config.model import CAUSAL, RELU, Attention, ModelConfig, ModelShape
from llmc_jax.kernels import functions
from llmc_jax.kernels.functions import GROUPS, PLAIN, PRODUCTS, assembled
from llmc_jax.machine.compiling import Options
from llmc_jax.machine.gpus import Machine, measured_on
from llmc_jax.ops import attention
from llmc_jax.ops.table import Function, Operations
from llmc_jax.training.optimizer import Optimizer
from llmc_jax.training.rules import named


class Measured(NamedTuple):
    """What was the fastest on a card."""

    implementation: str  # the name of a row, or the kind of attention
    beside: str  # the best of the others that were timed there; empty: none was
    ratio: float  # of that one's time to its own
    card: str  # as the driver names it


# By architecture and operation, as benchmarks/gpu_check.sh prints it. What is not here has not been measured on such a
# GPU and follows the order of the rows. cuDNN's attention is the one that JAX calls (PyTorch's is nearer: 1.08 x).
MEASURED: dict[tuple[str, str], Measured] = {
    ("sm_90", "layernorm"): Measured("pallas", "xla", 2.93, "NVIDIA H200"),
    ("sm_90", "gelu"): Measured("pallas", "xla", 1.95, "NVIDIA H200"),
    ("sm_90", "classifier"): Measured("pallas", "", 0.0, "NVIDIA H200"),
    ("sm_90", "embedding backward"): Measured("pallas", "xla", 5.54, "NVIDIA H200"),
    ("sm_90", "adamw"): Measured("pallas", "xla", 1.38, "NVIDIA H200"),
    ("sm_90", "global norm"): Measured("xla", "pallas", 1.00, "NVIDIA H200"),
    ("sm_90", "attention"): Measured("flash", "cudnn", 1.38, "NVIDIA H200"),
}
MEASURED_HERE = "measured here"
ESTIMATED = "by estimate: not measured on such a GPU yet"


# What is found out on the card at hand (trials/), as plain data.
class Finding(NamedTuple):
    """One implementation of one operation, tried at a run's shapes."""

    operation: str  # a key of GROUPS
    implementation: str  # the name of a row
    problem: str = ""  # what is wrong with it; empty: nothing
    unjudged: str = ""  # why nobody knows whether it is right; what is not wrong may be used

    @property
    def key(self) -> tuple[str, str]:
        """Return what tells it from others."""
        return self.operation, self.implementation

    @property
    def label(self) -> str:
        """Return the name of what was tried."""
        return f"{self.operation}: {self.implementation}"


class Findings(NamedTuple):
    """What was found out for one combination of card, versions, shapes and precision."""

    found: tuple[Finding, ...] = ()
    fastest: tuple[tuple[str, str], ...] = ()  # operations and their rows: a whole step on them was right, and fastest
    options: Options = ()  # of XLA, which that step had to be compiled with
    steps: tuple[tuple[str, float], ...] = ()  # seconds of the whole steps that were timed, by what ran them
    notes: tuple[str, ...] = ()  # what a user should know, a line each

    def problem(self, operation: str, implementation: str) -> str:
        """Return why a row cannot be used on this card; empty where it can, or nothing is known."""
        return next((each.problem for each in self.found if each.key == (operation, implementation)), "")


NOTHING = Findings()  # has been found out


class Preferences(NamedTuple):
    """What the user asked for. The defaults leave it to the program."""

    kernels: str = "auto"
    attention: str = "auto"
    gelu_fusion: int = -1
    logit_rows: int = -1
    triton_gemm: str = "auto"
    products: str = "auto"


class Setting(NamedTuple):
    """What an implementation may or may not be able to serve."""

    machine: Machine
    dtype: str  # fp32, bf16, fp16
    head_size: int
    interpret: bool = False  # our kernels are simulated on a CPU: for tests
    spread: bool = False  # the optimizer's state is split over devices, or sums are in a fixed order
    attention: Attention = CAUSAL  # as the model has it
    optimizer: str = "adamw"  # as --optimizer has it
    replaced: tuple[str, ...] = ()  # products of ours, of `Operations`, that the model does without
    untried: bool = False  # nothing was compared on this card, where the choice is for a run
    # C, F, Vp: of the stream, the MLP's hidden layer (0: there is none) and the logits; here GPT-2 124M's
    widths: tuple[int, int, int] = (768, 3072, 50304)


Maker = Callable[[str, Setting], Function]  # of a function in ops/ its implementation, by name


class Implementation(NamedTuple):
    """One way to compute an operation."""

    operation: str  # a key of GROUPS
    name: str  # unique within the operation
    by: str  # xla, pallas, triton: what --kernels names; cudnn
    maker: Maker
    problem: Callable[[Setting], str] = lambda _: ""  # why it cannot serve a setting; empty where it can
    kind: str = ""  # of attention: what --attention names
    makes_matrix: bool = False  # attention's T x T matrix, which then counts in memory
    repeats_bits: bool = False  # promised: the same inputs give the same bits. cuDNN and XLA may sum in any order

    def functions(self, setting: Setting) -> dict[str, Function]:
        """Return its functions, by their names in GROUPS."""
        return {name: self.maker(name, setting) for name in GROUPS[self.operation]}


class Choice(NamedTuple):
    """What runs one operation, and why."""

    operation: str  # a key of GROUPS
    implementation: str  # the name of a row
    by: str  # what computes it: xla, pallas, triton, cudnn
    why: str  # for people
    fell_back: bool = False  # it is not what was asked for
    makes_matrix: bool = False  # attention's T x T matrix


class Selection(NamedTuple):
    """What runs everything."""

    op: Operations
    optimizer: Optimizer
    choices: tuple[Choice, ...]


def makes_matrix(choices: Sequence[Choice]) -> bool:
    """Return whether attention makes its T x T matrix."""
    return any(choice.makes_matrix for choice in choices)


# ----- what each can serve ------------------------------------------------------------------------------------------

FLASH_LARGEST_HEAD = 128  # channels of a head, which a kernel holds in registers
NO_GPU = "there is no GPU"
RELU_KERNEL = "relu, pallas"


def _pallas_problem(setting: Setting) -> str:
    machine = setting.machine
    if machine.platform != "gpu":
        return NO_GPU
    if machine.target is None:
        found = f"{machine.kind} (compute capability {machine.capability or 'unknown'})"
        return f"the kernels need an NVIDIA GPU of compute capability 8.x, 9.x, 10.x or 12.x, not {found}"
    return ""


def _update_problem(setting: Setting) -> str:
    """Return why our kernels cannot update the parameters; empty where they can."""
    if setting.spread:
        return "the kernels update whole buffers and sum in an order of their own; here are parts, or a fixed order"
    return _pallas_problem(setting)


def _other_attention(setting: Setting, own: Attention = CAUSAL) -> str:
    """Return why a kernel does not compute the model's attention; empty where it does. own: what it computes."""
    return "" if setting.attention == own else f"the kernel computes {own.words}, not {setting.attention.words}"


def _relu_problem(setting: Setting) -> str:
    """Return why our kernels cannot compute relu attention; empty where they can."""
    return _other_attention(setting, RELU) or _flash_problem(setting._replace(attention=CAUSAL))


def _flash_problem(setting: Setting) -> str:
    """Return why our kernels cannot compute attention without the T x T matrix; empty where they can."""
    if problem := _pallas_problem(setting) or _other_attention(setting):
        return problem
    if setting.dtype == "fp32":
        return "the kernels compute in bf16 or fp16, not fp32"
    if setting.head_size > FLASH_LARGEST_HEAD:
        return f"the kernels take heads of up to {FLASH_LARGEST_HEAD} channels, not {setting.head_size}"
    return ""


def _cudnn_problem(setting: Setting) -> str:
    """Return what `jax.nn.dot_product_attention` would refuse later."""
    machine, dtype, head_size, *_ = setting
    if machine.platform != "gpu":
        return NO_GPU
    if problem := _other_attention(setting):
        return problem
    if machine.version < (8, 0):
        return f"it needs an NVIDIA GPU, Ampere or later, not {machine.kind}"
    if dtype == "fp32":
        return "it computes in bf16 or fp16, not fp32"
    largest = 256 if machine.version >= (9, 0) else 128
    if head_size > largest or head_size % 8:
        return f"here it takes heads of up to {largest} channels, a multiple of 8, not {head_size}"
    return ""


def _product_problem(columns: int, setting: Setting) -> str:
    """Return why our kernels cannot compute a product over C and what follows it. columns: their place in widths."""
    if problem := _pallas_problem(setting):
        return problem
    if setting.machine.target != "sm_90":
        return f"the kernels are made of Hopper's instructions, which {setting.machine.kind} does not have"
    if setting.dtype != "bf16":
        return f"the kernels compute in bf16, not {setting.dtype}"
    C, found = setting.widths[0], setting.widths[columns]
    if not found or C % 64 or found % 128:
        return f"the kernels sum over a multiple of 64, for columns a multiple of 128, not over {C} for {found}"
    return ""


def _triton_problem(setting: Setting) -> str:
    if setting.machine.platform != "gpu":
        return NO_GPU
    if setting.machine.version == (0, 0):
        return f"its kernels are made for NVIDIA GPUs, not for {setting.machine.kind}"
    from llmc_jax.kernels.triton import availability

    return availability() or ""


# ----- the rows -----------------------------------------------------------------------------------------------------


def _pallas_kernel(name: str, setting: Setting) -> Function:
    return functions.pallas_kernel(name, str(setting.machine.target), setting.interpret)


BY: dict[str, tuple[Maker, Callable[[Setting], str]]] = {
    "xla": (lambda name, *_: PLAIN[name], lambda _: ""),
    "pallas": (_pallas_kernel, _pallas_problem),
    "triton": (lambda name, *_: functions.triton_kernel(name), _triton_problem),
}


def _relu_kernel(name: str, setting: Setting) -> Function:
    return functions.relu_kernel(name, str(setting.machine.target), setting.interpret)


def _row(
    operation: str, by: str, name: str = "", problem: Callable[[Setting], str] | None = None, kind: str = ""
) -> Implementation:
    """Return what computes an operation by XLA or by kernels of ours. name: where it is not `by`."""
    maker, usual = BY[by]
    return Implementation(operation, name or by, by, maker, problem or usual, kind, repeats_bits=by != "xla")


def _product_row(operation: str, columns: int) -> Implementation:
    """Return a product of ours and what follows it. columns: their place in a setting's widths."""

    def problem(setting: Setting) -> str:
        own = set(GROUPS[operation]) & set(setting.replaced)
        return "the model computes this by operations of its own" if own else _product_problem(columns, setting)

    return _row(operation, "pallas", problem=problem)


def _by_softmax(by: str) -> Implementation:
    """Return attention with the T x T matrix, whose softmaxes are kernels of ours."""
    kernel, usual = BY[by]

    def problem(setting: Setting) -> str:
        return usual(setting) or _other_attention(setting)

    def make(name: str, setting: Setting) -> Function:
        way = name.removeprefix("attention_")
        softmax = kernel(f"softmax_{way}", setting)
        return partial(getattr(attention, f"attention_by_softmax_{way}"), softmax=softmax)

    return Implementation("attention", f"naive, softmax {by}", by, make, problem, "naive", makes_matrix=True)


# In order of preference. By bytes: one kernel that reads and writes each array once, against the several passes that
# XLA's fusions make; the norm is one reading either way. Triton's kernels run where they are asked for.
IMPLEMENTATIONS: tuple[Implementation, ...] = (
    _row("layernorm", "pallas"),
    _row("layernorm", "xla"),
    _row("layernorm", "triton"),
    _row("gelu", "pallas"),
    _row("gelu", "xla"),
    _row("attention", "pallas", "flash, pallas", _flash_problem, "flash"),
    _row("attention", "pallas", RELU_KERNEL, _relu_problem, "flash")._replace(maker=_relu_kernel),
    Implementation(
        "attention", "cudnn", "cudnn", lambda name, *_: getattr(functions, f"cudnn_{name}"), _cudnn_problem, "cudnn"
    ),
    _by_softmax("pallas"),
    _by_softmax("triton"),
    _row("attention", "xla", "naive, xla", kind="naive")._replace(makes_matrix=True),
    _row("classifier", "pallas"),
    _row("classifier", "xla"),
    _row("classifier", "triton"),
    _row("embedding backward", "pallas"),
    _row("embedding backward", "xla"),
    _row("adamw", "pallas", problem=_update_problem),
    _row("adamw", "xla"),
    _row("global norm", "xla"),
    _row("global norm", "pallas", problem=_update_problem),
    _product_row("head", 2),
    _row("head", "xla"),
    _product_row("fc", 1),
    _row("fc", "xla"),
    _product_row("fcproj", 1),
    _row("fcproj", "xla"),
)  # fmt: skip


def implementations(operation: str) -> dict[str, Implementation]:
    """Return the rows of an operation by their names, in order of preference."""
    return {row.name: row for row in IMPLEMENTATIONS if row.operation == operation}


# ----- choosing -----------------------------------------------------------------------------------------------------


class Candidates(NamedTuple):
    """What may run an operation."""

    rows: list[Implementation]  # in the order in which they are tried; the last one can always run
    why: str  # of the first one, if it runs
    asked: bool = False  # the first one was named by the user: another one is a fallback


def choose_one(operation: str, asked: Preferences, setting: Setting, findings: Findings = NOTHING) -> Choice:
    """Choose an implementation of an operation.

    findings: what was found out on this card; `auto` is then what was the fastest, and what was found to be wrong does
    not run. What was asked for and cannot run here becomes XLA's, with the reason.
    """
    return _first(candidates(operation, asked, setting), setting, findings)


def select(choices: Sequence[Choice], setting: Setting, strict: bool = False) -> Selection:
    """Return what has been chosen, one choice for each operation. With strict a fallback raises InputError."""
    if strict:
        _refuse_fallbacks(choices)
    by_name: dict[str, Function] = {}
    for choice in choices:
        by_name |= implementations(choice.operation)[choice.implementation].functions(setting)
    return Selection(*assembled(by_name, named(setting.optimizer)), tuple(choices))


def candidates(operation: str, asked: Preferences, setting: Setting) -> Candidates:
    """Return what may run an operation, in the order in which it is tried."""
    if operation == "attention":
        return _attention_candidates(asked, setting)
    if operation in PRODUCTS:
        return _product_candidates(operation, asked, setting)
    rows = {row.by: row for row in implementations(operation).values()}
    if asked.kernels == "auto":
        return _automatic([row for row in rows.values() if row.by != "triton"], setting)
    if asked.kernels not in rows:
        return Candidates([rows["xla"]], f"there is no {asked.kernels.capitalize()} kernel of this")
    return Candidates([rows[asked.kernels], rows["xla"]], "as asked", asked=True)


def _automatic(rows: list[Implementation], setting: Setting) -> Candidates:
    """Return what was measured to be the fastest first, then the order of the rows, with XLA's last."""
    if setting.machine.platform != "gpu":
        return Candidates([row for row in rows if row.by == "xla"], "on a CPU")
    if setting.machine.target is None:
        return Candidates(rows, _pallas_problem(setting))
    found = MEASURED.get((setting.machine.target, rows[0].operation))
    fastest = [row for row in rows if found is not None and found.implementation in (row.kind, row.name)]
    if found is None or not fastest:
        return Candidates(rows, ESTIMATED)
    others = [row for row in rows if row not in fastest]
    return Candidates([*fastest, *others], measured_on(found.card, found.beside, found.ratio))


def _product_candidates(operation: str, asked: Preferences, setting: Setting) -> Candidates:
    """Return what may run a product that ends in something. --kernels asks for ours only where they can run."""
    ours, plain = implementations(operation).values()
    own = products_wish(operation, asked)
    wish = asked.kernels if own == "auto" else own
    if wish in ("xla", "triton"):
        return Candidates([plain], "as asked")
    if own == "auto" and (wish == "auto" or ours.problem(setting)):
        known = MEASURED.get((str(setting.machine.target), operation))
        if setting.untried and known is None and not ours.problem(setting):
            return Candidates([plain], "ours has not been compared with it on this card")
        return _automatic([ours, plain], setting)
    return Candidates([ours, plain], "as asked", asked=True)


def products_wish(operation: str, asked: Preferences) -> str:
    """Return what is asked for of a product: by -ge for those beside GELU, else by --products."""
    least = {"fc": 1, "fcproj": 2}.get(operation, 0)  # llm.c's: 1 is GELU itself, 2 its gradient too
    if least == 0 or asked.gelu_fusion < 0:
        return asked.products
    return "pallas" if asked.gelu_fusion >= least else "xla"


def _attention_candidates(asked: Preferences, setting: Setting) -> Candidates:
    """Return what may run attention.

    With --attention auto: without the T x T matrix where that can be, unless XLA alone was asked for.
    """
    kind, rows, spec = asked.attention, list(implementations("attention").values()), setting.attention
    if spec != CAUSAL:  # another model: a kernel of it runs where it can, else XLA's operations
        if kind in ("auto", "relu"):
            kind = {"xla": "naive", "pallas": "flash"}.get(asked.kernels, kind)
        own = [row for row in rows if row.kind == kind and not row.makes_matrix]  # what cannot compute it says so
        if spec == RELU and kind not in ("naive", "cudnn"):
            own = [row for row in rows if row.name == RELU_KERNEL]
        why = "as asked" if spec == RELU or kind == "naive" else f"no kernel computes {spec.words}"
        plain = [row for row in rows if row.name == "naive, xla"]
        return Candidates([*own, *plain], why, asked=kind in ("flash", "cudnn"))
    rows = [row for row in rows if row.name != RELU_KERNEL]
    without = [row for row in rows if not row.makes_matrix]
    naive = [row for row in rows if row.makes_matrix and row.by in (asked.kernels, "xla")]
    if kind in ("auto", "relu"):
        kind = {"xla": "naive", "pallas": "flash"}.get(asked.kernels, "auto")
    if kind == "auto":
        return _automatic([*without, *naive], setting)
    if kind == "naive":
        return Candidates(naive, "as asked")
    return Candidates([*(row for row in without if row.kind == kind), *naive], "as asked", asked=True)


def _first(found: Candidates, setting: Setting, findings: Findings) -> Choice:
    """Return the first candidate that can run here; if any of them may, the one that was the fastest on this card."""

    def problem(row: Implementation) -> str:
        return row.problem(setting) or findings.problem(row.operation, row.name)

    operation, first = found.rows[0].operation, found.rows[0]
    rows = {row.name: row for row in found.rows if not problem(row)}
    fastest = rows.get(dict(findings.fastest).get(operation, ""))
    if not found.asked and fastest is not None and len(found.rows) > 1:
        return Choice(operation, fastest.name, fastest.by, MEASURED_HERE, False, fastest.makes_matrix)
    row = next(iter(rows.values()))
    why = found.why if row is first else problem(first)
    fell_back = found.asked and row is not first
    if fell_back:
        why = f"not {first.by if first.kind == row.kind else first.kind}: {why}"
    return Choice(operation, row.name, row.by, why, fell_back, row.makes_matrix)


def _refuse_fallbacks(choices: Sequence[Choice]) -> None:
    """Raise InputError if one of them is not what was asked for; alike ones are named together."""
    alike: dict[tuple[str, str], list[str]] = {}
    for choice in choices:
        if choice.fell_back:
            alike.setdefault((choice.implementation, choice.why), []).append(choice.operation)
    if alike:
        found = "; ".join(f"{', '.join(which)}: {what}, {why}" for (what, why), which in alike.items())
        raise InputError(f"--strict-kernels: {found}; leave --strict-kernels out to run it like this")


def decoding_refusal(shape: ModelShape) -> str:
    """Return why no kernels of ours make a model's tokens one after another; empty where they do."""
    from pallas_kernels.tuning import DECODED_CHANNELS, HEAD_SIZES  # here: who has no GPU does without

    if not isinstance(shape, ModelConfig) or shape.family != "gpt2":
        return f"they compute GPT-2, not the family {shape.family}"
    if shape.attention != CAUSAL:
        return f"they compute causal softmax attention, not {shape.attention.words}"
    if shape.channels not in DECODED_CHANNELS or shape.head_size not in HEAD_SIZES:
        found = f"C={shape.channels}, heads of {shape.head_size}"
        return f"they take C in steps of 32 up to 1600 and heads in steps of 16 up to 128, not {found}"
    if shape.hidden != 4 * shape.channels or shape.padded_vocab_size % 16:
        return f"they take F=4C and Vp in steps of 16, not F={shape.hidden}, Vp={shape.padded_vocab_size}"
    return ""
