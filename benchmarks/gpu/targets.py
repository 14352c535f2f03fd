"""What the figures should be, and whether they are; and which implementation the figures choose."""

from fnmatch import fnmatchcase
from typing import NamedTuple

from benchmarks.gpu.results import DONE, Results
from llmc_jax.machine.gpus import Machine

MET, REACHED, MISSED, UNKNOWN = "aim met", "must met", "NOT MET", "not measured"


class Figure(NamedTuple):
    """A figure of the items of a part whose names match; of several the best."""

    part: str
    pattern: str
    name: str


class Target(NamedTuple):
    """One line of the summary. Where `over` names others, the figure is a ratio to the best of them."""

    what: str
    must: float
    aim: float
    unit: str  # of the copy, tok/s, of the peak, of a step, s, times
    figure: Figure
    over: tuple[Figure, ...] = ()
    less: bool = False  # whether less is better


def _share(what: str, pattern: str, must: float, aim: float) -> Target:
    return Target(what, must, aim, "of the copy", Figure("kernels", pattern, "of copy"))


def _mfu(model: str, must: float, aim: float) -> Target:
    return Target(
        f"step, {model}, bf16, PaLM MFU", must, aim, "of the peak", Figure("step", f"{model} bf16 B=*", "PaLM MFU")
    )


STEP = Figure("step", "d12 bf16 B=*", "tok/s")
FP32_STEP = Figure("step", "d12 fp32 TF32 B=4", "tok/s")
TARGETS = (
    *[
        _share(f"{function}, C={C}", f"{function} bf16 65536x{width * C}", 0.75, 0.85)
        for C in (768, 1600)
        for function, width in (
            ("layernorm_forward", 1), ("layernorm_backward", 1), ("residual_layernorm_forward", 1),
            ("residual_layernorm_backward", 1), ("gelu_forward", 4), ("gelu_backward", 4),
        )
    ],
    _share("classifier, bf16, 50,304 columns", "classifier bf16 *x50257x50304*", 0.80, 0.90),
    _share("AdamW, 124M", "adamw_update bf16 124518400", 0.85, 0.92),
    _share("AdamW, 1558M", "adamw_update bf16 1557725184", 0.85, 0.92),
    Target(
        "flash attention, HS=64, T=1024, TFLOP/s over cuDNN's", 0.0, 1.0, "times",
        Figure("kernels", "attention bf16 64x1024x12x64 implementation=*m*ma", "TFLOP/s"),
        (
            Figure("kernels", "attention bf16 64x1024x12x64 implementation=cudnn", "TFLOP/s"),
            Figure("torch", "attention bf16 64x1024x12x64 backend=cudnn", "TFLOP/s"),
        ),
    ),
    Target("step, d12, bf16", 560e3, 620e3, "tok/s", STEP),
    Target("step, d12, bf16, over PyTorch's", 1.0, 1.2, "times", STEP, (Figure("torch", "d12 bf16 B=*", "tok/s"),)),
    Target("step, d12, bf16, over llm.c's", 1.0, 1.2, "times", STEP, (Figure("llmc", "d12 bf16 B=*", "tok/s"),)),
    _mfu("d24", 0.53, 0.57),
    _mfu("d36", 0.55, 0.59),
    _mfu("d48", 0.56, 0.61),
    Target(
        "step, d12, fp32 with TF32, B=4, over llm.c's", 1.0, 1.3, "times", FP32_STEP,
        (Figure("llmc", "d12 fp32 TF32 B=4", "tok/s"),),
    ),
    Target(
        "step, d12, fp32 with TF32, B=4, over PyTorch's", 1.0, 1.3, "times", FP32_STEP,
        (Figure("torch", "d12 tf32 B=4", "tok/s"),),
    ),
    Target(
        "time that a save adds, d12, bf16", 0.05, 0.05, "of a step",  # of 524,288 tokens
        Figure("resume", "save of d12 bf16", "of a 524,288-token step"), less=True,
    ),
    Target("command to first step, d12, cold", 60, 40, "s", Figure("start", "d12", "cold s"), less=True),
    Target("command to first step, d12, warm", 15, 10, "s", Figure("start", "d12", "warm s"), less=True),
)  # fmt: skip


