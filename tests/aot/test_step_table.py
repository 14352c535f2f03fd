"""The kernels of a whole step on GPUs that are not there: how many of each group, and what there must be none of."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import aot, step_table
from llmc_jax.config.model import parse_descriptor
from llmc_jax.models.work import Shape, step_work

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(aot.problem()), reason=aot.problem()),
]
LAYERS = 3
# Kernels of one layer more, and of everything that there is once.
PER_LAYER = {
    "products forward": 4, "products backward": 8, "sums of partial sums": 4, "attention forward": 1,
    "attention backward": 2, "layernorm forward": 2, "layernorm backward": 2, "slices of weights": 6,
    "gradient in one piece": 4,
}  # fmt: skip
ONCE = 51
# Of the head: its product, from which the targets' rows are taken, and what is taken from their gradients, not rounded.
OF_THE_TARGETS = ["f32[4096,768]"] * 2


def made(folder: Path, *words: str) -> step_table.Table:
    """The table of a step on an H200, made by a process of its own."""
    command = [sys.executable, step_table.__file__, *words, "--json", str(folder / "table.json")]
    subprocess.run(command, env={**os.environ, "JAX_PLATFORMS": "cpu"}, check=True)
    (table,) = step_table.read_tables(folder / "table.json").values()
    return table


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> dict[int, step_table.Table]:
    """A step on an H200 with so many layers, all else as GPT-2 124M, nothing recomputed; in a process of their own."""
    folder = tmp_path_factory.mktemp("tables")
    return {layers: made(folder, "-e", f"L{layers}-NH12-C768", "-b", "4", "-r", "0") for layers in (LAYERS - 1, LAYERS)}


def test_nothing_is_copied_widened_or_added_by_itself(tables: dict[int, step_table.Table]) -> None:
    for layers, table in tables.items():
        assert table.facts.copies == [] and [each.split()[1] for each in table.facts.wide] == OF_THE_TARGETS
        for passes in ("bias additions", "bias gradients", "delta of attention", "GELU forward", "GELU backward"):
            assert table.groups[passes].kernels == 0
        assert table.facts.epilogues["BIAS"] == 3 * layers  # the fourth is in a product of ours
        assert table.groups["products of the head"].kernels == 3


def test_the_matrices_of_all_layers_are_computed_together(tmp_path: Path) -> None:
    """Muon's products are three in each of five steps, for each of four tensors, whatever the number of layers."""
    table = made(tmp_path, "-e", f"L{LAYERS}-NH12-C768", "-b", "4", "-r", "0", "--optimizer", "muon")
    assert table.groups["products update"].kernels == 3 * 5 * 4 and table.groups["AdamW"].kernels == 0
    assert table.facts.copies == [] and len(table.facts.wide) == len(OF_THE_TARGETS)
    work = step_work(parse_descriptor(f"L{LAYERS}-NH12-C768"), Shape(4, 1024, products=5))
    flops = sum(each.flops for each in work if each.operation == "matrices")
    assert table.groups["products update"].flops == flops


def test_kernels_of_a_layer(tables: dict[int, step_table.Table]) -> None:
    more, fewer = tables[LAYERS].groups, tables[LAYERS - 1].groups
    found = {name: more[name].kernels - fewer[name].kernels for name in more}
    assert {name: count for name, count in found.items() if count} == PER_LAYER
    assert tables[LAYERS].total.kernels - LAYERS * sum(PER_LAYER.values()) == ONCE
