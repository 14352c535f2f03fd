"""The process that writes a run's page: whatever it does, the run goes on, and hears of it once."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from llmc_jax.run import page
from llmc_jax.run.command import main
from llmc_jax.run.page import PageWriter
from tests.run.test_loop import tiny_flags

# Programs in the place of llmc_jax.report; their first word is the folder.
WRITES = "import sys, pathlib; pathlib.Path(sys.argv[1], 'report.html').open('a').write('x')"
FAILS = "import sys; print('first', file=sys.stderr); sys.exit('no fonts')"
HANGS = (
    "import sys, pathlib, time; pathlib.Path(sys.argv[1], '.report.html.0123abcd.tmp').touch(); "
    "pathlib.Path(sys.argv[1], 'begun').touch(); time.sleep(600)"
)


class Bench(NamedTuple):
    folder: Path
    warnings: list[str]
    patch: pytest.MonkeyPatch

    def writer(self, program: str, minutes: float = 1e-6, there: bool = True, writing: bool = True) -> PageWriter:
        self.patch.setattr(page, "command", lambda folder: [sys.executable, "-c", program, str(folder)])
        return PageWriter(self.folder, minutes, self.warnings.append, lambda: there, writing)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setenv(page.SWITCH, "1")
    monkeypatch.setattr(page, "AT_END", 60.0)
    monkeypatch.setattr(page, "SHARE", 1e9)
    yield Bench(tmp_path, [], monkeypatch)


def test_it_is_written_again_and_again_and_at_the_end(bench: Bench) -> None:
    writer = bench.writer(WRITES)
    until = time.monotonic() + 60
    while not (writer.path.exists() and len(writer.path.read_text()) > 1) and time.monotonic() < until:
        writer.refresh()
        time.sleep(0.01)
    before = len(writer.path.read_text())
    writer.finish()
    assert writer.written and before < len(writer.path.read_text()) <= before + 2
    assert bench.warnings == []


def test_a_page_is_not_begun_before_its_time(bench: Bench) -> None:
    writer = bench.writer(WRITES, minutes=1e300)
    writer.refresh()
    assert not writer.path.exists()
    writer.finish()
    assert writer.path.read_text() == "x"


def test_what_goes_wrong_is_one_warning_with_its_reason(bench: Bench) -> None:
    writer = bench.writer(FAILS)
    writer.finish()
    writer.finish()
    (warning,) = bench.warnings
    assert "no fonts" in warning and "first" not in warning and str(writer.path) in warning
    assert not writer.written


def test_a_process_that_cannot_be_started_is_one_warning(bench: Bench) -> None:
    writer = bench.writer(WRITES)
    bench.patch.setattr(page, "command", lambda _: ["/nowhere/python"])
    for _ in range(3):
        writer.refresh()
    writer.finish()
    assert len(bench.warnings) == 1 and not writer.written


@pytest.mark.parametrize("limit", ["LONGEST", "AT_END", "close"])
def test_one_that_hangs_is_ended_and_leaves_nothing(bench: Bench, limit: str) -> None:
    writer = bench.writer(HANGS)
    until = time.monotonic() + 60
    while not (bench.folder / "begun").exists() and time.monotonic() < until:
        writer.refresh()
        time.sleep(0.01)
    child = writer._child
    assert child is not None
    if limit == "close":
        writer.close()
    else:
        bench.patch.setattr(page, limit, 0.0)
        writer.refresh() if limit == "LONGEST" else writer.finish()
    assert child._process.returncode is not None and child._process.returncode < 0
    assert [path.name for path in bench.folder.iterdir()] == ["begun"]
    assert len(bench.warnings) == 1 and not writer.written


def test_what_cannot_be_cleared_away_is_left(bench: Bench) -> None:
    (bench.folder / ".report.html.0123abcd.tmp").mkdir()
    writer = bench.writer("import time; time.sleep(600)")
    while writer._child is None:
        writer.refresh()
    writer.close()
    assert len(bench.warnings) == 1 and not writer.written


@pytest.mark.parametrize("off", ["minutes", "process", "environment", "folder"])
def test_none_is_written_where_none_is_wanted(bench: Bench, off: str) -> None:
    if off == "environment":
        bench.patch.setenv(page.SWITCH, "0")
    writer = bench.writer(WRITES, 0.0 if off == "minutes" else 1e-6, there=off != "folder", writing=off != "process")
    writer.refresh()
    writer.finish()
    assert list(bench.folder.iterdir()) == [] and bench.warnings == []


def test_a_run_says_where_its_page_is(
    tokens: object, bench: Bench, capsys: pytest.CaptureFixture[str], nothing_lasts: None
) -> None:
    bench.writer(WRITES)
    folder = bench.folder / "run"
    assert main([*map(str, tiny_flags(tokens)), "-o", str(folder)]) == 0
    assert (folder / "report.html").read_text() == "x"
    assert f"report:       {folder / 'report.html'}" in capsys.readouterr().out.splitlines()
