"""`python -m llmc_jax.data`: make token files from text, get tinyshakespeare, look into token and tokenizer files.

Leaves out the work itself (prepare.py, corpora.py, show.py, tokenizers.py). Exit status: 0 done, 2 bad input, 130
stopped by Ctrl-C.
"""

import argparse
import inspect
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from llmc_jax.cli.parsers import Parser, run_command
from llmc_jax.config.train import TrainConfig
from llmc_jax.data.corpora import TINYSHAKESPEARE_FOLDER, Corpus, stdlib_corpus, tinyshakespeare_corpus
from llmc_jax.data.documents import Reading, find_inputs, size_of
from llmc_jax.data.prepare import SHARD_TOKENS, VAL_SHARE, VAL_TOKENS, Prepared, Report, Settings, prepare
from llmc_jax.data.show import SHOWN_TOKENS, describe, inspect_token_file
from llmc_jax.data.tokenfile import expand_pattern
from llmc_jax.data.tokenizers import (
    DEFAULT_BIN,
    Tokenizer,
    load_tokenizer,
    read_tokenizer_bin,
    sample_text,
    write_tokenizer_bin,
)
from llmc_jax.errors import InputError
from llmc_jax.machine.jax_setup import train_command, typed
from llmc_jax.streams import print_error

SMALL_SHARD = 64 * 1024 + 1  # B*T+1 of llm.c's run of GPT-2 124M
PROGRESS_SECONDS = 10.0
MEGABYTE = 1e6


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status. Bad input is one line on standard error."""
    return run_command(typed("llmc_jax.data"), make_parser(), arguments)


# ----- options ------------------------------------------------------------------------------------------------------


def make_parser() -> Parser:
    """Return the parser of its commands."""
    program = typed("python -m llmc_jax.data")
    parser = Parser(
        prog=program,
        description="Make the token files that training reads, and look into them.",
        epilog=f"`{program} COMMAND --help` explains a command.",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_prepare(commands)
    _add_tinyshakespeare(commands)
    _command(commands, "stdlib", _stdlib)
    _add_inspect(commands)
    _add_tokenizer(commands)
    return parser


def _command(commands: argparse._SubParsersAction, name: str, run: Callable[..., None]) -> argparse.ArgumentParser:
    """Add a command, whose help is the docstring of what it runs."""
    about = inspect.cleandoc(run.__doc__ or "")
    parser: argparse.ArgumentParser = commands.add_parser(name, help=about.partition("\n")[0], description=about)
    parser.set_defaults(run=run)
    return parser


def _add_tokenizer_spec(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tokenizer",
        default="gpt2",
        metavar="SPEC",
        help=f"bytes; gpt2: its table from tiktoken's cache, ./{DEFAULT_BIN} or the network; llama3: likewise from "
        f"./tokenizer.model, a cache or the network; or the path of a {DEFAULT_BIN} or of Llama 3's tokenizer.model "
        "(default: gpt2)",
    )


def _add_prepare(commands: argparse._SubParsersAction) -> None:
    parser = _command(commands, "prepare", _prepare)
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="file, folder (all files in it) or pattern")
    parser.add_argument("-o", "--out", type=Path, metavar="FOLDER", help="where to write (default: dev/data/NAME)")
    parser.add_argument("--name", help="what the files are called (default: after the first INPUT)")
    _add_tokenizer_spec(parser)
    parser.add_argument("--force", action="store_true", help="replace the files of this name if there are any")
    reading = parser.add_argument_group("reading")
    reading.add_argument(
        "--format",
        choices=["auto", "text", "jsonl", "parquet"],
        default="auto",
        help="of the input; auto: by its ending, .jsonl .ndjson .json .parquet, all else text (default: auto)",
    )
    reading.add_argument("--field", default="text", help="what holds the text in jsonl and parquet (default: text)")
    reading.add_argument(
        "--split-on",
        type=_separator,
        metavar="TEXT",
        help=r"ends a document in text files and stays with it; \n is a newline, `blank-line` is \n\n "
        "(default: a file is one document)",
    )
    reading.add_argument(
        "--errors",
        choices=["strict", "replace"],
        default="strict",
        help="bytes that are not UTF-8: strict stops, replace puts U+FFFD (default: strict)",
    )
    reading.add_argument("--workers", type=int, metavar="N", help="processes (default: cores, fewer for little input)")
    split = parser.add_argument_group(
        "splitting",
        f"Without an option the first 1/{VAL_SHARE} of the tokens, at most {VAL_TOKENS}, are for validation.",
    )
    split.add_argument(
        "--shard-size",
        type=_count,
        default=SHARD_TOKENS,
        metavar="N",
        help=f"tokens per file; 100M and 1e8 are understood (default: {SHARD_TOKENS})",
    )
    split.add_argument("--val-tokens", type=_count, metavar="N", help="the first N tokens are validation; 0: none")
    split.add_argument(
        "--val-fraction", type=float, metavar="F", help="about this share of the documents is, chosen by their hash"
    )


def _add_tinyshakespeare(commands: argparse._SubParsersAction) -> None:
    parser = _command(commands, "tinyshakespeare", _tinyshakespeare)
    parser.add_argument(
        "--text", "--from", dest="source", type=Path, metavar="FILE", help="a local copy of input.txt, the text"
    )
    _add_tokenizer_spec(parser)
    parser.add_argument(
        "-o",
        "--out",
        type=Path,
        default=TINYSHAKESPEARE_FOLDER,
        metavar="FOLDER",
        help=f"where to write (default: {TINYSHAKESPEARE_FOLDER})",
    )


def _add_inspect(commands: argparse._SubParsersAction) -> None:
    parser = _command(commands, "inspect", _inspect)
    parser.add_argument("files", nargs="+", metavar="FILE", help="token file or pattern")
    parser.add_argument(
        "--vocab-size", type=_count, metavar="V", help="check that all ids are below V (default: what they suggest)"
    )
    parser.add_argument(
        "--tokenizer",
        default="auto",
        metavar="SPEC",
        help="shows the first tokens as text: bytes, gpt2, llama3, a path, none, or auto: by the ids (default: auto)",
    )
    parser.add_argument("--eot", type=int, metavar="ID", help="id before each document (default: the tokenizer's)")
    parser.add_argument(
        "--first", type=int, default=SHOWN_TOKENS, metavar="N", help=f"tokens to show (default: {SHOWN_TOKENS})"
    )


def _add_tokenizer(commands: argparse._SubParsersAction) -> None:
    summary = f"Write or read a {DEFAULT_BIN}; encode or decode a short text."
    parser = commands.add_parser("tokenizer", help=summary, description=summary)
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    write = _command(actions, "write", _tokenizer_write)
    write.add_argument("path", type=Path, nargs="?", default=Path(DEFAULT_BIN), help=f"(default: {DEFAULT_BIN})")
    write.add_argument("--version", type=int, choices=[1, 2], default=2, help="of the format (default: 2, llm.c's)")
    write.add_argument("--force", action="store_true", help="replace the file if there is one")
    show = _command(actions, "inspect", _tokenizer_inspect)
    show.add_argument("path", type=Path, nargs="?", default=Path(DEFAULT_BIN), help=f"(default: {DEFAULT_BIN})")
    encode = _command(actions, "encode", _tokenizer_encode)
    encode.add_argument("text", help="the text; - reads it from standard input")
    decode = _command(actions, "decode", _tokenizer_decode)
    decode.add_argument("ids", nargs="+", type=int, metavar="ID", help="token ids")
    for action in (write, encode, decode):
        _add_tokenizer_spec(action)


def _count(text: str) -> int:
    """Return a number of tokens: 100000000, 1e8 or 100M."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d\d?)?)([kMG]?)", text)
    value = float(match[1]) * {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9}[match[2]] if match else 0.5
    if value != int(value):
        raise argparse.ArgumentTypeError(f"expected a whole number such as 32768, 1e8 or 100M; found {text!r}")
    return int(text) if text.isdecimal() else int(value)


