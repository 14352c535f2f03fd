"""Public files of questions with several answers: HellaSwag, MMLU, ARC and LAMBADA, as text and then in tokens.

A new task is a row of TASKS with a function that makes a question of a row of its file, jsonl or parquet, which are
told apart by how they begin. Leaves out llm.c's own format (evalfile.py), where the files come from (datasets.py), and
the evaluation (evaluate/).
"""

import stat
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from llmc_jax.base import magics
from llmc_jax.base.commands import typed
from llmc_jax.base.errors import FormatError, InputError
from llmc_jax.base.files import refusing
from llmc_jax.data.documents import json_object, open_parquet, parquet_rows, text_lines
from llmc_jax.data.evalfile import Item, is_eval_file, read_eval_file
from llmc_jax.data.tokenizers import Tokenizer

FOLDER = Path("dev/data")
LONGEST_LINE = 1 << 24
AGAIN = "copy or download it again"


class Row(NamedTuple):
    """A row of a public file. where: file and place, for messages. number: in it, from 0. fields: by name."""

    where: str
    number: int
    fields: dict[str, Any]


class Question(NamedTuple):
    """A context, what may follow it (each with the space that it begins with), and which of that is right."""

    name: str
    context: str
    choices: tuple[str, ...]
    label: int


class Task(NamedTuple):
    """An evaluation. file: where `llmc-jax data` leaves its public file. question: makes one of a row with the fields.

    greedy: the single choice is right if the model would have written it. others: names of other files of it, beside
    `file`, which are taken where that is missing.
    """

    name: str
    title: str
    file: Path
    fields: tuple[str, ...]
    question: Callable[[Row], Question]
    greedy: bool = False
    others: tuple[str, ...] = ()

    @property
    def usual_file(self) -> Path:
        """Return the file that is read where none is named: the first there is, else where it should be."""
        files = [self.file, *(self.file.with_name(name) for name in self.others)]
        return next((path for path in files if path.exists()), self.file)

    def read(self, path: Path) -> Iterator[Question]:
        """Yield the questions of a public file. Raises InputError that names file and place for what is none of it."""
        asked: Counter[str] = Counter()
        for row in read_rows(path):
            if not row.fields.keys() >= set(self.fields):
                found = ", ".join(row.fields) or "(none)"
                wanted = ", ".join(self.fields)
                raise InputError(f"{row.where}: has the fields {found}; expected those of {self.title}, with {wanted}")
            question = self.question(row)
            if self.name == "mmlu":  # called by its subject, and its number in that
                asked[question.name] += 1
                question = question._replace(name=f"{question.name}:{asked[question.name] - 1}")
            yield question


# ----- rows ---------------------------------------------------------------------------------------------------------


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a file of jsonl or parquet. Raises InputError that names file and place."""
    with refusing(f"{path}: cannot be read", "check the path and its permissions"):
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for its writer
            raise InputError(f"{path}: is not a regular file; give a file as it was published")
        with path.open("rb") as file:
            begin = file.read(4)
            file.seek(0)
            if (magic := int.from_bytes(begin, "little")) in magics.MEANINGS:
                raise FormatError(f"{path}: is {magics.MEANINGS[magic]}; expected jsonl or parquet")
            if begin == b"PAR1":
                with open_parquet(str(path), file) as table:
                    for number, fields in enumerate(parquet_rows(table)):
                        yield Row(f"{path}: row {number}", number, fields)
                return
            lines = (line for line in text_lines(file, str(path), LONGEST_LINE, advice=AGAIN) if line[1].strip())
            for number, (line, text, _) in enumerate(lines):
                where = f"{path}:{line}"
                yield Row(where, number, json_object(text, where))


# ----- questions out of rows ----------------------------------------------------------------------------------------


def _hellaswag(row: Row) -> Question:
    """Source: render_example of llm.c's dev/data/hellaswag.py."""
    label = row.fields.get("label", "")
    if label == "":
        raise InputError(f"{row.where}: has no label, as the test split; take the validation split")
    endings = _texts(row, "endings", row.fields["endings"])
    name = str(row.fields.get("ind", row.number))
    choices = tuple(f" {ending}" for ending in endings)
    return Question(name, _text(row, "ctx"), choices, _label(row, "label", map(str, range(len(endings))), str(label)))


def _mmlu(row: Row) -> Question:
    """Source: render_example of llm.c's dev/data/mmlu.py, which reads with pandas and so has `nan` for a choice `None`
    or `NA`, and may spell numbers anew. Here the text stands as it is in the file.
    """
    choices = _texts(row, "choices", row.fields["choices"])
    label = _label(row, "answer", map(str, range(len(choices))), str(row.fields["answer"]))
    context = f"Question: {_text(row, 'question')}\n\nAnswer:"
    return Question(_text(row, "subject"), context, tuple(f" {choice}" for choice in choices), label)


