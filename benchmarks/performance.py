"""What a card measured, on the pages: tables and a picture out of its records.

    python benchmarks/performance.py

Writes what stands in README.md, docs/performance.md and docs/compare.md between `<!-- performance.py: NAME -->` and
`<!-- until here -->`, and docs/performance.png, from benchmarks/results/gpu_nvidia_h200.json and the files beside it.
Needs no GPU. Leaves out measuring (gpu_check.py), and the card's own page with all records (gpu_check.py --page).
"""

import json
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu.results import DONE, Results  # noqa: E402
from llmc_jax.base.numbers import Interval  # noqa: E402

FOLDER, NAME = ROOT / "benchmarks/results", "gpu_nvidia_h200"
PAGES = tuple(ROOT / name for name in ("README.md", "docs/performance.md", "docs/compare.md"))
PICTURE = ROOT / "docs/performance.png"
BLOCK = re.compile(r"(<!-- performance\.py: ([\w ]+) -->\n)(.*?)(<!-- until here -->\n)", re.DOTALL)
STEP = "d12 bf16 B=64"
Row = tuple[str, ...]


def results() -> Results:
    """Return the card's records."""
    found = Results(FOLDER, "", NAME)
    found.read()
    return found


def file_of(name: str) -> Path:
    """Return a file beside the records: _groups.json, _losses_ours.txt and so on."""
    return FOLDER / f"{NAME}_{name}"


def figures(card: Results, part: str, name: str) -> dict[str, Any]:
    """Return what an item measured. Raises KeyError where it did not."""
    record = card.records[part, name]
    assert record.status == DONE, (part, name, record.message)
    return dict(record.figures)


