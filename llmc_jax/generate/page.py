"""What the page asks and what it is told: JSON to a request of the engine, and the engine's tokens to JSON.

Leaves out HTTP (serve.py) and the page itself (page.html).
"""

import json
from collections.abc import Mapping
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
MOST_STOPS, LONGEST_STOP = 16, 200
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
    counts: dict[str, Any] = {
        name: _whole(name, content.get(name, default), *ends) for name, (default, *ends) in WHOLE.items()
    }
    chosen = Sampling(**{name: _number(name, content.get(name, default)) for name, default in SAMPLING.items()})
    sampling.check(chosen)
    if not isinstance(prompt := content.get("prompt", ""), str):
        raise InputError(f"prompt: found {_shown(prompt)}; expected a text")
    typed = _ids("prompt", list(typed_ids(model.tokenizer, prompt, "prompt")), model) or (model.end_of_text,)
    after = _ids("after", content.get("after", []), model)
    return Request(typed + after, sampling=chosen, stops=_stops(content.get("stops", [])), **counts)


def _whole(name: str, value: object, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise InputError(f"{name}: found {_shown(value)}; expected a whole number from {least} to {most}")
    return value


def _number(name: str, value: object) -> Any:
    """Return a setting of the sampling, of the type that its default has; what it may be, `sampling.check` says."""
    if type(SAMPLING[name]) is int:
        return _whole(name, value, 0, (1 << 64) - 1)
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= LARGEST:
        raise InputError(f"{name}: found {_shown(value)}; expected a number")
    return float(value)


def _ids(name: str, value: object, model: Model) -> tuple[int, ...]:
    V = model.config.vocab_size
    if not isinstance(value, list):
        raise InputError(f"{name}: found {_shown(value)}; expected a list of ids")
    for token in value:
        if type(token) is not int or not 0 <= token < V:
            raise InputError(f"{name}: found {_shown(token)}; the model's ids are 0 to {V - 1}")
    return tuple(value)


def _stops(value: object) -> tuple[str, ...]:
    stops = value if isinstance(value, list) else [None]
    if not all(isinstance(stop, str) and 0 < len(stop) <= LONGEST_STOP for stop in stops):
        raise InputError(f"stops: expected a list of strings, each of 1 to {LONGEST_STOP} characters")
    if len(stops) > MOST_STOPS:
        raise InputError(f"stops: found {len(stops)}; give at most {MOST_STOPS}")
    return tuple(stops)


def _shown(value: object) -> str:
    return escaped(json.dumps(value)[:60])


def piece(model: Model, token: int) -> str:
    """Return one id's bytes as text for display: escaped where they are no whole character or cannot be seen."""
    if model.tokenizer is None or token >= model.tokenizer.vocab_size:
        return str(token)
    return escaped(model.tokenizer.piece(token).decode(errors="backslashreplace"))


def record(model: Model, drawn: Drawn) -> dict[str, Any]:
    """Return one new token as the page is told of it; probabilities are the model's own, before any filter."""
    return {
        "sample": drawn.sample,
        "position": drawn.position,
        "token": drawn.token,
        "piece": piece(model, drawn.token),
        "text": drawn.text,
        "logprob": drawn.logprob,
        "candidates": [[token, piece(model, token), logprob] for token, logprob in drawn.candidates],
        "end": drawn.end,
    }
