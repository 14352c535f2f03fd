"""The tokenizer of a run: whose ids its data and its model know, found before the run.

Leaves out reading tables (data/), and which one a checkpoint brings along (checkpoint/tokenizer.py).
"""

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
) -> Choice:
    """Return the tokenizer of a run: the one that --tokenizer names, else that of the data, else that of the model.

    Where neither brings one, the vocabulary suggests it. loaders, corpus: of the data; source, earlier: what the
    weights come from. Raises InputError where data and model have unlike tables, and where a table of the data cannot
    be read or is too large for the model.
    """
    asked, V = config.tokenizer, model.vocab_size
    before = None if earlier is None or earlier.metadata.tokenizer is None else earlier.metadata.options
    if asked == "none" or (asked != "auto" and (before is None or before.get("tokenizer") != asked)):
        return load_tokenizer(asked, V)
    of_model = _of_model(source, earlier)
    of_data = _of_data(loaders, corpus)
    if of_data:
        (words, tokenizer), *others = of_data
        if of_model is not None and of_model.tokenizer is not None:
            others.append((of_model.note, of_model.tokenizer))
        for other, another in others:
            tables.check_alike(words, tokenizer, other, another)
        return fitted(Choice(tokenizer, words), V)
    if of_model is not None:
        return of_model
    try:
        return load_tokenizer("auto", V, [loader.paths[0].parent for loader in loaders])
    except InputError as error:
        if config.sample_every:
            raise
        return Choice(None, str(error))  # nobody asked for it


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
