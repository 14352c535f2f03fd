"""The tokenizer of a run: whose ids its data and its model know, found before the run.

Leaves out reading tables (data/), and which one a checkpoint brings along (checkpoint/tokenizer.py).
"""

from contextlib import suppress

from llmc_jax.base.errors import InputError
from llmc_jax.checkpoint.source import Source
from llmc_jax.checkpoint.tokenizer import own_tokenizer
from llmc_jax.data import tables
from llmc_jax.data.corpora import Corpus
from llmc_jax.data.loader import TokenLoader
from llmc_jax.data.tokenizers import Choice, Tokenizer, bytes_tokenizer, fitted, load_tokenizer


def choose(
    asked: str,
    vocab_size: int,
    loaders: list[TokenLoader],
    corpus: Corpus | None,
    source: Source | None,
    *,
    as_before: bool = False,
) -> tuple[Choice, list[str]]:
    """Return the tokenizer of a run, and warnings: what --tokenizer asks for, else that of the data, else the model's.

    Where neither brings one, the vocabulary suggests it. loaders, corpus: of the data; source: what the weights come
    from. as_before: a run is resumed that was asked for the same. Raises InputError where data and model have unlike
    tables, and where a table of the data cannot be read or is too large for the model.
    """
    own = None if source is None else own_tokenizer(source)
    if asked == "none":
        known = None if own is None else own.named
        with suppress(InputError):  # whoever does without need not mend the table of the data
            known = known or next((tables.named(tokenizer) for _, tokenizer in _of_data(loaders, corpus)), None)
        return Choice(None, "no tokenizer was asked for", known), []
    if asked != "auto":
        found = own if own is not None and as_before and own.tokenizer else load_tokenizer(asked, vocab_size)
        assert found.tokenizer is not None
        named = tables.named(found.tokenizer)
        if own is not None and own.named is not None and as_before and own.named.sha256 not in ("", named.sha256):
            return own, [f"--tokenizer {asked} is another table by now: {own.note}"]
        return found._replace(named=found.named or named), []
    of_data = _of_data(loaders, corpus)
    if not of_data:
        return own or load_tokenizer("auto", vocab_size, [loader.paths[0].parent for loader in loaders]), []
    (words, tokenizer), *others = of_data
    named, doubts = tables.named(tokenizer), []
    if own is not None and own.named is not None:
        if own.tokenizer is not None:
            others.append((own.note, own.tokenizer))
        elif not own.named.sha256:
            doubts.append(f"whether {words} is the table of the model is not known: {own.note}")
        elif own.named.sha256 != named.sha256:
            raise InputError(f"{words} is not the table of the model: {own.note}")
        named = own.named if own.named.sha256 == named.sha256 else named
    for other, another in others:
        tables.check_alike(words, tokenizer, other, another)
    return fitted(Choice(tokenizer, words, named), vocab_size), doubts


def _of_data(loaders: list[TokenLoader], corpus: Corpus | None) -> list[tuple[str, Tokenizer]]:
    """Return the tables that the data was made with, and where each comes from."""
    paths = [path for loader in loaders for path in loader.paths]
    built_in = [] if corpus is None else [("the built-in corpus, in bytes", bytes_tokenizer())]
    others = paths if corpus is None else [path for path in paths if path not in (corpus.train, corpus.val)]
    return [*((tables.words(*each), each[1]) for each in tables.of_token_files(others)), *built_in]
