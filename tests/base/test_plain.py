"""Records through JSON, each field by its annotation."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

import pytest

from llmc_jax.base.plain import Count, from_json, to_json


class Part(NamedTuple):
    name: str
    share: float | None = None


class Whole(NamedTuple):
    count: Count
    size: Annotated[float, lambda size: size > 0]
    side: Literal["left", "right"]
    parts: tuple[Part, ...] = ()
    named: Mapping[str, tuple[int, str]] = {}


WHOLE = Whole(3, 1.5, "left", (Part("a"), Part("b", 2.0)), {"x": (1, "one")})


def test_back_again() -> None:
    assert from_json(Whole, json.loads(json.dumps(to_json(WHOLE)))) == WHOLE
    found = from_json(Part, {"name": "a", "share": 1})  # JSON writes 1.0 as it likes
    assert found == Part("a", 1.0) and type(found.share) is float


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"count": -1}, "count is -1"),
        ({"count": True}, "count is True"),
        ({"count": 1.0}, "count is 1.0"),
        ({"size": 0}, "size is 0"),
        ({"size": float("nan")}, "size is nan"),
        ({"side": "up"}, "side is 'up'"),
        ({"parts": [{"name": None}]}, "parts.name is None"),
        ({"parts": [{"name": "a", "share": "1"}]}, "parts.share is '1'"),
        ({"named": {"x": [1]}}, r"named.x is \[1\]"),
        ({"more": 1}, "this version does not know more"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"^{words}$"):
        from_json(Whole, to_json(WHOLE) | change)
    with pytest.raises(ValueError, match="it lacks size"):
        from_json(Whole, {"count": 1, "side": "left"})
