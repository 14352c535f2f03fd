"""Tables that travel: a tokenizer as a file, beside the token files that it made and in the folder of a run.

It is llm.c's gpt2_tokenizer.bin where the table is all that there is to know, else Hugging Face's tokenizer.json. So a
model can be asked years later, in another place, by the table that it was trained with. Leaves out reading the two
formats (tokenizers.py, hf_tokenizer.py), and which of several counts (checkpoint/tokenizer.py, run/tokenizer.py).
"""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from llmc_jax.data.tokenizers import PUBLIC, Tokenizer, file_tokenizer, table_bytes
from llmc_jax.errors import InputError
from llmc_jax.files import write_bytes

BESIDE = ".tokenizer"  # of token files NAME_train_000001.bin it is NAME.tokenizer, which no pattern *.bin takes in
IN_RUN = {".bin": "tokenizer.bin", ".json": "tokenizer.json"}  # in a run's folder, by the ending of the format
TOKEN_FILE = re.compile(r"(.+)_(?:train|val)(?:_\d{6,})?\.bin")


class Named(NamedTuple):
    """What a training state says of the table that its ids belong to.

    sha256: of the file that holds it; empty for one that was not kept, since it could not be read, or was left out.
    """

    name: str
    ids: int
    sha256: str


def contents(tokenizer: Tokenizer) -> tuple[str, bytes]:
    """Return the ending and the bytes of the file that holds a tokenizer. The same table has the same bytes always."""
    if tokenizer.json:
        return ".json", tokenizer.json.encode()
    return ".bin", table_bytes(tokenizer.name, tokenizer.pieces, tokenizer.eot)


def named(tokenizer: Tokenizer) -> Named:
    """Return what tells a tokenizer from any other."""
    return Named(tokenizer.name, tokenizer.vocab_size, hashlib.sha256(contents(tokenizer)[1]).hexdigest())


def write(path: Path, tokenizer: Tokenizer) -> None:
    """Write the file of a tokenizer. Raises OSError."""
    write_bytes(path, contents(tokenizer)[1])


def in_run(folder: Path) -> Path | None:
    """Return the file with the table of a run; None where its folder has none."""
    return next((path for name in IN_RUN.values() if (path := folder / name).is_file()), None)


def keep(folder: Path, tokenizer: Tokenizer | None) -> None:
    """Write a run's tokenizer into its folder, unless it is there, in the place of any other. Raises OSError."""
    there = in_run(folder)
    if tokenizer is None or (there is not None and holds(there, tokenizer)):
        return
    path = folder / IN_RUN[contents(tokenizer)[0]]
    write(path, tokenizer)
    if there not in (None, path):
        there.unlink()


def holds(path: Path, tokenizer: Tokenizer) -> bool:
    """Return whether a file is that of a tokenizer. Raises OSError."""
    return path.read_bytes() == contents(tokenizer)[1]


def words(path: Path, tokenizer: Tokenizer) -> str:
    """Return where a tokenizer comes from, and which of the public ones it is, in a few words."""
    return f"{tokenizer.name}, {path}" if tokenizer.name in PUBLIC else str(path)


def of_token_files(paths: Iterable[Path]) -> list[tuple[Path, Tokenizer]]:
    """Return the tables that lie beside token files, each once. Raises FormatError for one that cannot be read."""
    matches = ((path, TOKEN_FILE.fullmatch(path.name)) for path in paths)
    beside = dict.fromkeys(path.with_name(match[1] + BESIDE) for path, match in matches if match)
    return [(path, file_tokenizer(path)) for path in beside if path.is_file()]


def check_alike(what: str, one: Tokenizer, other: str, another: Tokenizer) -> None:
    """Raise InputError where an id stands for one text in a table and for another text in the other.

    The end of text may have two names. what, other: where the tables come from.
    """
    ends = {one.eot, another.eot} if one.eot == another.eot else set()
    pairs = enumerate(zip(one.pieces, another.pieces, strict=False))
    if wrong := next(((token, pair) for token, pair in pairs if pair[0] != pair[1] and token not in ends), None):
        token, (left, right) = wrong
        raise InputError(
            f"{what} and {other} are two tokenizers: id {token} is {left!r} in the first and {right!r} in the second; "
            "make the data with the model's (prepare --tokenizer), or name the one that counts with --tokenizer"
        )
