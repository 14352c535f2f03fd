"""What the page asks and what it is told: JSON to a request of the engine, and the engine's tokens to JSON.

Leaves out HTTP (serve.py) and the page itself (page.html).
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from llmc_jax.base.errors import InputError
from llmc_jax.base.streams import escaped
from llmc_jax.generate import sampling
from llmc_jax.generate.command import model_facts
from llmc_jax.generate.engine import Drawn, Request
from llmc_jax.generate.model import Model
from llmc_jax.generate.sampling import Sampling
from llmc_jax.generate.text import typed_ids

WHOLE = {"tokens": (200, 1, 100_000), "samples": (1, 1, 8), "candidates": (5, 0, 20)}  # default, least, most
SAMPLING = Sampling()._asdict()
FIELDS = ("prompt", "after", "stops", *WHOLE, *SAMPLING)
LARGEST = 1e9  # more than any setting can be


def facts(model: Model) -> dict[str, Any]:
    """Return what the page says of the model, and the defaults and limits of its settings."""
    config = model.config
    V, T = config.vocab_size, config.max_seq_len
    return model_facts(model) | {
        "shape": f"L{config.num_layers}-NH{config.num_heads}-C{config.channels}-V{V}-T{T}",
        "T": T,
        "V": V,
        "tokenizer": None if model.tokenizer is None else model.tokenizer.name,
        "tokenizer_note": model.tokenizer_note,
        "defaults": {name: default for name, (default, *_) in WHOLE.items()} | SAMPLING,
        "limits": {name: most for name, (*_, most) in WHOLE.items()},
    }


def parsed(body: bytes) -> dict[str, Any]:
    """Return the JSON object that a body holds. Raises InputError if it is anything else, NaN and infinity included."""
    try:
        content = json.loads(body.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise InputError(f"the body: is not JSON in UTF-8 ({str(error)[:100]}); send one object") from error
    if not isinstance(content, dict):
        raise InputError('the body: is JSON, but no object; send one such as {"prompt": "Once"}')
    if unknown := sorted(content.keys() - set(FIELDS)):
        raise InputError(f"{unknown[0][:100]!r}: no such setting; known: {', '.join(FIELDS)}")
    return content


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON's")


def request_of(model: Model, content: Mapping[str, Any]) -> Request:
    """Return the request that an object asks for; what it leaves out has its default.

    prompt: a text; for a model without a tokenizer ids, with spaces between them. An empty one is the beginning of a
    text. after: ids of an earlier answer, which go behind the prompt: what comes then is what would have come of it,
    if it was the first of its samples.
    Raises InputError with one line that names the setting.
    """
    V = model.config.vocab_size
    ids: Check = (lambda value: _all(value, lambda id: type(id) is int and 0 <= id < V), f"ids from 0 to {V - 1}")
    counts: Any = {name: _checked(content, name, default, _whole(*ends)) for name, (default, *ends) in WHOLE.items()}
    chosen = {
        name: type(default)(_checked(content, name, default, SEED if name == "seed" else _number(default)))
        for name, default in SAMPLING.items()
    }
    sampling.check(Sampling(**chosen))
    text = _checked(content, "prompt", "", (lambda value: isinstance(value, str), "a text"))
    listed = {"prompt": list(typed_ids(model.tokenizer, text, "prompt"))}
    prompt = _checked(listed, "prompt", [], ids) or [model.end_of_text]
    after, stops = _checked(content, "after", [], ids), _checked(content, "stops", [], STOPS)
    return Request((*prompt, *after), sampling=Sampling(**chosen), stops=tuple(stops), **counts)


Check = tuple[Callable[[Any], bool], str]  # what a setting may be, and in words


def _all(value: object, good: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(good, value))


def _whole(least: int, most: int) -> Check:
    return lambda value: type(value) is int and least <= value <= most, f"a whole number from {least} to {most}"


def _number(default: float) -> Check:
    """Return what a setting of the sampling may be at all; the rest says `sampling.check`."""
    whole = _whole(0, int(LARGEST))
    return whole if type(default) is int else (lambda v: type(v) in (int, float) and abs(v) <= LARGEST, "a number")


SEED = _whole(0, (1 << 64) - 1)
STOPS: Check = (
    lambda value: _all(value, lambda stop: isinstance(stop, str) and 0 < len(stop) <= 200) and len(value) <= 16,
    "a list of at most 16 strings, each of 1 to 200 characters",
)


def _checked(content: Mapping[str, Any], name: str, default: Any, check: Check) -> Any:
    """Return a setting, or its default. Raises InputError for what it may not be."""
    value, (good, expected) = content.get(name, default), check
    if not good(value):
        raise InputError(f"{name}: found {escaped(json.dumps(value)[:60])}; expected {expected}")
    return value


def piece(model: Model, token: int) -> str:
    """Return one id's bytes as text for display: escaped where they are no whole character or cannot be seen."""
    if model.tokenizer is None or token >= model.tokenizer.vocab_size:
        return str(token)
    return escaped(model.tokenizer.piece(token).decode(errors="backslashreplace"))


def record(model: Model, drawn: Drawn) -> dict[str, Any]:
    """Return one new token as the page is told of it; probabilities are the model's own, before any filter."""
    candidates = [[token, piece(model, token), logprob] for token, logprob in drawn.candidates]
    return drawn._asdict() | {"piece": piece(model, drawn.token), "candidates": candidates}
