"""Every implementation of every operation, and which of them runs.

Each is a row: what computes it, what it supports, its functions. Rows stand in order of preference, and the first that
fits what was asked for and can run here is chosen. A new implementation is a new row.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from llmc_jax.errors import InputError
from llmc_jax.kernels import cudnn, ours
from llmc_jax.kernels.findings import Findings, Sizes, Variant
from llmc_jax.kernels.functions import GROUPS, PLAIN, assembled, functions_of
from llmc_jax.machine.target import Machine
from llmc_jax.ops import attention, gelu
from llmc_jax.ops.table import XLA, Function, Operations
from llmc_jax.training.optimizer import Optimizer

# What measurement chose, by architecture and operation: the implementation, and the table that shows it. What is not
# here has not been measured on a GPU yet and follows the order of the rows.
MEASURED: dict[tuple[str, str], tuple[str, str]] = {}
MEASURED_HERE = "measured here"
ESTIMATED = "by estimate: not measured on a GPU yet"


class Wish(NamedTuple):
    """What the user asked for: --kernels, --attention, -ge."""

    kernels: str = "auto"
    attention: str = "auto"
    gelu_fusion: int = -1


class Setting(NamedTuple):
    """What an implementation may or may not be able to serve."""

    machine: Machine
    dtype: str  # fp32, bf16, fp16
    head_size: int


class Implementation(NamedTuple):
    """One way to compute an operation."""

    operation: str  # a key of GROUPS
    name: str  # unique within the operation
    by: str  # xla, pallas, triton: what --kernels names; cudnn, cublas
    functions: Callable[[Setting, Variant], Sequence[Function]]  # in the order of GROUPS
    problem: Callable[[Setting], str] = lambda _: ""  # why it cannot serve a setting; empty where it can
    kind: str = ""  # of attention: flash, cudnn, naive, relu: what --attention names
    makes_matrix: bool = False  # attention's T x T matrix, which then counts in memory
    repeats_bits: bool = False  # promised: the same inputs give the same bits. cuDNN and XLA may sum in any order


class Choice(NamedTuple):
    """What runs one operation, and why."""

    operation: str  # a key of GROUPS
    implementation: str  # the name of a row
    by: str  # what computes it: xla, pallas, triton, cudnn, cublas
    why: str  # for people
    fell_back: bool = False  # it is not what was asked for
    makes_matrix: bool = False  # attention's T x T matrix
    backward: str = ""  # the name of the row whose backward runs, where that is another one
    version: str = ""  # which form of it runs; empty: the one that pallas_kernels/tuning.py names
    sizes: Sizes = ()  # what is other than in pallas_kernels/tuning.py
    measured: bool = False  # it was the fastest of what was timed on this card
    ratio: float = 0.0  # of the time of the best other implementation there to its own; 0: no other was timed
    beside: str = ""  # the name of that other row

    @property
    def text(self) -> str:
        """Return what runs, in words."""
        return " ".join(filter(None, [self.implementation, Variant(self.version, self.sizes).text]))


class Selection(NamedTuple):
    """What runs everything."""

    op: Operations
    optimizer: Optimizer
    choices: tuple[Choice, ...]
    gelu_fusion: int  # 1: the forward's GELU is computed in the product before it


def makes_matrix(choices: Sequence[Choice]) -> bool:
    """Return whether attention makes its T x T matrix."""
    return any(choice.makes_matrix for choice in choices)


# ----- what each can serve ------------------------------------------------------------------------------------------

FLASH_LARGEST_HEAD = 128  # channels of a head, which a kernel holds in registers
NO_GPU = "there is no GPU"
IN_PRODUCT = "in the product"  # GELU, by NVIDIA's library, which computes no gradient of it


def _pallas_problem(setting: Setting) -> str:
    machine = setting.machine
    if machine.platform != "gpu":
        return NO_GPU
    if machine.target is None:
        found = f"{machine.kind} (compute capability {machine.capability or 'unknown'})"
        return f"the kernels need an NVIDIA GPU of compute capability 8.x, 9.x, 10.x or 12.x, not {found}"
    return ""


def _flash_problem(setting: Setting) -> str:
    """Attention without the T x T matrix by our kernels."""
    if problem := _pallas_problem(setting):
        return problem
    if setting.dtype == "fp32":
        return "the kernels compute in bf16 or fp16, not fp32"
    if setting.head_size > FLASH_LARGEST_HEAD:
        return f"the kernels take heads of up to {FLASH_LARGEST_HEAD} channels, not {setting.head_size}"
    return ""


def _cudnn_problem(setting: Setting) -> str:
    """Return what `jax.nn.dot_product_attention` would refuse later."""
    machine, dtype, head_size = setting
    if machine.platform != "gpu":
        return NO_GPU
    if machine.version < (8, 0):
        return f"it needs an NVIDIA GPU, Ampere or later, not {machine.kind}"
    if dtype == "fp32":
        return "it computes in bf16 or fp16, not fp32"
    largest = 256 if machine.version >= (9, 0) else 128
    if head_size > largest or head_size % 8:
        return f"here it takes heads of up to {largest} channels, a multiple of 8, not {head_size}"
    return ""


def _cublas_problem(setting: Setting) -> str:
    if setting.machine.version < (8, 0):
        return f"NVIDIA's library computes it, on Ampere GPUs and later, not on {setting.machine.kind}"
    return ""


def _triton_problem(setting: Setting) -> str:
    if setting.machine.platform != "gpu":
        return NO_GPU
    if setting.machine.version == (0, 0):
        return f"its kernels are made for NVIDIA GPUs, not for {setting.machine.kind}"
    from llmc_jax.kernels.triton import availability

    return availability() or ""


# ----- the rows -----------------------------------------------------------------------------------------------------


def _xla(operation: str) -> Implementation:
    return Implementation(operation, "xla", "xla", lambda *_: functions_of(PLAIN, operation))


def _pallas(
    operation: str, name: str = "pallas", problem: Callable[[Setting], str] = _pallas_problem, kind: str = ""
) -> Implementation:
    def functions(setting: Setting, variant: Variant) -> Sequence[Function]:
        return functions_of(ours.pallas_functions(_target(setting), variant=variant), operation)

    return Implementation(operation, name, "pallas", functions, problem, kind, repeats_bits=True)


def _triton(operation: str) -> Implementation:
    def functions(_: Setting, __: Variant) -> Sequence[Function]:
        return [ours.triton_kernel(name) for name in GROUPS[operation]]

    return Implementation(operation, "triton", "triton", functions, _triton_problem, repeats_bits=True)


def _target(setting: Setting) -> str:
    return str(setting.machine.target)


# In order of preference. By bytes: one kernel that reads and writes each array once, against the several passes that
# XLA's fusions make; the norm is one reading either way. Triton's kernels run where they are asked for.
IMPLEMENTATIONS: tuple[Implementation, ...] = (
    _pallas("layernorm"),
    _xla("layernorm"),
    _triton("layernorm"),
    _pallas("gelu"),
    _xla("gelu"),
    Implementation(
        "gelu", IN_PRODUCT, "cublas", lambda *_: [gelu.gelu_forward_in_product, XLA.gelu_backward], _cublas_problem
    ),
    _pallas("attention", "flash, pallas", _flash_problem, "flash"),
    Implementation(
        "attention", "cudnn", "cudnn",
        lambda *_: [cudnn.cudnn_attention_forward, cudnn.cudnn_attention_backward], _cudnn_problem, "cudnn",
    ),
    Implementation(
        "attention", "naive, softmax pallas", "pallas",
        lambda at, _: ours.by_softmax(partial(ours.pallas_kernel, target=_target(at))), _pallas_problem, "naive",
        makes_matrix=True,
    ),
    Implementation(
        "attention", "naive, softmax triton", "triton", lambda *_: ours.by_softmax(ours.triton_kernel), _triton_problem,
        "naive", makes_matrix=True,
    ),
    _xla("attention")._replace(name="naive, xla", kind="naive", makes_matrix=True),
    Implementation(
        "attention", "relu, pallas", "pallas", lambda at, variant: ours.relu_kernels(_target(at), variant),
        _flash_problem, "relu", repeats_bits=True,
    ),
    Implementation(
        "attention", "relu, xla", "xla",
        lambda *_: [attention.relu_attention_forward, attention.relu_attention_backward], kind="relu",
        makes_matrix=True,
    ),
    _pallas("classifier"),
    _xla("classifier"),
    _triton("classifier"),
    _pallas("embedding backward"),
    _xla("embedding backward"),
    _pallas("adamw"),
    _xla("adamw"),
    _xla("global norm"),
    _pallas("global norm"),
)  # fmt: skip


def implementations(operation: str) -> list[Implementation]:
    """Return the rows of an operation, in order of preference."""
    return [row for row in IMPLEMENTATIONS if row.operation == operation]


# ----- choosing -----------------------------------------------------------------------------------------------------


class Candidates(NamedTuple):
    """What may run an operation."""

    rows: list[Implementation]  # in the order in which they are tried; the last one can always run
    why: str  # of the first one, if it runs
    asked: bool = False  # the first one was named by the user: another one is a fallback


def choose_one(operation: str, wish: Wish, setting: Setting, findings: Findings | None = None) -> Choice:
    """Choose an implementation of an operation.

    findings: what was found out on this card; `auto` is then what was the fastest, and what was found to be wrong does
    not run. What was asked for and cannot run here becomes XLA's, with the reason.
    """
    choice = _first(candidates(operation, wish, setting), setting, findings or Findings())
    if operation != "gelu" or wish.gelu_fusion < 1:
        return choice
    row = next(row for row in implementations("gelu") if row.name == IN_PRODUCT)
    if problem := row.problem(setting) or (findings or Findings()).problem("gelu", row.name):
        return choice._replace(why=f"not {row.name}: {problem}", fell_back=True)
    return Choice(
        "gelu", row.name, row.by, "as asked", choice.fell_back,
        backward=choice.implementation, version=choice.version, sizes=choice.sizes,
    )  # fmt: skip


def select(choices: Sequence[Choice], setting: Setting, strict: bool = False) -> Selection:
    """Return what has been chosen, one choice for each operation. With strict a fallback raises InputError."""
    if strict:
        _refuse_fallbacks(choices)
    by_name = {
        name: function
        for choice in choices
        for name, function in zip(GROUPS[choice.operation], functions_for(choice, setting), strict=True)
    }
    in_product = any(choice.implementation == IN_PRODUCT for choice in choices)
    return Selection(*assembled(by_name), tuple(choices), int(in_product))


def functions_for(choice: Choice, setting: Setting) -> list[Function]:
    """Return the functions of a choice, in the order of GROUPS. Raises KeyError for a row that there is not."""
    rows = {row.name: row for row in implementations(choice.operation)}
    variant = Variant(choice.version, choice.sizes)
    functions = list(rows[choice.implementation].functions(setting, variant))
    if choice.backward:
        functions[-1] = rows[choice.backward].functions(setting, variant)[-1]
    return functions


def candidates(operation: str, wish: Wish, setting: Setting) -> Candidates:
    """Return what may run an operation, in the order in which it is tried."""
    if operation == "attention":
        return _attention_candidates(wish, setting)
    rows = {row.by: row for row in implementations(operation) if row.by != "cublas"}  # -ge asks for that
    if wish.kernels == "auto":
        return _automatic([row for row in rows.values() if row.by != "triton"], operation, setting)
    if wish.kernels not in rows:
        return Candidates([rows["xla"]], f"there is no {wish.kernels.capitalize()} kernel of this")
    return Candidates([rows[wish.kernels], rows["xla"]], "as asked", asked=True)


def _automatic(rows: list[Implementation], operation: str, setting: Setting) -> Candidates:
    """Return what was measured to be the fastest first, then the order of the rows, with XLA's last."""
    measured, source = MEASURED.get((str(setting.machine.target), operation), ("", ""))
    first = [row for row in rows if measured in (row.kind, row.name)] if measured else []
    rows = first + [row for row in rows if row not in first]
    why = f"fastest, see {source}" if first else ESTIMATED
    if setting.machine.platform != "gpu":
        rows, why = [row for row in rows if row.by == "xla"], "on a CPU"
    elif setting.machine.target is None:
        why = _pallas_problem(setting)
    return Candidates(rows, why)


