"""What models are asked about, texts and tasks: prepared without any weights, then given to one model after the other.

Leaves out how results are shown (report.py), and the flags.
"""

import hashlib
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llmc_jax.base.commands import typed
from llmc_jax.base.errors import InputError
from llmc_jax.base.files import refusing
from llmc_jax.data import tables
from llmc_jax.data.documents import read_text
from llmc_jax.data.evalfile import Item, check_fit
from llmc_jax.data.tasks import TASKS, read_items
from llmc_jax.data.tokenizers import Tokenizer
from llmc_jax.evaluate import choices, texts
from llmc_jax.evaluate.figures import Figure, exponential, mean
from llmc_jax.evaluate.texts import Piece, Span
from llmc_jax.generate.model import Model
from llmc_jax.generate.scorer import ScoreOptions, Scorer, score

OnProgress = Callable[[int], None]  # is called with the positions that were computed
Cut = Callable[[Sequence[Piece]], list[Span]]  # pieces of a text into rows


class Text(NamedTuple):
    """A text, as one model reads it. key: two texts of the same key are the same tokens."""

    kind: str  # data (token files) or text
    name: str
    key: str
    pieces: tuple[Piece, ...]
    rows: Sequence[Span]
    bytes_of: np.ndarray | None

    @property
    def scored(self) -> int:
        """Return how many tokens are scored: what `told` will have been told in the end."""
        return sum(span.scored for span in self.rows)


class Questions(NamedTuple):
    """A task, as one model reads it."""

    name: str
    file: Path
    items: Sequence[Item]
    kind: str = "task"

    @property
    def scored(self) -> int:
        """Return how many tokens are scored, as of a text."""
        return sum(len(completion) for item in self.items for completion in item.completions)


class Result(NamedTuple):
    """What one model makes of a text or task.

    facts: how much of it there was. key: two results of the same key are compared unit by unit.
    """

    figures: list[Figure]
    facts: dict[str, Any]
    key: str


def common_positions(models: Sequence[Model], asked: int | None) -> int:
    """Return the T that all models are asked with: what was asked for, else the smallest of theirs."""
    smallest = min(models, key=lambda model: model.config.max_seq_len)
    most = smallest.config.max_seq_len
    if asked is not None and asked > most:
        raise InputError(f"-t {asked}: {smallest.path} has T={most} positions; take -t {most} or less")
    return asked or most


# ----- texts --------------------------------------------------------------------------------------------------------


def text_of_data(model: Model, pattern: str, cut: Cut) -> Text:
    """Return the token files that a pattern names as one text. Raises InputError."""
    pieces = texts.pieces_of_files(pattern, "--data", model.config.vocab_size)
    if model.tokenizer is not None:
        for path, tokenizer in tables.of_token_files([Path(piece.name) for piece in pieces]):
            tables.check_alike(
                f"--data {tables.words(path, tokenizer)}", tokenizer, model.tokenizer_note, model.tokenizer
            )
    return Text("data", pattern, pattern, pieces, cut(pieces), bytes_of(model))


def text_of_file(model: Model, path: str, cut: Cut) -> Text:
    """Return a file of text, made into tokens, after the end-of-text token. Raises InputError."""
    if model.tokenizer is None:
        raise InputError(
            f"--text {path}: {model.path} has no tokenizer ({model.tokenizer_note}); token files need none"
        )
    ids = np.concatenate([[model.end_of_text], _encoded(model.tokenizer, path)])
    pieces = (texts.piece_of_ids(f"--text {path}", ids),)
    key = hashlib.sha256(ids.astype(np.int64).tobytes()).hexdigest()
    return Text("text", path, key, pieces, cut(pieces), bytes_of(model))


def _encoded(tokenizer: Tokenizer, path: str) -> np.ndarray:
    with refusing(f"--text {path}: cannot be read", "check the path"), open(path, "rb") as file:
        advice = f"turn it into token files with `{typed('data')} prepare`, and give them by --data"
        content = read_text(file, f"--text {path}", advice)
    if not content:
        raise InputError(f"--text {path}: is empty; give a file of text")
    try:
        return tokenizer.encode(content)
    except InputError as error:
        raise InputError(f"--text {path}: {error}") from error


def bytes_of(model: Model) -> np.ndarray | None:
    """Return how many bytes each id stands for (V,); an end of text is none of the text, nor is a padding row."""
    tokenizer = model.tokenizer
    if tokenizer is None:
        return None
    sizes = np.array([len(tokenizer.piece(token)) for token in range(model.config.vocab_size)], np.int64)
    sizes[tokenizer.eot] = 0
    return sizes


def text_result(scorer: Scorer, text: Text, told: OnProgress = lambda tokens: None) -> Result:
    """Return what a model makes of a text."""
    found = texts.losses(scorer, text.pieces, text.rows, text.bytes_of, told)
    facts = {"tokens": found.tokens, "rows": len(text.rows)}
    if found.bytes is not None:
        facts["bytes"] = int(found.bytes.sum())
    return Result(texts.figures(found), facts, text.key)


# ----- tasks --------------------------------------------------------------------------------------------------------


def named_task(word: str) -> tuple[str, Path]:
    """Return the task and the file that a word names: `hellaswag`, `mmlu=FILE`. Raises InputError."""
    name, equals, path = word.partition("=")
    if name not in TASKS:
        raise InputError(f"--tasks {word}: unknown task; known are {', '.join(TASKS)}")
    if equals and not path:
        raise InputError(f"--tasks {word}: names no file; write {name}=FILE, or {name} alone for {TASKS[name].file}")
    return name, Path(os.path.expanduser(path)) if path else TASKS[name].usual_file


def questions(model: Model, word: str, positions: int, limit: int | None) -> Questions:
    """Return the items of a task that `named_task` takes.

    Raises InputError for a file of another task, a tokenizer that does not fit, an item that is too long.
    """
    task, path = named_task(word)
    items = read_items(task, path, model.tokenizer, limit, model.config.vocab_size)
    check_fit(items, positions, f"--tasks {word}")
    return Questions(task, path, items)


def questions_result(scorer: Scorer, asked: Questions, told: OnProgress = lambda tokens: None) -> Result:
    """Return what a model answers to the items of a task."""
    greedy = TASKS[asked.name].greedy
    scored = []
    for each in score(scorer, choices.rows_of_items(asked.items), ScoreOptions(rank=greedy)):
        told(len(each.losses))
        scored.append(each)
    found = choices.answers(asked.items, scored)
    facts: dict[str, Any] = {"file": str(asked.file), "items": len(found)}
    if not greedy:
        facts["chance"] = float(np.mean([1 / len(item.completions) for item in asked.items]))
    return Result(word_figures(found) if greedy else choice_figures(found), facts, asked.name)


def choice_figures(found: Sequence[choices.Answer]) -> list[Figure]:
    sound = _sound(found)
    return [
        mean("accuracy", sound * np.array([each.right for each in found])),
        mean("accuracy norm", sound * np.array([each.right_norm for each in found])),
    ]


def _sound(found: Sequence[choices.Answer]) -> np.ndarray:
    """Return 1 for each answer (n,), and nan for one with a loss that is none: which is the smallest means nothing."""
    return np.array([math.nan if math.isnan(sum(each.losses)) else 1.0 for each in found])


def word_figures(found: Sequence[choices.Answer]) -> list[Figure]:
    right = _sound(found) * np.array([each.written is not None and each.written[each.label] for each in found])
    losses = np.array([each.losses[each.label] for each in found])
    return [mean("accuracy", right), exponential("perplexity", mean("", losses))]
