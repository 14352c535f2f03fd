"""Messages as bytes: they come through however they are cut, and nothing else does."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc_jax.cluster.messages import Lines, NotAMessage, decode, encode

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(st.lists(st.tuples(st.text(), values), max_size=5), st.data())
def test_messages_come_through_however_they_are_cut(sent: list[tuple[str, object]], data: st.DataObject) -> None:
    stream = b"".join(encode(kind, value=value) for kind, value in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=5)))
    lines, received = Lines(), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        received += lines.feed(stream[start:end])
    assert received == [{"is": kind, "value": value} for kind, value in sent]


@given(st.binary())
def test_bytes_are_messages_or_refused(data: bytes) -> None:
    lines = Lines(longest=100)
    try:
        messages = lines.feed(data)
    except NotAMessage:
        return
    assert all(isinstance(message["is"], str) for message in messages)


@pytest.mark.parametrize("line", [b"", b"{}", b"[1]", b'{"is": 1}', b"\xff", b"[" * 10**5, b"9" * 5000, b'{"is": "a"'])
def test_what_is_no_message(line: bytes) -> None:
    with pytest.raises(NotAMessage):
        decode(line)


def test_a_line_has_a_greatest_length() -> None:
    line = json.dumps({"is": "a"}).encode()
    assert Lines(len(line)).feed(line + b"\n") == [{"is": "a"}]
    with pytest.raises(NotAMessage):
        Lines(len(line) - 1).feed(line)  # also while its end is still to come
