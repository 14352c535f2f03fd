"""One layer's timeline as a picture: what runs when in its forward and in its backward pass, as coloured boxes.

Time in which nothing of the layer runs is left out: XLA runs some of a layer's instructions long before or after the
others, such as the copy of its weights. The idea is the figure in llm.c's announcement. matplotlib is imported when a
picture is drawn, without pyplot.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from llmc_jax.base.pictures import save_figure
from llmc_jax.machine.hlo import CONTAINERS
from llmc_jax.plan.program import Program
from llmc_jax.profile.trace import Span, Trace

COLORS = {
    "ln1": "#7fb069", "ln2": "#7fb069", "lnf": "#7fb069", "qkv": "#1f5fa8", "attproj": "#4a86c5", "fc": "#274b7a",
    "fcproj": "#6ba3d6", "attention": "#d1495b", "gelu": "#e6a532", "weights": "#9a9a9a", "embedding": "#8a5fbf",
    "head": "#17406d", "classifier": "#c9703f", "other": "#cccccc",
}  # fmt: skip


Stretch = tuple[float, float]  # start and end


class Box(NamedTuple):
    """A stretch of time in which one operation ran, in microseconds of its panel."""

    operation: str
    start: float
    end: float
    row: int  # several at once stand above each other


def layer_boxes(trace: Trace, program: Program, layer: int, phase: str) -> list[Box]:
    """Return the boxes of one layer's forward or backward pass in the last step of a trace.

    An operation is one box while something of it runs on any thread, short gaps included.
    """
    spans = [span for span in _last_step(trace) if _is_of(span, program, layer, phase)]
    if not spans:
        return []
    tolerated = (max(span.end for span in spans) - spans[0].start) / 200
    by_operation: dict[str, list[Stretch]] = defaultdict(list)
    for span in spans:
        by_operation[program.owners[span.name].place.operation].append((span.start, span.end))
    joined = {operation: _joined(stretches, tolerated) for operation, stretches in by_operation.items()}
    rows: list[float] = []  # where each row is free from
    boxes: list[Box] = []
    idle, busy_until = spans[0].start, spans[0].start  # time that is left out; where all boxes so far end
    for start, end, operation in sorted((*each, name) for name in joined for each in joined[name]):
        idle += max(0.0, start - busy_until)
        busy_until = max(busy_until, end)
        row = next((index for index, free in enumerate(rows) if free <= start), len(rows))
        rows[row:row + 1] = [end]  # fmt: skip
        boxes.append(Box(operation, (start - idle) / 1e3, (end - idle) / 1e3, row))
    return boxes


def _joined(stretches: Iterable[Stretch], tolerated: float) -> list[Stretch]:
    """Return stretches of time in the order of their starts, joined where no more than `tolerated` lies in between."""
    joined: list[Stretch] = []
    for start, end in stretches:
        if joined and start - joined[-1][1] <= tolerated:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((start, end))
    return joined


def _last_step(trace: Trace) -> Sequence[Span]:
    """Return the spans of the last step. A GPU's clock need not be the host's, so its spans are dealt out by count."""
    if not trace.steps:
        return trace.spans
    if trace.on_device:
        return trace.spans[-(len(trace.spans) // len(trace.steps)) :]
    start, end = trace.steps[-1]
    return [span for span in trace.spans if start <= span.start <= end]


def _is_of(span: Span, program: Program, layer: int, phase: str) -> bool:
    owner, instruction = program.owners.get(span.name), program.by_name.get(span.name)
    if owner is None or (instruction is not None and instruction.opcode in CONTAINERS):
        return False
    return owner.place.layer == layer and owner.place.phase == phase


def draw_layer(trace: Trace, program: Program, layer: int, out_png: Path, title: str) -> bool:
    """Draw one layer's forward and backward pass into a PNG, SVG or PDF; return False if the trace has none of it."""
    from matplotlib.figure import Figure

    panels = {phase: layer_boxes(trace, program, layer, phase) for phase in ("forward", "backward")}
    drawn = [box for boxes in panels.values() for box in boxes]
    if not drawn:
        return False
    figure = Figure(figsize=(11, 4.2), dpi=110)
    longest = max(box.end for box in drawn)
    unit, scale = ("ms", 1e-3) if longest > 2000 else ("µs", 1.0)
    axes = figure.subplots(2, 1, sharex=True, gridspec_kw={"left": 0.09, "right": 0.985, "top": 0.87, "bottom": 0.2})
    for (phase, boxes), panel in zip(panels.items(), axes, strict=True):
        _draw_panel(panel, boxes, phase, longest, scale, unit)
    axes[1].set_xlabel(f"{unit} in which something of the layer runs")
    _legend(figure, {box.operation for box in drawn})
    figure.suptitle(title, fontsize=11, fontweight="bold")
    save_figure(figure, out_png)
    return True


def _draw_panel(axes: Any, boxes: Sequence[Box], phase: str, longest: float, scale: float, unit: str) -> None:
    for box in boxes:
        width = box.end - box.start
        color = COLORS.get(box.operation, COLORS["other"])
        axes.barh(box.row, scale * width, left=scale * box.start, height=0.9, color=color, edgecolor="white", lw=0.4)
        if width > longest * (0.0075 * len(box.operation) + 0.002):  # the name fits
            middle = scale * (box.start + width / 2)
            axes.text(middle, box.row, box.operation, ha="center", va="center", fontsize=8, color="white")
    end = max((box.end for box in boxes), default=0.0)
    axes.set_ylabel(f"{phase}\n{scale * end:.3g} {unit}", rotation=0, ha="right", va="center")
    axes.set_yticks([])
    axes.set_xlim(0, scale * longest)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _legend(figure: Any, operations: set[str]) -> None:
    from matplotlib.patches import Patch

    shown: dict[str, str] = {}
    for operation, color in COLORS.items():
        if operation in operations:
            shown[color] = f"{shown[color]}, {operation}" if color in shown else operation
    handles = [Patch(color=color, label=label) for color, label in shown.items()]
    figure.legend(handles=handles, loc="lower center", ncol=max(1, len(handles)), frameon=False, fontsize=8)
