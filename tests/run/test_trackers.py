"""A run's trackers as processes: what they are told, and what a tracker that misbehaves can do to the run: nothing.

The tracker is a stand-in for wandb, in a process as in a run.
"""

import errno
import os
import re
import resource
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from llmc_jax.base.errors import InputError
from llmc_jax.config.checks import validate
from llmc_jax.config.flags import parse_args
from llmc_jax.config.train import TrainConfig
from llmc_jax.logs.files import METRICS
from llmc_jax.run.command import main
from llmc_jax.run.folder import RunLog
from llmc_jax.run.trackers import Trackers, asked_trackers, require_trackers
from llmc_jax.trackers.child import Status
from tests.metrics import read_metrics
from tests.trackers.fakes import fake_wandb, told
from tests.waiting import wait_until

PATIENCE = 60.0  # seconds that nothing here needs


class Shown(NamedTuple):
    """A run that was shown, and what its tracker was told."""

    status: Status
    told: list[list[Any]]
    warnings: list[str]


Show = Callable[..., Shown]


@pytest.fixture
def show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Show:
    """Write a run's log as a run does, with a tracker that misbehaves in one way."""

    def shown(
        how: str = "", steps: int = 30, limit: float = 0.5, until: str = "", begin: str = "start", end: str = "done"
    ) -> Shown:
        log = fake_wandb(tmp_path / "fakes", how)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fakes"))
        monkeypatch.setenv("WANDB_API_KEY", "secret-of-mine")
        folder, warnings = tmp_path / "run", list[str]()
        folder.mkdir(exist_ok=True)
        with RunLog(folder) as run:
            run.event(begin, step=0, config={"options": {"learning_rate": 0.5}})
            with Trackers(TrainConfig(wandb="team/project"), folder, 0, limit, start=run.begun) as trackers:
                for step in range(steps):
                    run.event("train", step=step, loss=1.0 / (step + 1))
                run.event("val", step=steps, loss=0.25)
                run.event("sample", step=steps, text="<script>\x1b[2J", tokens=3)
                if end:
                    run.event("end", step=steps, outcome=end)

                def arrived() -> bool:
                    trackers.tell(warnings.append)
                    return not until or bool(warnings) or any(each[0] == until for each in told(log))

                wait_until(arrived)
                (status,) = trackers.end().values()
                return Shown(status, told(log), warnings)

    return shown


def test_everything_arrives_and_the_end_too(show: Show) -> None:
    shown = show(limit=PATIENCE)
    logged = [values for what, values in shown.told if what == "log"]
    assert shown.status == Status("/elsewhere/run", 32, 0, "", True)
    assert {each["step"]: each["train/loss"] for each in logged if "train/loss" in each} == {
        step: 1.0 / (step + 1) for step in range(30)
    }
    assert [each["val/loss"] for each in logged if "val/loss" in each] == [0.25]
    assert [each["sample"] for each in logged if "sample" in each] == ["<pre>&lt;script&gt;\ufffd[2J</pre>"]
    assert shown.told[-1] == ["finish", 0]
    (options,) = [values for what, values in shown.told if what == "init"]
    assert (options["entity"], options["project"], options["name"]) == ("team", "project", "run")


@pytest.mark.parametrize(("end", "status"), [("stopped", 0), ("diverged", 1), ("", 1)])
def test_a_tracker_hears_how_the_run_ended(show: Show, end: str, status: int) -> None:
    """Without a last event it died: the pipe's end tells of it."""
    assert show(limit=PATIENCE, end=end, steps=2).told[-1] == ["finish", status]


def test_a_run_with_many_open_files_hears_its_tracker(show: Show) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], min(limits[1], 2000)), limits[1]))
    with ExitStack() as closing:
        closing.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        for _ in range(1100):
            closing.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        assert show(limit=PATIENCE).status.sent == 32


def test_a_resume_shows_the_same_run_from_where_it_begins(show: Show) -> None:
    first = show(limit=PATIENCE)
    second = show(limit=PATIENCE, begin="resume", steps=2)
    assert second.status.sent == 4
    ids = [values["id"] for what, values in second.told if what == "init"]
    assert len(first.told) < len(second.told)
    assert ids[0] == ids[1]


@pytest.mark.parametrize(
    ("how", "until", "sent"),
    [
        ("hangs in init", "hangs", 0), ("hangs in log", "hangs", 0),
        ("hangs in finish", "", 32),  # which it comes to only at the end
        ("raises", "a warning", 0), ("exits", "a warning", 0), ("dies", "a warning", 0),
    ],
)  # fmt: skip
def test_a_tracker_that_misbehaves_is_told_of_and_ended(show: Show, how: str, until: str, sent: int) -> None:
    shown = show(how, until=until)
    assert shown.status.sent == sent and shown.status.problem
    assert how == "dies" or shown.status.dropped == 32 - sent
    assert until != "hangs" or ["hangs"] in shown.told
    assert not re.search("secret|hunter2", " ".join([shown.status.problem, *shown.warnings]))


