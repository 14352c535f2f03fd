"""Every kernel and whole training steps, compiled for GPUs that are not there and compared with the committed table.

`make test-aot` runs this with each supported JAX. A kernel may not spill more than tests/aot/table.json says (made by
benchmarks/aot.py --write), nothing large may be copied, and what is donated must be overwritten in place. Kernels by
themselves are compiled only where they are not those that the table was made of; the steps, which call them, always.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import pytest

from benchmarks import aot
from tests.aot import cases

TABLE = aot.read_table()
Measured = dict[str, Future[dict[str, Any]]]

UNCHANGED = {target: not aot.problem() and aot.kernels_unchanged(target) for target in aot.TARGETS}

needs_compiler = pytest.mark.skipif(bool(aot.problem()), reason=aot.problem())


@pytest.fixture(scope="session")
def measured(request: pytest.FixtureRequest) -> Measured:
    """What the compiler says, for each GPU that a chosen test asks for; two processes at a time."""
    wanted = [item.callspec.params.get("target") for item in request.session.items if hasattr(item, "callspec")]
    with ThreadPoolExecutor(2) as pool:
        return {
            target: pool.submit(aot.measure_apart, target, "step " if UNCHANGED[target] else "")
            for target in aot.TARGETS
            if target in wanted
        }


def entry(target: str, name: str) -> dict[str, Any]:
    """What the table says."""
    rows = TABLE.get(jax.__version__, {}).get(target, {})
    assert name in rows, f"no entry in {aot.TABLE.name} for JAX {jax.__version__}: python benchmarks/aot.py --write"
    return rows[name]


def spilled_by_kernel(row: dict[str, Any]) -> dict[str, int]:
    worst: dict[str, int] = {}
    for kernel, _, spilled in row["kernels"]:
        worst[kernel] = max(spilled, worst.get(kernel, 0))
    return worst


compiled = {target: cases.steps(target) if UNCHANGED[target] else cases.compiled_for(target) for target in aot.TARGETS}
every_case = pytest.mark.parametrize(
    ("target", "name"), [(target, case.name) for target in aot.TARGETS for case in compiled[target]]
)


@pytest.mark.slow
@needs_compiler
@every_case
def test_spills_no_more_than_the_table_says(target: str, name: str, measured: Measured) -> None:
    found, expected = measured[target].result()[name], entry(target, name)
    assert "error" not in found, found["error"]
    known = spilled_by_kernel(expected)
    for kernel, spilled in spilled_by_kernel(found).items():
        assert kernel in known, f"{kernel} is not in the table: python benchmarks/aot.py --write"
        assert spilled <= known[kernel], f"{kernel} spills {spilled} bytes; the table says {known[kernel]}"


@pytest.mark.slow
@needs_compiler
@every_case
def test_memory_is_reused_and_nothing_is_copied(target: str, name: str, measured: Measured) -> None:
    found, expected = measured[target].result()[name], entry(target, name)
    assert "error" not in found, found["error"]
    assert aot.problems_of(name, found) == []
    assert found["temporaries"] <= 1.01 * expected["temporaries"]


SOUND: aot.Row = {"kernels": [("k", 9, 0)], "serialized": [], "calls": 1, "donated": 4, "aliased": 4, "copies": []}


@pytest.mark.parametrize(
    "fault", [{"kernels": []}, {"serialized": ["k"]}, {"calls": 0}, {"aliased": 3}, {"copies": ["f32[9]"]}]
)
def test_what_no_table_excuses(fault: aot.Row) -> None:
    assert aot.problems_of("m.k", SOUND) == []
    assert len(aot.problems_of("m.k", SOUND | fault)) == 1


def test_table_has_an_entry_for_every_case_and_no_other() -> None:
    assert len(TABLE) == 2, "one part for each supported JAX"
    for version, targets in TABLE.items():
        assert tuple(targets) == aot.TARGETS, version
        for target, rows in targets.items():
            expected = [case.name for case in cases.compiled_for(target)]
            assert list(rows) == expected, f"JAX {version}, {target}: python benchmarks/aot.py --write"


def test_readable_table_is_the_table() -> None:
    assert aot.RESULTS.read_text() == aot.render(TABLE)


ABORTING = """
import json, os, sys
from pathlib import Path
output = Path(sys.argv[2])
done = output.read_text() if output.exists() else ""
for name in ("m.a x", "m.b x", "m.c x"):
    if name in done:
        continue
    print(f"h200: {name}", file=sys.stderr, flush=True)
    if name == "m.b x":
        print("LLVM ERROR: cannot select", file=sys.stderr, flush=True)
        os.abort()
    with output.open("a") as file:
        print(json.dumps([name, {"kernels": []}]), file=file)
"""


def test_an_abort_is_the_error_of_one_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "aborting.py"
    script.write_text(ABORTING)
    monkeypatch.setattr(aot, "__file__", str(script))
    rows = aot.measure_apart("h200")
    assert list(rows) == ["m.a x", "m.b x", "m.c x"]
    assert rows["m.a x"] == rows["m.c x"] == {"kernels": []}
    assert rows["m.b x"] == {"error": "exit status -6\nLLVM ERROR: cannot select"}


def test_a_process_that_does_not_start_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "broken.py"
    script.write_text("import no_such_package")
    monkeypatch.setattr(aot, "__file__", str(script))
    with pytest.raises(RuntimeError, match="no_such_package"):
        aot.measure_apart("h200")
