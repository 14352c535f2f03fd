"""The picture: what is drawn is what was logged."""

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from llmc_jax import curves, runlog
from llmc_jax.curves import Curve, binned, curve, draw_curves, smoothed
from llmc_jax.errors import InputError

VALUES = st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=300)


def _curve(values: list[float]) -> Curve:
    return Curve(np.arange(len(values), dtype=np.int64), np.array(values))


def _metrics(steps: int = 60, **changes: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [{"event": "start"}]
    for step in range(steps):
        if step % 20 == 0:
            rows.append({"event": "val", "step": step, "loss": 5.6 - step / 20, "batches": 2})
        row = {"event": "train", "step": step, "loss": 5.5 - step / 20, "norm": 1.0, "lr": 1e-3, "ms": 1.0}
        rows.append({**row, "skipped": False, "tokens": 256 * (step + 1), **changes})
    return rows


def _pixels(png: Path) -> np.ndarray:
    with Image.open(png) as image:
        return np.asarray(image.convert("RGB")).astype(int)


def _has_colour(pixels: np.ndarray, colour: str) -> bool:
    wanted = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)])
    return bool((np.abs(pixels - wanted).max(axis=-1) < 8).any())


@given(VALUES, st.integers(1, 40))
def test_bins_hide_no_value_and_keep_the_mean(values: list[float], bins: int) -> None:
    c = _curve(values)
    b = binned(c, bins)
    assert len(b.steps) == min(len(values), bins) if len(values) > bins else len(values)
    assert b.low.min() == min(values) and b.high.max() == max(values)
    assert np.all(b.low <= b.mean + 1e-9) and np.all(b.mean <= b.high + 1e-9)
    assert np.all(np.diff(b.steps) > 0)
    if len(values) % len(b.steps) == 0:
        assert b.mean.mean() == pytest.approx(np.mean(values), abs=1e-9)
    # every value lies within the band of the bin that holds it
    owner = np.clip(
        np.searchsorted(np.linspace(0, len(values), len(b.steps) + 1).astype(int), c.steps, "right") - 1, 0, None
    )
    assert np.all(c.values >= b.low[owner]) and np.all(c.values <= b.high[owner])


@given(VALUES, st.integers(1, 60))
def test_smoothing_is_a_centred_mean(values: list[float], window: int) -> None:
    got = smoothed(_curve(values), window).values
    for i in range(len(values)):
        half = min(window // 2, i, len(values) - 1 - i)
        assert got[i] == pytest.approx(np.mean(values[i - half : i + half + 1]), abs=1e-8)


def test_a_step_logged_again_counts_once_as_it_was_last() -> None:
    rows = [{"event": "train", "step": s, "loss": v} for s, v in [(0, 5.0), (1, 4.0), (2, 3.0), (1, 4.5), (2, 3.5)]]
    rows.append({"event": "val", "step": 9, "loss": 1.0})
    c = curve(rows, "train", "loss")
    assert c.steps.tolist() == [0, 1, 2] and c.values.tolist() == [5.0, 4.5, 3.5]
    assert curve(rows, "train", "norm").steps.tolist() == []


def test_the_picture_shows_every_curve(tmp_path: Path) -> None:
    draw_curves(_metrics(), tmp_path / "a.png", "a run", {"bigram entropy": 4.0})
    draw_curves(_metrics(), tmp_path / "b.png", "a run")
    draw_curves([r for r in _metrics() if r["event"] != "val"], tmp_path / "c.png", "a run", {"bigram entropy": 4.0})
    with_all, no_yardstick, no_val = (_pixels(tmp_path / f"{name}.png") for name in "abc")
    # a yardstick within the range of the losses changes nothing but its line, across the panel, and its name above it
    rows, columns = np.nonzero((with_all != no_yardstick).any(axis=-1))
    assert np.ptp(rows) < 30 and np.ptp(columns) > 700
    assert with_all.shape[0] > 500 and with_all.shape[1] > 800
    for colour in (curves.TRAIN, curves.VAL, curves.RATE, curves.NORM):
        assert _has_colour(with_all, colour)
    assert not _has_colour(no_val, curves.VAL)
    assert not _has_colour(with_all, curves.SKIPPED)


def test_skipped_steps_are_marked_and_do_not_stop_the_drawing(tmp_path: Path) -> None:
    rows = _metrics()
    bad = [row for row in rows if row["event"] == "train"]
    bad[30].update(loss=float("nan"), norm=float("inf"), skipped=True)
    bad[31].update(loss=float("inf"), norm=float("nan"))
    draw_curves(rows, tmp_path / "a.png")
    assert _has_colour(_pixels(tmp_path / "a.png"), curves.SKIPPED)


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [{"event": "start"}],
        _metrics(1),
        _metrics(2)[2:],
        [{"event": "val", "step": 0, "loss": 5.5}],
        _metrics(3, loss=float("nan"), norm=float("nan")),
        _metrics(40, loss=0.0, norm=0.0, lr=0.0),
        _metrics(40, tokens=0),
        _metrics(3000),
    ],
    ids=["empty", "started", "one step", "no val", "val only", "all nan", "all zero", "no tokens", "binned"],
)
@pytest.mark.filterwarnings("error")
def test_any_run_can_be_drawn(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    draw_curves(rows, tmp_path / "a.png", "title", {"bigram entropy": 2.48, "goal": 2.45})
    assert _pixels(tmp_path / "a.png").std() > 1


def test_the_metrics_file_gives_the_same_picture_as_its_events(tmp_path: Path) -> None:
    with runlog.RunLog(tmp_path) as log:
        for row in _metrics(30):
            log.event(row["event"], **{k: v for k, v in row.items() if k != "event"})
    draw_curves(tmp_path / "metrics.jsonl", tmp_path / "a.png", "t")
    draw_curves(_metrics(30), tmp_path / "b.png", "t")
    assert np.array_equal(_pixels(tmp_path / "a.png"), _pixels(tmp_path / "b.png"))


def test_a_picture_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "a.png"
    draw_curves(_metrics(), target)
    before = target.read_bytes()

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(InputError, match=r"a\.png"):
        draw_curves(_metrics(10), target)
    assert target.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.png"]


def test_no_pyplot_and_no_changed_settings(tmp_path: Path) -> None:
    code = (
        "import sys, matplotlib; from pathlib import Path; from llmc_jax.curves import draw_curves\n"
        "def settings(): return {k: matplotlib.rcParams[k] for k in matplotlib.rcParams if k != 'backend'}\n"
        "before = settings()\n"
        f"draw_curves([{{'event': 'val', 'step': 0, 'loss': 1.0}}], Path({str(tmp_path / 'a.png')!r}))\n"
        "print('matplotlib.pyplot' in sys.modules, before == settings())"
    )
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
    with Image.open(io.BytesIO((tmp_path / "a.png").read_bytes())) as image:
        image.verify()
