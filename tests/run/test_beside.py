"""The process that writes a run's page and picture: whatever it does, the run goes on, and hears of it once."""

import json
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from llmc_jax.logs import picture
from llmc_jax.logs.files import CURVES, METRICS, REPORT
from llmc_jax.logs.reading import Log
from llmc_jax.report import beside as writer
from llmc_jax.report.command import MARK
from llmc_jax.run import beside
from llmc_jax.run.beside import Beside
from llmc_jax.run.command import main
from tests.drawing import drawing
from tests.logs.test_picture import metrics_of
from tests.run.test_loop import tiny_flags
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("quick_compilation")

# Programs in the place of llmc_jax.report.beside: ours, each file once a moment; and such as misbehave
OFTEN = "from llmc_jax.report import beside; beside.FIRST = beside.DRAW_EVERY = 0.01; beside.SHARE = 1e9; "
WRITES = OFTEN + "beside.write = lambda name, asked: open(asked.folder + '/' + name, 'a').write('x'); beside.main()"
FAILS = OFTEN + "beside.write = lambda name, asked: 1 / 0; beside.main()"
DIES = "import sys; print('first', file=sys.stderr); sys.exit('no memory')"
MOVES = (
    OFTEN + "import os; beside.write = lambda name, asked: "
    "(os.rename(asked.folder, asked.folder + '-elsewhere'), os.mkdir(asked.folder)); beside.main()"
)
HANGS = (
    "import sys, pathlib, json, time; folder = pathlib.Path(json.loads(sys.argv[1])[0]); "
    "(folder / '.report.html.0123abcd.tmp').touch(); (folder / 'begun').touch(); time.sleep(600)"
)


class Bench(NamedTuple):
    folder: Path
    modules: Path
    warnings: list[str]
    patch: pytest.MonkeyPatch

    def beside(self, program: str, minutes: float = 1e-6, there: bool = True, writing: bool = True) -> Beside:
        (self.modules / "stand_in.py").write_text(program)
        self.patch.setattr(beside, "MODULE", "stand_in")
        return Beside(self.folder, "", {}, minutes, self.warnings.append, lambda: there, writing=writing)

    def until(self, run: Beside, holds: Callable[[], bool]) -> None:
        def refreshed() -> bool:
            run.refresh()
            return holds()

        wait_until(refreshed)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    folder, modules = tmp_path / "run", tmp_path / "modules"
    folder.mkdir()
    modules.mkdir()
    monkeypatch.setenv(beside.SWITCH, "1")
    monkeypatch.setenv("PYTHONPATH", str(modules))
    with drawing():
        yield Bench(folder, modules, [], monkeypatch)


def test_both_are_written_again_and_again_and_at_the_end(bench: Bench) -> None:
    run = bench.beside(WRITES)
    files = [bench.folder / CURVES, bench.folder / REPORT]
    bench.until(run, lambda: all(file.exists() and len(file.read_text()) > 1 for file in files))
    before = [len(file.read_text()) for file in files]
    run.finish()
    assert run.written == {CURVES, REPORT} and bench.warnings == []
    assert all(length < len(file.read_text()) for length, file in zip(before, files, strict=True))


def test_a_file_is_not_begun_before_its_time(bench: Bench) -> None:
    run = bench.beside(WRITES.replace("0.01", "0.5"), minutes=1e300)
    bench.until(run, (bench.folder / CURVES).exists)
    run.finish()
    assert (bench.folder / REPORT).read_text() in ("x", "xx")  # at first, and at the end


@pytest.mark.slow
@pytest.mark.parametrize("off", ["minutes", "environment"])
def test_the_picture_comes_without_the_page_too(bench: Bench, off: str) -> None:
    if off == "environment":
        bench.patch.setenv(beside.SWITCH, "0")
    run = bench.beside("from llmc_jax.report.beside import main; main()", 0.0 if off == "minutes" else 3.0)
    (bench.folder / METRICS).write_text("".join(json.dumps(row) + "\n" for row in metrics_of(3)))
    run.finish()
    assert sorted(path.name for path in bench.folder.iterdir()) == [CURVES, METRICS] and bench.warnings == []


