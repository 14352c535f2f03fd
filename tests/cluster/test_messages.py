"""Messages as bytes: they come through however they are cut, and nothing else does."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc_jax.cluster.messages import (
    BY_NAME,
    Beat,
    Ended,
    Hello,
    Lines,
    Meet,
    Message,
    Met,
    NotAMessage,
    Note,
    Verdict,
    Welcome,
    decode,
    encode,
)

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)
messages = (
    st.builds(Meet, st.text(), values)
    | st.builds(Met, st.text(), st.lists(values, max_size=3).map(tuple))
    | st.sampled_from([
        Hello(1, 3, "7", "", "host", 4), Note("tick"), Welcome(("a", "b"), (1, 2), peer_timeout=2.5),
        Beat(1, "step", 0.5), Ended("killed", 9, at=Beat(3, "save", worker=7)),
        Verdict(1, "a", 2, "gone", also=(0, 3)),
    ])
)  # fmt: skip


@given(st.lists(messages, max_size=5), st.data())
def test_messages_come_through_however_they_are_cut(sent: list[Message], data: st.DataObject) -> None:
    stream = b"".join(map(encode, sent))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=5)))
    lines, received = Lines(), list[Message]()
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        received += lines.feed(stream[start:end])
    assert received == sent and [type(each) for each in received] == [type(each) for each in sent]


@given(st.binary())
def test_bytes_are_messages_or_refused(data: bytes) -> None:
    lines = Lines(longest=100)
    try:
        messages = lines.feed(data)
    except NotAMessage:
        return
    assert all(isinstance(message, tuple(BY_NAME.values())) for message in messages)


def spoilt(message: Message, **fields: Any) -> bytes:
    return json.dumps(json.loads(encode(message)) | fields).encode()


VERDICT = Verdict(1, "a", 2, "gone")


@pytest.mark.parametrize("line", [
    b"", b"{}", b"[1]", b'{"is": 1}', b'{"is": []}', b'{"is": "other"}', b"\xff", b"[" * 10**5, b"9" * 5000,
    b'{"is": "beat"', b'{"is": "meet"}', spoilt(Beat(), worker=-1), spoilt(Beat(), step=True),
    spoilt(Beat(), step=1 << 53), spoilt(Beat(), seconds=float("nan")), spoilt(Beat(), age=10**400),
    spoilt(Beat(), phase=None), spoilt(Ended("end", 0), kind="other"), spoilt(Ended("end", 0), at=[]),
    spoilt(VERDICT, cause="bad luck"), spoilt(VERDICT, also=["0"]), spoilt(Hello(1, 3, "", "", "", 4), magic="b"),
])  # fmt: skip
def test_what_is_no_message(line: bytes) -> None:
    with pytest.raises(NotAMessage):
        decode(line)


def test_what_another_version_has_beside_our_fields_does_not_count() -> None:
    hello = Hello(1, 3, "", "", "", 4)
    assert decode(spoilt(hello, colour="red", protocol=9)) == hello._replace(protocol=9)


def test_a_line_has_a_greatest_length() -> None:
    line = encode(Note("tick"))[:-1]
    assert Lines(len(line)).feed(line + b"\n") == [Note("tick")]
    with pytest.raises(NotAMessage):
        Lines(len(line) - 1).feed(line)  # also while its end is still to come