def _arc(row: Row) -> Question:
    """Source of the prompt: arc_easy.yaml of EleutherAI's lm-evaluation-harness. Labels are letters or count from 1."""
    found = row.fields["choices"]
    columns = found if isinstance(found, dict) else {}
    texts, labels = (_texts(row, f"choices.{key}", columns.get(key)) for key in ("text", "label"))
    if len(texts) != len(labels):
        raise InputError(f"{row.where}: has {len(texts)} choices and {len(labels)} labels")
    label = _label(row, "answerKey", labels, _text(row, "answerKey"))
    context = f"Question: {_text(row, 'question')}\nAnswer:"
    return Question(str(row.fields.get("id", row.number)), context, tuple(f" {text}" for text in texts), label)


def _lambada(row: Row) -> Question:
    """Source: lambada_openai.yaml of EleutherAI's lm-evaluation-harness, and its `_encode_pair`: the last word follows
    the last space, and takes all the white space before it from the context.
    """
    before, _, last = (text := _text(row, "text")).rpartition(" ")
    if not ((context := before.rstrip()) and last):
        raise InputError(f"{row.where}: field 'text' has no last word with a text and one space before it")
    return Question(str(row.number), context, (text[len(context) :],), 0)


def _text(row: Row, key: str) -> str:
    if not isinstance(value := row.fields.get(key), str):
        raise InputError(f"{row.where}: field {key!r} holds a {type(value).__name__}; expected text")
    return value


def _texts(row: Row, key: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
        raise InputError(f"{row.where}: field {key!r} holds {str(value)[:60]!r}; expected a list of texts")
    return list(value)


def _label(row: Row, key: str, labels: Iterable[str], label: str) -> int:
    known = list(labels)
    if label not in known:
        raise InputError(f"{row.where}: {key} is {label!r}; expected one of {', '.join(known)}")
    return known.index(label)


# ----- the tasks ----------------------------------------------------------------------------------------------------


_ARC_FIELDS = ("question", "choices", "answerKey")
_TASKS = (
    Task("hellaswag", "HellaSwag", FOLDER / "hellaswag/hellaswag_val.parquet", ("ctx", "endings"), _hellaswag,
         others=("hellaswag_val.jsonl", "hellaswag_val.bin")),
    Task("mmlu", "MMLU", FOLDER / "mmlu/mmlu_test.parquet", ("question", "subject", "choices", "answer"), _mmlu,
         others=("mmlu_test.bin",)),
    Task("arc-easy", "ARC-Easy", FOLDER / "arc/ARC-Easy-Test.parquet", _ARC_FIELDS, _arc),
    Task("arc-challenge", "ARC-Challenge", FOLDER / "arc/ARC-Challenge-Test.parquet", _ARC_FIELDS, _arc),
    Task("lambada", "LAMBADA", FOLDER / "lambada/lambada_test.jsonl", ("text",), _lambada, greedy=True),
)  # fmt: skip
TASKS = {task.name: task for task in _TASKS}


# ----- in tokens ----------------------------------------------------------------------------------------------------


def read_items(
    task: str, path: str | Path, tokenizer: Tokenizer | None, limit: int | None = None, vocab_size: int | None = None
) -> list[Item]:
    """Return the questions of a task's file in tokens, the first `limit` of them.

    The file is a public one, or llm.c's evaluation file, which needs no tokenizer. Contexts and choices are encoded
    each by itself, as in llm.c's scripts. Raises InputError for a file that cannot be read or is another task's, one
    without questions, a missing tokenizer, a text of no tokens, and an id that a vocabulary of `vocab_size` lacks.
    """
    path, found = Path(path), TASKS[task]
    limit = None if limit is None else min(limit, sys.maxsize)  # no slice goes further
    if not path.exists():
        raise InputError(f"{path}: no such file; `{typed('data')} {found.file.parent.name}` gets {found.title}")
    if is_eval_file(path):
        if found.greedy:
            raise InputError(f"{path}: is llm.c's evaluation file, of questions with 4 answers; {task} has one")
        items = read_eval_file(path)[:limit]
    else:
        items = list(_encoded(path, islice(found.read(path), limit), tokenizer))
    if not items:
        raise InputError(f"{path}: has no questions for {found.title}; give the file as it was published")
    if vocab_size is not None:
        _check_ids(path, items, vocab_size)
    return items


def _encoded(path: Path, questions: Iterable[Question], tokenizer: Tokenizer | None) -> Iterator[Item]:
    if tokenizer is None:
        raise InputError(f"{path}: is text, which takes a tokenizer to evaluate; name the model's with --tokenizer")
    for question in questions:
        context, *choices = (tuple(tokenizer.encode(text).tolist()) for text in (question.context, *question.choices))
        if not (context and all(choices)):
            raise InputError(f"{path}: question {question.name} has a context or an answer without any text")
        yield Item(question.name, context, tuple(choices), question.label)


def _check_ids(path: Path, items: Iterable[Item], vocab_size: int) -> None:
    for item in items:
        highest = max(map(max, (item.context, *item.completions)))
        if highest >= vocab_size:
            raise InputError(
                f"{path}: question {item.name} has id {highest}, but with V={vocab_size} ids end at {vocab_size - 1}: "
                "its tokenizer is not the model's"
            )