def best(results: Results, figure: Figure, less: bool = False) -> tuple[str, float] | None:
    """The best item and its figure; None if none was measured."""
    found = list(results.figures(*figure))
    return (min if less else max)(found, key=lambda each: each[1]) if found else None


def value(results: Results, target: Target) -> tuple[str, float] | None:
    """(item, figure) of a target; None if something of it was not measured."""
    found = best(results, target.figure, target.less)
    if found is None or not target.over:
        return found
    others = [other[1] for figure in target.over if (other := best(results, figure)) is not None]
    return (found[0], found[1] / max(others)) if others else None


def verdict(target: Target, found: float | None) -> str:
    """Return whether a target is met."""
    if found is None:
        return UNKNOWN
    sign = -1 if target.less else 1
    if sign * found >= sign * target.aim:
        return MET
    return REACHED if sign * found >= sign * target.must else MISSED


def _amount(target: Target, number: float) -> str:
    if target.unit in ("of the copy", "of the peak", "of a step"):
        return f"{100 * number:.1f} %"
    return f"{number:,.0f} {target.unit}" if number >= 1000 else f"{number:.3g} {target.unit}"


def summary(results: Results) -> str:
    """The targets as a Markdown table, then what repeats, and kernels that XLA beats."""
    if not results.machine.get("capability"):
        said = [*repetition(results), *resumption(results)]
        return "\n".join(["In small, without a GPU: no figure here means anything.", "", *said])
    lines = [f"| what | must | aim | {results.card} | | of |", "|---|---|---|---|---|---|"]
    for target in TARGETS:
        found = value(results, target)
        cells = [target.what, _amount(target, target.must) if target.must else "", _amount(target, target.aim)]
        cells += [_amount(target, found[1]) if found else "", verdict(target, found and found[1])]
        lines.append(f"| {' | '.join(cells)} | {found[0] if found else ''} |")
    return "\n".join([*lines, "", *slower(results), *repetition(results), *resumption(results)])


def slower(results: Results) -> list[str]:
    """The kernels that take longer than XLA's version."""
    ratios = list(results.figures("kernels", "*", "xla / ours"))
    if not ratios:
        return [f"{results.card}, kernels beside XLA: not measured."]
    worse = [f"{name} ({ratio:.2f})" for name, ratio in ratios if round(ratio, 2) < 1]
    if not worse:
        return [f"{results.card}: no kernel is slower than XLA's version, of {len(ratios)} measured."]
    return [f"{results.card}, slower than XLA's version (its time over ours): {', '.join(worse)}."]


def repetition(results: Results) -> list[str]:
    """Return which runs of part `repeat` gave the bits of the first."""
    runs = {
        name: record for (part, name), record in results.records.items() if part == "repeat" and record.status == DONE
    }
    said = []
    for first, others in (
        ("first", [name for name in runs if "cudnn" not in name and name != "first"]),
        ("--kernels xla --attention cudnn", [name for name in runs if name.endswith("cudnn again")]),
    ):
        for name in others if first in runs else []:
            same = all(runs[name].figures[each] == runs[first].figures[each] for each in ("losses", "state"))
            said.append(f"'{name}' {'has the bits of' if same else 'DIFFERS from'} '{first}'")
    return [f"Repetition: {'; '.join(said)}."] if said else ["Repetition: not measured."]


def resumption(results: Results) -> list[str]:
    """Return whether a run that was killed went on with the bits of the one that was not."""
    said = [
        f"'{name}': {record.figures.get('verdict', record.figures.get('bits'))}"
        for (part, name), record in results.records.items()
        if part == "resume" and record.status == DONE and "resumed at" in record.figures
    ]
    return [f"Continued runs: {'; '.join(said)}."] if said else ["Continued runs: not measured."]


# ----- what the measurements choose ---------------------------------------------------------------------------------

