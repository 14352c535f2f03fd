"""Tables that travel: a tokenizer as a file, beside the token files that it made and in the folder of a run.

It is llm.c's gpt2_tokenizer.bin where the table is all that there is to know, else Hugging Face's tokenizer.json. So a
model can be asked years later, in another place, by the table that it was trained with. Leaves out reading the two
formats (tokenizers.py, hf_tokenizer.py), and which of several counts (checkpoint/tokenizer.py, run/inputs.py).
"""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from llmc_jax.base.errors import InputError
from llmc_jax.base.files import write_bytes
from llmc_jax.data.tokenizers import PUBLIC, Named, Tokenizer, file_tokenizer, table_bytes

BESIDE = ".tokenizer"  # of token files NAME_train_000001.bin it is NAME.tokenizer, which no pattern *.bin takes in
IN_RUN = {".bin": "tokenizer.bin", ".json": "tokenizer.json"}  # in a run's folder, by the ending of the format
KEPT = re.compile(r"tokenizer(-[0-9a-f]{12})?\.(bin|json)")
TOKEN_FILE = re.compile(r"(.+)_(?:train|val)(?:_\d{6,})?\.bin")


def contents(tokenizer: Tokenizer) -> tuple[str, bytes]:
    """Return the ending and the bytes of the file that holds a tokenizer. The same table has the same bytes always."""
    if tokenizer.json:
        return ".json", tokenizer.json.encode()
    return ".bin", table_bytes(tokenizer.pieces, tokenizer.eot)


def named(tokenizer: Tokenizer) -> Named:
    """Return what tells a tokenizer from any other."""
    return Named(tokenizer.name, tokenizer.vocab_size, hashlib.sha256(contents(tokenizer)[1]).hexdigest())


def write(path: Path, tokenizer: Tokenizer) -> None:
    """Write the file of a tokenizer. Raises OSError."""
    write_bytes(path, contents(tokenizer)[1])


def of_run(folder: Path) -> list[Path]:
    """Return the files with tables of a run's folder: the run's own first, then those that it had before."""
    return sorted((path for path in folder.glob("tokenizer*") if KEPT.fullmatch(path.name)), key=lambda p: len(p.name))


def keep(folder: Path, tokenizer: Tokenizer | None) -> None:
    """Write a run's tokenizer into its folder, unless it is there; move another aside. Raises OSError.

    States of before name that other one, so it is tokenizer-SHA256.bin then, the first 12 digits.
    """
    if tokenizer is None:
        return
    ending, data = contents(tokenizer)
    for path in (folder / name for name in IN_RUN.values()):
        if path.is_file():
            before = path.read_bytes()
            if before == data:
                return
            path.rename(path.with_stem(f"tokenizer-{hashlib.sha256(before).hexdigest()[:12]}"))
    write_bytes(folder / IN_RUN[ending], data)


def words(path: Path, tokenizer: Tokenizer) -> str:
    """Return where a tokenizer comes from, and which of the public ones it is, in a few words."""
    return f"{tokenizer.name}, {path}" if tokenizer.name in PUBLIC else str(path)


def of_token_files(paths: Iterable[Path]) -> list[tuple[Path, Tokenizer]]:
    """Return the tables that lie beside token files, each once. Raises FormatError for one that cannot be read."""
    found: dict[Path, None] = {}
    for path in paths:
        for each in (path, path.resolve()):  # by the name of a link, else of what it leads to
            beside = (match := TOKEN_FILE.fullmatch(each.name)) and each.with_name(match[1] + BESIDE)
            if beside and beside.is_file():
                found[beside] = None
                break
    return [(path, file_tokenizer(path)) for path in found]


def check_alike(what: str, one: Tokenizer, other: str, another: Tokenizer) -> None:
    """Raise InputError where an id stands for one text in a table and for another text in the other.

    What ends a text may have two names, but one id. what, other: where the tables come from.
    """
    pairs = enumerate(zip(one.pieces, another.pieces, strict=False))
    unlike = ((token, a, b) for token, (a, b) in pairs if a != b and token != one.eot)
    found = next((f"id {token} is {a!r} in the first and {b!r} in the second" for token, a, b in unlike), "")
    if one.eot != another.eot:
        found = f"a text ends with id {one.eot} in the first, {another.eot} in the second"
    if found:
        raise InputError(
            f"{what} and {other} are two tokenizers: {found}; make the data with the model's (prepare --tokenizer), or "
            "name the one that counts with --tokenizer"
        )
