"""What models are asked, and what comes of it: the table or the one JSON object, notes and progress beside it.

Leaves out the flags (command.py) and what a text or a task is to a model (subjects.py).
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from string import ascii_uppercase
from typing import Any

from rich.progress import BarColumn, Task, TextColumn, TimeRemainingColumn

from llmc_jax.base.errors import InputError
from llmc_jax.base.kit import print_json
from llmc_jax.base.progress import show_progress
from llmc_jax.evaluate import report, subjects
from llmc_jax.evaluate.report import Subject
from llmc_jax.evaluate.subjects import OnProgress, Questions, Result, Text
from llmc_jax.evaluate.texts import rows_of_text
from llmc_jax.generate.answer import until_ctrl_c
from llmc_jax.generate.command import model_facts, say_model
from llmc_jax.generate.model import Model, open_model
from llmc_jax.generate.scorer import Scorer, scorer_of
from llmc_jax.machine.device import describe_device, refusing_full_memory

FULL_MEMORY = "compute fewer rows at a time (-b 1 is the least), lower -t, or write --dtype bf16"

Subjects = list[Text | Questions]  # as one model reads them, in the order in which they are shown


def run(flags: argparse.Namespace) -> None:
    """Ask all models, and print the table or the JSON. Raises InputError."""
    for word in flags.tasks:
        subjects.named_task(word)
    devices = number_of_devices(flags.devices)
    how = {"tokenizer": flags.tokenizer, "step": flags.step}
    opened = [open_model(path, dtype=flags.dtype, weights=False, **how) for path in flags.checkpoints]
    positions = subjects.common_positions(opened, flags.positions)
    asked = [read_subjects(flags, model, positions) for model in opened]
    began = time.monotonic()
    facts, results = evaluate(flags, asked, devices, positions)
    shown = side_by_side(asked[0], results)
    if flags.json:
        settings = {"T": positions, "devices": devices, "limit": flags.limit}
        about = {"models": facts, "settings": settings, "subjects": list(map(report.plain_data, shown))}
        print_json({**about, "seconds": time.monotonic() - began})
        return
    if len(facts) > 1:
        letters = zip(ascii_uppercase, flags.checkpoints, strict=False)
        print(*(f"{letter}  {path}" for letter, path in letters), sep="\n", end="\n\n")
    print(report.table(shown, positions))


# ----- what is asked ------------------------------------------------------------------------------------------------


def read_subjects(flags: argparse.Namespace, model: Model, positions: int) -> Subjects:
    """Return the texts and tasks as one model reads them."""
    cut = partial(rows_of_text, positions=positions, limit=flags.limit)
    return [
        *(subjects.text_of_data(model, pattern, cut) for pattern in flags.data),
        *(subjects.text_of_file(model, path, cut) for path in flags.text),
        *(subjects.questions(model, word, positions, flags.limit) for word in flags.tasks),
    ]


def number_of_devices(asked: int) -> int:
    """Return how many devices compute: as many as were asked for; 0: all GPUs, or the CPU. Raises InputError."""
    device = describe_device()
    if asked > device.num_devices:
        raise InputError(f"--devices {asked}: this machine has {device.num_devices}; take as many or fewer")
    return asked or (1 if device.platform == "cpu" else device.num_devices)


# ----- what comes of it ---------------------------------------------------------------------------------------------


def evaluate(
    flags: argparse.Namespace, asked: Sequence[Subjects], devices: int, positions: int
) -> tuple[list[dict[str, Any]], list[list[Result]]]:
    """Open one model after the other, and ask it; return facts about each, and its results, by model."""
    facts, results = [], []
    total = sum(subject.scored for own in asked for subject in own)
    with refusing_full_memory(FULL_MEMORY), progress(total) as told:
        for path, own in zip(flags.checkpoints, asked, strict=True):
            model = open_model(path, dtype=flags.dtype, tokenizer=flags.tokenizer, step=flags.step)
            say_model(model)
            facts.append(model_facts(model))
            scorer = scorer_of(model, devices, flags.rows and flags.rows * positions)
            results.append([result(scorer, subject, told) for subject in own])
            del model, scorer  # before the next one's weights are read
    return facts, results


def result(scorer: Scorer, subject: Text | Questions, told: OnProgress) -> Result:
    """Return what a model makes of a text or a task."""
    if isinstance(subject, Text):
        return subjects.text_result(scorer, subject, told)
    return subjects.questions_result(scorer, subject, told)


def side_by_side(asked: Subjects, results: Sequence[list[Result]]) -> list[Subject]:
    """Return by subject what each model makes of it."""
    names = [own.name for own in asked]
    words = [
        f"{own.name}={own.file}" if isinstance(own, Questions) and names.count(own.name) > 1 else own.name
        for own in asked
    ]
    columns = zip(*results, strict=True)
    return [Subject(own.kind, word, column) for own, word, column in zip(asked, words, columns, strict=True)]


@contextmanager
def progress(total: int) -> Iterator[OnProgress]:
    """Show how many tokens are scored, of so many in total. What it yields raises KeyboardInterrupt after Ctrl-C.

    JAX's own callbacks would swallow an interrupt that comes while they run.
    """
    words = TextColumn("{task.completed:,.0f} of {task.total:,.0f} tokens, left:")

    def line(task: Task) -> str:
        return f"{task.percentage:.0f} % | {task.completed:,.0f} of {total:,} tokens"

    with (
        until_ctrl_c() as stop,
        show_progress((BarColumn(), words, TimeRemainingColumn()), total, line) as update,
    ):

        def told(tokens: int) -> None:
            update(advance=tokens)
            if stop.is_set():
                raise KeyboardInterrupt

        yield told
