"""`llmc-jax data`: make token files from text, get the data sets that are known by name, look into such files.

Leaves out the work itself (prepare.py, datasets.py, corpora.py, show.py, tokenizers.py). Exit status: 0 done, 2 bad
input, 130 stopped by Ctrl-C.
"""

import argparse
import inspect
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from llmc_jax.base.commands import typed
from llmc_jax.base.errors import InputError
from llmc_jax.base.files import quoted, refuse_existing
from llmc_jax.base.options import Check, Option, own
from llmc_jax.base.parsers import Parser, commands_line
from llmc_jax.base.progress import MEGABYTE, show_bytes
from llmc_jax.base.streams import print_error
from llmc_jax.base.text import table
from llmc_jax.config.train import TrainConfig
from llmc_jax.data import datasets as sets
from llmc_jax.data.datasets import DATASETS, DOWNLOADS, Dataset
from llmc_jax.data.documents import BLANK_LINE, Reading, check_parquet, find_inputs, size_of
from llmc_jax.data.download import fetch, shown
from llmc_jax.data.evalfile import START, write_eval_file
from llmc_jax.data.hub import File
from llmc_jax.data.prepare import SHARD_TOKENS, VAL_SHARE, VAL_TOKENS, Settings, prepare, refuse_made
from llmc_jax.data.show import SHOWN_TOKENS, describe
from llmc_jax.data.tasks import FOLDER, TASKS, read_items
from llmc_jax.data.tokenfile import MAX_TOKENS, expand_pattern
from llmc_jax.data.tokenizers import DEFAULT_BIN, Tokenizer, load_tokenizer, write_tokenizer_bin

# ----- options ------------------------------------------------------------------------------------------------------


TOKENIZER = own(
    "--tokenizer", "SPEC", "gpt2", f"bytes; gpt2: its table from tiktoken's cache, ./{DEFAULT_BIN} or the network; or "
    f"the path of a {DEFAULT_BIN}, or of a folder or tokenizer.json of Hugging Face's (default: gpt2)",
)  # fmt: skip


def command(
    commands: argparse._SubParsersAction, name: str, run: Callable[..., None], options: Sequence[Option] = ()
) -> Parser:
    """Add a command, whose help is the docstring of what it runs."""
    about = inspect.cleandoc(run.__doc__ or "")
    parser: Parser = commands.add_parser(name, help=about.partition("\n")[0], description=about)
    parser.set_defaults(run=run)
    parser.add(options)
    return parser


