"""The trackers that a run can be shown in, each behind the same five methods: TensorBoard, Weights & Biases, MLflow.

Each package is imported when its sink is made, in a process of its own (child.py). Credentials and addresses are each
tool's own affair: its environment, its files. Leaves out what is sent (rows.py) and what becomes of failures
(child.py).
"""

import html
import importlib.util
import os
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from llmc_jax.base.streams import escaped
from llmc_jax.trackers.rows import Facts


class Sink(Protocol):
    """What takes a run's numbers. Every method may raise anything, and take any time."""

    def begin(self, facts: Facts) -> str:
        """Start or resume a run; return where it can be seen."""

    def put(self, step: int, when: float, values: Mapping[str, float]) -> None:
        """Take the numbers of a step. when: seconds since 1970."""

    def text(self, step: int, when: float, name: str, text: str) -> None:
        """Take a text, as it stands: it holds whatever a model has made up."""

    def flush(self) -> None:
        """Send what was taken."""

    def close(self, outcome: str) -> None:
        """End the run. outcome: as the last event has it, or died."""


GOOD = ("done", "stopped")  # outcomes that are no failure


class TensorBoard:
    """Event files in the run's folder, one record for each event: a fifth of what a record for each number takes."""

    def __init__(self, target: str) -> None:
        from tensorboardX import RecordWriter, summary
        from tensorboardX.proto import event_pb2, summary_pb2

        self._new_file: Callable[[str], Any] = RecordWriter
        self._made: Any = summary
        self._event: Any = event_pb2
        self._summary: Any = summary_pb2.Summary

    def begin(self, facts: Facts) -> str:
        where = Path(facts.folder) / "tensorboard"
        where.mkdir(exist_ok=True)
        # a file of its own for each process, the oldest first by name
        now = time.time()
        self._file = self._new_file(str(where / f"events.out.tfevents.{now:.0f}.{platform.node()}.{os.getpid()}"))
        self._write(now, 0, file_version="brain.Event:2")
        if facts.resumed:  # drops what stands beyond its step
            begun = self._event.SessionLog(status=self._event.SessionLog.START)
            self._write(now, facts.step, session_log=begun)
        shown = {name: _simple(value) for name, value in facts.parameters.items()}
        for each in self._made.hparams(shown, {"val/loss": 0.0, "train/loss": 0.0}):
            self._write(now, 0, summary=each)
        table = "\n".join(f"{name} = {value}" for name, value in shown.items())
        self.text(facts.step, now, "configuration", table)
        return str(where)

    def _write(self, when: float, step: int, **content: Any) -> None:
        self._file.write(self._event.Event(wall_time=when, step=step, **content).SerializeToString())

    def put(self, step: int, when: float, values: Mapping[str, float]) -> None:
        numbers = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(when, step, summary=self._summary(value=numbers))

    def text(self, step: int, when: float, name: str, text: str) -> None:
        # it is shown as Markdown, where indented lines stand as they are
        indented = "".join(f"    {line}\n" for line in escaped(text, keep="\n\t", instead="\ufffd").split("\n"))
        self._write(when, step, summary=self._made.text(name, indented))

    def flush(self) -> None:
        self._file.flush()

    def close(self, outcome: str) -> None:
        self._file.close()


class WeightsAndBiases:
    """A run of a project, on the service or, with WANDB_MODE=offline, in the run's folder."""

    def __init__(self, target: str) -> None:
        import wandb

        self._wandb: Any = wandb
        self._entity, _, self._project = target.rpartition("/")

    def begin(self, facts: Facts) -> str:
        # none of what this process prints, and no address of a repository, which may hold a password
        settings = self._wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True)
        self._run = self._wandb.init(
            project=self._project, entity=self._entity or None, id=facts.run_id, name=facts.name, resume="allow",
            dir=facts.folder, settings=settings,
        )  # fmt: skip
        self._run.config.update(facts.parameters, allow_val_change=True)
        # its own count of calls never goes back, as a resume after a kill does
        self._run.define_metric("*", step_metric="step")
        return str(self._run.url or Path(self._run.dir).parent)

    def put(self, step: int, when: float, values: Mapping[str, float]) -> None:
        self._run.log({**values, "step": step, "_timestamp": when})

    def text(self, step: int, when: float, name: str, text: str) -> None:
        page = self._wandb.Html(f"<pre>{html.escape(escaped(text, keep='\n\t', instead='\ufffd'))}</pre>", inject=False)
        self._run.log({name: page, "step": step, "_timestamp": when})

    def flush(self) -> None:
        """Leave it to wandb's own process."""

    def close(self, outcome: str) -> None:
        self._run.finish(exit_code=0 if outcome in GOOD else 1)


