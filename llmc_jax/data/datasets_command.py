"""`llmc-jax data NAME` and `list`: the data sets that are known by name.

Leaves out the table, and what becomes of a data set (data/datasets.py).
"""

import argparse
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from llmc_jax.base.commands import typed
from llmc_jax.base.errors import InputError
from llmc_jax.base.files import refuse_existing, refusing
from llmc_jax.base.options import Option, own
from llmc_jax.base.parsers import Parser
from llmc_jax.base.progress import MEGABYTE
from llmc_jax.base.streams import print_error
from llmc_jax.base.text import table
from llmc_jax.data import datasets as sets
from llmc_jax.data.command_kit import TOKENIZER, command, count, load, make_token_files
from llmc_jax.data.datasets import DATASETS, DOWNLOADS, SAMPLES, Dataset
from llmc_jax.data.documents import check_parquet, size_of
from llmc_jax.data.download import mismatch, shown
from llmc_jax.data.evalfile import START, write_eval_file
from llmc_jax.data.hub import File
from llmc_jax.data.prepare import check_settings
from llmc_jax.data.tasks import FOLDER, TASKS, read_items
from llmc_jax.data.tokenizers import Tokenizer

# ----- options ------------------------------------------------------------------------------------------------------


def add_datasets(commands: argparse._SubParsersAction) -> None:
    """Add `list` and a command for each data set."""
    command(commands, "list", _list)
    for dataset in DATASETS.values():
        _add_corpus(commands, dataset) if dataset.recipe else _add_evaluation(commands, dataset)


def _add(commands: argparse._SubParsersAction, dataset: Dataset, about: str, own_options: Sequence[Option]) -> Parser:
    parser: Parser = commands.add_parser(
        dataset.name, help=f"{dataset.title}.", description=f"{dataset.title}. {about} Published: {dataset.page}"
    )
    given = "--text --from" if dataset.place is None else "--from"
    parser.add([
        own("-o --out", "FOLDER", None, f"where to write (default: {FOLDER / dataset.folder})"),
        *own_options,
    ])  # fmt: skip
    if dataset.recipe or dataset.eval_file:
        parser.add([own(given, "FILE...", None, "local copies; nothing is downloaded", name="source")])
    return parser


def _add_evaluation(commands: argparse._SubParsersAction, dataset: Dataset) -> None:
    made = f" makes llm.c's evaluation file of it, {dataset.eval_file}," if dataset.eval_file else ""
    about = f"Downloads what is published,{made} and says how to evaluate with it."
    force = own("--force", "", False, f"replace {dataset.eval_file}")
    options = [TOKENIZER, force] if dataset.eval_file else []
    _add(commands, dataset, about, options).set_defaults(run=partial(_evaluation, dataset))


def _add_corpus(commands: argparse._SubParsersAction, dataset: Dataset) -> None:
    options = [
        TOKENIZER,
        own("--force", "", False, "replace the token files of this name if there are any"),
        own("--files", "N", None, "only the first N files of it", read=_positive),
        own("--shard-size", "N", None, "tokens per file (default: as llm.c's script)", read=_positive),
        own("--workers", "N", None, "processes (default: cores)"),
        own("--download-only", "", False, "download only: make nothing of the files"),
    ]
    sample = own("--sample", "|".join(SAMPLES), SAMPLES[0], f"how much of it, in tokens (default: {SAMPLES[0]})")
    options += [sample] if dataset.listed == "sample/10BT" else []
    parser = _add(commands, dataset, "Downloads it, or the rest of it, and makes token files.", options)
    parser.set_defaults(run=partial(_corpus, dataset), sample=SAMPLES[0])


def _positive(text: str) -> int:
    if (value := count(text)) < 1:
        raise InputError("expected 1 or more")
    return value


# ----- commands -----------------------------------------------------------------------------------------------------


def _list(options: argparse.Namespace) -> None:
    """List the data sets that are known by name: how large, how much is in them, where they are published."""
    sizes = {row.name: row.about or sum(file.size or 0 for file in row.files) for row in DATASETS.values()}
    rows = [
        (row.name, row.title, _size(sizes[row.name]), row.holds, str(FOLDER / row.folder), row.page)
        for row in DATASETS.values()
    ]
    headings = ("name", "what", "download", "holds", "folder", "published; its licence stands there")
    print(table(headings, rows, left=(headings[0], headings[1], headings[4], headings[5]), optional=headings[4:]))


