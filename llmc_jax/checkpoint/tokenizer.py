"""Which tokenizer a checkpoint belongs to: the table that it brings along, else one that its vocabulary suggests.

A table that it brings along and that cannot be read is never replaced by another.
"""

from pathlib import Path

from llmc_jax.checkpoint.source import Source
from llmc_jax.config.model import ModelConfig
from llmc_jax.data import tables
from llmc_jax.data.hf_tokenizer import has_tokenizer
from llmc_jax.data.tables import Named
from llmc_jax.data.tokenizers import PUBLIC, Choice, file_tokenizer, fitted, load_tokenizer
from llmc_jax.errors import InputError


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
    folder = folder_of(source)
    found: Choice | None = None
    try:
        if source.kind == "hugging-face":
            found = _of_file(folder) if has_tokenizer(folder) else None
        elif source.kind == "state":
            found = _of_state(source, folder.parent)
        elif source.kind != "random" and (path := tables.in_run(folder)) is not None:
            found = _of_file(path)
        return found and fitted(found, source.config.vocab_size)
    except InputError as error:
        return Choice(None, f"{error}; --tokenizer names another", True)


def _of_file(path: Path) -> Choice:
    tokenizer = file_tokenizer(path)
    return Choice(tokenizer, tables.words(path, tokenizer), True)


def folder_of(source: Source) -> Path:
    """Return the folder that a checkpoint is, or lies in."""
    return source.path if source.path.is_dir() else source.path.parent


def _of_state(source: Source, run: Path) -> Choice | None:
    """Return the table that a training state names; of an older one, which names none, the file of its --tokenizer."""
    metadata = source.opened.metadata
    if metadata.tokenizer is not None:
        return find_named(metadata.tokenizer, (run, source.path))
    trained = str(metadata.options.get("tokenizer", "auto"))
    is_file = trained not in ("auto", "none", *PUBLIC) and Path(trained).exists()
    return _of_file(Path(trained)) if is_file else None


def find_named(wanted: Named, folders: tuple[Path, ...]) -> Choice:
    """Return the table that a training state names: of the run's folder, or for a public one from where it is at hand.

    Choice(None, why) where it is nowhere. Raises InputError for a file that cannot be read.
    """
    for folder in folders:
        path = tables.in_run(folder)
        if path is not None and tables.named(tokenizer := file_tokenizer(path)).sha256 == wanted.sha256:
            return Choice(tokenizer, tables.words(path, tokenizer), True)
    if wanted.name in PUBLIC:
        public = load_tokenizer("auto", wanted.ids)
        if public.tokenizer is not None and tables.named(public.tokenizer).sha256 == wanted.sha256:
            return public._replace(own=True)
    expected = " or ".join(tables.IN_RUN.values())
    missing = f"(SHA-256 {wanted.sha256[:12]}…), which is not at hand: expected in {folders[0]} as {expected}"
    why = missing if wanted.sha256 else "which was not kept"
    return Choice(None, f"its tokenizer is {wanted.name}, of {wanted.ids} ids, {why}; --tokenizer names a file", True)


def name_of(choice: Choice, config: ModelConfig, place: Path) -> Named | None:
    """Return what a training state says of its tokenizer; of one that is left out or cannot be read where it was.

    None where none was brought along, and none was chosen.
    """
    if choice.tokenizer is not None:
        return tables.named(choice.tokenizer)
    return Named(place.name, config.vocab_size, "") if choice.own else None
