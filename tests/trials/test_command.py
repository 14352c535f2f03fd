"""llmc-jax kernels: what it shows, and what it says where there is nothing to show or to measure."""

from pathlib import Path

import pytest

from llmc_jax.kernels import Finding, Findings
from llmc_jax.plan.separate import kept
from llmc_jax.trials import command, known, start
from llmc_jax.trials.candidates import Case
from llmc_jax.trials.known import Known
from tests.families import TOY, shape_of
from tests.kernels.test_findings import FINDINGS
from tests.trials.test_check import D12
from tests.trials.test_start import H200


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLMC_JAX_CACHE", str(tmp_path))
    return tmp_path


def keep(case: Case) -> None:
    facts = known.facts_of(case, H200)
    kept(known.file_of(facts), Known, lambda: Known(facts, FINDINGS, "2026-11-29 12:00"))


def test_what_is_not_judged_is_not_called_right() -> None:
    (row,) = command.rows(Findings(found=(Finding("gelu", "pallas", unjudged="no space"),)))
    assert row == ["gelu", "pallas", "not judged: no space", ""]


def test_what_is_known(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep(D12)
    assert command.main([]) == 0
    shown = capsys.readouterr().out
    assert "NVIDIA H200, driver 580.1" in shown and "B=64 T=1024" in shown
    runs = [line.split()[0] for line in shown.splitlines() if line.endswith("runs")]
    assert runs == ["attention", "layernorm"]
    assert (
        "output 1: error 0.5" in shown and "dynamic_slice_fusion=false" in shown and "the kernels: 100.00 ms" in shown
    )
    assert "jax " in shown and H200.uuid not in shown and str(cache) not in shown
    assert command.main(["--clear"]) == 0
    assert "1 combinations" in capsys.readouterr().out and not list(cache.glob("kernels/*.json"))


def test_what_is_known_of_a_users_model(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep(D12._replace(model=shape_of("toy-V61-C8-T16", TOY)))
    assert command.main([]) == 0
    assert "vocab_size 61" in capsys.readouterr().out


def test_nothing_is_known(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--clear"], ["--help"]):
        assert command.main(words) == 0
    assert "--measure" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--measure"], "no NVIDIA GPU"),
        (["--measure", "--seconds", "0"], "--seconds 0"),
        (["--measure", "--clear"], "--clear and --measure"),
        (["-b", "4"], "-b: goes with --measure"),
        (["--measure", "-b", "x"], "-b x"),
        (["--measure", "-i", "x.bin"], "-i"),
    ],
)
def test_what_cannot_be(words: list[str], message: str, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(words) == 2
    assert message in capsys.readouterr().err


def test_measuring_again(cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def find_out(case: object, here: object, **more: object) -> Findings:
        asked.update(more, case=case, here=here)
        return FINDINGS

    monkeypatch.setattr("llmc_jax.machine.driver.seen_cards", lambda: [H200])
    monkeypatch.setattr(start, "find_out", find_out)
    assert command.main(["--measure", "-e", "d12", "-b", "64", "-t", "1024", "--seconds=30"]) == 0
    assert asked["again"] and asked["seconds"] == 30.0 and asked["case"].batch_size == 64  # type: ignore[attr-defined]
    assert asked["case"].dtype == "bf16"  # type: ignore[attr-defined]
    assert "flash, pallas" in capsys.readouterr().out
    monkeypatch.setattr(start, "find_out", lambda *_, **__: Findings(notes=("the card is busy",)))
    assert command.main(["--measure"]) == 2
    assert "the card is busy" in capsys.readouterr().err
