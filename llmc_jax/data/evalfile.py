"""llm.c's evaluation files: questions with four completions each, in tokens. Read and written byte for byte.

    header    256 int32: magic 20240522, version 1, number of examples, bytes of the longest example, zeros
    example   uint16: 65535, its bytes, its number from 0, the right completion, 4, then five times a count and as many
              ids: the context, and the completions

All little-endian. Leaves out where questions come from (tasks.py).
Source: `write_evalfile` of llm.c's dev/data/data_common.py, and the EvalLoader of its llmc/dataloader.h.
"""

import itertools
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from llmc_jax.base import magics
from llmc_jax.base.errors import FormatError, InputError
from llmc_jax.base.files import refusing, write_atomic
from llmc_jax.base.magics import HEADER_BYTES

VERSION = 1
START = 65535  # begins each example, so it is no id
COMPLETIONS = 4
MOST = 65535  # examples, and bytes of one
SHORTEST = 30  # bytes of an example whose context and completions have one id each
AGAIN = "copy or write the file again"


class Item(NamedTuple):
    """One question: a context, and completions of which one is right.

    name: what its file calls it, or its number as text. context: at least one id. completions: one or more, each of at
    least one id; a single one (LAMBADA's last word) is right if the model would have written it. label: the right one.
    """

    name: str
    context: tuple[int, ...]
    completions: tuple[tuple[int, ...], ...]
    label: int

    @property
    def longest(self) -> int:
        """Return the ids of context and longest completion together. The last one is a target alone."""
        return len(self.context) + max(map(len, self.completions))


def check_fit(items: Sequence[Item], positions: int, what: str) -> None:
    """Check that each item fits T positions: its ids without the last, which is a target alone.

    what: the items' file, for the message. Raises InputError. llm.c's trainers stop at an assert two ids earlier.
    """
    long = [item for item in items if item.longest - 1 > positions]
    if long:
        raise InputError(
            f"{what}: item {long[0].name} has {long[0].longest} tokens and {len(long)} of {len(items)} items have too "
            f"many: T={positions} takes {positions + 1}; take a model of a larger T"
        )


# ----- reading ------------------------------------------------------------------------------------------------------


def is_eval_file(path: str | Path) -> bool:
    """Return whether a regular file begins with the magic number. Raises InputError if it cannot be read."""
    path = Path(path)
    with refusing(f"{path}: cannot be read", "check the path and its permissions"):
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(4) == struct.pack("<i", magics.EVALUATION)


def read_eval_file(path: str | Path) -> list[Item]:
    """Return the questions of an evaluation file; the name of each is its number from 0.

    Raises InputError if there is no readable file, FormatError for all that llm.c's loader stops at: another magic
    number or version, an example without its start or with another number, not 4 completions, a label beyond them, an
    empty context or completion; and for sizes that do not agree, or bytes that are missing or too many.
    """
    path = Path(path)
    with refusing(f"{path}: cannot be read", "check the path and its permissions"):
        data = path.read_bytes()
    count, longest = _read_header(path, data)
    items, found, at = [], 0, HEADER_BYTES
    for number in range(count):
        words = np.frombuffer(data, "<u2", min(len(data) - at, longest) // 2, at).tolist()
        items.append(_read_example(path, at, words, number))
        at, found = at + words[1], max(found, words[1])
    if at != len(data):
        raise FormatError(f"{path}: oversized: its {count} examples end at byte {at}, but bytes follow; {AGAIN}")
    if found != longest:
        raise FormatError(f"{path}: byte 12: the longest example should have {longest} bytes and has {found}; {AGAIN}")
    return items


def _read_header(path: Path, header: bytes) -> tuple[int, int]:
    """Return the number of examples, and the bytes of the longest."""
    _, version, count, longest, *_ = magics.read_header(path, header, magics.EVALUATION, "an evaluation file")
    if version != VERSION:
        raise FormatError(f"{path}: byte 4: version {version}; expected version {VERSION}; {AGAIN}")
    if not 1 <= count <= MOST:
        raise FormatError(f"{path}: byte 8: the header counts {count} examples; expected 1 to {MOST}; {AGAIN}")
    if not SHORTEST <= longest <= MOST:
        raise FormatError(
            f"{path}: byte 12: the longest example has {longest} bytes; expected {SHORTEST} to {MOST}; {AGAIN}"
        )
    return count, longest


def _read_example(path: Path, at: int, words: list[int], number: int) -> Item:
    """Return the question that words begin with, the first of which is at a byte of the file."""
    start, size, own, label, completions = words[:5] if len(words) > 5 else [0] * 5
    rest, parts = words[5 : size // 2], []
    while rest and 0 < rest[0] < len(rest) and START not in rest[1 : 1 + rest[0]]:
        parts.append(tuple(rest[1 : 1 + rest[0]]))
        rest = rest[1 + rest[0] :]
    whole = size == 2 * (5 + sum(1 + len(part) for part in parts)) and not rest and len(parts) == 1 + COMPLETIONS
    if not whole or (start, own, completions) != (START, number, COMPLETIONS) or label >= COMPLETIONS:
        raise FormatError(
            f"{path}: byte {at}: expected example {number}: {START}, its bytes, {number}, a label below {COMPLETIONS}, "
            f"{COMPLETIONS}, a context and {COMPLETIONS} completions of one id or more; {AGAIN}"
        )
    return Item(str(number), parts[0], tuple(parts[1:]), label)


# ----- writing ------------------------------------------------------------------------------------------------------


def write_eval_file(path: str | Path, items: Sequence[Item]) -> None:
    """Write an evaluation file that appears under its name only when complete (a file of that name is replaced).

    Names are not kept: the file counts. Raises InputError for what the format cannot hold, and if the file cannot be
    written.
    """
    if not 1 <= len(items) <= MOST:
        raise InputError(f"{path}: {len(items)} questions; an evaluation file of llm.c takes 1 to {MOST}")
    examples = [_words(path, number, item) for number, item in enumerate(items)]
    header = [magics.EVALUATION, VERSION, len(items), 2 * max(map(len, examples)), *[0] * 252]
    body = np.fromiter(itertools.chain.from_iterable(examples), "<u2")
    write_atomic(path, struct.pack("<256i", *header) + body.tobytes())


def _words(path: str | Path, number: int, item: Item) -> list[int]:
    parts = (item.context, *item.completions)
    words = [START, 0, number, item.label, COMPLETIONS]
    for part in parts:
        words += [len(part), *part]
    words[1] = 2 * len(words)
    ids = [token for part in parts for token in part]
    fits = len(item.completions) == COMPLETIONS and 0 <= item.label < COMPLETIONS and all(parts)
    if not fits or words[1] > MOST or not 0 <= min(ids) <= max(ids) < START:
        raise InputError(
            f"{path}: question {number} ({item.name}): llm.c's evaluation files hold {COMPLETIONS} completions, one of "
            f"them right, in ids below {START}, a context and completions that are not empty, and at most {MOST} bytes"
        )
    return words
