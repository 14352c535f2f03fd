"""Several processes, the others stand-ins: what they compare before they connect, and how they end together."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from llmc_jax import cluster
from llmc_jax.base.errors import ExitCode, InputError
from llmc_jax.cluster.agreement import Agreed
from llmc_jax.cluster.worker import Group
from llmc_jax.config.flags import parse_args
from llmc_jax.config.model import parse_descriptor
from llmc_jax.config.train import TrainConfig
from llmc_jax.kernels import this_machine
from llmc_jax.plan.plan import make_plan
from llmc_jax.run import processes
from llmc_jax.run.end import last_save
from llmc_jax.run.saver import Saved
from llmc_jax.run.state import Outcome, Progress
from tests.families import TOY, shape_of


class OfTwo(Group):
    rank, size, hosts = 0, 2, ("a", "b")


# ----- the run that -y 1 goes on with ---------------------------------------------------------------------------------


class Three(Group):
    """Rank 1 of three, whose others have found what they are told to have found."""

    rank, size, hosts = 1, 3, ("a", "a", "b")

    def __init__(self, others: bool) -> None:
        self.others = others

    def meet(self, name: str, value: Any = None) -> list[Any]:
        return [{"value": self.others}, value, {"value": self.others}]


@pytest.mark.parametrize("there", [True, False])
def test_all_find_a_run_or_none_does(tmp_path: Path, there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if there:
        (tmp_path / "config.json").write_text("{}")
    config = TrainConfig(reuse=True, output_dir=str(tmp_path))
    monkeypatch.setattr(cluster, "_here", Three(others=there))
    processes.check_earlier(config)
    monkeypatch.setattr(cluster, "_here", Three(others=not there))
    with pytest.raises(Agreed) as error:
        processes.check_earlier(config)
    ones, others = "rank 1 (host a)", "ranks 0, 2 (hosts a, b)"
    first, second = (ones, others) if there else (others, ones)
    assert f"there is a run in the folder of -o for {first}, and none for {second}; give all" in str(error.value)


def test_without_y_no_folder_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_here", Three(others=False))
    (tmp_path / "config.json").write_text("{}")
    processes.check_earlier(TrainConfig(reuse=False, output_dir=str(tmp_path)))


# ----- the connection -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("other", "local"), [("127.0.0.1", True), ("10.0.0.1", False), ("node1", False)])
def test_the_service_listens_for_this_machine_alone_where_that_is_enough(
    monkeypatch: pytest.MonkeyPatch, other: str, local: bool
) -> None:
    class Addresses(OfTwo):
        def meet(self, name: str, value: Any = None) -> list[Any]:
            return [{"value": "127.0.0.1"}, {"value": other}] if name == "addresses of rank 0" else [value, value]

    told: dict[str, Any] = {}
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **given: told.update(given))
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    monkeypatch.setattr(cluster, "_here", Addresses())
    processes.connect(processes.Share("cpu", 1, None))
    bind = told["coordinator_bind_address"]
    assert bind is None if not local else bind.startswith("127.0.0.1:")


@pytest.mark.parametrize(
    ("words", "flags"),
    [("-x 5", "-i -j"), ("-x 5 -v 0", "-i"), ("-x 0", "-j"), ("-x 5 -v 0 -a 1", "-j"), ("-x 0 -v 0", "")],
)
def test_the_files_that_are_read_are_compared_and_no_others(words: str, flags: str) -> None:
    assert list(processes.data_files(parse_args(words.split()))) == flags.split()


def test_the_models_file_is_compared(tmp_path: Path) -> None:
    """By its content, not by where it lies. Its digest stands among the files, in which processes must agree."""
    (tmp_path / "m.py").write_text(TOY.read_text() + "\n")
    words = "-e toy-V61-C8-T16 -x 0 -v 0"
    found = [
        processes.own_facts(parse_args([*words.split(), "--model", str(file)])) for file in (TOY, tmp_path / "m.py")
    ]
    assert [list(each.files) for each in found] == [["--model"]] * 2
    assert found[0].files["--model"] == shape_of("toy-V61-C8-T16", TOY).source != found[1].files["--model"]


@pytest.mark.parametrize(("place", "other"), [(0, {"logit_rows": 7}), (1, "algorithms_0.txt")])
def test_a_process_that_plans_another_step_is_named(place: int, other: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any exchange on the devices, in which each would wait for the other: other options, another file."""

    class Other(OfTwo):
        def meet(self, name: str, value: Any = None) -> list[Any]:
            theirs = list(value["value"])
            theirs[place] = {**theirs[place], **other} if isinstance(other, dict) else other
            return [value, {"value": theirs}]

    plan = make_plan(parse_args(["-b", "1"]), parse_descriptor("d12"), this_machine())
    monkeypatch.setattr(cluster, "_here", Other())
    with pytest.raises(Agreed, match=r"rank 1 \(host b\): .*XLA_FLAGS"):
        processes.first_exchange(SimpleNamespace(), plan)  # type: ignore[arg-type]


# ----- the end: what only one of them finds must not let the others wait for it ---------------------------------------


def ended(group: Group, saved: Saved, full: bool) -> Outcome:
    """The end of a run whose last save was under way. full: its log cannot be written."""

    def event(kind: str, **fields: Any) -> None:
        if full:
            raise InputError("metrics.jsonl: No space left on device")

    run: Any = SimpleNamespace(
        setup=SimpleNamespace(config=TrainConfig(save=False), steps=8),
        saver=SimpleNamespace(wait=lambda: [saved], prune=lambda least: ((), None)),
        log=SimpleNamespace(event=event),
        console=SimpleNamespace(warning=lambda words: None),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster, "_here", group)
        return last_save(run, Outcome(ExitCode.DONE, Progress(None, step=8, saving=8)), None)


def test_a_log_that_cannot_be_written_ends_the_process() -> None:
    """Alone it still says where everything is; of several it leaves, for the others go on to save with it."""
    good = Saved(8, Path("state_00000008"), None, 0.0, 0.0)
    with pytest.raises(InputError, match="No space"):
        ended(OfTwo(), good, full=True)
    assert ended(Group(), good, full=True).code == ExitCode.BAD_INPUT


def test_a_save_that_fails_for_all_ends_all_alike() -> None:
    outcome = ended(OfTwo(), Saved(8, Path("state_00000008"), "no room", 0.0, 0.0), full=False)
    assert (outcome.code, type(outcome.problem)) == (ExitCode.BAD_INPUT, Agreed)
