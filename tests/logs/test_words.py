"""Events in words: each is one line, of any event, and obeyed by no terminal."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc_jax.base.streams import escaped
from llmc_jax.logs.state import LONGEST, WORDS, event_words

ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9), st.lists, max_leaves=3
)
NAMES = ["step", "loss", "path", "ms", "host", "pid", "words", "problem", "outcome", "seconds", "cap", "\x1b[2J\n"]


@given(st.sampled_from([*WORDS, "another_kind", "\n", 3]), st.dictionaries(st.sampled_from(NAMES), ANY))
def test_any_event_is_one_printable_line(kind: Any, fields: dict[str, Any]) -> None:
    words = event_words({"event": kind, **fields})
    assert escaped(words) == words and 0 < len(words) <= LONGEST  # spaces of any kind may stay


@pytest.mark.parametrize(
    ("event", "words"),
    [
        ({"event": "start", "host": "node7", "pid": 41}, "started on node7, pid 41"),
        ({"event": "checkpoint", "path": "state_00000100", "ms": 1234.5}, "saved state_00000100 in 1,234 ms"),
        pytest.param(
            {"event": "checkpoint", "path": "state_00000100", "ms": 10**400},
            f"saved state_00000100 in {10**400} ms",
            id="400 digits",
        ),
        (
            {
                "event": "lost",
                "rank": 1,
                "host": "n2",
                "pid": 41,
                "cause": "gone",
                "step": 10,
                "phase": "step",
                "words": "",
            },
            "lost rank 1 on n2, pid 41, in phase step: gone ",
        ),
        ({"event": "end", "outcome": "done"}, "finished"),
        ({"event": "new_kind", "step": 3, "loss": 0.25, "name": "x", "time": 1.0}, "new kind: loss 0.25, name x"),
    ],
)
def test_what_an_event_says(event: dict[str, Any], words: str) -> None:
    assert event_words(event) == words
