"""What the figures should be, and whether they are; and which implementation the figures choose."""

from fnmatch import fnmatchcase
from typing import NamedTuple

from benchmarks.gpu.results import DONE, Results

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
        (Figure("kernels", "attention bf16 64x1024x12x64 implementation=cudnn", "TFLOP/s"),),
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
    lines = ["| what | must | aim | measured | | of |", "|---|---|---|---|---|---|"]
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
        return ["Kernels beside XLA: not measured."]
    worse = [f"{name} ({ratio:.2f})" for name, ratio in ratios if ratio < 1]
    if not worse:
        return [f"No kernel is slower than XLA's version, of {len(ratios)} measured."]
    return [f"Slower than XLA's version (its time over ours): {', '.join(worse)}."]


def repetition(results: Results) -> list[str]:
    """Return which runs of part `repeat` gave the bits of the first."""
    runs = {
        name: record for (part, name), record in results.records.items() if part == "repeat" and record.status == DONE
    }
    said = []
    for first, others in (
        ("first", [name for name in runs if "cudnn" not in name and name != "first"]),
        ("--kernels xla --attention cudnn", [name for name in runs if name.endswith("cudnn, again")]),
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

# Operation of kernels.GROUPS -> the items whose times count, at GPT-2 124M's shapes.
COMPARED = {
    "layernorm": (
        "layernorm_forward bf16 65536x768", "layernorm_backward bf16 65536x768",
        "residual_layernorm_forward bf16 65536x768", "residual_layernorm_backward bf16 65536x768",
    ),
    "gelu": ("gelu_forward bf16 65536x3072", "gelu_backward bf16 65536x3072"),
    "classifier": ("classifier bf16 32768x50257x50304*",),
    "embedding backward": ("embedding_backward bf16 64x1024x768x50304",),
    "adamw": ("adamw_update bf16 124518400",),
    "global norm": ("global_norm bf16 124518400",),
}  # fmt: skip
ATTENTIONS = {"wgmma": "flash", "mma": "flash", "cudnn": "cudnn", "naive": "naive"}


def measured_lines(results: Results, page: str) -> str:
    """The lines of MEASURED in llmc_jax/kernels/choice.py that these figures give, with their times as comments."""
    capability = results.machine.get("capability", "")
    if not capability:
        return ""
    from llmc_jax.kernels import Machine

    target = Machine("gpu", results.machine["device"], capability).target
    lines = []
    for operation, patterns in COMPARED.items():
        times = [_both_times(results, pattern) for pattern in patterns]
        known = [each for each in times if each is not None]
        if len(known) < len(times):
            continue
        ours, xla = (sum(each[k] for each in known) for k in (0, 1))
        winner = "pallas" if ours <= xla else "xla"
        lines.append(
            f'    ("{target}", "{operation}"): ("{winner}", "{page}"),  # pallas {ours:,.0f} us, xla {xla:,.0f} us'
        )
    found = {
        name.rpartition("=")[2]: us
        for name, us in results.figures("kernels", "attention bf16 64x1024x12x64 implementation=*", "us")
    }
    if found:
        winner = min(found, key=lambda each: found[each])
        said = ", ".join(f"{name} {us:,.0f} us" for name, us in found.items())
        lines.append(f'    ("{target}", "attention"): ("{ATTENTIONS[winner]}", "{page}"),  # {said}')
        if ATTENTIONS[winner] == "flash":  # --attention flash runs the version that the kernels' own table names
            lines.append(f"    # and in attention_sizes of pallas_kernels/tuning.py: version {winner} on {target}")
    return "\n".join(lines)


def _both_times(results: Results, pattern: str) -> tuple[float, float] | None:
    """Microseconds of ours and of XLA's, of the fastest form; XLA wins where ours computes something wrong."""
    ours, xla = best(results, Figure("kernels", pattern, "us"), less=True), None
    for (part, name), record in results.records.items():
        if part == "kernels" and record.status == DONE and fnmatchcase(name, pattern) and "xla us" in record.figures:
            xla = float(record.figures["xla us"])
    if xla is None:
        return None
    return (ours[1] if ours else float("inf")), xla