def count(text: str) -> int:
    """Return a number of tokens: 100000000, 1e8 or 100M."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d\d?)?)([kMG]?)", text)
    value = float(match[1]) * {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9}[match[2]] if match else 0.5
    if not value.is_integer():  # nor is inf, which a number of more than 308 digits becomes
        raise InputError("expected a whole number such as 32768, 1e8 or 100M")
    return int(text) if text.isdecimal() else int(value)


def load(spec: str) -> Tokenizer:
    tokenizer = load_tokenizer(spec).tokenizer
    if tokenizer is None:
        raise InputError(f"--tokenizer {spec}: this command needs one: gpt2, bytes or the path of a file")
    return tokenizer


def _positive(text: str) -> int:
    if not 1 <= (value := count(text)) <= MAX_TOKENS:
        raise InputError(f"expected 1 to {MAX_TOKENS}")
    return value


def _name(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", text):
        raise InputError("expected letters, digits and . _ - (the name goes into patterns)")
    return text


def _separator(text: str) -> re.Pattern[str]:
    if not text:
        raise InputError("expected at least one character")
    if text == "blank-line":
        return BLANK_LINE
    meant = re.sub(r"\\([nrt\\])", lambda match: {"n": "\n", "r": "\r", "t": "\t", "\\": "\\"}[match[1]], text)
    return re.compile(re.escape(meant))


WORKERS = own("--workers", "N", None, "processes (default: cores, fewer for little input)", most=1024)
PREPARE = (
    own("inputs", "INPUT...", None, "file, folder (all in it) or pattern"),
    own("-o --out", "FOLDER", None, "where to write (default: dev/data/NAME)"),
    own("--name", "NAME", None, "name of the files (default: that of the first INPUT)", read=_name),
    TOKENIZER,
    own("--force", "", False, "replace the files of this name if there are any"),
)
READING = (
    own("--format", "auto|text|jsonl|json|parquet", "auto", "of the input; json: one list of objects; auto: by its "
        "ending, .jsonl .ndjson .json .parquet, all else text (default: auto)"),
    own("--field", "FIELD", "text", "what holds the text in jsonl and parquet (default: text)"),
    own("--split-on", "TEXT", None, r"ends a document in text files and stays with it; \n is a newline, `blank-line` "
        r"is \n\n or \r\n\r\n (default: a file is one document)", read=_separator),
    own("--drop-separator", "", False, "leave the separator out of the documents", needs="split_on"),
    own("--errors", "strict|replace", "strict", "bytes that are not UTF-8: strict stops, replace puts U+FFFD (default: "
        "strict)"),
    WORKERS,
)  # fmt: skip
SPLITTING = (
    own("--shard-size", "N", SHARD_TOKENS, "tokens per file; 100M and 1e8 are understood (default: "
        f"{SHARD_TOKENS})", read=_positive),
    own("--val-tokens", "N", None, "the first N tokens are validation; 0: none", read=count, excludes="val_fraction"),
    own("--val-fraction", "F", None, "about this share of the documents is, chosen by their hash",
        check=Check(lambda value: 0 < value < 1, "between 0 and 1, such as 0.05")),
)  # fmt: skip
INSPECT = (
    own("files", "FILE...", None, "token file or pattern"),
    own("--tokenizer", "SPEC", "auto", "shows the first tokens as text: bytes, gpt2, a path, none, or auto: by "
        "the ids (default: auto)"),
    own("--first", "N", SHOWN_TOKENS, f"tokens to show (default: {SHOWN_TOKENS})", 0),
)  # fmt: skip


def make_parser() -> Parser:
    """Return the parser of its commands."""
    program = typed("data")
    parser = Parser(
        prog=program,
        shown=(("prepare book.txt --tokenizer bytes", "token files of your own text"), ("list", "known data sets")),
        description="Make the files that training and evaluation read, and look into them.",
        epilog=f"`{program} COMMAND --help` explains a command.",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    making = command(commands, "prepare", _prepare, PREPARE)
    making.add(READING, "reading")
    parts = f"the first 1/{VAL_SHARE} of the tokens, at most {VAL_TOKENS}, are for validation."
    making.add(SPLITTING, "splitting", f"Without an option {parts}")
    command(commands, "list", _list)
    for dataset in DATASETS.values():
        _add(commands, dataset)
    command(commands, "inspect", _inspect, INSPECT)
    summary = f"Write a {DEFAULT_BIN}."
    tokenizer = commands.add_parser("tokenizer", help=summary, description=summary)
    actions = tokenizer.add_subparsers(title="actions", metavar="ACTION", required=True)
    force = own("--force", "", False, "replace the file if there is one")
    path = own("path", "[PATH]", Path(DEFAULT_BIN), f"(default: {DEFAULT_BIN})", type=Path)
    command(actions, "write", _tokenizer_write, [path, force, TOKENIZER])
    return parser


def _add(commands: argparse._SubParsersAction, dataset: Dataset) -> None:
    """Add the command of a data set: an evaluation, or a corpus, which becomes token files."""
    made = f" makes llm.c's evaluation file of it, {dataset.eval_file}," if dataset.eval_file else ""
    about = f"Downloads what is published,{made} and says how to evaluate with it."
    options = [own("-o --out", "FOLDER", None, f"where to write (default: {FOLDER / dataset.folder})")]
    options += [TOKENIZER] if dataset.makes or dataset.eval_file else []
    if dataset.makes:
        about = "Downloads it, or the rest of it, and makes token files."
        options += [
            own("--force", "", False, "replace the token files of this name if there are any"),
            own("--files", "N", None, "only the first N files of it", read=_positive),
            own("--shard-size", "N", None, "tokens per file (default: as llm.c's script)", read=_positive),
            WORKERS,
        ]
    if dataset.listed == "sample/10BT":
        options += [own("--sample", "|".join(sets.SAMPLES), "10BT", "how much of it, in tokens (default: 10BT)")]
    parser: Parser = commands.add_parser(
        dataset.name, help=f"{dataset.title}.", description=f"{dataset.title}. {about} Published: {dataset.page}"
    )
    parser.add(options)
    parser.set_defaults(run=partial(_corpus if dataset.makes else _evaluation, dataset), sample="10BT")


main = commands_line("data", make_parser)


# ----- commands -----------------------------------------------------------------------------------------------------


def _prepare(options: argparse.Namespace) -> None:
    """Make token files from text, jsonl or parquet files.

    The end-of-text token stands before every document. Files are named NAME_val_000000.bin and NAME_train_000001.bin,
    as llm.c names FineWeb's, and appear together when all are complete.
    """
    name = options.name or _name_after(options.inputs[0])
    folder = options.out or Path("dev/data") / name
    settings = Settings(
        reading=Reading(options.format, options.field, options.split_on, options.drop_separator, options.errors),
        shard_tokens=options.shard_size,
        val_tokens=options.val_tokens,
        val_fraction=options.val_fraction,
        workers=options.workers,
    )
    find_inputs(options.inputs)  # what is not there is told before a tokenizer is looked for
    tokenizer = load(options.tokenizer)
    make_token_files(options.inputs, folder, name, tokenizer, settings, options)


def _name_after(item: str) -> str:
    """Return a name for the files from an input: its own; of a pattern, that of the first part that is none."""
    path = Path(os.path.abspath(item))
    while re.search(r"[*?\[]", path.name) and not path.exists():
        path = path.parent
    stem = path.name if path.is_dir() else path.stem
    return re.sub(r"[^A-Za-z0-9_-]+", "_", stem).strip("_-") or "text"


def _inspect(options: argparse.Namespace) -> None:
    """Say what is in token files: format, tokens, documents, ids, first text."""
    for pattern in options.files:
        for path in expand_pattern(pattern, "inspect"):
            print(describe(path, options.tokenizer, options.first))


def _tokenizer_write(options: argparse.Namespace) -> None:
    """Write a tokenizer's table as llm.c's gpt2_tokenizer.bin."""
    refuse_existing(options.path, options.force)
    tokenizer = load(options.tokenizer)
    if tokenizer.json:
        raise InputError(
            f"--tokenizer {options.tokenizer}: its table alone does not tell its ids; give the folder itself"
        )
    write_tokenizer_bin(options.path, tokenizer.pieces, tokenizer.eot)
    print(f"Saved {tokenizer.vocab_size} ids to {options.path}")


# ----- token files --------------------------------------------------------------------------------------------------


def make_token_files(
    inputs: list[str], folder: Path, name: str, tokenizer: Tokenizer, settings: Settings, options: argparse.Namespace
) -> None:
    """Run `prepare` with progress, and print what it made and the command that trains on it."""
    total = sum(map(size_of, find_inputs(inputs)))
    start = time.monotonic()
    with show_bytes(total) as update:
        encoded = 0

        def report(read: int, tokens: int) -> None:
            nonlocal encoded
            encoded += tokens
            update(advance=read, description=f"{encoded:,} tokens")

        made = prepare(inputs, folder, name, tokenizer, settings, options.force, report)
    seconds = time.monotonic() - start
    for shard in made.shards:
        print(f"Saved {shard.tokens} tokens to {shard.path}")
    print(f"Saved their tokenizer, V={tokenizer.vocab_size}, to {made.table}")
    left_out = f" ({made.empty:,} without text left out)" if made.empty else ""
    print(
        f"{made.documents:,} document{'s' * (made.documents != 1)}{left_out}: "
        f"{made.tokens('train'):,} tokens for training, "
        f"{made.tokens('val'):,} for validation; {seconds:.1f} s, {total / MEGABYTE / max(seconds, 1e-9):.1f} MB/s"
    )
    train, val = (folder / f"{name}_{split}{'_*' * settings.numbered}.bin" for split in ("train", "val"))
    if str(train) == TrainConfig().train_data:
        print(f"Next: {typed('train')} --preset tinyshakespeare")
        return
    model = f"L4-NH4-C128-V{tokenizer.vocab_size}-T128 -t 128"  # a size for a first look, on a CPU too
    validation = f"-j {quoted(val)}" if made.tokens("val") else "-v 0"
    print(f"Next: {typed('train')} -i {quoted(train)} {validation} -e {model}")


# ----- data sets by name ----------------------------------------------------------------------------------------------


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
    paths = _downloaded(dataset, list(dataset.files), folder)
    found = list(zip(dataset.tasks, paths, strict=True))
    counts = [sum(1 for _ in TASKS[task].read(path)) for task, path in found]
    if tokenizer is not None:
        _write_eval_file(dataset, paths[0], folder, tokenizer)
    for (task, path), questions in zip(found, counts, strict=True):
        print(f"{TASKS[task].title}: {questions:,} questions in {path}")
    named = [task if path == TASKS[task].file else f"{task}={path}" for task, path in found]
    print(f"Next: {typed('evaluate')} CHECKPOINT --tasks {shlex.join(named)}")


def _write_eval_file(dataset: Dataset, path: Path, folder: Path, tokenizer: Tokenizer) -> None:
    """Write llm.c's file of a published one, in place of what was made of it before."""
    target = folder / sets.own_name(str(dataset.eval_file), tokenizer)
    if tokenizer.vocab_size > START:
        print_error(f"note: {target} is not written: its ids have 16 bits, and V={tokenizer.vocab_size}")
        return
    items = read_items(dataset.tasks[0], path, tokenizer)
    write_eval_file(target, items)
    print(f"Saved {len(items):,} questions to {target}")


