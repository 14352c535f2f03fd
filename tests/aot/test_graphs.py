"""The step's program for an H200: one CUDA graph, or none for a trace; and the same when its lowering was kept."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks import aot
from llmc_jax.machine import compiling, deviceless
from llmc_jax.plan.compiled import arguments, plan_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(aot.problem()), reason=aot.problem()),
]
PLAN = plan_for("h200", "-e L2-NH12-C768 -b 4 -t 1024 -d 4096 -r 0 --dtype bf16")


@pytest.fixture(scope="module")
def lowered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    """As usual, kept, and read back; and in the surroundings in which they are compiled."""
    from llmc_jax.run.programs import lower_step  # here, because where this is skipped its packages may be missing

    lies = NamedSharding(deviceless.gpu_mesh("h200"), PartitionSpec())
    arrays = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=lies), arguments(PLAN))
    kept = tmp_path_factory.mktemp("kept") / "step"
    with jax.sharding.use_abstract_mesh(deviceless.abstract_gpu("h200")):
        yield [
            lower_step(arrays, PLAN.model, PLAN.step_options, path, ("cuda",)).lowered for path in (None, kept, kept)
        ]


def compiled(lowered: Any, folder: Path, *more: tuple[str, Any]) -> tuple[Any, int]:
    """Return a program, and the CUDA graphs that it consists of."""
    options = (*PLAN.execution.compiler_options, ("xla_dump_to", str(folder)), ("xla_dump_hlo_as_text", True), *more)
    program = compiling.compiled(lowered, options)
    (thunks,) = folder.glob("*.thunk_metadata.txt")
    return program, thunks.read_text().count('"kCommandBuffer"')


def test_one_graph_or_none_for_a_trace(lowered: list[Any], tmp_path: Path) -> None:
    """Both programs are the same but for that, so the products have the same algorithms."""
    timed, graphs = compiled(lowered[0], tmp_path / "timed")
    traced, none = compiled(lowered[0], tmp_path / "traced", *compiling.without_graphs("gpu", {}))
    assert (graphs, none) == (1, 0)
    assert traced.as_text() == timed.as_text()


def test_a_kept_step_compiles_to_the_same_program(lowered: list[Any], tmp_path: Path) -> None:
    def facts(number: int) -> Any:
        program, graphs = compiled(lowered[number], tmp_path / f"{number}")
        memory = deviceless.memory_use(program)._replace(arguments=0)  # an exported one takes unused scalars as well
        kinds = re.findall(r"custom_call_target=\S+|kind=k\w+", program.as_text())
        return memory, graphs, Counter(kinds)

    assert facts(2) == facts(1) == facts(0)