def _attention_candidates(wish: Wish, setting: Setting) -> Candidates:
    """With --attention auto: without the T x T matrix where that can be, unless XLA alone was asked for."""
    rows = implementations("attention")

    def of(kind: str) -> list[Implementation]:
        """Of naive and relu, the one whose kernels were asked for first."""
        if kind in ("flash", "cudnn"):
            return [row for row in rows if row.kind == kind]
        by = "pallas" if kind == "relu" and wish.kernels != "xla" else wish.kernels
        return [row for row in rows if row.kind == kind and row.by in (by, "xla")]

    if wish.attention == "relu":
        return Candidates(of("relu"), "as asked", asked=wish.kernels == "pallas")
    if wish.attention == "naive" or (wish.attention == "auto" and wish.kernels == "xla"):
        return Candidates(of("naive"), "as asked")
    if wish.attention != "auto":
        return Candidates([*of(wish.attention), *of("naive")], "as asked", asked=True)
    if wish.kernels == "pallas":
        return Candidates([*of("flash"), *of("naive")], "as asked", asked=True)
    return _automatic([*of("flash"), *of("cudnn"), *of("naive")], "attention", setting)


def _first(found: Candidates, setting: Setting, findings: Findings) -> Choice:
    """The first candidate that can run here; if any of them may, the one that was the fastest on this card."""

    def problem(row: Implementation) -> str:
        return row.problem(setting) or findings.problem(row.operation, row.name)

    operation, first = found.rows[0].operation, found.rows[0]
    fastest = next((each for each in findings.fastest if each.operation == operation), None)
    rows = {row.name: row for row in found.rows if not problem(row)}
    if not found.asked and fastest is not None and fastest.implementation in rows and len(found.rows) > 1:
        row, (ratio, beside) = rows[fastest.implementation], findings.ratio(fastest)
        why = f"{ratio:.2f} x {beside}, {MEASURED_HERE}" if beside else MEASURED_HERE
        choice = Choice(row.operation, row.name, row.by, why, False, row.makes_matrix, "", *fastest.variant)
        return choice._replace(measured=True, ratio=ratio, beside=beside)
    row = next(iter(rows.values()))
    why = found.why if row is first else problem(first)
    fell_back = found.asked and row is not first
    if fell_back:
        why = f"not {first.kind if first.kind in ('flash', 'cudnn') else first.by}: {why}"
    variant = findings.variant(row.operation, row.name)
    return Choice(row.operation, row.name, row.by, why, fell_back, row.makes_matrix, "", *variant)


def _refuse_fallbacks(choices: Sequence[Choice]) -> None:
    """Raise InputError if one of them is not what was asked for; alike ones are named together."""
    alike: dict[tuple[str, str], list[str]] = {}
    for choice in choices:
        if choice.fell_back:
            alike.setdefault((choice.implementation, choice.why), []).append(choice.operation)
    if alike:
        found = "; ".join(f"{', '.join(which)}: {what}, {why}" for (what, why), which in alike.items())
        raise InputError(f"--strict-kernels: {found}; leave --strict-kernels out to run it like this")