def _separator(text: str) -> str:
    if text == "blank-line":
        return "\n\n"
    return re.sub(r"\\([nrt\\])", lambda match: {"n": "\n", "r": "\r", "t": "\t", "\\": "\\"}[match[1]], text)


# ----- commands -----------------------------------------------------------------------------------------------------


def _load(spec: str) -> Tokenizer:
    tokenizer = load_tokenizer(spec).tokenizer
    if tokenizer is None:
        raise InputError(f"--tokenizer {spec}: this command needs one: gpt2, bytes, llama3 or the path of a file")
    return tokenizer


def _prepare(options: argparse.Namespace) -> None:
    """Make token files from text, jsonl or parquet files.

    The end-of-text token stands before every document. Files are named NAME_val_000000.bin and NAME_train_000001.bin,
    as llm.c names FineWeb's, and appear together when all are complete.
    """
    name = options.name or _name_after(options.inputs[0])
    folder = options.out or Path("dev/data") / name
    settings = Settings(
        reading=Reading(options.format, options.field, options.split_on, options.errors),
        shard_tokens=options.shard_size,
        val_tokens=options.val_tokens,
        val_fraction=options.val_fraction,
        workers=options.workers,
    )
    total = sum(map(size_of, find_inputs(options.inputs)))
    tokenizer = _load(options.tokenizer)
    start = time.monotonic()
    with _progress(total) as report:
        made = prepare(options.inputs, folder, name, tokenizer, settings, options.force, report)
    seconds = time.monotonic() - start
    for shard in made.shards:
        print(f"Saved {shard.tokens} tokens to {shard.path}")
    _print_summary(made, total, seconds)
    train, val = (folder / f"{name}_{split}_*.bin" for split in ("train", "val"))
    _print_next(train, val if made.tokens("val") else None, options.tokenizer, tokenizer)


