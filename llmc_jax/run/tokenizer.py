"""The tokenizer of a run: whose ids its data and its model know, found before the run.

Leaves out reading tables (data/), and which one a checkpoint brings along (checkpoint/tokenizer.py).
"""

from pathlib import Path

from llmc_jax.checkpoint.source import Source
from llmc_jax.checkpoint.store import Checkpoint
from llmc_jax.checkpoint.tokenizer import find_named, own_tokenizer
from llmc_jax.config.model import ModelConfig
from llmc_jax.config.train import TrainConfig
from llmc_jax.data import tables
from llmc_jax.data.corpora import Corpus
from llmc_jax.data.loader import TokenLoader
from llmc_jax.data.tokenizers import Choice, Tokenizer, bytes_tokenizer, fitted, load_tokenizer
from llmc_jax.errors import InputError


def choose(
    config: TrainConfig,
    model: ModelConfig,
    loaders: list[TokenLoader],
    corpus: Corpus | None,
    source: Source | None,
    earlier: Checkpoint | None,
) -> tuple[Choice, list[str]]:
    """Return the tokenizer of a run, and warnings: what --tokenizer names, else that of the data, else of the model.

    Where neither brings one, the vocabulary suggests it. loaders, corpus: of the data; source, earlier: what the
    weights come from. Raises InputError where data and model have unlike tables, and where a table of the data cannot
    be read or is too large for the model.
    """
    asked, V, own = config.tokenizer, model.vocab_size, _of_model(source, earlier)
    if asked != "auto":
        as_before = earlier is not None and earlier.metadata.options.get("tokenizer") == asked
        if own is not None and own.tokenizer is not None and as_before and asked != "none":
            return own, []  # of a run that was moved, the file that was named may be elsewhere
        return load_tokenizer(asked, V)._replace(own=own is not None), []
    if of_data := _of_data(loaders, corpus):
        (words, tokenizer), *others = of_data
        doubts = []
        if own is not None and own.tokenizer is not None:
            others.append((own.note, own.tokenizer))
        elif own is not None:
            doubts.append(f"whether {words} is the table of the model is not known: {own.note}")
        for other, another in others:
            tables.check_alike(words, tokenizer, other, another)
        return fitted(Choice(tokenizer, words), V), doubts
    found = own or _suggested(config, V, [loader.paths[0].parent for loader in loaders])
    unread = found.tokenizer is None and (found.own or config.sample_every)
    return found, [f"samples are printed as token ids: {found.note}"] if unread else []


def _suggested(config: TrainConfig, vocab_size: int, folders: list[Path]) -> Choice:
    """Return what the vocabulary suggests. Raises InputError where that cannot be read, and samples are wanted."""
    try:
        return load_tokenizer("auto", vocab_size, folders)
    except InputError as error:
        if config.sample_every:
            raise
        return Choice(None, str(error))


def _of_data(loaders: list[TokenLoader], corpus: Corpus | None) -> list[tuple[str, Tokenizer]]:
    """Return the tables that the data was made with, and where each comes from."""
    found = tables.of_token_files([path for loader in loaders for path in loader.paths])
    built_in = [] if corpus is None else [("the built-in corpus, in bytes", bytes_tokenizer())]
    return [*((tables.words(*each), each[1]) for each in found), *built_in]


def _of_model(source: Source | None, earlier: Checkpoint | None) -> Choice | None:
    if earlier is None:
        return None if source is None else own_tokenizer(source)
    wanted = earlier.metadata.tokenizer
    return None if wanted is None else find_named(wanted, (earlier.folder.parent, earlier.folder))
