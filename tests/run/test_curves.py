"""The picture is drawn anew in little memory while a run goes on. tests/logs/test_picture.py has what it shows."""

import json
import tracemalloc
from pathlib import Path

import pytest

from llmc_jax.logs.files import METRICS
from llmc_jax.run import curves
from llmc_jax.run.curves import CurveDrawer
from tests.logs.test_picture import metrics_of


def test_a_picture_of_a_long_run_is_drawn_in_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer draws it: a list of events took 1.3 kB a step."""
    steps, drawn = 10_000, []
    (tmp_path / METRICS).write_text("".join(json.dumps(row) + "\n" for row in metrics_of(steps)))
    monkeypatch.setattr(curves, "draw_curves", lambda logs, *_: drawn.append(len(logs[0].train.steps)))
    drawer = CurveDrawer(tmp_path, "", {}, pytest.fail, lambda: True)
    tracemalloc.start()
    try:
        drawer.finish()
        assert tracemalloc.get_traced_memory()[1] < 300 * steps and drawn == [steps]
    finally:
        tracemalloc.stop()
        drawer.close()