# Operation of kernels.GROUPS -> the items whose times count, at GPT-2 124M's shapes. Of several patterns of one item
# the first that was measured counts: the classifier of 8,192 rows has no peer.
COMPARED = {
    "layernorm": [
        ("layernorm_forward bf16 65536x768",), ("layernorm_backward bf16 65536x768",),
        ("residual_layernorm_forward bf16 65536x768",), ("residual_layernorm_backward bf16 65536x768",),
    ],
    "gelu": [("gelu_forward bf16 65536x3072",), ("gelu_backward bf16 65536x3072",)],
    "classifier": [("classifier bf16 32768x50257x50304*", "classifier bf16 8192x50257x50304*")],
    "embedding backward": [("embedding_backward bf16 64x1024x768x50304",)],
    "adamw": [("adamw_update bf16 124518400",)],
    "global norm": [("global_norm bf16 124518400",)],
}  # fmt: skip
ATTENTION = "attention bf16 64x1024x12x64 implementation="
VERSIONS = {"wgmma": "flash", "mma": "flash"}  # of ours; another name is an implementation's own
PRODUCTS = ("head", "fc", "fcproj")  # of kernels.GROUPS: they save passes, so a whole step without them is beside them
PRODUCTS_ASIDE = "--products xla"  # the variant that is such a step
TRITON = "d12 bf16 --triton-gemm {} B=64"
Times = dict[str, float]  # of implementations by their names


def measured_lines(results: Results) -> str:
    """Return the lines of MEASURED in llmc_jax/kernels/choice.py that these figures give."""
    capability = results.machine.get("capability", "")
    if not capability:
        return ""
    target = Machine("gpu", results.card, capability).target
    lines = []
    for operation, items in COMPARED.items():
        times = [_times(results, patterns) for patterns in items]
        names = set.intersection(*map(set, times))
        lines += _line(target, operation, {name: sum(each[name] for each in times) for name in names}, results.card)
    versions = {name.removeprefix(ATTENTION): us for name, us in results.figures("kernels", f"{ATTENTION}*", "us")}
    attention: Times = {}
    for name, us in versions.items():
        own = VERSIONS.get(name, name)
        attention[own] = min(us, attention.get(own, us))
    lines += _line(target, "attention", attention, results.card)
    if versions and (fastest := min(versions, key=lambda each: versions[each])) in VERSIONS:
        # --attention flash runs the version that the kernels' own table names
        lines.append(f"    # and in attention_sizes of pallas_kernels/tuning.py: version {fastest} on {target}")
    by_triton = {
        choice: ms for choice in ("on", "off") for _, ms in results.figures("step", TRITON.format(choice), "ms")
    }
    lines += _line(target, "triton_gemm", by_triton, results.card) if len(by_triton) == 2 else []
    return "\n".join([*lines, *_product_lines(results, target)])


def _product_lines(results: Results, target: str | None) -> list[str]:
    """Return the lines of products of ours, which save passes: a whole step with them, and one without any."""
    steps = {"pallas": ("step", "d12 bf16 B=64"), "xla": ("variants", PRODUCTS_ASIDE)}
    times = {by: ms for by, (part, name) in steps.items() for _, ms in results.figures(part, name, "ms")}
    return [line for name in PRODUCTS if len(times) == 2 for line in _line(target, name, times, results.card)]


def _line(target: str | None, operation: str, times: Times, card: str) -> list[str]:
    """Return the line of an operation; none where nothing was measured."""
    winner, beside, *_ = [*sorted(times, key=lambda name: (times[name], name)), "", ""]
    if not winner:
        return []
    ratio = f"{times[beside] / times[winner]:.2f}" if beside else "0.0"
    return [f'    ("{target}", "{operation}"): Measured("{winner}", "{beside}", {ratio}, "{card}"),']


def _times(results: Results, patterns: tuple[str, ...]) -> Times:
    """Return microseconds of ours, of its fastest form, and of XLA's; ours is left out where it computes wrongly."""
    for pattern in patterns:
        ours = best(results, Figure("kernels", pattern, "us"), less=True)
        found = {"pallas": ours[1]} if ours else {}
        for (part, name), record in results.records.items():
            if part == "kernels" and fnmatchcase(name, pattern) and "xla us" in record.figures:
                found["xla"] = float(record.figures["xla us"])
        if found:
            return found
    return {}
