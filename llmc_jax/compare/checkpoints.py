"""Two checkpoints of any format beside each other, tensor by tensor: `llmc-jax compare checkpoints`.

Reads one layer of one tensor at a time. Leaves out how each format is read (checkpoint/sources.py), and whatever a
training state holds besides weights, m and v.
"""

import argparse
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from llmc_jax.base import text
from llmc_jax.base.options import own
from llmc_jax.checkpoint.source import Source
from llmc_jax.checkpoint.sources import open_source
from llmc_jax.compare.tensors import Difference, Limit, Show, as_json, cells, index_text
from llmc_jax.config.model import ModelShape
from llmc_jax.models import family
from llmc_jax.models.layout import tensor_specs
from llmc_jax.models.tensors import TensorSpec

DESCRIPTION = """\
Compare two checkpoints of any format (llm.c's model files and training states, our own, Hugging Face, nanoGPT): for
each tensor the largest and mean difference, their relative norm ||a - b|| / ||b||, the worst element, and how many
values and bits differ. Weights of 16 bits are compared as the float32 values that they are. What both hold is compared:
weights, and m, v and the 16-bit copy where both have them.

Exit status: 0 all the same bits (with --tolerance: all within it), 2 bad input, 4 compared, and something differs."""

OPTIONS = (
    own("a", "A", None, "a checkpoint: a file, or a folder", type=Path, is_path=True),
    own("b", "B", None, "the one that A is compared with", type=Path, is_path=True),
    own("--model", "FILE.py...", [], "the files of models of your own, which they were trained by", name="model_files"),
    own("--tolerance", "X", None, "agree where no |a - b| is above X [default: the same bits]", 0),
)
WORDS = {"params": "weights", "copy": "16-bit copy"}  # others go by their names


class Row(NamedTuple):
    """One tensor of both. found: None where the shapes differ, and nothing is compared."""

    group: str
    name: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    found: Difference | None = None
    layers: tuple[int, ...] = ()  # whose bits differ

    @property
    def same_bits(self) -> bool:
        return self.found is not None and self.found.same_bits

    @property
    def agrees(self) -> bool:
        """Return whether the bits are the same; with a tolerance, whether all values are within it."""
        return self.found is not None and self.found.agrees


def run(args: argparse.Namespace, show: Show) -> tuple[bool, dict[str, Any]]:
    """Compare and print; return whether they agree, and the result for JSON. Raises InputError."""
    for file in args.model_files:
        family.load(file)
    a, b = (open_source(path) for path in (args.a, args.b))
    notes = differences_in_shape(a.config, b.config)
    show("\n".join([*_headline("A", a), *_headline("B", b), *notes, *_groups_apart(a, b), ""]))
    rows = list(compare(a, b, args.tolerance))
    show(f"{table(rows)}\n\n{verdict(rows, notes, args.tolerance)}")
    agrees = not notes and all(row.agrees for row in rows)
    return agrees, {
        "a": _source_json(a), "b": _source_json(b), "tolerance": args.tolerance, "agrees": agrees, "shapes": notes,
        "same_bits": not notes and all(row.same_bits for row in rows), "tensors": [_row_json(row) for row in rows],
    }  # fmt: skip


# ----- comparing -----------------------------------------------------------------------------------------------------


def compare(a: Source, b: Source, tolerance: float | None = None) -> Iterator[Row]:
    """Yield a row per group and tensor that both hold, in the order of Params; a layer of each in memory at a time."""
    of_b = {spec.name: spec for spec in tensor_specs(b.config)}  # of another family they need not be the same
    for group in a.groups:
        if group in b.groups:
            for ours in tensor_specs(a.config):
                if ours.name in of_b:
                    yield _compare_tensor(a, b, group, ours, of_b[ours.name], tolerance)


