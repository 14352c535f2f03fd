"""The learning-rate range test: its means and what they suggest, its rates, what it leaves, and that it goes on."""

import json
import math
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc_jax.base.options import parse_rates
from llmc_jax.checkpoint.store import open_checkpoint
from llmc_jax.config.flags import parse_args
from llmc_jax.config.train import of_test
from llmc_jax.plan.plan import Plan
from llmc_jax.run.command import main
from llmc_jax.run.find_lr import RangeTest, draw_test, test_of
from tests.run.in_turn import forget
from tests.same_run import Result, events, leftovers, steps_of

pytestmark = pytest.mark.usefixtures("nothing_lasts", "quick_compilation")
test_of.__test__ = False  # type: ignore[attr-defined]  # it is none of pytest's


def made(losses: list[float]) -> RangeTest:
    """A test of these losses over six decades."""
    found = RangeTest()
    for rate, loss in zip(np.geomspace(1e-6, 1, max(2, len(losses))), losses, strict=False):
        found = found.then(float(rate), loss)
    return found


# ----- means, the end, the suggestion ---------------------------------------------------------------------------------

LOSSES = st.lists(st.floats(0.1, 50) | st.sampled_from([math.nan, math.inf]), min_size=1, max_size=40)


@settings(max_examples=30)
@given(LOSSES)
def test_the_means_are_weighted_means_of_the_losses(losses: list[float]) -> None:
    found = made(losses)
    assert found.means
    for k, mean in enumerate(found.means):
        weights = 0.9 ** np.arange(k, -1, -1)
        np.testing.assert_allclose(mean, np.sum(weights * losses[: k + 1]) / weights.sum(), rtol=1e-9)


@given(LOSSES)
def test_a_test_ends_with_the_first_mean_that_exploded(losses: list[float]) -> None:
    found = made(losses)
    limit = 1.5 * losses[0] + 1
    assert all(mean <= limit < math.inf for mean in found.means[:-1])
    assert found.exploded == (not found.means[-1] <= limit < math.inf)
    assert len(found.losses) == len(losses) or found.exploded
    assert len({len(found.rates), len(found.losses), len(found.means)}) == 1


@given(LOSSES, st.integers(0, 40))
def test_a_checkpoint_keeps_all_of_it(losses: list[float], at: int) -> None:
    whole = made(losses[:at])
    kept = test_of(json.loads(json.dumps(whole.to_json(), allow_nan=False)))
    for loss in losses[at:]:
        whole, kept = whole.then(1.0, loss), kept.then(1.0, loss)
    assert repr(kept) == repr(whole)  # as text, so that NaN is NaN


@given(st.floats(-4, -1.5), st.floats(0.8, 1.2), st.integers(0, 99))
def test_the_suggestion_lies_where_the_loss_falls(fall: float, gap: float, seed: int) -> None:
    """It falls by 3 round a rate 10^fall, and rises from 10^(fall + gap) on. The suggestion is within a decade; the
    mean lags behind the losses, so it is rather higher.
    """
    x = np.linspace(-6, 0, 100) - fall
    losses = 5.5 - 3 / (1 + np.exp(-4 * x)) + 0.1 * np.exp(8 * (x - gap))
    found = made(list(losses + 0.03 * np.random.default_rng(seed).standard_normal(100)))
    assert found.suggestion is not None and -0.4 < math.log10(found.suggestion) - fall < 1


@given(LOSSES)
def test_a_suggestion_is_a_rate_where_the_mean_falls(losses: list[float]) -> None:
    found = made(losses)
    at = found.steepest
    if at is not None:
        assert found.lowest is not None and 0 < at <= found.lowest
        assert found.suggestion == pytest.approx(found.rates[at], rel=0.051)
        assert min(found.means[at:]) < max(found.means[:at])


@pytest.mark.parametrize("losses", [[], [math.nan], [5.0], [5.0] * 50, list(np.linspace(5, 6, 50)), [5.0, math.inf]])
def test_a_loss_that_falls_nowhere_suggests_nothing(losses: list[float]) -> None:
    assert made(losses).suggestion is None


@pytest.mark.parametrize("losses", [[math.nan], [5.0], [5.0, 5.0, math.inf], [0.0, 0.0], list(np.linspace(9, 1, 50))])
def test_any_test_can_be_drawn(losses: list[float], tmp_path: Path) -> None:
    draw_test(made(losses), tmp_path / "drawn.png", "title")
    assert (tmp_path / "drawn.png").read_bytes()[:4] == b"\x89PNG"


# ----- options --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "rates"),
    [
        ("1e-6:1", (1e-6, 1.0)), ("0.001:0.1", (1e-3, 0.1)), ("1:1", None), ("1:0.1", None), ("0:1", None),
        ("-1:1", None), ("1e-6", None), ("1e-6:nan", None), ("1e-6:1:2", None), ("1e-99:1", None), ("1:1e9", None),
    ],
)  # fmt: skip
def test_a_range_is_two_rates(text: str, rates: tuple[float, float] | None) -> None:
    assert parse_rates(text) == rates


