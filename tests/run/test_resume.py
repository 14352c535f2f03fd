"""Stopping a run and continuing it: the same bits as without a break, what is refused, what a failing save costs."""

import hashlib
import itertools
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from llmc_jax.base.errors import InputError
from llmc_jax.checkpoint import store
from llmc_jax.checkpoint.contents import Counters, Identity, Metadata
from llmc_jax.config.model import ModelConfig
from llmc_jax.config.train import TrainConfig
from llmc_jax.data.loader import TokenLoader
from llmc_jax.kernels import choice, record
from llmc_jax.logs.files import KERNELS
from llmc_jax.machine.algorithms import path_of
from llmc_jax.models.layout import views
from llmc_jax.plan.plan import Plan
from llmc_jax.run import resume
from llmc_jax.run.command import main
from llmc_jax.run.figures import StepFigures
from llmc_jax.run.folder import RunLog, locked
from llmc_jax.run.resume import find_earlier, repeated
from tests.run.in_turn import forget
from tests.same_run import Result, arrays, check_same, healthy, leftovers, steps_of
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("nothing_lasts", "quick_compilation")

FLAGS = "-e L1-NH1-C16-V257-T16 -b 2 -t 16 -l 1e-2 -v 3 -m 2 -s 5 -g 4 -x 12"
Train = Callable[..., Result]
Resumed = Callable[..., None]


def flags_of(*more: Any) -> list[str]:
    return [*FLAGS.split(), *map(str, more)]


@pytest.fixture
def train(data: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Train:
    """Runs the command line in this process; flags given here count. stop: a signal comes after so many steps."""

    def run(*flags: Any, folder: Path | str = "run", stop: int = 0, number: int = signal.SIGTERM) -> Result:
        output = tmp_path / folder
        with stopped_after(stop, number):
            code = main(flags_of(*data, "-o", output, *flags))
        return Result(code, output, *capsys.readouterr())

    return run


@contextmanager
def after_step(step: int, action: Callable[[], Any]) -> Iterator[None]:
    """Within the block, does something once so many steps have been logged; with 0 never."""
    log_train = RunLog.train

    def train(log: RunLog, figures: StepFigures) -> None:
        log_train(log, figures)
        if figures.step + 1 == step:
            action()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunLog, "train", train)
        yield


def stopped_after(steps: int, number: int = signal.SIGTERM) -> AbstractContextManager[None]:
    """Within the block a signal comes once so many steps have been logged."""
    return after_step(steps, lambda: os.kill(os.getpid(), number))


def complete(run: Result) -> Result:
    assert (run.code, run.err) == (0, ""), run.out + run.err
    return run


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """What would show that something was written: of every file and folder its size and time."""
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in [folder, *folder.rglob("*")]}


# ----- the same bits ------------------------------------------------------------------------------------------------

SCHEDULES = {
    "cosine": ["-k", "cosine", "-u", 30, "-q", 0.1],
    "linear": ["-k", "linear", "-u", 20, "-q", 0.0],
    "constant": ["-k", "constant"],
    "wsd": ["-k", "wsd", "-u", 10],
    "step": ["-k", "step", "--step-every", 50, "--step-factor", 0.3],
}
PRECISIONS = {
    "fp32": [],
    "bf16": ["--dtype", "bf16"],
    "stochastic": ["--dtype", "bf16", "-w", 0],
    # overflows at first, and grows into the next one
    "fp16": ["--dtype", "fp16", "--loss-scale", 2.0**24, "--loss-scale-steps", 9],
}
OUTLIERS = ["-sl", 0.5, "-sg", 0.5, "-l", 1e-4]  # losses that fall are never above those before
STEPS, EPOCH_END = 145, 140  # more than the 128 that the outlier detector looks at
STOPS = {"before": EPOCH_END - 1, "at": EPOCH_END, "after": EPOCH_END + 1}


