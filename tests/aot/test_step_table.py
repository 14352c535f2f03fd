"""The kernels of a whole step on GPUs that are not there: how many of each group, and what there must be none of."""

import os
import subprocess
import sys

import pytest

from benchmarks import aot, step_table

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(aot.problem()), reason=aot.problem()),
]
LAYERS = 3
# Kernels of one layer more, and of everything that there is once.
PER_LAYER = {
    "products forward": 4, "products backward": 8, "bias gradients": 4, "sums of partial sums": 4,
    "attention forward": 1, "attention backward": 2, "layernorm forward": 2,
    "layernorm backward": 2, "GELU forward": 1, "GELU backward": 1, "slices of weights": 8,
}  # fmt: skip
ONCE = 31


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> dict[int, step_table.Table]:
    """A step on an H200 with so many layers, all else as GPT-2 124M, nothing recomputed; in a process of their own."""
    found = {}
    for layers in (LAYERS - 1, LAYERS):
        path = tmp_path_factory.mktemp("tables") / "table.json"
        words = ["-e", f"L{layers}-NH12-C768", "-b", "4", "-r", "0", "--json", str(path)]
        subprocess.run(
            [sys.executable, step_table.__file__, *words], env={**os.environ, "JAX_PLATFORMS": "cpu"}, check=True
        )
        (found[layers],) = step_table.read_tables(path).values()
    return found


def test_nothing_is_copied_widened_or_added_by_itself(tables: dict[int, step_table.Table]) -> None:
    for layers, table in tables.items():
        assert table.facts.copies == [] and table.facts.wide == []
        assert table.groups["bias additions"].kernels == 0
        assert table.facts.epilogues["BIAS"] == 4 * layers


def test_kernels_of_a_layer(tables: dict[int, step_table.Table]) -> None:
    more, fewer = tables[LAYERS].groups, tables[LAYERS - 1].groups
    found = {name: more[name].kernels - fewer[name].kernels for name in more}
    assert {name: count for name, count in found.items() if count} == PER_LAYER
    assert tables[LAYERS].total.kernels - LAYERS * sum(PER_LAYER.values()) == ONCE
