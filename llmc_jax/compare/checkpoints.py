"""Two checkpoints of any format beside each other, tensor by tensor: `python -m llmc_jax.compare checkpoints`.

Reads one layer of one tensor at a time. Leaves out how each format is read (checkpoint/sources.py), and whatever a
training state holds besides weights, m and v.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from llmc_jax import text
from llmc_jax.checkpoint.llmc import V2_ORDERS
from llmc_jax.checkpoint.source import Source
from llmc_jax.checkpoint.sources import open_source
from llmc_jax.compare import report
from llmc_jax.compare.tensors import DIFFERS, Difference, Limit, Measure, as_json, index_text, tolerance_of
from llmc_jax.config.model import ModelConfig
from llmc_jax.models.gpt2.tensors import BY_NAME, tensor_specs
from llmc_jax.models.tensors import TensorSpec

DESCRIPTION = """\
Compare two checkpoints of any format (llm.c's model files and training states, our own, Hugging Face, nanoGPT): for
each tensor the largest and mean difference, their relative norm ||a - b|| / ||b||, the worst element, and how many
values and bits differ. Weights of 16 bits are compared as the float32 values that they are. What both hold is compared:
weights, and m, v and the 16-bit copy where both have them.

Exit status: 0 all the same bits (with --tolerance: all within it), 2 bad input, 4 compared, and something differs."""

WORDS = {"params": "weights", "m": "m", "v": "v", "copy": "16-bit copy"}


class Row(NamedTuple):
    """One tensor of both. found: None where the shapes differ, and nothing is compared."""

    group: str
    name: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    found: Difference | None = None
    layers: tuple[int, ...] = ()  # whose bits differ
    agrees: bool = False  # the bits are the same; with a tolerance, all values are within it

    @property
    def same_bits(self) -> bool:
        return self.found is not None and self.found.same_bits


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `checkpoints`."""
    parser.description = DESCRIPTION
    parser.add_argument("a", type=Path, metavar="A", help="a checkpoint: a file, or a folder")
    parser.add_argument("b", type=Path, metavar="B", help="the one that A is compared with")
    parser.add_argument(
        "--tolerance", type=tolerance_of, metavar="X", help="agree where no |a - b| is above X [default: the same bits]"
    )
    parser.add_argument(
        "--v2-order", choices=V2_ORDERS, default="auto", help="of llm.c's version 2: where the layernorms stand"
    )
    report.add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Compare, print, and return the exit status. Raises InputError."""
    report.check_json(args.json)
    a, b = open_source(args.a, v2_order=args.v2_order), open_source(args.b, v2_order=args.v2_order)
    notes = differences_in_shape(a.config, b.config)
    for line in [*_headline("A", a), *_headline("B", b), *notes, *_groups_apart(a, b), ""]:
        report.show(line, json_path=args.json)
    rows = list(compare(a, b, args.tolerance))
    agrees = not notes and all(row.agrees for row in rows)
    report.show(table(rows), json_path=args.json)
    report.show(f"\n{verdict(rows, notes, args.tolerance)}", json_path=args.json)
    report.emit({
        "a": _source_json(a), "b": _source_json(b), "tolerance": args.tolerance, "agrees": agrees, "shapes": notes,
        "same_bits": not notes and all(row.same_bits for row in rows), "tensors": [_row_json(row) for row in rows],
    }, json_path=args.json)  # fmt: skip
    return 0 if agrees else DIFFERS


# ----- comparing -----------------------------------------------------------------------------------------------------


def compare(a: Source, b: Source, tolerance: float | None = None) -> Iterator[Row]:
    """Yield a row per group and tensor that both hold, in the order of Params; a layer of each in memory at a time."""
    pairs = list(zip(tensor_specs(a.config), tensor_specs(b.config), strict=True))
    for group in a.groups:
        if group in b.groups:
            for ours, theirs in pairs:
                yield _compare_tensor(a, b, group, ours, theirs, tolerance)


def _compare_tensor(
    a: Source, b: Source, group: str, ours: TensorSpec, theirs: TensorSpec, tolerance: float | None
) -> Row:
    shapes = (ours.shape, theirs.shape)
    if ours.shape != theirs.shape:
        return Row(group, ours.name, shapes)
    layered = BY_NAME[ours.name].layered
    measure = Measure(None if tolerance is None else Limit(tolerance), nan_agrees=True)
    layers = []
    for layer in range(ours.shape[0] if layered else 1):
        before = measure.other_values
        measure.add(a.read(group, ours.name, layer), b.read(group, ours.name, layer))
        if layered and measure.other_values > before:
            layers.append(layer)
    found = measure.result(ours.shape)
    agrees = found.same_bits if tolerance is None else found.agrees
    return Row(group, ours.name, shapes, found, tuple(layers), agrees)


def differences_in_shape(a: ModelConfig, b: ModelConfig) -> list[str]:
    """Return one line that names the fields in which two models differ, or none."""
    other = [name for name in vars(a) if getattr(a, name) != getattr(b, name)]
    if not other:
        return []
    fields = ", ".join(f"{name} {getattr(a, name)} and {getattr(b, name)}" for name in other)
    return [f"the models differ: {fields} (of A and of B)"]


def _groups_apart(a: Source, b: Source) -> list[str]:
    lines = []
    for name, one, other in (("A", a, b), ("B", b, a)):
        alone = [WORDS[group] for group in one.groups if group not in other.groups]
        if alone:
            lines.append(f"only {name} holds: {', '.join(alone)}; not compared")
    return lines


# ----- printing ------------------------------------------------------------------------------------------------------


def _headline(letter: str, source: Source) -> list[str]:
    step = "" if source.step is None else f", step {source.step:,}"
    holds = ", ".join(WORDS[group] for group in source.groups)
    line = f"{letter}  {source.path}: {source.kind}, weights in {source.dtype}{step}; holds {holds}"
    return [line, *(f"   warning: {warning}" for warning in source.warnings)]


def table(rows: Sequence[Row]) -> str:
    """Return a line per tensor."""
    headings = ["of", "tensor", "shape", "largest", "mean", "relative norm", "worst at", "A", "B", "values", "bits",
                "layers", "verdict"]  # fmt: skip
    return text.table(
        headings,
        [_cells(row) for row in rows],
        left=("of", "tensor", "shape", "worst at", "layers", "verdict"),
        optional=("B", "A", "worst at", "bits", "shape", "mean", "values", "relative norm", "layers"),
    )


def _cells(row: Row) -> list[str]:
    group, found = WORDS[row.group], row.found
    if found is None:
        shapes = " and ".join(index_text(shape) for shape in row.shapes)
        return [group, row.name, shapes, *[""] * 9, "OTHER SHAPE"]
    start = [group, row.name, index_text(found.shape)]
    if found.same_bits:
        return [*start, *[""] * 9, "same bits"]
    verdict = "within" if row.agrees else "DIFFERS"
    if found.nonfinite:
        verdict += f", {found.nonfinite:,} NaN or infinite"
    return [
        *start, report.small(found.largest), report.small(found.mean), report.small(found.relative),
        index_text(found.worst), f"{found.a:.6g}", f"{found.b:.6g}", f"{found.other_values:,}", f"{found.other_bits:,}",
        _ranges(row.layers), verdict,
    ]  # fmt: skip


def _ranges(numbers: Sequence[int]) -> str:
    """0-3,7 for 0, 1, 2, 3, 7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def verdict(rows: Sequence[Row], notes: Sequence[str], tolerance: float | None) -> str:
    """Return the result in a sentence."""
    if not notes and all(row.same_bits for row in rows):
        return f"All {len(rows)} tensors have the same bits."
    other = [row for row in rows if not row.agrees]
    if not other and notes:
        return "The tensors agree, but the models differ: " + notes[0].partition(": ")[2]
    if not other:
        return f"All {len(rows)} tensors agree within {tolerance:g}; not all bits are the same."
    compared = [row.found for row in other if row.found is not None]
    how = "have other bits" if tolerance is None else f"differ by more than {tolerance:g}"
    values = sum(found.other_values for found in compared)
    words = f"{len(compared)} of {len(rows)} tensors {how} ({values:,} values)" if compared else ""
    unlike = len(other) - len(compared)
    shapes = f"{unlike} of {len(rows)} have another shape and are not compared" if unlike else ""
    return "; ".join(part for part in (words, shapes) if part) + "."


def _source_json(source: Source) -> dict[str, Any]:
    return {
        "path": source.path, "kind": source.kind, "dtype": source.dtype, "step": source.step,
        "model": vars(source.config), "groups": source.groups, "warnings": source.warnings,
    }  # fmt: skip


def _row_json(row: Row) -> dict[str, Any]:
    start = {"group": row.group, "name": row.name, "agrees": row.agrees}
    if row.found is None:
        return start | {"shape": row.shapes[0], "other_shape": row.shapes[1]}
    return start | as_json(row.found) | {"differing_layers": row.layers}
