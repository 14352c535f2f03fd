"""A run in the real trackers, offline: what is read back out of them is what metrics.jsonl says.

`make test-trackers` has their packages; elsewhere these tests are skipped.
"""

import json
import math
import struct
from collections import defaultdict
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from llmc_jax.config.train import TrainConfig
from llmc_jax.logs.files import METRICS
from llmc_jax.run.folder import RunLog, cut_logs
from llmc_jax.run.trackers import Trackers
from llmc_jax.trackers.child import Status
from llmc_jax.trackers.rows import row_of
from tests.metrics import read_metrics
from tests.trackers.test_rows import FACTS

PATIENCE = 60.0
RESUMED_AT = 40
Points = dict[str, list[tuple[int, float]]]


def needs(*modules: str) -> pytest.MarkDecorator:
    missing = [name for name in modules if find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}: make test-trackers")


def write(log: RunLog, steps: range) -> None:
    """Write the events of steps as a run does. The same step has the same numbers each time."""
    for step in steps:
        if step % 20 == 0:
            log.val(step, loss=5.0 / (step + 1), batches=4)
            log.accuracy(step, items=10, correct=3, correct_norm=step // 20)
            log.sample(step, f"step {step}: <script>alert(1)</script> \x1b[2J # *a*", tokens=5)
        loss = math.inf if step == 7 else math.nan if step == 8 else float(np.float32(3.0 / (step + 1)))
        log.event("train", step=step, loss=loss, norm=1.5, lr=1e-3, tokens=10 * (step + 1), memory=2**40 + step)
        log.event("gpu", step=step, power=100 + step)


class Shown(NamedTuple):
    folder: Path
    status: Status
    events: list[dict[str, Any]]
    points: Points  # of metrics.jsonl, as a tracker names them


def shown(tmp_path: Path, **options: Any) -> Shown:
    """Show a run that ends at step 50 as if killed, and goes on from step 40 to its end."""
    folder = tmp_path / "run"
    folder.mkdir()
    for steps, rate, kind in ((range(50), 0.5, "start"), (range(RESUMED_AT, 60), 0.25, "resume")):
        if kind == "resume":
            cut_logs(folder, RESUMED_AT)
        with RunLog(folder) as log:
            config = {"options": {"learning_rate": rate, "tensorboard": True}, "model": {"channels": 8}}
            log.event(kind, step=steps.start, steps=60, config=config)
            with Trackers(TrainConfig(**options), folder, 0, PATIENCE, start=log.begun) as trackers:
                write(log, steps)
                if kind == "resume":
                    log.event("end", step=60, outcome="done")
                (status,) = trackers.end().values()
        assert status.problem == ""
        assert (status.sent, status.dropped) == (2 * len(steps) + 3 * len([s for s in steps if s % 20 == 0]), 0)
    events = read_metrics(folder / METRICS)
    points: Points = defaultdict(list)
    for row in filter(None, (row_of(event, FACTS) for event in events)):
        for name, value in row.values.items():
            points[name].append((row.step, value))
    return Shown(folder, status, events, points)


def same(found: Points, expected: Points) -> None:
    assert found.keys() == expected.keys()
    for name, points in expected.items():
        np.testing.assert_equal(sorted(found[name]), sorted(points), err_msg=name)


@needs("tensorboardX", "tensorboard")
def test_tensorboard(tmp_path: Path) -> None:
    """TensorBoard's files hold float32; after a resume nothing is left of what stood beyond its step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = shown(tmp_path, tensorboard=True)
    assert run.status.where == str(run.folder / "tensorboard")
    reader = EventAccumulator(run.status.where, size_guidance={"scalars": 0, "tensors": 0})
    reader.Reload()
    found = {name: [(each.step, each.value) for each in reader.Scalars(name)] for name in reader.Tags()["scalars"]}
    same(found, {name: [(s, float(np.float32(v))) for s, v in points] for name, points in run.points.items()})
    times = {event["step"]: event["time"] for event in run.events if event["event"] == "val"}
    assert {each.step: each.wall_time for each in reader.Scalars("val/loss")} == pytest.approx(times, abs=1e-3)
    texts = {each.step: each.tensor_proto.string_val[0].decode() for each in reader.Tensors("sample/text_summary")}
    assert sorted(texts) == [0, 20, 40]
    assert texts[20].startswith("    step 20: <script>")
    assert "\x1b" not in texts[20]
    assert "_hparams_/session_start_info" in reader.summary_metadata


@needs("wandb")
def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both starts are the same run; the steps that were made twice are there twice, with the same numbers."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = shown(tmp_path, wandb="project")
    files = sorted(run.folder.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 2
    found: Points = defaultdict(list)
    starts, configs, samples = [], dict[str, Any](), 0
    for record in (each for file in files for each in wandb_records(file)):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            starts.append((record.run.run_id, record.run.project, record.run.display_name))
        if kind in ("run", "config"):
            updates = record.run.config.update if kind == "run" else record.config.update
            configs |= {each.key: json.loads(each.value_json) for each in updates}
        if kind != "history":
            continue
        items = {each.nested_key[0] if each.nested_key else each.key: each.value_json for each in record.history.item}
        values = {name: json.loads(text) for name, text in items.items() if "/" in name}
        samples += "sample" in items
        for name, value in values.items():
            found[name].append((int(json.loads(items["step"])), float(value)))
    assert len(set(starts)) == 1
    assert starts[0][1:] == ("project", "run")
    assert (configs["learning_rate"], configs["model/channels"]) == (0.25, 8)
    assert samples == 3 + 1
    once = {name: list({step: (step, value) for step, value in points}.values()) for name, points in found.items()}
    same(once, run.points)
    assert len(found["train/loss"]) == 50 + 20


def wandb_records(path: Path) -> Iterator[Any]:
    """Read a file of wandb's: a log as LevelDB writes it, of records in its protocol."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, part = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        part, place = part + data[place + 7 : place + 7 + length], place + 7 + length
        if kind in (1, 4):  # whole, or its last part
            record, part = Record.FromString(part), b""
            yield record


@needs("mlflow", "sqlalchemy")
def test_mlflow_in_a_local_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both starts are the same run; an option that a resume has changed is a tag."""
    from mlflow import MlflowClient

    address = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    run = shown(tmp_path, mlflow="an experiment")
    client = MlflowClient(address)
    experiment = client.get_experiment_by_name("an experiment")
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.status, found.info.run_name) == ("FINISHED", "run")
    assert (found.data.params["learning_rate"], found.data.params["model/channels"]) == ("0.5", "8")
    assert found.data.tags["step 40: learning_rate"] == "0.25"
    points: Points = {}
    for name in found.data.metrics:
        history = client.get_metric_history(found.info.run_id, name)
        once = {each.step: math.inf if each.value > 1e308 else each.value for each in history}  # it has no infinity
        points[name] = list(once.items())
    same(points, run.points)
    samples = sorted(tmp_path.rglob("sample/*.txt"))
    assert [path.stem for path in samples] == ["00000000", "00000020", "00000040"]
    assert samples[1].read_text() == "step 20: <script>alert(1)</script> \x1b[2J # *a*"
