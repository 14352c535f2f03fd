"""What the commands of `llmc-jax data` share: options, the making of token files, progress, last lines.

Leaves out the commands (data.py, datasets.py).
"""

import argparse
import inspect
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from llmc_jax.base.commands import typed
from llmc_jax.base.errors import InputError
from llmc_jax.base.files import quoted
from llmc_jax.base.options import Option, own
from llmc_jax.base.parsers import Parser
from llmc_jax.base.progress import MEGABYTE, show_progress, speed_of
from llmc_jax.base.streams import print_error
from llmc_jax.config.train import TrainConfig
from llmc_jax.data.documents import find_inputs, size_of
from llmc_jax.data.prepare import Prepared, Report, Settings, prepare
from llmc_jax.data.tokenizers import DEFAULT_BIN, Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from rich.progress import Task

SMALL_SHARD = 64 * 1024 + 1  # B*T+1 of llm.c's run of GPT-2 124M

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


# ----- token files --------------------------------------------------------------------------------------------------


def make_token_files(
    inputs: list[str], folder: Path, name: str, tokenizer: Tokenizer, settings: Settings, options: argparse.Namespace
) -> None:
    """Run `prepare` with progress, and print what it made and the command that trains on it."""
    total = sum(map(size_of, find_inputs(inputs)))
    start = time.monotonic()
    with _progress(total) as report:
        made = prepare(inputs, folder, name, tokenizer, settings, options.force, report)
    seconds = time.monotonic() - start
    for shard in made.shards:
        print(f"Saved {shard.tokens} tokens to {shard.path}")
    print(f"Saved their tokenizer, V={tokenizer.vocab_size}, to {made.table}")
    _print_summary(made, total, seconds)
    if settings.reading.split_on and not made.cuts:
        print_error("note: --split-on: no text file has its separator, so each is one document")
    train, val = (folder / f"{name}_{split}{'_*' * settings.numbered}.bin" for split in ("train", "val"))
    if str(train) == TrainConfig().train_data:
        print(f"Next: {typed('train')} --preset tinyshakespeare")
        return
    model = f"L4-NH4-C128-V{tokenizer.vocab_size}-T128 -t 128"  # a size for a first look, on a CPU too
    validation = f"-j {quoted(val)}" if made.tokens("val") else "-v 0"
    print(f"Next: {typed('train')} -i {quoted(train)} {validation} -e {model}")


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


# ----- progress -----------------------------------------------------------------------------------------------------


@contextmanager
def _progress(total: int) -> Iterator[Report]:
    """Show how much is encoded. total: bytes to read."""
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    tokens_made = TextColumn("{task.fields[tokens]:,} tokens, left:")
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), tokens_made, TimeRemainingColumn())

    def line(task: "Task") -> str:
        read = f"{task.completed / MEGABYTE:,.0f} of {total / MEGABYTE:,.0f} MB"
        return f"{task.percentage:.0f} % | {read} | {task.fields['tokens']:,} tokens | {speed_of(task)}"

    with show_progress(columns, total, line, tokens=0) as (task, update):
        yield lambda read, tokens: update(advance=read, tokens=task.fields["tokens"] + tokens)
