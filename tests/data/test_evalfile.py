"""llm.c's evaluation files: bytes built by hand from the format, every kind of bad file, mutated files."""

import os
import struct
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llmc_jax.base.errors import FormatError, InputError
from llmc_jax.data.evalfile import Item, is_eval_file, read_eval_file, write_eval_file

ITEMS = [
    Item("first", (5, 6, 7), ((1,), (2, 3), (4,), (65534,)), 3),
    Item("second", (9,), ((8,), (0,), (8, 8, 8), (1,)), 0),
]
# of the second item; words from 65535 on: bytes, number, label, 4, and five counted lists
SECOND = [65535, 34, 1, 0, 4, 1, 9, 1, 8, 1, 0, 3, 8, 8, 8, 1, 1]
FIRST = [65535, 36, 0, 3, 4, 3, 5, 6, 7, 1, 1, 2, 2, 3, 1, 4, 1, 65534]
SECOND_AT = 1024 + 36


def of_words(*examples: list[int], header: tuple[int, ...] = (20240522, 1, 2, 36)) -> bytes:
    words = [word for words in examples for word in words]
    return struct.pack("<256i", *header, *[0] * (256 - len(header))) + struct.pack(f"<{len(words)}H", *words)


GOOD = of_words(FIRST, SECOND)


def with_word(byte: int, value: int) -> bytes:
    return GOOD[:byte] + struct.pack("<H", value) + GOOD[byte + 2 :]


def decode(data: bytes) -> list[Item] | None:
    """What a file's bytes mean, by the written description of the format; None if they are no evaluation file."""
    if len(data) < 1024 or len(data) % 2:
        return None
    magic, version, count, longest = struct.unpack("<4i", data[:16])
    words = list(struct.unpack(f"<{len(data) // 2 - 512}H", data[1024:]))
    if (magic, version) != (20240522, 1) or not 0 < count < 65536:
        return None
    items, sizes = [], []
    for number in range(count):
        if len(words) < 5 or words[0] != 65535 or words[2] != number or words[3] > 3 or words[4] != 4:
            return None
        label, rest, parts = words[3], words[5:], []
        for _ in range(5):
            if not rest or rest[0] == 0 or len(rest) <= rest[0]:
                return None
            parts.append(tuple(rest[1 : 1 + rest[0]]))
            rest = rest[1 + rest[0] :]
        sizes.append(2 * (len(words) - len(rest)))
        if words[1] != sizes[-1] or any(65535 in part for part in parts):
            return None
        items.append(Item(str(number), parts[0], tuple(parts[1:]), label))
        words = rest
    return items if not words and max(sizes) == longest else None


def test_bytes_of_the_format(tmp_path: Path) -> None:
    path = Path("a.bin")
    write_eval_file(path, ITEMS)
    assert path.read_bytes() == GOOD
    assert os.listdir() == ["a.bin"]
    assert read_eval_file(path) == [ITEMS[0]._replace(name="0"), ITEMS[1]._replace(name="1")]
    assert is_eval_file(path) and not is_eval_file(tmp_path)


@st.composite
def any_items(draw: st.DrawFn) -> list[Item]:
    ids = st.lists(st.integers(0, 65534), min_size=1, max_size=5).map(tuple)
    one = st.builds(Item, st.just(""), ids, st.tuples(ids, ids, ids, ids), st.integers(0, 3))
    return [item._replace(name=str(i)) for i, item in enumerate(draw(st.lists(one, min_size=1, max_size=4)))]


@given(items=any_items())
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, items: list[Item]) -> None:
    path = tmp_path_factory.getbasetemp() / "round.bin"
    write_eval_file(path, items)
    assert decode(path.read_bytes()) == read_eval_file(path) == items


@given(cut=st.integers(0, len(GOOD)), at=st.integers(0, len(GOOD) - 1), value=st.integers(0, 255), more=st.binary())
@example(cut=len(GOOD), at=0, value=GOOD[0], more=b"")
@example(cut=len(GOOD), at=1030, value=2, more=b"")  # another right answer
def test_mutated_files(tmp_path_factory: pytest.TempPathFactory, cut: int, at: int, value: int, more: bytes) -> None:
    data = (GOOD[:at] + bytes([value]) + GOOD[at + 1 :])[:cut] + more
    path = tmp_path_factory.getbasetemp() / "mutated.bin"
    path.write_bytes(data)
    wanted = decode(data)
    if wanted is None:
        with pytest.raises(FormatError, match=r"mutated\.bin: "):
            read_eval_file(path)
    else:
        assert read_eval_file(path) == wanted


@pytest.mark.parametrize(
    ("data", "place"),
    [
        (b"", "truncated: 0 bytes"),
        (GOOD[:1000], "truncated: 1000 bytes"),
        (of_words(FIRST, SECOND, header=(20240522, 2, 2, 36)), "byte 4: version 2"),
        (of_words(header=(20240522, 1, 0, 36)), "byte 8: .* 0 examples"),
        (of_words(FIRST, SECOND, header=(20240522, 1, 2, 38)), "byte 12: .* 38 bytes and has 36"),
        (of_words(FIRST, SECOND, header=(20240522, 1, 3, 36)), "byte 1094: expected example 2"),
        (of_words(FIRST, SECOND, header=(20240522, 1, 1, 36)), "oversized: its 1 examples end at byte 1060"),
        *(
            (with_word(SECOND_AT + 2 * word, value), "byte 1060: expected example 1")
            for word, value in ((0, 65534), (1, 33), (2, 2), (3, 4), (4, 5), (5, 0), (15, 2), (6, 65535))
        ),
    ],
)
def test_bad_files(data: bytes, place: str) -> None:
    path = Path("a.bin")
    path.write_bytes(data)
    with pytest.raises(FormatError, match=rf"a\.bin: {place}") as caught:
        read_eval_file(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("items", "said"),
    [
        ([], "0 questions"),
        ([ITEMS[0]] * 65536, "65536 questions"),
        ([ITEMS[0], ITEMS[1]._replace(completions=((1,), (2,), (3,)))], r"question 1 \(second\)"),
        *(
            ([ITEMS[0]._replace(**change)], r"question 0 \(first\)")
            for change in (
                {"label": 4}, {"context": ()}, {"completions": ((1,), (2,), (), (3,))}, {"context": (7, 65535)},
                {"completions": ((1,), (2,), (-1,), (3,))}, {"context": (7,) * 32753},
            )
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_written(items: list[Item], said: str) -> None:
    Path("a.bin").write_text("stays")
    with pytest.raises(InputError, match=rf"a\.bin: .*{said}"):
        write_eval_file(Path("a.bin"), items)
    assert [path.read_text() for path in Path().iterdir()] == ["stays"]


def test_the_longest_example() -> None:
    longest = [Item("0", (7,) * 32753, ((1,), (2,), (3,), (4,)), 2)]
    write_eval_file(Path("a.bin"), longest)
    assert Path("a.bin").stat().st_size == 1024 + 65534
    assert read_eval_file(Path("a.bin")) == longest