class Case(NamedTuple):
    """A way to train, and where it is interrupted."""

    schedule: str
    precision: str
    accumulation: int
    outliers: bool  # updates whose loss or norm is an outlier are skipped
    stop: str

    def flags(self) -> list[Any]:
        return [
            *SCHEDULES[self.schedule], *PRECISIONS[self.precision], "-d", 32 * self.accumulation, "-x", STEPS,
            *(OUTLIERS if self.outliers else []), "-v", 70, "-s", 139, "-y", 1,
        ]  # fmt: skip


def covering(cases: list[Case]) -> list[Case]:
    """As few of the cases as it takes to have every pair of their values (found greedily)."""

    def pairs(case: Case) -> set[Any]:
        return set(itertools.combinations(enumerate(case), 2))

    chosen = []
    missing = set().union(*map(pairs, cases))
    while missing:
        chosen.append(max(cases, key=lambda case: len(pairs(case) & missing)))
        missing -= pairs(chosen[-1])
    return chosen


EVERY = covering([Case(*each) for each in itertools.product(SCHEDULES, PRECISIONS, (1, 2), (False, True), STOPS)])

SOME = Case("linear", "bf16", 2, False, "before")


@pytest.fixture(scope="module")
def references() -> dict[Case, Path]:
    """The runs without a break, made when they are first needed."""
    return {}


@pytest.fixture
def resumed(train: Train, references: dict[Case, Path], tmp_path_factory: pytest.TempPathFactory) -> Resumed:
    """Checks that a run stopped by a signal and continued is the run without a break.

    between: called before it is continued.
    """

    def check(case: Case, between: Callable[[], Any] = lambda: None) -> None:
        whole, stop = case._replace(stop=""), STOPS[case.stop]
        if whole not in references:
            run = train(*case.flags(), folder=tmp_path_factory.mktemp("reference") / "run")
            references[whole] = complete(run).folder
        first = train(*case.flags(), stop=stop)
        assert (first.code, steps_of(first.folder, "DONE")) == (130, [stop]), first.out + first.err
        between()
        again = complete(train(*case.flags()))
        assert "not bit-exact" not in again.out and "another run" not in again.out
        check_same(again.folder, references[whole])
        if case.outliers:
            skipped = again.values("train", "skipped")
            assert 0 < sum(skipped[128:]) < STEPS - 128, "choose another threshold"

    return check


@pytest.mark.parametrize(
    "case",
    [SOME, *(pytest.param(case, marks=pytest.mark.slow) for case in EVERY if case != SOME)],
    ids=lambda case: "-".join(map(str, case)),
)
def test_every_way_to_train_stopped_and_continued(case: Case, resumed: Resumed) -> None:
    resumed(case)


# Of the first an epoch is ten steps; of the second the loader does not move on from one batch.
@pytest.mark.slow
@pytest.mark.parametrize("words", ["-x -1", "-a 1", "--shuffle none", "-n 1 -nk 1", "-v 0 -s 0", "-v 1 -s 1"])
def test_stopped_twice(train: Train, words: str) -> None:
    """By Ctrl-C and by SIGTERM; each time something was due at that step."""
    flags = words.split()
    expected = complete(train(*flags, folder="expected"))
    assert train("-y", 1, *flags, stop=5, number=signal.SIGINT).code == 130
    second = train("-y", 1, *flags, stop=6)
    assert (second.code, steps_of(second.folder, "DONE")[-1]) == (130, 6)
    run = complete(train("-y", 1, *flags))
    check_same(run.folder, expected.folder)
    assert run.values("resume", "step") == [5, 6]
    assert leftovers(run.folder) == []


@pytest.mark.slow
def test_stopped_after_the_last_step(train: Train, unbroken: Path) -> None:
    """What is due after it, the last validation and sample, comes when the run goes on."""
    assert train("-y", 1, stop=12).code == 130
    run = complete(train("-y", 1))
    assert run.values("val", "step")[-1] == run.values("sample", "step")[-1] == 12
    check_same(run.folder, unbroken)


