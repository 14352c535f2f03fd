"""Runs with -h 1: figures are those of the weights at that step, a break changes nothing, bad files end it early."""

import io
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from llmc_jax.checkpoint.llmc import write_model
from llmc_jax.checkpoint.store import open_checkpoint
from llmc_jax.config.flags import parse_args
from llmc_jax.config.model import RELU, ModelConfig, parse_descriptor
from llmc_jax.data.evalfile import Item, write_eval_file
from llmc_jax.models.layout import num_parameters
from llmc_jax.run import due, processes
from llmc_jax.run.command import main
from tests.evaluate import models
from tests.generate import plain
from tests.questions import questions, write_questions
from tests.run.in_turn import forget
from tests.same_run import Result, check_same, write_shards

pytestmark = pytest.mark.usefixtures("nothing_lasts", "quick_compilation")

TINY = "L1-NH1-C16-V257-T16"
COUNT = 40
Train = Callable[..., Result]


class Whole(NamedTuple):
    """A run without a break, and its questions."""

    run: Result
    data: Path
    items: list[Item]


def flags(data: Path, folder: Path) -> list[str]:
    files = ("-i", data / "train_*.bin", "-j", data / "val_*.bin", "--hellaswag-file", data / "questions.bin")
    numbers = "-b 2 -t 16 -l 1e-2 -x 5 -v 2 -m 2 -s 2 -g 4 -n 2 -h 1"
    return ["-e", TINY, *numbers.split(), *map(str, files), "-o", str(folder)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = tmp_path_factory.mktemp("hellaswag")
    data = folder / "data"
    write_shards(data, {"train": (500,), "val": (200,)})
    items = write_questions(data / "questions.bin", COUNT)
    with redirect_stdout(io.StringIO()) as out:
        code = main(flags(data, folder / "run"))
    return Whole(Result(code, folder / "run", out.getvalue(), ""), data, items)


@pytest.fixture
def train(whole: Whole, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Train:
    """Runs the command line in this process; flags given here count."""

    def run(*more: Any) -> Result:
        code = main([*flags(whole.data, tmp_path / "run"), *map(str, more)])
        return Result(code, tmp_path / "run", *capsys.readouterr())

    return run


def test_the_figures_are_those_of_the_weights_at_that_step(whole: Whole) -> None:
    """llm.c's: of the completions the one of the smallest mean loss; by the plain model in float64, item by item."""
    evals = {each["step"]: each for each in whole.run.events if each["event"] == "eval"}
    assert list(evals) == [2, 4, 5]
    lines = (whole.run.folder / "main.log").read_text().splitlines()
    for step, found in evals.items():
        correct, correct_norm = figures_of(whole.run.model(step), whole.items, parse_descriptor(TINY))
        assert (found["items"], found["correct"], found["correct_norm"]) == (COUNT, correct, correct_norm)
        assert (found["accuracy"], found["accuracy_norm"]) == (correct / COUNT, correct_norm / COUNT)
        assert f"s:{step} eval:{correct_norm / COUNT:.4f}" in lines
        assert f"HellaSwag: {correct_norm}/{COUNT} = {correct_norm / COUNT:.6f}" in whole.run.out.splitlines()
    assert len({(each["correct"], each["correct_norm"]) for each in evals.values()}) > 1


def figures_of(flat: np.ndarray, items: list[Item], config: ModelConfig) -> tuple[int, int]:
    """How many are right by the sum of a completion's losses, and by their mean per token."""
    chosen = [plain_choices(flat, item, config) for item in items]
    by_sum, by_mean = (sum(each[k] == item.label for each, item in zip(chosen, items, strict=True)) for k in (0, 1))
    return by_sum, by_mean


def plain_choices(flat: np.ndarray, item: Item, config: ModelConfig) -> tuple[int, int]:
    """The completion of the smallest sum, and of the smallest mean loss."""
    losses = []
    for completion in item.completions:
        ids = np.array(item.context + completion)
        logits, _ = plain.forward(flat, ids[:-1], config)
        at = np.arange(len(item.context) - 1, len(ids) - 1)
        losses.append(-plain.log_softmax(logits)[at, ids[at + 1]])
    return int(np.argmin([each.sum() for each in losses])), int(np.argmin([each.mean() for each in losses]))


def test_it_comes_after_the_validation_and_before_the_sample(whole: Whole) -> None:
    assert whole.run.code == 0
    kinds = [each["event"] for each in whole.run.events if each["event"] != "train" and each["step"] == 4]
    assert kinds == ["val", "eval", "sample", "checkpoint"]
    assert whole.run.values("val", "step") == [0, 2, 4, 5]
    counters = open_checkpoint(whole.run.folder / "state_00000004").metadata.counters
    assert counters is not None and counters.evaluated == 4


@pytest.mark.slow
@pytest.mark.parametrize("step", [2, 5])
def test_a_run_stopped_while_it_evaluates_goes_on_as_without_a_break(
    whole: Whole, train: Train, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """The validation of that step is not made again, and nothing of the half evaluation is logged."""
    score = due.score

    def stopped(*arguments: Any, stop: Callable[[], bool]) -> Iterator[Any]:
        def asked() -> bool:
            if evaluated.append(1) or len(evaluated) == {2: 1, 5: 3}[step]:
                os.kill(os.getpid(), signal.SIGTERM)
            return stop()

        yield from score(*arguments, stop=asked)

    evaluated = list[int]()
    monkeypatch.setattr(due, "score", stopped)
    monkeypatch.setattr(due, "TOKENS_ON_CPU", 1 << 12)  # one computation each time
    run = train()
    assert (run.code, run.values("val", "step")[-1]) == (130, step)
    assert step not in run.values("eval", "step") and run.checkpoints[-1] == step
    counters = open_checkpoint(run.folder / f"state_{step:08d}").metadata.counters
    assert counters is not None and (counters.validated, counters.evaluated < step) == (step, True)
    monkeypatch.undo()
    again = train("-y", 1)
    assert (again.code, again.err) == (0, "")
    check_same(again.folder, whole.run.folder)
    assert len(train("-y", 1).values("eval", "step")) == 3


@pytest.mark.parametrize("left", [2, 4])
def test_a_killed_run_goes_on_as_without_a_break(whole: Whole, train: Train, tmp_path: Path, left: int) -> None:
    """Its logs are cut back to the checkpoint, which says what was evaluated before its step."""
    shutil.copytree(whole.run.folder, tmp_path / "run")
    forget(tmp_path / "run", *{4, 5} - {left})
    run = train("-y", 1)
    assert run.values("resume", "step") == [left]
    check_same(run.folder, whole.run.folder)


def test_a_run_without_steps_is_evaluated(whole: Whole, train: Train, tmp_path: Path) -> None:
    run = train("-x", 0, "-s", 0, "-n", 0, "-e", whole.run.folder)
    assert run.values("eval", "correct") == whole.run.values("eval", "correct")[-1:]
    assert run.values("eval", "step") == [0]


def test_a_model_with_relu_attention_is_evaluated_as_that(whole: Whole, train: Train, tmp_path: Path) -> None:
    values = 3 * models.flat()[: num_parameters(models.CONFIG)]  # so that what attention computes matters
    write_model(tmp_path / "model.bin", models.CONFIG, values)
    run = train("-x", 0, "-s", 0, "-n", 0, "-e", tmp_path / "model.bin", "--attention", "relu")
    (found,) = [each for each in run.events if each["event"] == "eval"]
    figures = figures_of(values, whole.items, replace(models.CONFIG, attention=RELU))
    assert (found["correct"], found["correct_norm"]) == figures
    assert figures != figures_of(values, whole.items, models.CONFIG)


DEFAULT = "dev/data/hellaswag/hellaswag_val.bin"


def test_llmcs_path_is_read_where_it_is_there(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    without = train("--hellaswag-file", DEFAULT, "-x", 2)
    assert (without.code, without.err, without.values("eval", "step")) == (0, "", [])
    assert any(DEFAULT in line and line.startswith("-h 1: ") for line in without.out.splitlines())
    write_questions(tmp_path / DEFAULT, count=3)
    found = train("--hellaswag-file", DEFAULT, "-x", 2, "-o", tmp_path / "with")
    assert "-h 1: " not in found.out and "HellaSwag: " in found.out


def cut(path: Path) -> None:
    write_questions(path)
    path.write_bytes(path.read_bytes()[:-2])


BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (lambda _: None, ""),
    "too long": (lambda path: write_questions(path, positions=17), "T=16"),
    "beyond V": (lambda path: write_questions(path, vocab_size=300), "257"),
    "damaged": (cut, ": byte "),
    "no questions": (lambda path: write_shards(path.parent, {"bad": (9,)}), ""),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_ends_the_run_before_anything_is_written(train: Train, tmp_path: Path, name: str) -> None:
    make, word = BAD[name]
    path = tmp_path / "bad_0.bin"
    make(path)
    run = train("--hellaswag-file", path)
    assert (run.code, run.out, run.err.count("\n")) == (2, "", 1)
    assert f"--hellaswag-file {path}: " in run.err and word in run.err
    assert not run.folder.exists()


def test_the_published_jsonl_is_read_with_the_runs_tokenizer(train: Train, tmp_path: Path) -> None:
    """Its bytes are those of the file of the same questions in tokens; without a tokenizer it cannot be read."""
    text = {"ctx": "a dog", "endings": ["runs", "is", "flies", "barks"], "label": 3, "ind": 7}
    (tmp_path / "some.jsonl").write_text(json.dumps(text) + "\n")
    endings = tuple(tuple(f" {each}".encode()) for each in ("runs", "is", "flies", "barks"))
    write_eval_file(tmp_path / "same.bin", [Item("0", tuple(b"a dog"), endings, 3)])
    found = [
        train("-x", 2, "-s", 0, "--hellaswag-file", tmp_path / name, "-o", tmp_path / name[:4])
        for name in ("some.jsonl", "same.bin")
    ]
    logs = [(tmp_path / name / "main.log").read_text() for name in ("some", "same")]
    assert [each.code for each in found] == [0, 0] and logs[0] == logs[1] and "eval:" in logs[0]
    refused = train("--hellaswag-file", tmp_path / "some.jsonl", "--tokenizer", "none")
    assert refused.code == 2 and "--tokenizer" in refused.err and not refused.folder.exists()


def test_questions_that_are_not_asked_are_not_read(train: Train, tmp_path: Path) -> None:
    run = train("--hellaswag-file", tmp_path / "missing", "-h", 0, "-x", 0)
    assert run.code == 0 and "HellaSwag:" not in run.out


def test_processes_compare_their_questions(whole: Whole) -> None:
    words = flags(whole.data, Path("run"))
    assert "--hellaswag-file" in processes.own_facts(parse_args(words)).files
    assert "--hellaswag-file" not in processes.own_facts(parse_args([*words, "-h", "0"])).files


def test_made_up_questions_are_as_long_as_they_may_be() -> None:
    made = questions(12, 257, 16)
    assert made[0].longest == 17 == max(item.longest for item in made)
