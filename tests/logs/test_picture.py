"""The picture: what is drawn is what was logged."""

import io
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image

from llmc_jax.logs import picture
from llmc_jax.logs.curves import BINS
from llmc_jax.logs.events import read_events
from llmc_jax.logs.reading import Log, log_of
from tests.compare.test_logs import log_of as log_of_losses


def metrics_of(steps: int = 60, **changes: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [{"event": "start"}]
    for step in range(steps):
        if step % 20 == 0:
            rows.append({"event": "val", "step": step, "loss": 5.6 - step / 20, "batches": 2})
        row = {"event": "train", "step": step, "loss": 5.5 - step / 20, "norm": 1.0, "lr": 1e-3, "ms": 1.0}
        rows.append({**row, "skipped": False, "tokens": 256 * (step + 1), **changes})
    return rows


def log_with(rows: list[dict[str, Any]], folder: Path, title: str = "") -> Log:
    """A run that has logged these rows."""
    log = folder / "metrics.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return log_of(read_events(log), title)


def draw_curves(rows: list[dict[str, Any]], png: Path, title: str = "", *more: Any) -> None:
    """Draw a run that has logged these rows."""
    picture.draw_curves(log_with(rows, png.parent, title), png, *more)


def _pixels(png: Path) -> np.ndarray:
    with Image.open(png) as image:
        return np.asarray(image.convert("RGB")).astype(int)


def _has_colour(pixels: np.ndarray, colour: str) -> bool:
    wanted = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)])
    return bool((np.abs(pixels - wanted).max(axis=-1) < 8).any())


def test_the_picture_shows_every_curve(tmp_path: Path) -> None:
    draw_curves(metrics_of(), tmp_path / "a.png", "a run", {"bigram baseline": 4.0})
    draw_curves(metrics_of(), tmp_path / "b.png", "a run")
    draw_curves([r for r in metrics_of() if r["event"] != "val"], tmp_path / "c.png", "a run", {"bigram baseline": 4.0})
    with_all, no_baseline, no_val = (_pixels(tmp_path / f"{name}.png") for name in "abc")
    # a baseline within the range of the losses changes nothing but its line, across the panel, and its name above it
    rows, columns = np.nonzero((with_all != no_baseline).any(axis=-1))
    assert np.ptp(rows) < 30 and np.ptp(columns) > 700
    assert with_all.shape[0] > 500 and with_all.shape[1] > 800
    for colour in (picture.TRAIN, picture.VAL, picture.RATE, picture.NORM):
        assert _has_colour(with_all, colour)
    assert not _has_colour(no_val, picture.VAL)
    assert not _has_colour(with_all, picture.SKIPPED)


def test_the_accuracy_has_a_panel_where_there_is_one(tmp_path: Path, panels: list[Any]) -> None:
    draw_curves(metrics_of(), tmp_path / "a.png")
    assert len(panels) == 3  # the loss, the learning rate, the norm at its right
    evals = [
        {"event": "eval", "step": step, "accuracy": 0.9, "accuracy_norm": 0.25 + step / 1000} for step in (20, 40, 60)
    ]
    draw_curves([*metrics_of(), *evals], tmp_path / "b.png")
    assert len(panels) == 4
    label, steps, heights = _line(panels[1], "HellaSwag")
    assert "0.3100" in label and steps == [20, 40, 60]
    np.testing.assert_allclose(heights, [0.27, 0.29, 0.31])