def _downloaded(dataset: Dataset, files: list[File], folder: Path) -> list[Path]:
    missing = sum(file.size or 0 for file in files if not (folder / file.name).exists())
    with shown(missing) as report:
        try:
            paths = [
                fetch(sets.remote(dataset, file), folder / file.name, partial(report, file.name)) for file in files
            ]
        except KeyboardInterrupt:
            print_error("note: what has arrived is kept, and the same command resumes there")
            raise
    print(f"{', '.join(map(str, paths[:3]))}{', …' if len(paths) > 3 else ''}: of the published size")
    return paths


def _corpus(dataset: Dataset, options: argparse.Namespace) -> None:
    dataset = sets.sampled(dataset, options.sample)
    folder = options.out or FOLDER / dataset.folder
    downloads = folder / DOWNLOADS
    settings = sets.with_shards(dataset.settings, options.shard_size)._replace(workers=options.workers)
    # what can go wrong is told now, and not when all has arrived
    tokenizer = load(options.tokenizer)
    name = sets.own_name(str(dataset.makes), tokenizer)
    refuse_made(folder, name, options.force)
    if settings.reading.format == "parquet":
        check_parquet(dataset.name)
    inputs = _downloaded(dataset, sets.published_files(dataset, options.files), downloads)
    files = [file for path in inputs for file in sets.unpacked(path, dataset.pattern)]
    print(f"{_size(sum(map(size_of, {*inputs, *files})))} in {downloads} can be deleted when the token files are made")
    make_token_files([str(path) for path in files[: options.files]], folder, name, tokenizer, settings, options)


def program(arguments: Sequence[str] | None = None) -> int:
    """Run the command line as a program of its own, and return the exit status."""
    # `kill` ends it as an exception, so that what is half-written goes away
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    return main(arguments)
