"""Which tokenizer a checkpoint belongs to: the table that it brings along, else one that its vocabulary suggests.

A table that it brings along and that cannot be read is never replaced by another.
"""

from contextlib import suppress
from pathlib import Path

from llmc_jax.base.errors import InputError
from llmc_jax.checkpoint.source import Source
from llmc_jax.data import tables
from llmc_jax.data.hf_tokenizer import has_tokenizer
from llmc_jax.data.tokenizers import PUBLIC, Choice, Named, file_tokenizer, fitted, load_tokenizer, public_tokenizer
from llmc_jax.logs.files import config_file


def choose_tokenizer(source: Source, spec: str) -> Choice:
    """Return the tokenizer of a model: the one that spec asks for as `load_tokenizer` has it, or for `auto` its own.

    Where it brings none, `auto` takes what its vocabulary suggests. Raises InputError where one was asked for that
    cannot be had, or has more ids than the model.
    """
    V = source.config.vocab_size
    if spec != "auto":
        return load_tokenizer(spec, V)
    folder = folder_of(source)
    return own_tokenizer(source) or load_tokenizer("auto", V, (folder, folder.parent))


def own_tokenizer(source: Source) -> Choice | None:
    """Return the tokenizer that a checkpoint brings along: in a folder of Hugging Face's, or in a run's.

    None where it brings none. Where it does, but it cannot be read or does not fit, the choice says which file and why.
    """
    folder, found = folder_of(source), None
    try:
        if source.kind == "state":
            found = _of_state(source)
        elif source.kind == "hugging-face":
            found = _of_file(folder) if has_tokenizer(folder) else None
        elif source.kind != "random" and config_file(folder) is not None:  # a model that a run has exported
            found = next(map(_of_file, tables.of_run(folder)), None)
        return found and fitted(found, source.config.vocab_size)
    except InputError as error:
        named = Named(folder.name, source.config.vocab_size, "") if found is None else found.named
        return Choice(None, f"{error}; --tokenizer names another", named)


def folder_of(source: Source) -> Path:
    """Return the folder that a checkpoint is, or lies in."""
    return source.path if source.path.is_dir() else source.path.parent


def _of_file(path: Path) -> Choice:
    tokenizer = file_tokenizer(path)
    return Choice(tokenizer, tables.words(path, tokenizer), tables.named(tokenizer))


def _of_state(source: Source) -> Choice | None:
    """Return the table that a training state names.

    It lies in the run's folder; a public one may be at hand elsewhere. Raises InputError for a file that is gone.
    """
    wanted, problem = source.opened.metadata.tokenizer, ""
    if wanted is None:
        return None
    folders = (source.path.parent, source.path.resolve().parent, source.path)
    for path in dict.fromkeys(path for folder in folders for path in tables.of_run(folder)):
        try:
            tokenizer = file_tokenizer(path)
        except InputError as error:
            problem = f" ({error})"
            continue
        if tables.named(tokenizer).sha256 == wanted.sha256:
            return Choice(tokenizer, tables.words(path, tokenizer), wanted)
    with suppress(InputError):
        public = public_tokenizer(wanted.name, allow_network=False) if wanted.name in PUBLIC else None
        if public is not None and tables.named(public).sha256 == wanted.sha256:
            return Choice(public, wanted.name, wanted)
    expected = " or ".join(tables.IN_RUN.values())
    missing = f"(SHA-256 {wanted.sha256[:12]}…), which is not in {source.path.parent} as {expected}{problem}"
    why = missing if wanted.sha256 else "which was not kept"
    return Choice(None, f"its tokenizer is {wanted.name}, of {wanted.ids} ids, {why}; --tokenizer names a file", wanted)