def _compare_tensor(
    a: Source, b: Source, group: str, ours: TensorSpec, theirs: TensorSpec, tolerance: float | None
) -> Row:
    shapes = (ours.shape, theirs.shape)
    if ours.shape != theirs.shape:
        return Row(group, ours.name, shapes)
    layered = ours.tensor.layered
    found = Difference(ours.shape, None if tolerance is None else Limit(tolerance), nan_agrees=True)
    layers = []
    for layer in range(ours.shape[0] if layered else 1):
        before = found.differing_values
        found.add(a.read(group, ours.name, layer), b.read(group, ours.name, layer))
        if layered and found.differing_values > before:
            layers.append(layer)
    return Row(group, ours.name, shapes, found, tuple(layers))


def differences_in_shape(a: ModelShape, b: ModelShape) -> list[str]:
    """Return one line that names the fields in which two models differ, or none."""
    pairs = {name: (vars(a).get(name), vars(b).get(name)) for name in {**vars(a), **vars(b)}}
    other = [f"{name} {ours} and {theirs}" for name, (ours, theirs) in pairs.items() if ours != theirs]
    return [f"the models differ: {', '.join(other)} (A and B)"] if other else []


def _groups_apart(a: Source, b: Source) -> list[str]:
    lines = []
    for name, one, other in (("A", a, b), ("B", b, a)):
        alone = [WORDS.get(group, group) for group in one.groups if group not in other.groups]
        if alone:
            lines.append(f"only {name} holds: {', '.join(alone)}; not compared")
    return lines


# ----- printing ------------------------------------------------------------------------------------------------------


def _headline(letter: str, source: Source) -> list[str]:
    step = "" if source.step is None else f", step {source.step:,}"
    holds = ", ".join(WORDS.get(group, group) for group in source.groups)
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
    found, shapes, nothing = row.found, dict.fromkeys(map(index_text, row.shapes)), [""] * 9
    start = [WORDS.get(row.group, row.group), row.name, " and ".join(shapes)]
    if found is None:
        return [*start, *nothing, "SHAPE DIFFERS"]
    if found.same_bits:
        return [*start, *nothing, "same bits"]
    counts = [f"{found.differing_values:,}", f"{found.differing_bits:,}", _ranges(row.layers)]
    bad = f", {found.not_finite:,} NaN or infinite" if found.not_finite else ""
    return [*start, *cells(found), *counts, ("within" if row.agrees else "DIFFERS") + bad]


def _ranges(numbers: Sequence[int]) -> str:
    """Return 0-3,7 for 0, 1, 2, 3, 7."""
    runs = ([n for _, n in run] for _, run in groupby(enumerate(numbers), lambda place: place[1] - place[0]))
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def verdict(rows: Sequence[Row], notes: Sequence[str], tolerance: float | None) -> str:
    """Return the result in a sentence."""
    other = [row for row in rows if not row.agrees]
    if not other and notes:
        return "The tensors agree, but the models differ: " + notes[0].partition(": ")[2]
    if not other:
        same = all(row.same_bits for row in rows)
        how = "have the same bits" if same else f"agree within {tolerance:g}; not all bits are the same"
        return f"All {len(rows)} tensors {how}."
    compared = [row.found for row in other if row.found is not None]
    how = "differ" if tolerance is None else f"differ by more than {tolerance:g}"
    values = sum(found.differing_values for found in compared)
    words = f"{len(compared)} of {len(rows)} tensors {how} ({values:,} values)" if compared else ""
    unlike = len(other) - len(compared)
    shapes = f"{unlike} of {len(rows)} differ in shape and are not compared" if unlike else ""
    return "; ".join(filter(None, (words, shapes))) + "."


def _source_json(source: Source) -> dict[str, Any]:
    names = ("path", "kind", "dtype", "step", "config", "groups", "warnings")
    return {name: getattr(source, name) for name in names}


def _row_json(row: Row) -> dict[str, Any]:
    measures = {} if row.found is None else as_json(row.found)
    return {"group": row.group, "name": row.name, "shapes": row.shapes, **measures,
            "agrees": row.agrees, "differing_layers": row.layers}  # fmt: skip