@pytest.fixture
def panels(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The panels of the picture drawn last, to look at what is in them."""
    found: list[Any] = []

    def keep(canvas: FigureCanvasAgg, file: Any, **_: Any) -> None:
        found[:] = canvas.figure.axes

    monkeypatch.setattr(FigureCanvasAgg, "print_png", keep)
    return found


def _line(axes: Any, beginning: str) -> tuple[str, list[int], np.ndarray]:
    """The label, the steps and the heights of the one line whose label begins so."""
    (line,) = [each for each in axes.lines if str(each.get_label()).startswith(beginning)]
    return str(line.get_label()), [int(step) for step in line.get_xdata()], np.asarray(line.get_ydata())


def test_the_bold_curve_is_what_its_label_says(tmp_path: Path, panels: list[Any]) -> None:
    """To its last point, which was once the mean of one step."""
    rows = metrics_of(850)
    rng = np.random.default_rng(0)
    for row in rows:
        if row["event"] == "train":
            row["loss"] = 3 + rng.normal()
    losses = np.array([row["loss"] for row in rows if row["event"] == "train"])
    draw_curves(rows, tmp_path / "a.png")
    label, steps, drawn = _line(panels[0], "training, mean of")
    window = int(label.split()[3])
    assert window == 17 and steps == list(range(8, 842))
    np.testing.assert_allclose(drawn, np.lib.stride_tricks.sliding_window_view(losses, window).mean(axis=1), rtol=1e-9)


def test_skipped_steps_are_marked_and_do_not_stop_the_drawing(tmp_path: Path, panels: list[Any]) -> None:
    rows = metrics_of()
    bad = [row for row in rows if row["event"] == "train"]
    bad[30].update(loss=float("nan"), norm=float("inf"), skipped=True)
    bad[31].update(loss=float("inf"), norm=float("nan"))
    draw_curves(rows, tmp_path / "a.png")
    assert _line(panels[0], "skipped updates: 1")[1] == [30]
    assert _line(panels[0], "training: 2 points not finite, first at step 30")[1] == [30, 31]


def test_a_picture_says_what_lies_outside_of_it(tmp_path: Path, panels: list[Any]) -> None:
    """A run that diverges: its last losses are enormous, then no numbers."""
    rows = metrics_of(1000)
    for row in rows:
        row["loss"] = 5.5 - row["step"] / 250 if "step" in row else None
        if row["event"] == "train" and row["step"] >= 990:
            row["loss"] = [1e3, 4e4, 2e3, math.inf][row["step"] - 990] if row["step"] < 994 else math.nan
    rows.append({"event": "val", "step": 1000, "loss": math.nan, "batches": 2})
    draw_curves(rows, tmp_path / "a.png")
    axes = panels[0]
    assert axes.get_ylim()[1] < 100
    label, steps, _ = _line(axes, "training: 3 points off scale")
    assert steps == [990, 991, 992] and label.endswith("largest 4e+04 at step 991")
    assert _line(axes, "training: 7 points not finite, first at step 993")[1] == list(range(993, 1000))
    assert _line(axes, "validation: 1 point not finite, first at step 1000")[1] == [1000]
    assert _line(axes, "validation (last nan)")[1][-1] == 980
    draw_curves(metrics_of(1000), tmp_path / "a.png")
    assert not [line for line in panels[0].lines if re.search("off scale|finite|skipped", str(line.get_label()))]


def test_a_diverged_run_says_so_and_hides_nothing(tmp_path: Path, panels: list[Any]) -> None:
    """The demo with a rate of 100: two steps, and then losses of millions until it gives up."""
    rows: list[dict[str, Any]] = [{"event": "start", "step": 0}, {"event": "val", "step": 0, "loss": 5.3}]
    for step, loss in enumerate([5.4, 422_000.0, *[4.1e6] * 10]):
        rows.append({"event": "train", "step": step, "loss": loss, "lr": 100.0, "skipped": step > 1})
    rows.append({"event": "end", "step": 12, "outcome": "diverged"})
    draw_curves(rows, tmp_path / "a.png", "demo", {"bigram baseline": 2.402})
    axes, figure = panels[0], panels[0].figure
    FigureCanvasAgg(figure).draw()
    assert "diverged after 12 steps" in figure.get_suptitle()
    assert axes.yaxis.label.get_window_extent().x0 >= 2  # not clipped
    (line,) = [each for each in axes.lines if each.get_label() == "training, each step"]
    assert (
        not line.get_transform()
        .transform_path(line.get_path())
        .intersects_bbox(axes.get_legend().get_window_extent(), filled=False)
    )
    draw_curves([*rows, {"event": "resume", "step": 12}], tmp_path / "a.png", "demo")
    assert panels[0].figure.get_suptitle() == "demo"


def test_a_long_run_of_nan_is_a_thousand_marks_and_not_a_million(tmp_path: Path, panels: list[Any]) -> None:
    rows = [{"event": "train", "step": step, "loss": math.nan} for step in range(50_000)]
    draw_curves(rows, tmp_path / "a.png")
    label, steps, _ = _line(panels[0], "training: 50,000 points not finite")
    assert "first at step 0" in label and len(steps) == BINS and (steps[0], steps[-1]) == (0, 49_950)


ODD_NAMES = ["W" * 300, "$x^{$_" * 20, "中文" * 40, "a\n\x1b[31m", ""]


@pytest.mark.slow
@pytest.mark.parametrize("name", ODD_NAMES, ids=["wide", "formula", "not in the font", "control", "none"])
@pytest.mark.filterwarnings("error")  # such as one about a character that the font does not have
def test_no_text_leaves_the_page(name: str, tmp_path: Path, panels: list[Any]) -> None:
    """With all panels, of a run that diverges, and of losses as large as they can be."""
    rows: list[dict[str, Any]] = [*metrics_of(), {"event": "eval", "step": 20, "accuracy_norm": 0.25}]
    rows += [
        {"event": "train", "step": 10**9 + step, "loss": 10.0**step, "lr": 1e-9, "norm": 1e9} for step in range(30)
    ]
    rows += [
        {"event": "train", "step": 10**9 + 90, "loss": "nan"},
        {"event": "end", "step": 10**9, "outcome": "diverged"},
    ]
    bad = log_with(rows, tmp_path, name)
    for log in (bad, log_with(metrics_of(1000), tmp_path, name), log_of_losses([1e30, -1e30])._replace(path=name)):
        picture.draw_curves(log, tmp_path / "a.png", {name: 3.0, "goal": 2.9})
        figure = panels[0].figure
        box, (width, height) = figure.get_tightbbox(FigureCanvasAgg(figure).get_renderer()), figure.get_size_inches()
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height, box
        assert ("diverged after 1000000000 steps" in figure.get_suptitle()) == (log is bad)


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [{"event": "start"}],
        metrics_of(1),
        metrics_of(2)[2:],
        [{"event": "val", "step": 0, "loss": 5.5}],
        metrics_of(3, loss=float("nan"), norm=float("nan")),
        metrics_of(40, loss=0.0, norm=0.0, lr=0.0),
        metrics_of(40, tokens=0),
        metrics_of(3000),
    ],
    ids=["empty", "started", "one step", "no val", "val only", "all nan", "all zero", "no tokens", "binned"],
)
@pytest.mark.filterwarnings("error")
def test_any_run_can_be_drawn(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    draw_curves(rows, tmp_path / "a.png", "title", {"bigram baseline": 2.48, "goal": 2.45})
    assert _pixels(tmp_path / "a.png").std() > 1


def test_no_pyplot_and_no_changed_settings(tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    log.write_text('{"event": "val", "step": 0, "loss": 1.0}\n')
    code = (
        "import sys, matplotlib; from pathlib import Path; from llmc_jax.logs.events import read_events\n"
        "from llmc_jax.logs.picture import draw_curves; from llmc_jax.logs.reading import log_of\n"
        "def settings(): return {k: matplotlib.rcParams[k] for k in matplotlib.rcParams if k != 'backend'}\n"
        "before = settings()\n"
        f"draw_curves(log_of(read_events(Path({str(log)!r}))), Path({str(tmp_path / 'a.png')!r}))\n"
        "print('matplotlib.pyplot' in sys.modules, before == settings())"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
    with Image.open(io.BytesIO((tmp_path / "a.png").read_bytes())) as image:
        image.verify()
