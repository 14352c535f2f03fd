"""Tokens to text as it comes: the pieces joined are the text decoded at once, and end before a stop string."""

from hypothesis import example, given
from hypothesis import strategies as st

from llmc_jax.data.tokenizers import Tokenizer, bytes_tokenizer
from llmc_jax.generate.text import TextStream

BYTES = bytes_tokenizer()
# Few different characters, some of several bytes, so that stop strings do occur, also one in the other
LETTERS = st.sampled_from("abé€𝄞\n")
TEXTS = st.text(LETTERS, max_size=12).map(str.encode) | st.binary(max_size=12)


def streamed(stream: TextStream, tokens: list[int]) -> list[str]:
    """The pieces that come out, those at the end too; nothing is added after a stop string, as in the engine."""
    pieces = []
    for token in tokens:
        pieces.append(stream.add(token))
        if stream.stopped:
            break
    return [*pieces, stream.finish()]


def table(pieces: list[bytes]) -> Tokenizer:
    """A tokenizer that can only decode."""
    return BYTES.__class__("table", tuple(pieces), 0, "table", BYTES.encode_text)


@example([b"a\xe2\x82", b"\xac", b"b"], ["€b", "a€"])
@example([b"ab", b"ab", b"a"], ["aba", "b"])
@example([b"xabab"], ["abab", "b"])
@given(st.lists(TEXTS, max_size=8), st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=3))
def test_pieces_joined_are_the_text_before_the_stop_that_is_complete_first(
    pieces: list[bytes], stops: list[str]
) -> None:
    stream = TextStream(table(pieces), tuple(stops))
    text = b"".join(pieces).decode(errors="replace")
    found = [(place + len(stop), place) for stop in stops if (place := text.find(stop)) >= 0]
    expected = text[: min(found)[1]] if found else text
    assert "".join(streamed(stream, list(range(len(pieces))))) == expected
    assert stream.stopped == bool(found)


@given(st.binary(max_size=40), st.text(LETTERS, min_size=1, max_size=3))
def test_what_was_let_out_is_never_taken_back_and_little_is_held(data: bytes, stop: str) -> None:
    stream, out = TextStream(BYTES, (stop,)), ""
    for count, token in enumerate(data, start=1):
        out += stream.add(token)
        known = data[:count].decode(errors="replace")
        if stream.stopped:
            assert out == known[: known.find(stop)]
            return
        assert known.startswith(out)
        assert len(known) - len(out) <= len(stop) + 2  # a possible beginning of it, and a character of which bytes lack


def test_without_a_tokenizer_the_text_is_ids_and_unknown_ids_are_nothing() -> None:
    stream = TextStream(None)
    assert [stream.add(12), stream.add(3), stream.finish()] == ["12 ", "3 ", ""]
    assert TextStream(BYTES).add(9999) == ""