def table(head: Row, rows: list[Row]) -> str:
    """Return Markdown: the first column to the left, the others to the right."""
    lines = [head, ("---", *["---:"] * (len(head) - 1)), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


# ----- the step -------------------------------------------------------------------------------------------------------


def trainers(card: Results) -> str:
    """Return the step of three programs side by side."""
    ours, torch, llmc = (figures(card, part, STEP) for part in ("step", "torch", "llmc"))
    machine = card.machine
    names = (
        f"**llmc-jax**, JAX {machine['jax']}",
        f"PyTorch {machine['torch']}, compiled, FlashAttention, fused AdamW, autocast",
        f"llm.c {llmc['version']}",
    )
    rows = [
        (
            name, f"{each['tok/s']:,.0f}", f"{each['ms']:.1f}", f"{each['ms'] / ours['ms']:.2f} ×",
            percent(each["spread"]) if "spread" in each else "not kept",
            f"{each['GiB']:.1f} GiB" if "GiB" in each else "not kept",
        )
        for name, each in zip(names, (ours, torch, llmc), strict=True)
    ]  # fmt: skip
    what = f"GPT-2 124M, bf16, B=64 T=1024, one {card.card}"
    head = (what, "tokens/s", "ms a step", "time / ours", "spread", "memory")
    return table(head, rows)


def small_batch(card: Results) -> str:
    """Return the steps of two programs at B=16, from their logs."""
    ours, llmc = (steps_of(file_of(f"losses_{who}.txt")) for who in ("ours", "llmc"))
    medians = [statistics.median(ms for *_, ms in each[4:]) for each in (ours, llmc)]
    rows = [
        (name, f"{ms:.1f}", f"{1e3 * 16 * 1024 / ms:,.0f}")
        for name, ms in zip(("llmc-jax", "llm.c"), medians, strict=True)
    ]
    return table((f"d12, B=16, {card.card}: train.py and train_gpt2cu", "ms a step", "tokens/s"), rows)


def sizes(card: Results) -> str:
    """Return the steps of several models."""
    rows = [
        (
            name, f"{each['ms']:.1f}", f"{each['tok/s']:,.0f}", percent(each["PaLM MFU"]), percent(each["llm.c MFU"]),
            f"{each['GiB']:.1f} GiB", percent(each["spread"]),
        )
        for name in (STEP, "d24 bf16 B=32", "d48 bf16 B=16")
        for each in [figures(card, "step", name)]
    ]  # fmt: skip
    return table((card.card, "ms", "tokens/s", "MFU (PaLM)", "MFU (llm.c)", "memory", "spread"), rows)


def variants(card: Results) -> str:
    """Return d12's step with one thing changed."""
    plain = figures(card, "step", STEP)
    names = ("-ge 1", "--xla_gpu_enable_command_buffer=", "--attention cudnn", "--kernels xla --attention cudnn")
    measured = {STEP: plain} | {name: figures(card, "variants", name) for name in names}
    rows = [
        (
            f"`{name}`", f"{each['ms']:.1f}", f"{each['GiB']:.1f} GiB", percent(each["spread"]),
            f"{each['ms'] / plain['ms']:.3f} ×",
        )
        for name, each in measured.items()
    ]  # fmt: skip
    return table((card.card, "ms", "memory", "spread", "time / unchanged"), rows)


# ----- where it goes --------------------------------------------------------------------------------------------------


def groups(card: Results) -> str:
    """Return the traced step by group of kernels, beside what was estimated before it ran."""
    found = json.loads(file_of("groups.json").read_text())
    rows = [
        (name, f"{kernels}", f"{estimated:.2f}" if estimated else "", f"{measured:.2f}")
        for name, kernels, estimated, measured in found["groups"]
    ]
    total = [sum(each[at] or 0 for each in found["groups"]) for at in (1, 2, 3)]
    rows.append(("**all**", f"{total[0]}", f"{total[1]:.2f}", f"{total[2]:.2f}"))
    rows.append(("nothing runs", "", "", f"{found['idle_ms']:.2f}"))
    rows.append(("the step, traced", "", "", f"{found['step_ms']:.2f}"))
    return table((f"group, {card.card}", "kernels", "estimated, ms", "measured, ms"), rows)


def attention(card: Results) -> str:
    """Return attention alone, ours and others'."""
    shape = "attention bf16 64x1024x12x64"
    names = {
        "ours, wgmma": ("kernels", f"{shape} implementation=wgmma"),
        "ours, mma": ("kernels", f"{shape} implementation=mma"),
        "cuDNN in PyTorch": ("torch", f"{shape} backend=cudnn"),
        "cuDNN by jax.nn": ("kernels", f"{shape} implementation=cudnn"),
        "FlashAttention in PyTorch": ("torch", f"{shape} backend=flash"),
    }
    rows = []
    for name, (part, item) in names.items():
        each = figures(card, part, item)
        shown = (f"{each['forward us']:,.0f}", f"{each['forward TFLOP/s']:.0f}", f"{each['backward us']:,.0f}")
        rows.append((name, *shown, f"{each['backward TFLOP/s']:.0f}", percent(each["spread"])))
    head = (f"B=64 T=1024, 12 heads of 64, {card.card}", "forward, µs", "TFLOP/s", "backward, µs", "TFLOP/s", "spread")
    return table(head, rows)


def kernels(card: Results) -> str:
    """Return every other kernel beside XLA's version of the operation."""
    rows = []
    for (part, name), record in card.records.items():
        if part != "kernels" or "attention" in name:
            continue
        each = card.shown(part, name, record)
        share = each.get("of copy")
        rows.append((
            name, f"{each['us']:,.1f}", f"{each['GB/s']:,.0f}", "" if share is None else percent(float(share)),
            f"{each['xla us']:,.1f}" if "xla us" in each else "not timed",
            f"{each['xla / ours']:.2f} ×" if "xla / ours" in each else "",
        ))  # fmt: skip
    return table((f"kernel, {card.card}", "µs", "GB/s", "of a copy", "XLA's, µs", "XLA's / ours"), rows)


def ceilings(card: Results) -> str:
    """Return what the card reaches at most."""
    rows = []
    for (part, name), record in card.records.items():
        if part == "machine" and record.status == DONE:
            rate, unit = next((record.figures[unit], unit) for unit in ("GB/s", "TFLOP/s") if unit in record.figures)
            rows.append((name, f"{rate:,.0f} {unit}", percent(float(record.figures["spread"]))))
    return table((card.card, "rate", "spread"), rows)


# ----- the rest -------------------------------------------------------------------------------------------------------

# What the plan said before the card had run anything: `llmc-jax plan FLAGS --gpu h200 --quick` at e8c1994.
BEFORE = {STEP: (110.0, 26.4), "d24 bf16 B=32": (154.0, 32.1), "d48 bf16 B=16": (345.0, 59.7)}


def planned(card: Results) -> str:
    """Return the plan's answers beside the figures: before the run, and by the rates that it gave."""
    rows = []
    for name, (before, gib) in BEFORE.items():
        each = figures(card, "step", name)
        now, memory = plan_of(each["flags"])
        rows.append((
            name, f"{before:.0f}", f"{1e3 * now.typical:.1f} ({1e3 * now.low:.0f} to {1e3 * now.high:.0f})",
            f"{each['ms']:.1f}", f"{gib:.1f}", f"{memory:.1f}", f"{each['GiB']:.1f}",
        ))  # fmt: skip
    head = (card.card, "before, ms", "now, ms", "measured, ms", "before, GiB", "now, GiB", "measured, GiB")
    return table(head, rows)


def plan_of(flags: str) -> tuple[Interval, float]:
    """Return seconds and GiB of a step on an H200, as the plan has them."""
    from llmc_jax.plan.compiled import plan_for
    from llmc_jax.plan.memory import computed
    from llmc_jax.plan.time import step_time

    plan = plan_for("h200", f"{flags} --products xla")  # those records are older than products of ours
    return step_time(plan).seconds, computed(plan).program / 2**30


def tokens(card: Results) -> str:
    """Return what a token of generated text takes, and a start."""
    one, many, start = (
        figures(card, part, name)
        for part, name in (("generate", "d12 bf16 B=1"), ("generate", "d12 bf16 B=16"), ("start", "d12"))
    )
    rows = [
        ("a token of one text", f"{one['ms']:.2f} ms", f"{one['tok/s']:,.0f} tokens/s"),
        ("a token of each of 16 texts", f"{many['ms']:.2f} ms", f"{many['tok/s']:,.0f} tokens/s"),
        ("train.py to its first step, nothing compiled before", f"{start['cold s']:.1f} s", ""),
        ("the same again, in another run folder", f"{start['warm s']:.1f} s", ""),
    ]
    return table((f"d12, bf16, {card.card}", "time", ""), rows)


def numerics(card: Results) -> str:
    """Return how many kernels were right, in words."""
    of_part = [record for (part, _), record in card.records.items() if part == "numerics"]
    right = sum(record.figures.get("verdict") == "right" for record in of_part)
    promised = [record for record in of_part if record.figures.get("bits") in ("the same", "OTHER")]
    same = sum(record.figures["bits"] == "the same" for record in promised)
    return (
        f"On one {card.card}, {right} of {len(of_part)} items were right, and {same} of {len(promised)} that promise "
        "their bits kept them in three repetitions."
    )


STEP_LINE = re.compile(
    r"^step +(\d+)/\d+ \| loss ([\d.]+) .*?\| norm ([\d.]+) .*?\| lr \S+ \| ([\d.]+) ms", re.MULTILINE
)


def steps_of(path: Path) -> list[tuple[int, float, float, float]]:
    """Return step, loss, norm and milliseconds of a log, as llm.c and train.py print them."""
    return [
        (int(step), float(loss), float(norm), float(ms)) for step, loss, norm, ms in STEP_LINE.findall(path.read_text())
    ]


def losses(card: Results) -> str:
    """Return the losses of llm.c's CUDA program and ours, step by step."""
    ours, theirs = (steps_of(file_of(f"losses_{who}.txt")) for who in ("ours", "llmc"))
    rows = [
        (f"{step}", f"{loss:.6f}", f"{other:.6f}", f"{loss - other:+.1e}", f"{norm:.4f}", f"{other_norm:.4f}")
        for (step, loss, norm, _), (_, other, other_norm, _) in zip(ours, theirs, strict=True)
    ]
    head = (f"step, {card.card}", "llmc-jax", "llm.c", "difference", "norm, llmc-jax", "norm, llm.c")
    return table(head, rows)


BLOCKS: dict[str, Callable[[Results], str]] = {
    "trainers": trainers, "small batch": small_batch, "sizes": sizes, "variants": variants, "groups": groups,
    "attention": attention, "kernels": kernels, "ceilings": ceilings, "planned": planned, "tokens": tokens,
    "numerics": numerics, "losses": losses,
}  # fmt: skip


def page_of(text: str, card: Results) -> str:
    """Return a page with its blocks made again. Raises KeyError for a name that is none."""
    return BLOCK.sub(lambda match: f"{match[1]}\n{BLOCKS[match[2]](card)}\n\n{match[4]}", text)


# ----- the picture ----------------------------------------------------------------------------------------------------

PARTS = {  # of the picture: groups of the trace, and a colour
    "products": ("products forward", "products backward", "products of the head"),
    "attention": ("attention forward", "attention backward", "delta of attention"),
    "GELU": ("GELU forward", "GELU backward"),
    "layernorm": ("layernorm forward", "layernorm backward"),
    "classifier": ("classifier",),
    "AdamW": ("AdamW",),
}
COLORS = ("#1f5fa8", "#d1495b", "#e6a532", "#7fb069", "#c9703f", "#8a5fbf", "#9a9a9a", "#e4e4e4")


def draw(card: Results, path: Path) -> None:
    """Draw the three trainers as bars, and below them where a step's time goes."""
    from matplotlib.figure import Figure

    from llmc_jax.base.pictures import save_figure

    figure = Figure(figsize=(9, 4.3), dpi=120)
    above, below = figure.subplots(2, 1, gridspec_kw={"height_ratios": (3, 1.25), "hspace": 0.55})
    figure.subplots_adjust(left=0.13, right=0.975, top=0.91, bottom=0.13)
    parts = {"llmc-jax": "step", "PyTorch": "torch", "llm.c": "llmc"}
    bars = {name: figures(card, part, STEP)["tok/s"] for name, part in parts.items()}
    for row, rate in enumerate(bars.values()):
        above.barh(row, rate, height=0.62, color=COLORS[0] if row == 0 else COLORS[6])
        above.text(rate - 8000, row, f"{rate:,.0f}", ha="right", va="center", color="white", fontweight="bold")
    above.set_yticks(range(len(bars)), list(bars))
    above.invert_yaxis()
    above.set_xticks([])
    above.set_title(f"Tokens per second, GPT-2 124M, bf16, B=64 T=1024, one {card.card}", loc="left", fontsize=10)
    _draw_step(below, json.loads(file_of("groups.json").read_text()))
    for axes in (above, below):
        axes.spines[["top", "right", "left", "bottom"]].set_visible(False)
        axes.tick_params(length=0)
    save_figure(figure, path)


def _draw_step(axes: Any, found: dict[str, Any]) -> None:
    """Draw one bar, cut into the time of each part."""
    left = {name: measured for name, _, _, measured in found["groups"]}
    parts = {part: sum(left.pop(name, 0.0) for name in names) for part, names in PARTS.items()}
    parts |= {"the rest": sum(left.values()), "nothing runs": found["idle_ms"]}
    begin = 0.0
    for (part, ms), color in zip(parts.items(), COLORS, strict=True):
        axes.barh(0, ms, left=begin, height=0.7, color=color, edgecolor="white", lw=0.6)
        if ms > 8:
            axes.text(begin + ms / 2, 0, f"{part} {ms:.1f}", ha="center", va="center", color="white", fontsize=9)
        begin += ms
    axes.set_xlim(0, begin)
    axes.set_yticks([])
    axes.set_xticks([])
    axes.set_title(f"Where the {found['step_ms']:.0f} ms of a traced step of llmc-jax go, ms", loc="left", fontsize=10)
    small = [(part, ms, color) for (part, ms), color in zip(parts.items(), COLORS, strict=True) if ms <= 8]
    handles = [axes.bar(0, 0, color=color) for *_, color in small]
    labels = [f"{part} {ms:.1f}" for part, ms, _ in small]
    axes.legend(handles, labels, loc="upper center", bbox_to_anchor=(0.5, -0.02), ncols=len(small), frameon=False,
                fontsize=8, handlelength=1, columnspacing=1.2)  # fmt: skip


def main() -> None:
    card = results()
    for path in PAGES:
        path.write_text(page_of(path.read_text(), card))
    draw(card, PICTURE)


if __name__ == "__main__":
    main()