def _name_after(item: str) -> str:
    """Return a name for the files from an input: its own; of a pattern, that of the first part that is none."""
    path = Path(os.path.abspath(item))
    while re.search(r"[*?\[]", path.name) and not path.exists():
        path = path.parent
    stem = path.name if path.is_dir() else path.stem
    return re.sub(r"[^A-Za-z0-9_-]+", "_", stem).strip("_-") or "text"


def _print_summary(made: Prepared, total: int, seconds: float) -> None:
    left_out = f" ({made.empty:,} without text left out)" if made.empty else ""
    print(
        f"{made.documents:,} document{'s' * (made.documents != 1)}{left_out}: "
        f"{made.tokens('train'):,} tokens for training, "
        f"{made.tokens('val'):,} for validation; {seconds:.1f} s, {total / MEGABYTE / max(seconds, 1e-9):.1f} MB/s"
    )
    last = [shard for shard in made.shards if shard.split == "train"][-1]
    if len(made.shards) > 2 and last.tokens < SMALL_SHARD:
        print_error(
            f"note: {last.path.name} holds {last.tokens} tokens; training needs B*T+1 in every file: choose a smaller "
            "batch, another --shard-size, or remove it"
        )


def _print_next(train: Path, val: Path | None, spec: str, tokenizer: Tokenizer) -> None:
    """Print the command that trains on the files: a size for a first look, on a CPU too."""
    model = f"L4-NH4-C128-V{tokenizer.vocab_size}-T128 -t 128"
    validation = f"-j {shlex.quote(str(val))}" if val else "-v 0"
    own_table = f" --tokenizer {shlex.quote(spec)}" if spec not in ("bytes", "gpt2", "llama3") else ""
    print(f"Next: {train_command()} -i {shlex.quote(str(train))} {validation} -e {model}{own_table}")


def _print_corpus(corpus: Corpus) -> None:
    for path, tokens in ((corpus.val, corpus.val_tokens), (corpus.train, corpus.train_tokens)):
        print(f"Saved {tokens} tokens to {path}")
    print(
        f"{corpus.description}; fingerprint {corpus.fingerprint}; {corpus.train_documents:,} documents for training, "
        f"{corpus.val_documents:,} for validation"
    )
    print(
        f"bigram baseline on validation: {corpus.bigram_nats:.3f} nats per token (unigram: {corpus.unigram_nats:.3f})"
    )


def _tinyshakespeare(options: argparse.Namespace) -> None:
    """Make token files of tinyshakespeare (1.1 MB, downloaded).

    With GPT-2's tokenizer they are llm.c's, byte for byte, and its table lies beside them. Without a network:
    --text input.txt --tokenizer gpt2_tokenizer.bin.
    """
    tokenizer = _load(options.tokenizer)
    corpus = tinyshakespeare_corpus(tokenizer, options.out, options.source)
    _print_corpus(corpus)
    if str(corpus.train) == TrainConfig().train_data:
        print(f"Next: {train_command()} --preset tinyshakespeare")
    else:
        _print_next(corpus.train, corpus.val, options.tokenizer, tokenizer)


