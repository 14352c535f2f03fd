"""Turn what the page asks, JSON, into a request of the engine; and describe the model to it.

Leaves out HTTP (serve.py) and the page itself (page.html).
"""

import json
from collections.abc import Mapping
from typing import Any

from llmc_jax.base.errors import InputError
from llmc_jax.base.streams import escaped
from llmc_jax.generate.command import model_facts
from llmc_jax.generate.engine import Request, check_request
from llmc_jax.generate.model import Model
from llmc_jax.generate.sampling import Sampling
from llmc_jax.generate.text import typed_ids
from llmc_jax.models.layout import letters

WHOLE = {"tokens": (200, 1, 100_000), "samples": (1, 1, 8), "candidates": (5, 0, 20)}  # default, least, most
SAMPLING = Sampling()._asdict()
DEFAULTS: dict[str, Any] = {"prompt": "", "after": [], "stops": []}
DEFAULTS |= {name: default for name, (default, *_) in WHOLE.items()} | SAMPLING
MOST_STOPS, LONGEST_STOP = 16, 200


def facts(model: Model) -> dict[str, Any]:
    """Return what the page says of the model, and the defaults and limits of its settings."""
    config = model.config
    V, T, sizes = config.vocab_size, config.max_seq_len, letters(config)
    numbers = "".join(f"{name}{sizes[name]}-" for name in ("L", "NH", "C") if sizes.get(name))
    return model_facts(model) | {
        "shape": f"{numbers}V{V}-T{T}",
        "T": T,
        "V": V,
        "tokenizer": None if model.tokenizer is None else model.tokenizer.name,
        "tokenizer_note": model.tokenizer_note,
        "defaults": DEFAULTS,
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
    if unknown := sorted(content.keys() - DEFAULTS.keys()):
        raise InputError(f"{unknown[0][:100]!r}: no such setting; known: {', '.join(DEFAULTS)}")
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
    chosen: dict[str, Any] = {name: _checked(name, content.get(name, default)) for name, default in DEFAULTS.items()}
    sampling = Sampling(**{name: chosen[name] for name in SAMPLING})
    counts, stops = {name: chosen[name] for name in WHOLE}, tuple(chosen["stops"])
    prompt = typed_ids(model.tokenizer, chosen["prompt"], "prompt") or (model.end_of_text,)
    request = Request((*prompt, *chosen["after"]), sampling=sampling, stops=stops, **counts)
    check_request(model, request)
    return request


def _checked(name: str, value: Any) -> Any:
    """Return a setting. Raises InputError for a value of another type, or beyond what a page may ask for."""
    kind = type(DEFAULTS[name])
    expected = {int: "a whole number", float: "a number", str: "a text", list: "a list"}[kind]
    good = type(value) is kind or (kind is float and type(value) is int)
    if name in WHOLE:
        _, least, most = WHOLE[name]
        expected, good = f"a whole number from {least} to {most}", good and least <= value <= most
    elif name == "after":
        expected, good = "a list of ids", good and all(type(id) is int for id in value)
    elif name == "stops":
        expected = f"a list of at most {MOST_STOPS} texts, each of 1 to {LONGEST_STOP} characters"
        short = good and all(type(stop) is str and 0 < len(stop) <= LONGEST_STOP for stop in value)
        good = short and len(value) <= MOST_STOPS
    if not good:
        raise InputError(f"{name}: found {escaped(json.dumps(value)[:60])}; expected {expected}")
    return value