class MLflow:
    """A run of an experiment, where MLFLOW_TRACKING_URI says."""

    MOST = 1000  # numbers that a request may have
    TAG = "llmc_jax.run"  # MLflow gives its runs their ids itself

    def __init__(self, target: str) -> None:
        import mlflow

        self._mlflow: Any = mlflow
        self._experiment = target
        self._metrics: list[Any] = []

    def begin(self, facts: Facts) -> str:
        self._client = self._mlflow.MlflowClient()
        found = self._client.get_experiment_by_name(self._experiment)
        experiment = found.experiment_id if found else self._client.create_experiment(self._experiment)
        runs = self._client.search_runs([experiment], f"tags.`{self.TAG}` = '{facts.run_id}'")
        run = runs[0] if runs else self._client.create_run(
            experiment, run_name=facts.name, tags={self.TAG: facts.run_id}
        )  # fmt: skip
        self._id = run.info.run_id
        if runs:
            self._client.update_run(self._id, status="RUNNING")
        self._parameters(facts, run.data.params)
        return f"{self._mlflow.get_tracking_uri()}, run {self._id}"

    def _parameters(self, facts: Facts, there: Mapping[str, str]) -> None:
        """Send parameters once: MLflow refuses another value later, so what a resume has changed becomes a tag."""
        entities = self._mlflow.entities
        shown = {name: str(_simple(value))[:500] for name, value in facts.parameters.items()}
        new = [entities.Param(name, value) for name, value in shown.items() if name not in there]
        for begin in range(0, len(new), 100):
            self._client.log_batch(self._id, params=new[begin : begin + 100])
        changed = {name: value for name, value in shown.items() if there.get(name, value) != value}
        tags = [entities.RunTag(f"step {facts.step}: {name}", value) for name, value in changed.items()]
        if tags:
            self._client.log_batch(self._id, tags=tags[:100])

    def put(self, step: int, when: float, values: Mapping[str, float]) -> None:
        stamp = int(1e3 * when)
        self._metrics += [self._mlflow.entities.Metric(name, value, stamp, step) for name, value in values.items()]

    def text(self, step: int, when: float, name: str, text: str) -> None:
        self._client.log_text(self._id, text, f"{name}/{step:08d}.txt")

    def flush(self) -> None:
        metrics, self._metrics = self._metrics, []
        for begin in range(0, len(metrics), self.MOST):
            self._client.log_batch(self._id, metrics=metrics[begin : begin + self.MOST])

    def close(self, outcome: str) -> None:
        status = {"done": "FINISHED", "stopped": "KILLED"}.get(outcome, "FAILED")
        self._client.set_terminated(self._id, status)


def _simple(value: Any) -> bool | int | float | str:
    return value if isinstance(value, bool | int | float | str) else str(value)


class Kind(NamedTuple):
    """A tracker: its sink, the module that this needs, and what installs that."""

    sink: Callable[[str], Sink]
    module: str
    package: str
    at_once: int = 1  # rows between two flushes; more where a flush is a request of its own

    @property
    def installed(self) -> bool:
        """Return whether the module is there; a folder of that name, as wandb makes them, is none."""
        found = importlib.util.find_spec(self.module)
        return found is not None and found.origin is not None


KINDS = {
    "tensorboard": Kind(TensorBoard, "tensorboardX", "tensorboardX"),
    "wandb": Kind(WeightsAndBiases, "wandb", "wandb"),
    "mlflow": Kind(MLflow, "mlflow", "mlflow-skinny sqlalchemy alembic", at_once=100),
}
