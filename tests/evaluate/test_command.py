"""`llmc-jax evaluate`: figures against the plain model, files, what is refused, several devices."""

import json
import math
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from llmc_jax.base.errors import InputError
from llmc_jax.checkpoint.sources import flat_parameters, open_source
from llmc_jax.data.tokenfile import write_token_file
from llmc_jax.data.tokenizers import write_tokenizer_bin
from llmc_jax.evaluate.choices import Answer
from llmc_jax.evaluate.command import main, make_parser, parse
from llmc_jax.evaluate.figures import Mean
from llmc_jax.evaluate.job import Subjects, number_of_devices, progress, side_by_side
from llmc_jax.evaluate.report import plain_data, shown
from llmc_jax.evaluate.report import table as table_of
from llmc_jax.evaluate.subjects import choice_figures, text_of_file, text_result
from llmc_jax.evaluate.texts import rows_of_text
from llmc_jax.generate.model import open_model
from llmc_jax.generate.scorer import scorer_of
from tests.generate import plain

A, B, C = "L2-NH2-C16-V257-T32", "L1-NH2-C16-V257-T48", "L1-NH2-C16-V258-T32"  # random weights; the tokens are bytes
T = 32
TEXT = b"the old sea and the little ship, again and again; nobody knew the song of the sailor any more" * 2


