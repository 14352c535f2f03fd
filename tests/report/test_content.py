"""What a page contains, as JSON."""

import json
import math

import numpy as np

from llmc_jax.report.content import (
    Content,
    Difference,
    Differences,
    Event,
    Figure,
    Panel,
    PanelCurve,
    Points,
    Run,
    Sample,
    Status,
    X,
)


def test_content_is_json_and_what_is_not_finite_is_a_word() -> None:
    x = X(np.arange(3), np.array([8.0, 16.0, 24.0]), None)
    curve = Figure(x, np.array([math.nan, math.inf, 0.1]), 3, Points(x, np.array([1.0, 2.0, 3.0])))
    status = Status("done", 3, 3, 1.5, None, "done")
    run = Run("a", "a", "run", status, None, [("loss", "1")], [("model", [("layers", "4")])], {"train.loss": curve},
              [Sample(0, 4, "</script>")], [Event("end", 3, 24.0, math.inf, "the end")], ["torn"])  # fmt: skip
    panels = [Panel("loss", "Loss", "nats per token", True, [PanelCurve("train.loss", "training", "line")])]
    content = Content("a", 2.5, "0.1", [run], panels, Differences(["a"], [Difference("options", "seed", ["1"])]))
    found = json.loads(json.dumps(content.to_json(), allow_nan=False))
    (shown,) = found["runs"]
    assert shown["curves"]["train.loss"]["y"] == ["nan", "inf", 0.1]
    assert shown["curves"]["train.loss"]["x"] == {"step": [0, 1, 2], "tokens": [8.0, 16.0, 24.0], "time": None}
    assert shown["curves"]["train.loss"]["mean"]["y"] == [1.0, 2.0, 3.0]
    assert shown["facts"] == [["model", [["layers", "4"]]]] and shown["samples"][0]["text"] == "</script>"
    assert shown["events"][0]["time"] == "inf" and shown["status"]["steps"] == 3
    assert found["panels"][0]["curves"] == [{"key": "train.loss", "label": "training", "mark": "line"}]
    assert found["differences"]["rows"][0]["values"] == ["1"]