def test_running_ahead_changes_nothing(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where a step is begun before the one before it has been read."""
    expected = complete(train("-n", 4, "-v", 0, "-s", 0, folder="expected"))
    monkeypatch.setattr(Plan, "runs_ahead", True)
    first = train("-n", 4, "-v", 0, "-s", 0, "-y", 1, stop=6)
    assert first.code == 130 and steps_of(first.folder, "DONE") == [4, 7]  # one was under way
    check_same(complete(train("-n", 4, "-v", 0, "-s", 0, "-y", 1)).folder, expected.folder)


def test_a_complete_run_says_so(train: Train) -> None:
    first = complete(train("-n", 5, "-y", 1))
    kept = {path: path.read_bytes() for path in first.folder.rglob("*") if path.is_file()}
    again = complete(train("-n", 5, "-y", 1))
    assert "after step 12 of 12; the run is already complete" in again.out
    assert not any(line.startswith("step ") for line in again.out.splitlines())
    changed = {path.name for path, content in kept.items() if path.read_bytes() != content}
    assert changed <= {"metrics.jsonl", "config.json"}
    before = snapshot(first.folder)
    fewer = train("-n", 5, "-y", 1, "-x", 11)
    assert fewer.code == 2 and "-x 11: the run has made 12 steps" in fewer.err and snapshot(first.folder) == before


def test_what_was_done_at_the_step_is_not_done_again(train: Train) -> None:
    """Of a checkpoint made on the way, what lies before it in the order of a step is there already. The random numbers
    of the next sample are those that follow.
    """
    flags = ("-n", 6, "-v", 3, "-s", 6, "--sampling", "train_gpt2.c")
    expected = complete(train(*flags, folder="expected"))
    shutil.copytree(expected.folder, expected.folder.with_name("run"))
    forget(expected.folder.with_name("run"), 12)
    run = complete(train(*flags, "-y", 1))
    assert run.values("resume", "step") == [6]
    check_same(run.folder, expected.folder)


def test_counters_of_an_older_checkpoint_begin_anew() -> None:
    older = {"skipped": 2, "skipped_in_a_row": 0, "val_loss": None, "validated": -1, "sampled": 20}
    stored = Metadata(3, Identity(ModelConfig(8, 16, 128, 1, 1, 4), "fp32", True), 9).to_json()
    found = Metadata.from_json(stored | {"progress": older}, Path("here"))
    assert found.counters == Counters(skipped=2, sampled=20, drawn=0)


# ----- that a mistake would be seen ---------------------------------------------------------------------------------


def misread(wrong: str) -> Callable[..., np.ndarray]:
    """Checkpoint.read, but for an array or a tensor of a buffer, which comes back as twice what it is."""
    read_array = store.Checkpoint.read
    buffer, _, tensor = wrong.partition("/")

    def read(checkpoint: store.Checkpoint, name: str) -> np.ndarray:
        found = read_array(checkpoint, name)
        if name == buffer and tensor:
            getattr(views(found, checkpoint.metadata.identity.model), tensor)[...] *= 2
        return (found * 2).astype(found.dtype) if name == wrong else found

    return read


def test_a_resume_that_forgets_the_position_of_the_data_is_seen(resumed: Resumed) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(AssertionError, match=r"event |differs"):
        resumed(SOME, lambda: patch.setattr(TokenLoader, "restore", lambda *_: None))


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrong", ["outliers/values", "m/wte", "v/lnfb", "step", "updates", "loss_scale/scale", "copy/qkvw"]
)
def test_a_resume_that_reads_it_wrongly_is_seen(wrong: str, resumed: Resumed) -> None:
    case = Case("constant", "fp16", 2, True, "before")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(AssertionError, match=r"event |differs"):
        resumed(case, lambda: patch.setattr(store.Checkpoint, "read", misread(wrong)))


# ----- refusals and notes -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stopped(data: list[Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of twelve steps stopped after seven, with a checkpoint at four; read-only by agreement."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    with stopped_after(7):
        assert main(flags_of(*data, "-n", 4, "-o", folder)) == 130
    assert steps_of(folder, "DONE") == [4, 7]
    return folder


@pytest.fixture
def copy(stopped: Path, tmp_path: Path) -> Path:
    """A copy of that run where `train` works by default."""
    return Path(shutil.copytree(stopped, tmp_path / "run"))


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["-e", "L1-NH2-C16-V300-T16", "-s", 0], ["num_heads is 1 there, 2 here", "vocab_size is 257 there, 300 here"]),
        (["-b", 4, "-d", 32, "-t", 8], ["-b is 2 there, 4 here", "-t is 16 there, 8 here"]),
        (
            ["--dtype", "bf16", "-w", 0, "--shuffle", "none", "-a", 1],
            [
                *("--dtype is fp32 there, bf16 here", "-w is 1 there, 0 here", "(-i)", "-a is 0 there, 1 here"),
                *("--rounding is nearest there, stochastic here", "--shuffle is llmc there, none here"),
            ],
        ),
        (["--optimizer", "sgd"], ["--optimizer is adamw there, sgd here"]),
        (["--attention", "relu"], ["attention is softmax attention there, relu attention here"]),
        (
            ["-e", "L1-NH1-C32-V257-T16", "--dtype", "bf16", "-d", 64, "--seed", 1, "-i", "other"],
            ["channels is 16 there, 32 here", "--dtype", "-d is 32 there, 64 here", "--seed is 42 there, 1 here", "-i"],
        ),
    ],
)
def test_another_run_is_refused(train: Train, shards: Path, copy: Path, flags: list[Any], named: list[str]) -> None:
    before = snapshot(copy)
    given = [shards / "other_*.bin" if word == "other" else word for word in flags]
    refused = train("-y", 1, *given)
    assert refused.code == 2 and "Traceback" not in refused.err
    lines = refused.err.splitlines()
    assert f"{copy}/state_00000007" in lines[0]
    for words in named:
        assert any(words in line for line in lines[1:-1]), (words, refused.err)
    assert len(lines) == len(named) + 2, refused.err  # and nothing else
    assert "another -o" in lines[-1] and "--init-from" in lines[-1]
    assert snapshot(copy) == before


def test_the_same_batch_in_other_words_is_the_same(train: Train, copy: Path) -> None:
    complete(train("-y", 1, "-n", 4, "-d", 32, "--shuffle", "llmc", "--seed", 42, "--dtype", "fp32"))


@pytest.mark.slow
def test_what_may_change_is_told(train: Train, copy: Path) -> None:
    run = complete(train("-y", 1, "-l", "2e-2", "-x", 14, "-k", "linear", "-c", 0.1, "-u", 3))
    (note,) = [line for line in run.out.splitlines() if "results differ from here" in line]
    for words in ("-l 0.01 -> 0.02", "steps 12 -> 14", "-k cosine -> linear", "-u 0 -> 3", "-c 0 -> 0.1"):
        assert words in note
    assert run.values("train", "step") == list(range(14))
    assert "not bit-exact" not in run.out


def test_what_does_not_matter_is_not_told(train: Train, copy: Path) -> None:
    run = complete(train("-y", 1, "-n", 3, "-nk", 5, "-v", 4, "-s", 0, "--print-every", 9, "-pn", 1, "-pg", 2,
                         "--report-every", 9))  # fmt: skip
    assert "another run" not in run.out and "results differ" not in run.out and "not bit-exact" not in run.out
    shown = [line.split("|")[0].split() for line in run.out.splitlines() if line.startswith("step ")]
    assert shown == [["step", "8/12"], ["step", "9/12"], ["step", "12/12"]]  # the first one after the resume too


def test_a_file_of_algorithms_is_kept_and_taken_again(train: Train, tmp_path: Path) -> None:
    """By the name of the run's own copy, whatever becomes of the file."""
    files = {text: tmp_path / f"{text}.txt" for text in ("one", "two")}
    for text, file in files.items():
        file.write_text(text)
    copies = {text: f"algorithms_{hashlib.sha256(text.encode()).hexdigest()[:12]}.txt" for text in files}

    def asked(run: Result) -> str:
        return json.loads((run.folder / "config.json").read_text())["options"]["algorithms"]

    first = train("-x", 2, "--algorithms", files["one"])
    assert first.code == 0 and asked(first) == copies["one"]
    assert "does nothing here" in first.out
    files["one"].unlink()
    shutil.rmtree(path_of(copies["one"]).parent)
    again = train("-x", 4, "-y", 1)
    assert again.code == 0 and asked(again) == copies["one"] and "--algorithms algorithms" not in again.out
    assert path_of(copies["one"]).read_text() == "one"
    other = train("-x", 6, "-y", 1, "--algorithms", files["two"])
    assert f"--algorithms {copies['one']} -> {copies['two']}" in " ".join(other.out.split())
    assert {text: (other.folder / name).read_text() for text, name in copies.items()} == {"one": "one", "two": "two"}
    missing = train("-x", 1, "--algorithms", tmp_path / "missing.txt", folder="new")
    assert missing.code == 2 and missing.err.count("\n") == 1 and "--algorithms" in missing.err
    assert not (tmp_path / "new").exists()


def test_another_environment_is_told_in_one_line(train: Train, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = resume.versions()
    monkeypatch.setattr(resume, "versions", lambda: versions | {"jax": "0.99"})
    (note,) = not_exact(complete(train("-y", 1)))
    assert f"jax {versions['jax']} -> 0.99" in note


# ----- the kernels of the run ---------------------------------------------------------------------------------------


BARE = ("-v", 0, "-s", 0)


@contextmanager
def other_gelu(*, preferred: bool = False) -> Iterator[None]:
    """Within the block there is another implementation of GELU; preferred: which would be chosen, as the last one."""
    rows = choice.IMPLEMENTATIONS
    xla = next(row for row in rows if (row.operation, row.name) == ("gelu", "xla"))
    other = xla._replace(name="other")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "IMPLEMENTATIONS", (*rows, other) if preferred else (other, *rows))
        yield


def gelu_of(place: Path) -> str:
    """The implementation of GELU that a run folder's kernels.json, or a checkpoint, says."""
    is_run = (place / KERNELS).exists()
    found = json.loads((place / KERNELS).read_bytes()) if is_run else store.open_checkpoint(place).metadata.kernels
    return next(each.implementation for each in record.from_json(found, "").choices if each.operation == "gelu")


@pytest.fixture(scope="module")
def by_other(data: list[Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run stopped after two steps whose GELU is another row's; read-only by agreement."""
    folder = tmp_path_factory.mktemp("other") / "run"
    with stopped_after(2), other_gelu(preferred=True):
        assert main(flags_of(*data, *BARE, "-o", folder)) == 130
    assert gelu_of(folder) == gelu_of(folder / "state_00000002") == "other"
    return folder


@pytest.fixture
def other_copy(by_other: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(by_other, tmp_path / "run"))


def not_exact(run: Result) -> list[str]:
    return [line for line in run.out.splitlines() if "not bit-exact from here" in line]


def test_a_continued_run_takes_the_kernels_of_its_checkpoint(train: Train, other_copy: Path) -> None:
    """Though another would be chosen now; the folder's own file counts only where there is no checkpoint."""
    (other_copy / KERNELS).write_text("damaged")
    with other_gelu():
        run = complete(train(*BARE, "-y", 1, "-x", 4))
    assert not_exact(run) == [] and run.values("resume", "step") == [2]
    assert gelu_of(run.folder) == gelu_of(run.folder / "state_00000004") == "other"


def test_kernels_that_there_are_not_any_more_are_chosen_anew(train: Train, other_copy: Path) -> None:
    run = complete(train(*BARE, "-y", 1, "-x", 4))
    (note,) = not_exact(run)
    assert "kernel of gelu other -> xla" in note and "no 'other'" in note
    assert gelu_of(run.folder) == gelu_of(run.folder / "state_00000004") == "xla"


def test_a_restart_before_the_first_checkpoint_takes_the_kernels(train: Train, other_copy: Path) -> None:
    forget(other_copy, 2)
    with other_gelu():
        run = complete(train(*BARE, "-y", 1, "-x", 1))
    assert run.values("resume", "step") == [] and run.values("train", "step") == [0]
    assert gelu_of(run.folder) == "other" and not_exact(run) == []


def test_a_damaged_choice_is_refused_where_it_would_be_taken(train: Train, other_copy: Path) -> None:
    forget(other_copy, 2)
    (other_copy / KERNELS).write_text('{"format": 1}')
    before = snapshot(other_copy)
    refused = train("-y", 1)
    assert refused.code == 2 and refused.err.startswith(f"train.py: {other_copy / KERNELS}: ")
    assert refused.err.count("\n") == 1 and snapshot(other_copy) == before


def test_an_older_checkpoint_has_no_kernels(train: Train, unbroken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        to_json = Metadata.to_json
        patch.setattr(Metadata, "to_json", lambda kept: {k: v for k, v in to_json(kept).items() if k != "kernels"})
        older = train("-n", 4, stop=7)
    (older.folder / KERNELS).unlink()
    run = complete(train("-y", 1, "-n", 4))
    assert not_exact(run) == []
    check_same(run.folder, unbroken)


def test_kernels_from_repeats_the_choice_of_another_run(train: Train, by_other: Path) -> None:
    places = (by_other, by_other / "state_00000002", by_other / KERNELS)
    found = [repeated(TrainConfig(kernels_from=str(place)), None) for place in places]
    assert len({each and each.resolved for each in found}) == 1 and None not in found
    with other_gelu():
        run = complete(train(*BARE, "-x", 1, "--kernels-from", by_other, folder="new"))
        assert gelu_of(run.folder) == "other" and "not repeated" not in run.out
        # It is this run's own from then on.
        again = complete(train(*BARE, "-x", 2, "-y", 1, folder="new"))
    assert gelu_of(again.folder) == "other" and not_exact(again) == []


def test_kernels_from_counts_more_than_the_checkpoint(train: Train, stopped: Path, other_copy: Path) -> None:
    with other_gelu():
        run = complete(train(*BARE, "-y", 1, "-x", 3, "--kernels-from", stopped))
    (note,) = not_exact(run)
    assert "kernel of gelu other -> xla" in note and gelu_of(run.folder) == "xla"


def test_kernels_from_another_machine(train: Train, by_other: Path) -> None:
    run = complete(train(*BARE, "-x", 1, "--kernels-from", by_other, folder="new"))
    (note,) = [line for line in run.out.splitlines() if "not repeated" in line]
    assert note.startswith(f"--kernels-from {by_other}: ") and "no 'other'" in note
    assert gelu_of(run.folder) == "xla"


def test_kernels_from_what_holds_none(train: Train, by_other: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged").write_bytes(b"\xff")
    for place in (tmp_path / "missing", tmp_path / "empty", tmp_path / "damaged", by_other / "config.json"):
        refused = train("--kernels-from", place, folder="new")
        assert refused.code == 2 and not refused.folder.exists()
        assert refused.err.startswith(f"train.py: --kernels-from {place}: ") and refused.err.count("\n") == 1


# ----- checkpoints that are damaged, logs that are torn -------------------------------------------------------------


def flip_a_bit(folder: Path) -> None:
    """In its largest file."""
    path = max((path for path in folder.rglob("*") if path.is_file()), key=os.path.getsize)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


@pytest.fixture(scope="module")
def unbroken(data: list[Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of `stopped` without a break."""
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    assert main(flags_of(*data, "-n", 4, "-o", folder)) == 0
    return folder


def test_a_bad_checkpoint_is_reported_and_the_one_before_used(train: Train, copy: Path, unbroken: Path) -> None:
    flip_a_bit(copy / "state_00000007")
    run = complete(train("-y", 1, "-n", 4))
    assert any("state_00000007" in line for line in run.out.splitlines() if "warning" in line), run.out
    assert run.values("resume", "step") == [4]
    check_same(run.folder, unbroken)


def test_where_no_checkpoint_is_good_nothing_is_begun_anew(train: Train, copy: Path) -> None:
    """However little of one is left, it is for the user to begin anew."""
    shutil.rmtree(copy / "state_00000004")  # but not its DONE_ file
    (copy / "DONE_00000007").unlink()
    flip_a_bit(copy / "state_00000007")
    before = snapshot(copy)
    refused = train("-y", 1, "-n", 4)
    assert refused.code == 2 and "Traceback" not in refused.err
    assert f"llmc-jax checkpoint verify {copy}" in refused.err and "another -o" in refused.err
    assert snapshot(copy) == before


def test_a_copy_without_its_empty_files_goes_on(train: Train, copy: Path, unbroken: Path) -> None:
    """Some tools copy none: the digests of the states say what the DONE_ files said."""
    for done in copy.glob("DONE_*"):
        done.unlink()
    run = complete(train("-y", 1, "-n", 4))
    assert run.values("resume", "step") == [7]
    assert steps_of(run.folder, "DONE") == [4, 7, 8, 12]
    check_same(run.folder, unbroken)


def test_metrics_that_were_cut_are_noticed(train: Train, copy: Path) -> None:
    os.truncate(copy / "metrics.jsonl", 0)
    run = complete(train("-y", 1, "-n", 4))
    assert len([line for line in run.out.splitlines() if "warning" in line and "metrics.jsonl" in line]) == 1
    assert run.values("resume", "step") == [7] and run.values("end", "outcome") == ["done"]
    assert "metrics.jsonl" not in complete(train("-y", 1, "-n", 4, "-x", 13)).out


def test_whose_main_log_it_is(tmp_path: Path) -> None:
    """Another program's would be lost; one beside a configuration of ours may begin anew."""
    config = TrainConfig(output_dir=str(tmp_path), reuse=True)
    (tmp_path / "main.log").write_text("s:0 tel:1.0000\n")
    with pytest.raises(InputError, match=r"main\.log of another program"):
        find_earlier(config, print)
    (tmp_path / "config.json").write_text("{}")
    assert find_earlier(config, print) is None


def test_two_processes_do_not_train_in_one_folder(train: Train, copy: Path) -> None:
    before = snapshot(copy)
    with locked(copy):
        refused = train("-y", 1)
    assert refused.code == 2 and "another process is training in this folder" in refused.err
    assert snapshot(copy) == before


def move(run: Path) -> None:
    run.rename(run.with_name("elsewhere"))


def replace_by_links(run: Path) -> None:
    """By a folder with the same files in it."""
    move(run)
    shutil.copytree(run.with_name("elsewhere"), run, copy_function=os.link)


def replace_a_log(run: Path) -> None:
    (run / "main.log").rename(run.with_name("elsewhere"))
    (run / "main.log").write_text("of somebody else\n")


@pytest.mark.slow
@pytest.mark.parametrize("away", [move, shutil.rmtree, replace_by_links, replace_a_log])
def test_a_run_whose_files_were_taken_away_ends_and_writes_nothing_there(
    train: Train, tmp_path: Path, away: Callable[[Path], None]
) -> None:
    """Between two saves; the last save, the last event and the last picture must not come either."""
    run, there = tmp_path / "run", dict[str, Any]()

    def act() -> None:
        wait_until((run / "DONE_00000004").exists)  # the save beside the steps comes to its end
        away(run)
        there.update(snapshot(run) if run.exists() else {})

    with after_step(6, act):
        ended = train("-n", 4)
    assert ended.code == 2 and ended.err.startswith(f"train.py: {run}") and ended.err.count("\n") == 1
    if away is replace_a_log:  # the folder is still the run's, so that what was learned is saved
        assert (run / "main.log").read_text() == "of somebody else\n"
        assert steps_of(run, "state") == [4, 6]
    else:
        assert (snapshot(run) if run.exists() else {}) == there
    if away in (move, replace_by_links):
        assert steps_of(tmp_path / "elsewhere", "state") == [4] and leftovers(tmp_path / "elsewhere") == []
        assert train("-n", 4, "-y", 1, folder="elsewhere").code == 0


# ----- starting from the weights ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("name", "step", "dtype"), [("state_00000004", 4, "bf16"), ("", 7, "fp32")])
def test_a_run_starts_from_the_weights_alone(train: Train, stopped: Path, name: str, step: int, dtype: str) -> None:
    before = snapshot(stopped)
    run = complete(train("--init-from", stopped / name, "-x", 2, "-v", 1, "--dtype", dtype, folder="new"))
    assert run.values("train", "step") == [0, 1] and run.values("train", "lr")[0] == np.float32(0.01)
    assert run.values("resume", "step") == []
    assert snapshot(stopped) == before
    assert steps_of(run.folder, "DONE") == [2]
    found, theirs = arrays(run.folder, 2), arrays(stopped, step)
    assert found["step"] == 2 and np.abs(found["params"] - theirs["params"]).max() <= 2.1e-2  # two updates


def test_a_run_does_not_start_from_what_is_no_checkpoint(train: Train, tmp_path: Path, copy: Path) -> None:
    (tmp_path / "empty").mkdir()
    flip_a_bit(copy / "state_00000007")
    for place in (tmp_path / "missing", tmp_path / "empty", copy / "state_00000007"):
        refused = train("-e", place, folder="new")
        assert refused.code == 2 and not refused.folder.exists()
        assert refused.err.startswith(f"train.py: -e {place}: ") and refused.err.count("\n") == 1


# ----- what is saved, and what a failing save costs -----------------------------------------------------------------


def test_no_save_saves_nothing_at_the_end(train: Train) -> None:
    assert steps_of(complete(train("-n", 5, "--no-save")).folder, "DONE") == [5, 10]
    assert steps_of(train("-n", 5, "--no-save", folder="stopped", stop=7).folder, "DONE") == [5]


def test_retention(train: Train) -> None:
    run = complete(train("-n", 2, "-nk", 2, "-nm", 6))
    kept = set(steps_of(run.folder, "DONE"))
    losses = dict(zip(run.values("val", "step"), run.values("val", "loss"), strict=True))
    best = min(losses, key=lambda step: losses[step])
    assert kept >= {6, 10, 12} and any(losses[step - step % 3] == losses[best] for step in kept)
    assert len(kept) <= 4
    assert steps_of(run.folder, "state") == sorted(kept)


def failing(step: int) -> Callable[..., Any]:
    """store.begin, but for one step, whose save fails."""
    begin = store.begin

    def begun(run: Path, at: int, *rest: Any) -> Any:
        if at == step:
            raise InputError(f"{run}/state_{at:08d}: no space left on device")
        return begin(run, at, *rest)

    return begun


def test_a_failed_save_is_told_and_the_run_goes_on(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = complete(train("-n", 4, folder="expected"))
    monkeypatch.setattr(store, "begin", failing(8))
    run = train("-n", 4)
    assert run.code == 0
    assert any("no space left on device" in line for line in run.out.splitlines()), run.out
    assert healthy(run.folder) == [4, 12]
    check_same(run.folder, expected.folder)


@pytest.mark.parametrize(("at", "stop", "good"), [(12, 0, [4, 8]), (6, 6, [4])])
def test_a_last_save_that_fails_is_bad(
    train: Train, monkeypatch: pytest.MonkeyPatch, at: int, stop: int, good: list[int]
) -> None:
    monkeypatch.setattr(store, "begin", failing(at))
    run = train("-n", 4, stop=stop)
    assert run.code == 2 and "no space left on device" in run.err
    assert healthy(run.folder) == good


def test_an_outlier_is_said_and_kept(train: Train) -> None:
    run = complete(train(*OUTLIERS, "-x", 145, "-v", 0, "-s", 0))
    skipped = run.values("train", "skipped")
    assert not any(skipped[:128]) and 0 < sum(skipped[128:]) < 17
    assert run.out.count("skipping update due to") == sum(skipped)
    assert arrays(run.folder, 145)["outliers/values"].shape == (2, 128)
    assert arrays(run.folder, 145)["updates"] == 145  # AdamW counts them, as llm.c's does
