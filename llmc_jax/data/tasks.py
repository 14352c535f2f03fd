"""Public files of questions with several answers: HellaSwag, MMLU, ARC and LAMBADA, as text and then in tokens.

A new task is a row of TASKS with a function that makes a question of a row of its file. Leaves out llm.c's own format
(evalfile.py), where the files come from (datasets.py), and the evaluation (evaluate/).
"""

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from llmc_jax.base.commands import typed
from llmc_jax.base.errors import InputError
from llmc_jax.data.evalfile import is_eval_file, read_eval_file
from llmc_jax.data.items import Item
from llmc_jax.data.rows import Row, read_rows
from llmc_jax.data.tokenizers import Tokenizer

FOLDER = Path("dev/data")


class Question(NamedTuple):
    """A context, what may follow it (each with the space that it begins with), and which of that is right."""

    name: str
    context: str
    choices: tuple[str, ...]
    label: int


class Task(NamedTuple):
    """An evaluation. file: where `llmc-jax data` leaves its public file. read: yields a file's questions.

    greedy: the single choice is right if the model would have written it. others: names of other files of it, beside
    `file`, which are taken where that is missing.
    """

    name: str
    title: str
    file: Path
    read: Callable[[Path], Iterator[Question]]
    greedy: bool = False
    others: tuple[str, ...] = ()

    @property
    def usual_file(self) -> Path:
        """Return the file that is read where none is named: the first there is, else where it should be."""
        files = [self.file, *(self.file.with_name(name) for name in self.others)]
        return next((path for path in files if path.exists()), self.file)


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
    fields = row.fields
    if 0 in fields:  # csv: question, four choices, letter
        if len(fields) != 6:
            raise InputError(
                f"{row.where}: has {len(fields)} columns; expected a question, 4 choices, and A, B, C or D"
            )
        choices, label = [fields[column] for column in range(1, 5)], _label(row, "column 5", "ABCD", fields[5].strip())
        subject, question = row.source.removesuffix(".csv").removesuffix("_test"), fields[0]
    else:
        choices, question = _texts(row, "choices", fields["choices"]), _text(row, "question")
        label = _label(row, "answer", map(str, range(len(choices))), str(fields["answer"]))
        subject = str(fields.get("subject", row.source))
    return Question(subject, f"Question: {question}\n\nAnswer:", tuple(f" {choice}" for choice in choices), label)


def _numbered(questions: Iterable[Question]) -> Iterator[Question]:
    """Yield questions, each called by its subject, which was its name, and its number in that, from 0."""
    asked: Counter[str] = Counter()
    for question in questions:
        yield question._replace(name=f"{question.name}:{asked[question.name]}")
        asked[question.name] += 1


def _arc(row: Row) -> Question:
    """Source of the prompt: arc_easy.yaml of EleutherAI's lm-evaluation-harness. Labels are letters or count from 1."""
    stem, texts, labels = _arc_choices(row)
    if len(texts) != len(labels):
        raise InputError(f"{row.where}: has {len(texts)} choices and {len(labels)} labels")
    label = _label(row, "answerKey", labels, _text(row, "answerKey"))
    name = str(row.fields.get("id", row.number))
    return Question(name, f"Question: {stem}\nAnswer:", tuple(f" {text}" for text in texts), label)


def _arc_choices(row: Row) -> tuple[str, list[str], list[str]]:
    """Return a question, the texts of its choices, and their labels, which jsonl and parquet hold in other ways."""
    asked = row.fields["question"]
    if isinstance(asked, dict):  # jsonl: question {"stem": …, "choices": [{"text": …, "label": …}, …]}
        pairs = [pair if isinstance(pair, dict) else {} for pair in _list(row, "choices", asked.get("choices"))]
        stem = _text(row._replace(fields=asked), "stem")
        columns = {key: [pair.get(key) for pair in pairs] for key in ("text", "label")}
    else:  # parquet: question, and choices {"text": […], "label": […]}
        found = row.fields.get("choices")
        stem, columns = _text(row, "question"), found if isinstance(found, dict) else {}
    texts, labels = (_texts(row, f"choices.{key}", columns.get(key)) for key in ("text", "label"))
    return stem, texts, labels


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


def _list(row: Row, key: str, value: Any) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise InputError(f"{row.where}: field {key!r} holds a {type(value).__name__}; expected a list of some length")
    return value


def _texts(row: Row, key: str, value: Any) -> list[str]:
    wrong = [item for item in _list(row, key, value) if not isinstance(item, str)]
    if wrong:
        raise InputError(f"{row.where}: field {key!r} holds a {type(wrong[0]).__name__} among its texts")
    return list(value)


def _label(row: Row, key: str, labels: Iterable[str], label: str) -> int:
    known = list(labels)
    if label not in known:
        raise InputError(f"{row.where}: {key} is {label!r}; expected one of {', '.join(known)}")
    return known.index(label)


# ----- the tasks ----------------------------------------------------------------------------------------------------


SIGNS: dict[str, set[str | int]] = {  # the fields by which a row is known; columns of csv are numbers
    "HellaSwag": {"ctx", "endings"},
    "ARC": {"question", "answerKey"},
    "MMLU": {"question", "choices", "answer"},
    "MMLU's csv": {0},
    "LAMBADA": {"text"},
}


def _hellaswag_file(path: Path) -> Iterator[Question]:
    return map(_hellaswag, _rows(path, ("HellaSwag",)))


def _mmlu_file(path: Path) -> Iterator[Question]:
    return _numbered(map(_mmlu, _rows(path, ("MMLU", "MMLU's csv"), re.compile(r"_test\.csv$"))))


def _arc_file(part: str, other: str, path: Path) -> Iterator[Question]:
    if other.lower() in path.name.lower():
        raise InputError(f"{path}: is {other} by its name; expected {part}")
    return map(_arc, _rows(path, ("ARC",), re.compile(rf"(^|/){part}-Test\.jsonl$")))


def _lambada_file(path: Path) -> Iterator[Question]:
    return map(_lambada, _rows(path, ("LAMBADA",)))


def _rows(path: Path, signs: tuple[str, ...], members: re.Pattern[str] | None = None) -> Iterator[Row]:
    """Yield a file's rows as long as they look like those of a task."""
    for row in read_rows(path, members):
        found = next((name for name, fields in SIGNS.items() if fields <= row.fields.keys()), None)
        if found not in signs:
            own = f"has the fields {', '.join(map(str, row.fields)) or '(none)'}"
            looks = f"looks like {found}" if found else own
            wanted = ", ".join(sorted(map(str, SIGNS[signs[0]])))
            raise InputError(f"{row.where}: {looks}; expected {signs[0]} as it was published, with {wanted}")
        yield row


_TASKS = (
    Task("hellaswag", "HellaSwag", FOLDER / "hellaswag/hellaswag_val.parquet", _hellaswag_file,
         others=("hellaswag_val.jsonl", "hellaswag_val.bin")),
    Task("mmlu", "MMLU", FOLDER / "mmlu/data.tar", _mmlu_file, others=("mmlu_test.bin",)),
    Task("arc-easy", "ARC-Easy", FOLDER / "arc/ARC-Easy-Test.parquet", partial(_arc_file, "ARC-Easy", "ARC-Challenge")),
    Task("arc-challenge", "ARC-Challenge", FOLDER / "arc/ARC-Challenge-Test.parquet",
         partial(_arc_file, "ARC-Challenge", "ARC-Easy")),
    Task("lambada", "LAMBADA", FOLDER / "lambada/lambada_test.jsonl", _lambada_file, greedy=True),
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