def test_what_goes_wrong_is_one_warning_for_each_with_its_reason(bench: Bench) -> None:
    run = bench.beside(FAILS)
    bench.until(run, lambda: len(bench.warnings) == 2)
    run.finish()
    assert all("ZeroDivisionError" in warning and str(bench.folder) in warning for warning in bench.warnings)
    assert not run.written


def test_a_process_that_dies_is_one_warning(bench: Bench) -> None:
    run = bench.beside(DIES)
    bench.until(run, lambda: len(bench.warnings) == 1)
    assert "no memory" in bench.warnings[0] and "first" not in bench.warnings[0]
    bench.until(run, lambda: run._child is None)
    run.finish()
    assert len(bench.warnings) == 1


def test_a_process_that_cannot_be_started_is_one_warning(bench: Bench) -> None:
    bench.patch.setattr("sys.executable", "/nowhere/python")
    run = bench.beside(WRITES)
    run.refresh()
    run.finish()
    assert len(bench.warnings) == 1 and not run.written


@pytest.mark.parametrize("limit", ["AT_END", "close"])
def test_one_that_hangs_is_ended_and_leaves_nothing(bench: Bench, limit: str) -> None:
    run = bench.beside(HANGS)
    bench.until(run, (bench.folder / "begun").exists)
    child = run._child
    assert child is not None
    bench.patch.setattr(beside, "AT_END", 0.0)
    run.finish() if limit == "AT_END" else run.close()
    assert child._process.returncode is not None and child._process.returncode < 0
    assert [path.name for path in bench.folder.iterdir()] == ["begun"]
    assert len(bench.warnings) == (limit == "AT_END") and not run.written


def test_what_cannot_be_cleared_away_is_left(bench: Bench) -> None:
    (bench.folder / ".report.html.0123abcd.tmp").mkdir()
    bench.beside("import time; time.sleep(600)").close()
    assert bench.warnings == []


@pytest.mark.parametrize("off", ["process", "folder", "moved", "killed"])
def test_nothing_is_written_where_nothing_is_wanted(bench: Bench, off: str) -> None:
    moved = off == "moved"  # by another, after the first of the two files
    run = bench.beside(MOVES if moved else WRITES.replace("0.01", "5"), 9.0, off != "folder", off != "process")
    if moved:
        bench.until(run, lambda: run._child is None)
    if off == "killed" and run._child:
        run._child.tell()
        assert run._child.status(60.0) == 0
    run.finish()
    assert list(bench.folder.iterdir()) == [] and bench.warnings == []


@pytest.mark.slow
def test_a_run_says_where_its_page_is(tokens: object, bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    folder = bench.folder / "run"
    assert main([*map(str, tiny_flags(tokens)), "-o", str(folder)]) == 0
    assert (folder / CURVES).stat().st_size and MARK in (folder / REPORT).read_bytes()[:1000]
    out = capsys.readouterr().out.splitlines()
    assert f"report:       {folder / REPORT}" in out and f"picture:      {folder / CURVES}" in out


def test_a_picture_of_a_long_run_is_drawn_in_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of events took 1.3 kB a step."""
    steps, drawn = 10_000, []
    (tmp_path / METRICS).write_text("".join(json.dumps(row) + "\n" for row in metrics_of(steps)))

    def draw(log: Log, path: Path, baselines: dict[str, float]) -> None:
        assert log.path == "a title" and path == tmp_path / CURVES
        drawn.append((len(log.train.steps), baselines))

    monkeypatch.setattr(picture, "draw_curves", draw)
    tracemalloc.start()
    try:
        writer.write(CURVES, writer.Request(str(tmp_path), "a title", {"bigram": 2.5}, 0.0))
        assert tracemalloc.get_traced_memory()[1] < 300 * steps and drawn == [(steps, {"bigram": 2.5})]
    finally:
        tracemalloc.stop()