def test_a_test_does_without_what_it_has_no_use_for() -> None:
    asked = parse_args(shlex.split("--preset demo --find-lr --find-lr-steps 30 -v 7 --patience 2 --export-llmc"))
    config = of_test(asked)
    assert not config.saves_at_end
    off = {"save": False, "export_llmc": False, "val_every": 0, "sample_every": 0, "patience": 0, "max_nonfinite": 0}
    assert asked.val_every and asked.sample_every and config == replace(asked, max_steps=30, **off)
    assert of_test(replace(asked, find_lr=False)) == replace(asked, find_lr=False)


# ----- whole tests ----------------------------------------------------------------------------------------------------

TINY = ["-e", "L1-NH1-C16-V257-T16", "-b", 2, "-t", 16, "-d", 64, "-x", 7, "-u", 5, "-v", 3, "-s", 5, "-g", 4]
TEST = ["--find-lr", "--find-lr-range", "1e-5:1000", "--find-lr-steps", 90, "-n", 20]


def run(folder: Path, *flags: Any) -> Result:
    code = main([str(word) for word in (*TINY, "-o", folder, *flags)])
    return Result(code, folder, "", "")


@pytest.fixture(scope="module")
def tested(data: list[Any], tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A test that exploded before its last step; read-only by agreement."""
    return run(tmp_path_factory.mktemp("tested") / "run", *data, *TEST)


def record(result: Result) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((result.folder / "find_lr.json").read_text())
    return found


def test_the_rate_rises_evenly_and_the_test_ends_where_the_loss_explodes(tested: Result) -> None:
    rates, losses, found = tested.values("train", "lr"), tested.losses, record(tested)
    np.testing.assert_allclose(rates, np.geomspace(1e-5, 1e3, 90)[: len(rates)], rtol=1e-5)
    assert tested.code == 0 and 50 < len(losses) < 90
    assert (found["rates"], found["losses"], found["exploded_at"]) == (rates, losses, rates[-1])
    assert found["smoothed"][-1] > 1.5 * losses[0] + 1
    place = int(np.argmin(np.abs(np.array(rates) - found["suggestion"])))
    assert found["smoothed"][place + 4] < found["smoothed"][place - 4]


def test_what_a_test_leaves(tested: Result) -> None:
    found = record(tested)
    (event,) = [each for each in tested.events if each["event"] == "find_lr"]
    for name in ("suggestion", "lowest_loss", "lowest_at", "exploded_at"):
        assert event[name] == found[name]
    assert tested.events[-1]["outcome"] == "done"
    assert (tested.folder / "find_lr.png").read_bytes()[:4] == b"\x89PNG"
    assert tested.values("val", "loss") == tested.values("sample", "text") == [] and tested.models == []
    assert tested.checkpoints == [k for k in (20, 40, 60, 80) if k < len(tested.losses)]  # those of -n alone
    assert leftovers(tested.folder) == []
    options = json.loads((tested.folder / "config.json").read_text())["options"]
    assert (options["max_steps"], options["val_every"], options["save"]) == (7, 3, True)  # as they were asked for


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True])
def test_a_killed_test_comes_to_the_same(
    data: list[Any], tested: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    """From the folder's options alone; also where a step is begun before the one before it has been read."""
    monkeypatch.setattr(Plan, "runs_ahead", ahead)
    folder = Path(shutil.copytree(tested.folder, tmp_path / "run"))
    forget(folder, *steps_of(folder, "state")[1:])
    (folder / "find_lr.json").unlink()
    assert main(["-y", "1", "-o", str(folder)]) == 0
    again = Result(0, folder, "", "")
    assert record(again) == record(tested)
    assert len(again.values("find_lr", "step")) == 1
    assert events(folder)[:-1][: len(tested.losses)] == events(tested.folder)[:-1]
    stored = open_checkpoint(folder / "state_00000060").metadata.range_test
    assert stored is not None and stored["losses"] == tested.losses[:60]


def test_a_test_does_not_become_a_run(data: list[Any], tested: Result, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tested.folder, tmp_path / "run"))
    assert run(folder, *data, "-y", 1, "--find-lr=0") == Result(2, folder, "", "")
    assert run(folder, *data, "-y", 1, "--find-lr-range", "1e-5:1") == Result(2, folder, "", "")


def test_weights_that_give_no_number_suggest_nothing(data: list[Any], tmp_path: Path) -> None:
    found = run(tmp_path / "run", *data, "--find-lr", "--find-lr-range", "100:1000", "--grad-clip", 0)
    assert found.code == 0 and record(found)["suggestion"] is None