def _stdlib(options: argparse.Namespace) -> None:
    """Make token files of the built-in corpus, the source of this Python's standard library.

    Training without -i does so by itself. They are kept in $LLMC_JAX_CACHE, or else the user's cache folder.
    """
    _print_corpus(stdlib_corpus())
    print(f"Next: {train_command()}")


def _inspect(options: argparse.Namespace) -> None:
    """Say what is in token files: format, tokens, documents, ids, first text."""
    for pattern in options.files:
        for path in expand_pattern(pattern, "inspect"):
            print(describe(inspect_token_file(path, options.tokenizer, options.vocab_size, options.eot, options.first)))


def _tokenizer_write(options: argparse.Namespace) -> None:
    """Write a tokenizer's table as llm.c's gpt2_tokenizer.bin."""
    if options.path.exists() and not options.force:
        raise InputError(f"{options.path} exists; choose another name, or replace it with --force")
    tokenizer = _load(options.tokenizer)
    write_tokenizer_bin(options.path, tokenizer.pieces, tokenizer.eot, options.version)
    print(f"Saved {tokenizer.vocab_size} ids to {options.path} (version {options.version})")


def _tokenizer_inspect(options: argparse.Namespace) -> None:
    """Say what is in a gpt2_tokenizer.bin."""
    table = read_tokenizer_bin(options.path)
    longest = max(range(len(table.pieces)), key=lambda token: len(table.pieces[token]))
    print(f"{options.path}: version {table.version}, {len(table.pieces)} ids, {options.path.stat().st_size:,} bytes")
    print(f"  end of text  id {table.eot}, {_quoted(table.pieces[table.eot])}")
    print(f"  longest      id {longest}, {len(table.pieces[longest])} bytes, {_quoted(table.pieces[longest])}")
    print(f"  first ids    {' '.join(map(_quoted, table.pieces[:16]))}")


def _quoted(piece: bytes) -> str:
    return repr(piece.decode(errors="replace"))


def _tokenizer_encode(options: argparse.Namespace) -> None:
    """Print the ids of a text, and the text in its pieces."""
    if options.text == "-" and sys.stdin is None:
        raise InputError("-: there is no standard input: it is closed; give the text itself")
    text = sys.stdin.buffer.read() if options.text == "-" else os.fsencode(options.text)
    tokenizer = _load(options.tokenizer)
    ids = tokenizer.encode(text).tolist()
    print(" ".join(map(str, ids)))
    print(f"{len(ids)} tokens: {' '.join(_quoted(tokenizer.pieces[token]) for token in ids)}")


def _tokenizer_decode(options: argparse.Namespace) -> None:
    """Print the text that ids stand for."""
    print(sample_text(_load(options.tokenizer), options.ids))


# ----- progress -----------------------------------------------------------------------------------------------------


@contextmanager
def _progress(total: int) -> Iterator[Report]:
    """Show progress on standard error: a bar on a terminal, else a line now and then. total: bytes to read."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TextColumn("{task.fields[tokens]:,} tokens, left:"),
        TimeRemainingColumn(),
    )
    on_terminal = sys.stderr.isatty()
    shown = time.monotonic()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not on_terminal) as bar:
        bar.add_task("", total=total, tokens=0)
        [task] = bar.tasks

        def report(read: int, tokens: int) -> None:
            nonlocal shown
            bar.update(task.id, advance=read, tokens=task.fields["tokens"] + tokens)
            if on_terminal or time.monotonic() - shown < PROGRESS_SECONDS:
                return
            shown = time.monotonic()
            print_error(
                f"{task.percentage:.0f} % | {task.completed / MEGABYTE:,.0f} of {total / MEGABYTE:,.0f} MB | "
                f"{task.fields['tokens']:,} tokens | {(task.speed or 0) / MEGABYTE:.1f} MB/s | "
                f"{task.time_remaining or 0:.0f} s left"
            )

        yield report


def program(arguments: Sequence[str] | None = None) -> int:
    """Run the command line as a program of its own, and return the exit status."""
    # `kill` ends it as an exception, so that what is half-written goes away
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    return main(arguments)