def _size(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / MEGABYTE:,.1f} MB"


def _evaluation(dataset: Dataset, options: argparse.Namespace) -> None:
    """Download an evaluation, and write llm.c's file of one that has four answers to each question."""
    folder = options.out or FOLDER / dataset.folder
    tokenizer = load(options.tokenizer) if dataset.eval_file else None  # before what may take long
    given = [Path(path) for path in options.source or ()] if dataset.eval_file else []
    paths = given or _downloaded(dataset, list(dataset.files), folder)
    if len(paths) != len(dataset.tasks):
        raise InputError(f"--from: names {len(paths)} files; {dataset.name} is one")
    found = list(zip(dataset.tasks, paths, strict=True))
    counts = [sum(1 for _ in TASKS[task].read(path)) for task, path in found]  # llm.c's own file is refused here
    if tokenizer is not None:
        _write_eval_file(dataset, paths[0], folder, tokenizer, options.force or not given)
    for (task, path), questions in zip(found, counts, strict=True):
        print(f"{TASKS[task].title}: {questions:,} questions in {path}")
    named = [task if path == TASKS[task].file else f"{task}={path}" for task, path in found]
    print(f"Next: {typed('evaluate')} CHECKPOINT --tasks {shlex.join(named)}")


def _write_eval_file(dataset: Dataset, path: Path, folder: Path, tokenizer: Tokenizer, force: bool) -> None:
    """Write llm.c's file. What was made of the published file may be replaced: it is made of the same again."""
    target = folder / sets.own_name(str(dataset.eval_file), tokenizer)
    if tokenizer.vocab_size > START:
        print_error(f"note: {target} is not written: its ids have 16 bits, and V={tokenizer.vocab_size}")
        return
    refuse_existing(target, force)
    items = read_items(dataset.tasks[0], path, tokenizer)
    with refusing(f"{folder}: cannot be made", "choose another --out"):
        folder.mkdir(parents=True, exist_ok=True)
    write_eval_file(target, items)
    print(f"Saved {len(items):,} questions to {target}")


def _downloaded(dataset: Dataset, files: list[File], folder: Path) -> list[Path]:
    missing = sum(file.size or 0 for file in files if not (folder / file.name).exists())
    with shown(missing) as report:
        try:
            paths = sets.obtain(dataset, files, folder, report)
        except KeyboardInterrupt:
            print_error("note: what has arrived is kept, and the same command resumes there")
            raise
    print(f"{', '.join(map(str, paths[:3]))}{', …' if len(paths) > 3 else ''}: of the published size")
    return paths


def _corpus(dataset: Dataset, options: argparse.Namespace) -> None:
    dataset = sets.sampled(dataset, options.sample)
    recipe = dataset.recipe
    assert recipe is not None
    folder = options.out or FOLDER / dataset.folder
    downloads = folder / DOWNLOADS
    settings = recipe.settings(options.shard_size)._replace(workers=options.workers)
    tokenizer = None
    if not options.download_only:  # what can go wrong is told now, and not when all has arrived
        tokenizer = load(options.tokenizer)
        name = sets.own_name(recipe.name, tokenizer)
        check_settings(settings, name)
        sets.refuse_made(folder, name, options.force)
        if settings.reading.format == "parquet":
            check_parquet(dataset.name)
    if options.source:
        inputs = sets.local_inputs(recipe, options.source)
        for path in inputs if dataset.place is None else ():
            with refusing(f"{path}: cannot be read", "check its permissions"):
                if mismatch(sets.remote(dataset, dataset.files[0]), path):
                    raise InputError(f"{path}: is not {dataset.name}; for other text: {typed('data')} prepare")
    else:
        inputs = _downloaded(dataset, sets.published_files(dataset, options.files), downloads)
    if tokenizer is None:
        return
    files = [file for path in inputs for file in sets.unpacked(path, downloads, recipe.pattern)]
    make_token_files([str(path) for path in files[: options.files]], folder, name, tokenizer, settings, options)
    if made := {*inputs, *files} - set(inputs if options.source else ()):
        print(f"{_size(sum(map(size_of, made)))} in {downloads} can be deleted now")