class Done(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def subjects(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.out)["subjects"]
        return found


Evaluate = Callable[..., Done]


@pytest.fixture
def evaluate(capsys: pytest.CaptureFixture[str]) -> Evaluate:
    """Run the command line with words."""

    def evaluate(*words: str | Path) -> Done:
        status = main(list(map(str, words)))
        return Done(status, *capsys.readouterr())

    return evaluate


@cache
def plain_losses(model: str, ids: bytes | tuple[int, ...]) -> np.ndarray:
    """Of all ids but the first, each given those before it; float64."""
    source = open_source(model)
    logits, _ = plain.forward(flat_parameters(source), np.array(list(ids))[:-1], source.config)
    return -plain.log_softmax(logits)[range(len(ids) - 1), list(ids[1:])]


def of_rows(model: str, ids: tuple[int, ...]) -> list[np.ndarray]:
    return [plain_losses(model, ids[at : at + T + 1]) for at in range(0, len(ids) - 1, T)]


class Files(NamedTuple):
    text: Path
    data: Path
    hellaswag: Path
    lambada: Path


QUESTIONS = [
    ("the sea is", [" deep", " dry and old", " red", " a"]),
    ("nobody", [" knew", " is", " sings", " ever"]),
] * 3
QUESTIONS[4] = ("again", [" same", " same", " same", " same"])  # of equals the first
WORDS = ["the old sea", "again and again", "any more of it"]


def losses_of(model: str, question: int) -> list[np.ndarray]:
    """Of each completion's tokens."""
    context, choices = QUESTIONS[question]
    return [plain_losses(model, (context + each).encode())[len(context) - 1 :] for each in choices]


def likeliest(model: str, question: int) -> int:
    return int(np.argmin([each.sum() for each in losses_of(model, question)]))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """A text, the same as a token file, and two tasks: the first model is right in 4 of 6 questions."""
    folder = tmp_path_factory.mktemp("files")
    found = Files(*(folder / name for name in ("text.txt", "val.bin", "hellaswag.jsonl", "lambada.jsonl")))
    found.text.write_bytes(TEXT)
    write_token_file(found.data, np.frombuffer(TEXT, np.uint8))
    lines = []
    for number, (context, endings) in enumerate(QUESTIONS):
        label = (likeliest(A, number) + (number in (1, 3))) % 4
        lines.append({"ind": number, "ctx": context, "endings": [each[1:] for each in endings], "label": label})
    found.hellaswag.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    found.lambada.write_text("".join(f"{json.dumps({'text': text})}\n" for text in WORDS))
    return found


def test_a_text_begins_after_the_end_of_a_text_and_a_token_file_does_not(evaluate: Evaluate, files: Files) -> None:
    done = evaluate(A, "--data", files.data, "--text", files.text, "--json")
    assert done.status == 0
    for subject, ids in zip(done.subjects, (tuple(TEXT), (256, *TEXT)), strict=True):
        rows = of_rows(A, ids)
        losses = np.concatenate(rows)
        (found,) = subject["results"]
        assert (found["tokens"], found["rows"], found["bytes"]) == (len(losses), len(rows), len(losses))
        np.testing.assert_allclose(found["loss"]["value"], losses.mean(), atol=1e-5)
        np.testing.assert_allclose(found["perplexity"]["value"], np.exp(losses.mean()), rtol=1e-5)
        np.testing.assert_allclose(found["bits_per_byte"]["value"], losses.mean() / np.log(2), rtol=1e-5)
        sums, counts = np.array([each.sum() for each in rows]), np.array([len(each) for each in rows])
        spread = np.sum((sums - losses.mean() * counts) ** 2) * len(rows) / (len(rows) - 1)
        np.testing.assert_allclose(found["loss"]["error"], np.sqrt(spread) / len(losses), rtol=1e-3)
    assert [each["kind"] for each in done.subjects] == ["data", "text"]


def test_the_table_has_the_figures_of_the_json(evaluate: Evaluate, files: Files) -> None:
    words = (A, "--text", files.text, "--tasks", f"hellaswag={files.hellaswag}")
    text, task = (each["results"][0] for each in evaluate(*words, "--json").subjects)
    lines = evaluate(*words).out.splitlines()
    assert f"{text['loss']['value']:.4f} ± {text['loss']['error']:.4f}" in lines[2]
    assert f"{text['tokens']} tokens" in lines[3]
    assert "hellaswag" in lines[6] and f"{task['accuracy']['value']:.4f} ± {task['accuracy']['error']:.4f}" in lines[6]


def test_perplexities_have_three_decimals() -> None:
    for value, expected in ((6.00449, "6.004"), (60.0449, "60.045"), (1144.11, "1,144.110"), (math.inf, "inf")):
        assert shown("perplexity", Mean(value, math.nan)) == expected
    assert shown("loss", Mean(-1.5, 0.25), "+") == "-1.5000 ± 0.2500"


def test_models_that_read_other_tokens_are_not_subtracted(evaluate: Evaluate, tmp_path: Path) -> None:
    """One model has a table of 257 pieces of which some have two bytes."""
    text, table = tmp_path / "text.txt", tmp_path / "table.bin"
    text.write_bytes(TEXT)
    pieces = (*(bytes([value]) for value in range(256)), b"th", b"<|endoftext|>")
    write_tokenizer_bin(table, pieces, 257)
    cut = partial(rows_of_text, positions=T)
    models = [open_model(A), open_model(C, tokenizer=str(table))]
    asked: list[Subjects] = [[text_of_file(model, str(text), cut)] for model in models]
    results = [[text_result(scorer_of(model), *own)] for model, own in zip(models, asked, strict=True)]
    (subject,) = side_by_side(asked[0], results)
    first, second = plain_data(subject)["results"]
    assert (first["bytes"], second["bytes"]) == (len(TEXT), len(TEXT))
    assert first["tokens"] - second["tokens"] == TEXT.count(b"th") and "difference" not in second
    assert any("tokens" in line and f"{first['tokens']}" in line for line in table_of([subject], T).splitlines())


def test_two_models_are_compared_row_by_row(evaluate: Evaluate, files: Files) -> None:
    first, second = evaluate(A, B, "--data", files.data, "--json").subjects[0]["results"]  # T=32, the smaller one's
    rows = [of_rows(model, tuple(TEXT)) for model in (A, B)]
    apart = np.concatenate(rows[1]) - np.concatenate(rows[0])
    assert "difference" not in first
    np.testing.assert_allclose(second["difference"]["loss"]["value"], apart.mean(), atol=2e-6)
    by_row = np.array([b.sum() - a.sum() - apart.mean() * len(a) for a, b in zip(*rows, strict=True)])
    error = np.sqrt(np.sum(by_row**2) * len(by_row) / (len(by_row) - 1)) / len(apart)
    np.testing.assert_allclose(second["difference"]["loss"]["error"], error, atol=2e-6)


def test_a_model_without_a_tokenizer_has_no_bits_per_byte(evaluate: Evaluate, files: Files) -> None:
    done = evaluate(A, "L1-NH2-C16-V300-T32", "--data", files.data, "--json")
    (second,) = done.subjects[0]["results"][1:]
    assert "bits_per_byte" not in second and {*second["difference"]} == {"loss", "perplexity"}


def test_the_first_rows_alone(evaluate: Evaluate, files: Files) -> None:
    (found,) = evaluate(A, "--data", files.data, "--limit", "4", "--json").subjects[0]["results"]
    expected = np.concatenate(of_rows(A, tuple(TEXT))[:4])
    assert (found["tokens"], found["rows"]) == (128, 4)
    np.testing.assert_allclose(found["loss"]["value"], expected.mean(), atol=1e-5)


def test_questions_are_answered_as_by_the_plain_model(evaluate: Evaluate, files: Files) -> None:
    first, second = evaluate(A, B, "--tasks", f"hellaswag={files.hellaswag}", "--json").subjects[0]["results"]
    assert first["items"] == 6 and first["chance"] == 0.25
    np.testing.assert_allclose([*first["accuracy"].values()], [4 / 6, np.sqrt(4 / 6 * 2 / 6 / 5)], rtol=1e-12)
    labels = [json.loads(line)["label"] for line in files.hellaswag.read_text().splitlines()]
    right, norm = (
        np.array([[np.argmin([f(x) for x in losses_of(m, n)]) == labels[n] for n in range(6)] for m in (A, B)])
        for f in (np.sum, np.mean)
    )
    assert second["accuracy"]["value"] == right[1].mean()
    assert [each["accuracy_norm"]["value"] for each in (first, second)] == norm.mean(1).tolist()
    apart = right[1].astype(float) - right[0]
    assert second["difference"]["accuracy"]["value"] == pytest.approx(apart.mean())
    assert second["difference"]["accuracy"]["error"] == pytest.approx(apart.std(ddof=1) / np.sqrt(6))


def test_a_last_word_is_right_if_it_would_have_been_written(evaluate: Evaluate, files: Files) -> None:
    done = evaluate(A, "--tasks", f"lambada={files.lambada}", "--limit", "2", "--json")
    sums = [plain_losses(A, text.encode())[len(text.rpartition(" ")[0]) - 1 :].sum() for text in WORDS[:2]]
    (found,) = done.subjects[0]["results"]
    assert found["items"] == 2 and found["accuracy"]["value"] == 0  # random weights never write a whole word
    np.testing.assert_allclose(found["perplexity"]["value"], np.exp(np.mean(sums)), rtol=1e-4)


def test_progress_ends_when_all_is_done(evaluate: Evaluate, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmc_jax.base.progress.PROGRESS_SECONDS", 0.0)
    words = ("--data", files.data, "--tasks", f"hellaswag={files.hellaswag}")
    shares = [int(line.split(" %")[0]) for line in evaluate(A, B, *words).err.splitlines() if " %" in line]
    assert shares == sorted(shares) and shares[-1] == 100 and 50 in shares


def test_a_full_memory_is_one_line(evaluate: Evaluate, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 123 bytes.\nmore")

    monkeypatch.setattr("llmc_jax.evaluate.job.result", full)
    done = evaluate(A, "--data", files.data)
    assert (done.status, done.out) == (2, "")
    assert "123 bytes; " in done.err.splitlines()[-1] and "-b" in done.err.splitlines()[-1]


@pytest.mark.slow
def test_two_devices_give_the_figures_of_one(evaluate: Evaluate, files: Files) -> None:
    words = [A, "--data", str(files.data), "--text", str(files.text), "--tasks", f"hellaswag={files.hellaswag}"]
    words += [f"lambada={files.lambada}", "--json"]
    code = "import sys; from llmc_jax.evaluate.command import main; sys.exit(main(sys.argv[1:]))"
    there = subprocess.run(
        [sys.executable, "-c", code, *words, "--devices", "2"], capture_output=True, text=True, check=True
    )
    found = json.loads(there.stdout)
    assert found["settings"]["devices"] == 2
    assert found["subjects"] == evaluate(*words).subjects
    with pytest.raises(InputError, match="--devices 99"):
        number_of_devices(99)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--data", "{data}"], "CHECKPOINT"),
        ([A], "--data, --text or --tasks"),
        ([A, "--text", "missing.txt"], "missing.txt"),
        ([A, "--data", "{large}"], "id 300"),
        ([A, "--text", "{empty}"], "is empty"),
        ([A, "--tokenizer", "none", "--text", "{text}"], "no tokenizer"),
        ([A, "--data", "{data}", "-t", "33"], "-t 33"),
        ([A, B, "--data", "{data}", "-t", "40"], A),
        ([A, "--tasks", "hellaswag={lambada}"], "those of HellaSwag"),
        ([A, "--tasks", "hellaswag={long}"], "item 7 has"),
        ([A, "--tasks", "riddles"], "riddles"),
        ([A, "--tasks", "mmlu="], "mmlu="),
        ([A, "--tokenizer", "none", "--tasks", "hellaswag={hellaswag}"], "--tokenizer"),
        ([A, "--data", "{data}", "--devices", "1000"], "--devices 1000"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    evaluate: Evaluate, files: Files, tmp_path: Path, words: list[str], named: str
) -> None:
    made = {name: tmp_path / name for name in ("large", "short", "empty", "long")}
    places = {**files._asdict(), "folder": tmp_path, **made}
    write_token_file(places["large"], np.array([1, 300]))
    write_token_file(places["short"], np.array([1]))
    places["empty"].touch()
    places["long"].write_text(json.dumps({"ind": 7, "ctx": "a" * 32, "endings": ["b", "c"], "label": 0}))
    done = evaluate(*(word.format(**places) for word in words))
    lines = [line for line in done.err.splitlines() if not line.startswith(("note", "model", "warning"))]
    assert (done.status, done.out, len(lines)) == (2, "", 1), done.err
    assert named in lines[0]


def test_ctrl_c_ends_it_at_the_next_answer() -> None:
    with progress(10) as told:
        told(1)
        signal.raise_signal(signal.SIGINT)  # is not raised where it comes
        with pytest.raises(KeyboardInterrupt):
            told(1)


def test_answers_of_losses_that_are_none_have_no_accuracy() -> None:
    """What is smallest among such losses would look like an answer."""
    good, bad = Answer(0, (1.0, 2.0), (1, 1)), Answer(0, (1.0, math.nan), (1, 1))
    assert [figure.value for figure in choice_figures([good, good])] == [1.0, 1.0]
    assert all(math.isnan(figure.value) for figure in choice_figures([good, bad]))


def test_every_flag_is_told_of() -> None:
    actions = {each.dest: each for each in make_parser()._actions}
    assert all(each.help for name, each in actions.items() if name != "checkpoints")
    asked = parse([A, B, "--data", "x", "y", "--data", "z"])
    assert asked.data == ["x", "y", "z"] and [str(path) for path in asked.checkpoints] == [A, B]