def test_a_tracker_that_prints_without_end_is_not_heard(show: Show) -> None:
    shown = show("floods", limit=PATIENCE)
    assert (shown.status.sent, shown.status.problem) == (32, "")


def test_a_slow_tracker_gets_validations_first(show: Show) -> None:
    """Of 1,000 steps most are dropped when the run has ended, and none goes uncounted."""
    shown = show("slow", steps=1000, limit=2.0, until="log")
    assert 2 < shown.status.sent < 1002
    assert shown.status.sent + shown.status.dropped == 1002
    assert {"val/loss", "sample"} <= {name for what, values in shown.told if what == "log" for name in values}


def test_process_0_alone_has_trackers(tmp_path: Path) -> None:
    with Trackers(TrainConfig(wandb="p", tensorboard=True, mlflow="e"), tmp_path, rank=1) as trackers:
        assert trackers.running == {}


def test_a_process_that_cannot_be_started_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def popen(*_: Any, **__: Any) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", popen)
    warnings = list[str]()
    with Trackers(TrainConfig(wandb="p", mlflow="e"), tmp_path, rank=0) as trackers:
        for _ in range(2):
            trackers.tell(warnings.append)
    assert [warning.split(":")[0] for warning in warnings] == ["--wandb", "--mlflow"]


def test_a_log_knows_where_its_first_event_stands(tmp_path: Path) -> None:
    for before in (b"", b"first\n" * 20_000):
        (tmp_path / METRICS).write_bytes(before)
        with RunLog(tmp_path) as log:
            log.event("start", step=0)
            log.event("train", step=0)
            assert log.begun == len(before)


def test_a_package_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that wandb has made where the run is started is no package."""
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.delitem(__import__("sys").modules, "wandb", raising=False)
    for config in (TrainConfig(wandb="p"), TrainConfig(mlflow="p"), TrainConfig(tensorboard=True)):
        monkeypatch.delenv("UV_RUN_RECURSION_DEPTH", raising=False)
        with pytest.raises(InputError, match="pip install"):
            require_trackers(config)
        monkeypatch.setenv("UV_RUN_RECURSION_DEPTH", "1")  # uv's environments have no pip
        with pytest.raises(InputError, match="uv run --with"):
            require_trackers(config)


@pytest.mark.parametrize("flag", ["--wandb", "--mlflow"])
@pytest.mark.parametrize("secret", [
    "https://me:hunter2@host/p", "me:hunter2@host", "0123456789abcdef0123456789abcdef01234567", "wandb_v1_hunter2",
    "api_key=hunter2",
])  # fmt: skip
def test_what_may_be_a_secret_is_refused_and_not_repeated(flag: str, secret: str) -> None:
    name = flag.removeprefix("--")
    for refuse in (
        lambda: parse_args([flag, secret]),
        lambda: validate(TrainConfig(**{name: secret})),
        lambda: TrainConfig.from_json({name: secret}),
    ):
        with pytest.raises(InputError) as caught:
            refuse()
        assert all(each not in str(caught.value) for each in (secret, "hunter2", "\n"))


@pytest.mark.parametrize("name", ["gpt2", "team/gpt2", "/Users/me@example.org/gpt2", "a b: c", "Größe"])
def test_names_are_taken(name: str) -> None:
    config = parse_args(["--wandb", name, "--mlflow", name, "--tensorboard"])
    assert [*asked_trackers(config).values()] == ["", name, name]
    validate(config)


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_lasts", "quick_compilation")
def test_the_run_goes_on_and_says_how_each_tracker_went(
    tmp_path: Path, tokens: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_wandb(tmp_path / "fakes", "raises")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fakes"))
    monkeypatch.setenv("WANDB_API_KEY", "secret-of-mine")
    monkeypatch.syspath_prepend(tmp_path / "fakes")
    flags = "-e L1-NH1-C8-V257-T16 -b 2 -t 16 -x 3 -v 0 -s 0 --no-save --wandb project"
    files = ["-i", str(tokens.train), "-j", str(tokens.val), "-o", str(tmp_path / "run")]
    assert main([*flags.split(), *files]) == 0
    *_, end, tracker = read_metrics(tmp_path / "run" / METRICS)
    expected = {"event": "tracker", "name": "wandb", "sent": 0, "dropped": 3, "where": "/elsewhere/run"}
    assert end["event"] == "end" and expected.items() <= tracker.items() and tracker["problem"]
    files = [each.read_text() for each in (tmp_path / "run").iterdir() if each.suffix not in (".png", ".bin")]
    assert not re.search("secret-of-mine|hunter2", "".join([*capsys.readouterr(), *files]))
