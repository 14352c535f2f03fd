"""Token files: round trips, every kind of bad file, and mutated files against a decoder written from the format."""

import gc
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from llmc_jax.base.errors import FormatError, InputError
from llmc_jax.data import tokenfile
from llmc_jax.data.tokenfile import KINDS, expand_pattern, open_token_file, write_token_file

FOREIGN = [20240326, 20240327, 20240328, 20240522, 20240527, 20240803]


def header(magic: int, version: int, count: int) -> bytes:
    return struct.pack("<3i", magic, version, count) + bytes(1012)


def decode(data: bytes) -> tuple[str, list[int]] | None:
    """What a token file's bytes mean, by the written description of the formats; None if they are no token file."""
    if len(data) < 4:
        return None
    magic = int.from_bytes(data[:4], "little", signed=True)
    formats = {20240520: ("gpt2-uint16", 1, "H"), 20240801: ("llama3-uint32", 7, "I")}
    if magic in formats:
        name, version, code = formats[magic]
        if len(data) < 1024:
            return None
        found_version, count = struct.unpack("<ii", data[4:12])
        body = data[1024:]
        if found_version != version or count < 0 or len(body) != count * struct.calcsize("<" + code):
            return None
        return name, list(struct.unpack(f"<{count}{code}", body))
    if magic in FOREIGN or len(data) % 4:
        return None
    ids = list(struct.unpack(f"<{len(data) // 4}i", data))
    return ("raw-int32", ids) if all(0 <= i < 2**24 for i in ids) else None


@pytest.mark.parametrize(
    ("kind", "tokens"),
    [
        ("gpt2-uint16", [0, 1, 50256, 65535]),
        ("llama3-uint32", [0, 128255, 2**32 - 1]),
        ("raw-int32", [0, 7, 50256, 2**24 - 1]),
        ("gpt2-uint16", []),
        ("llama3-uint32", []),
    ],
)
def test_round_trip(kind: str, tokens: list[int]) -> None:
    path = Path("a.bin")
    write_token_file(path, tokens, kind)
    assert decode(path.read_bytes()) == (kind, tokens)
    file = open_token_file(path)
    assert (file.path, file.kind, file.num_tokens) == (path, kind, len(tokens))
    found = file.read()
    assert (found.tolist(), found.dtype, found.flags.writeable) == (tokens, KINDS[kind].dtype, False)
    assert os.listdir() == ["a.bin"]


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_of_a_file(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    write_token_file(Path("a.bin"), range(100), kind)
    for most in (1 << 30, 64):  # 64 bytes: as the system gives less at once than what is asked for
        monkeypatch.setattr(tokenfile, "MOST_AT_ONCE", most)
        with open_token_file(Path("a.bin")) as file:
            assert file.read(7, 30).tolist() == list(range(7, 37))
            assert file.read(90).tolist() == list(range(90, 100))
            assert file.read(100).size == file.read(3, 0).size == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_shortened(kind: str) -> None:
    """What is still there can be read, what is not is an error that says how much there was and is; growth is none."""
    path = Path("a.bin")
    write_token_file(path, range(5000), kind)
    with open_token_file(path) as file:
        size, cut = file.size, file.header_bytes + 1000 * file.dtype.itemsize - 1
        os.truncate(path, cut)
        assert file.read(0, 999).tolist() == list(range(999))
        for start, count in ((990, 10), (999, 1), (4000, 1000)):
            with pytest.raises(FormatError, match=rf"a\.bin: was shortened .* had {size} bytes and has {cut} now"):
                file.read(start, count)
    write_token_file(path, range(5000), kind)
    with open_token_file(path) as file:
        with path.open("ab") as more:
            more.write(bytes(4096))
        assert file.read(4990).tolist() == list(range(4990, 5000))


def test_a_disk_that_gives_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> bytes:
        raise OSError(5, "Input/output error")

    write_token_file("a.bin", range(100))
    monkeypatch.setattr(os, "pread", broken)
    with open_token_file("a.bin") as file, pytest.raises(InputError, match="Input/output error"):
        file.read()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux's /proc")
def test_no_file_stays_open(tmp_path: Path) -> None:
    """Closed by hand, by being forgotten, and where the file was refused."""

    def stay_open() -> list[str]:
        """Return the files of this test alone: garbage of earlier ones may be collected meanwhile."""
        links = [f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd")]
        return [path for path in map(os.path.realpath, links) if path.startswith(str(tmp_path))]

    write_token_file(Path("a.bin"), range(100))
    Path("b.bin").write_bytes(b"text")
    file = open_token_file(Path("a.bin"))
    assert stay_open() == [os.path.realpath("a.bin")]
    file.close()
    file.close()
    open_token_file(Path("a.bin"))
    with pytest.raises(FormatError):
        open_token_file(Path("b.bin"))
    gc.collect()
    assert stay_open() == []


def test_writing_any_integer_dtype() -> None:
    for dtype in (np.uint8, np.int16, np.int64, np.uint64):
        tokens = np.arange(101, dtype=dtype)
        write_token_file(Path("a.bin"), tokens[::-1])
        assert open_token_file("a.bin").read().tolist() == list(range(100, -1, -1))


def test_what_does_not_fit_is_not_written() -> None:
    with pytest.raises(AssertionError, match="ids that gpt2-uint16 has no room for"):
        write_token_file(Path("a.bin"), [1, 65536])
    assert os.listdir() == []


GOOD = header(20240520, 1, 3) + bytes(6)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "has 0 bytes"),
        (GOOD[:-1], "truncated: 1029 bytes, but 3 tokens of 2 bytes after a header of 1024 make 1030"),
        (header(20240520, 2, 0), "byte 4: version 2 of the format with magic 20240520; expected version 1"),
        (header(20240520, 1, -1), "byte 8: the header counts -1 tokens"),
        *((header(magic, 1, 0), f"magic {magic}; expected a token file") for magic in FOREIGN),
        (b"First Citizen:\nBefore we proceed", "no magic number of a token file.*holds 1936877894 at byte 0"),
        (struct.pack("<6H", *[50256, 464] * 3), "which is not a token id.*uint16 tokens without a header"),
        (struct.pack("<3H", 65, 64, 66), "not whole int32 tokens either; uint16 tokens without a header"),
        (struct.pack("<5i", 1, 2, 3, -4, 5), "holds -4 at byte 12, which is not a token id"),
        (struct.pack("<99i", *[7] * 77, -1, *[7] * 21), f"holds -1 at byte {4 * 77}"),  # beyond the first block
    ],
)
def test_bad_files(monkeypatch: pytest.MonkeyPatch, data: bytes, message: str) -> None:
    monkeypatch.setattr(tokenfile, "READ_BYTES", 64)
    path = Path("bad.bin")
    path.write_bytes(data)
    with pytest.raises(FormatError, match=message) as error:
        open_token_file(path)
    assert str(error.value).startswith(f"{path}: ") and "\n" not in str(error.value)
    assert decode(data) is None


def whole_files() -> st.SearchStrategy[bytes]:

    def build(kind: str, tokens: list[int]) -> bytes:
        magic, version, dtype = KINDS[kind]
        ids = tokenfile.MAX_RAW_ID + 1 if magic is None else 1 << (8 * dtype.itemsize)
        body = np.array([token % ids for token in tokens], np.int64).astype(dtype).tobytes()
        return body if magic is None else header(magic, version or 0, len(tokens)) + body

    return st.builds(build, st.sampled_from(list(KINDS)), st.lists(st.integers(0, 2**33), max_size=12))


@st.composite
def mutated_files(draw: st.DrawFn) -> bytes:
    data = bytearray(draw(whole_files()))
    for _ in range(draw(st.integers(0, 3))):
        how = draw(st.sampled_from(["flip", "cut", "add", "word", "swap"]))
        # where the meaning sits: the first 16 bytes and what follows the header
        at = draw(st.one_of(st.integers(0, 15), st.integers(0, max(len(data) - 1, 0))))
        if how == "flip" and at < len(data):
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif how == "cut":
            del data[len(data) - draw(st.integers(0, len(data))) :]
        elif how == "add":
            data += draw(st.binary(max_size=8))
        elif how == "word" and len(data) >= 12:
            words = [0, 1, 2, 7, -1, 2**31 - 1, -(2**31), 20240520, 20240801, *FOREIGN]
            struct.pack_into("<i", data, 4 * draw(st.integers(0, 2)), draw(st.sampled_from(words)))
        elif how == "swap":
            data[:4] = data[:4][::-1]
    return bytes(data)


@given(data=st.one_of(mutated_files(), st.binary(max_size=64)))
@example(data=GOOD)
@example(data=header(20240801, 7, 2) + struct.pack("<2I", 5, 2**32 - 1))
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_mutated_files_read_as_their_bytes_say_or_are_refused(data: bytes) -> None:
    path = Path("mutated.bin")
    path.write_bytes(data)
    expected = decode(data)
    try:
        file = open_token_file(path)
    except FormatError as error:
        assert expected is None, f"refused a valid file: {error}"
        assert "\n" not in str(error) and len(str(error)) < 1000
    else:
        assert (file.kind, file.read().tolist()) == expected
        assert file.num_tokens == len(file.read())


def test_patterns(tmp_path: Path) -> None:
    for name in ("b.bin", "a.bin", "B.bin", "a10.bin", "a9.bin", "é.bin", ".hidden.bin", "c.txt"):
        (tmp_path / name).touch()
    # as C's glob() in the C locale: bytes, so capitals first and accents last
    expected = ["B.bin", "a.bin", "a10.bin", "a9.bin", "b.bin", "é.bin"]
    assert [p.name for p in expand_pattern("*.bin", "-i")] == expected
    assert [p.name for p in expand_pattern("a?.bin", "-i")] == ["a9.bin"]
    assert [p.name for p in expand_pattern("[ab].bin", "-i")] == ["a.bin", "b.bin"]
    assert expand_pattern(Path("c.txt"), "-i") == [Path("c.txt")]
    Path("run1.bin").touch()
    Path("run[1].bin").touch()  # what exists is no pattern
    assert expand_pattern(Path("run[1].bin"), "-i") == [Path("run[1].bin")]
    assert expand_pattern("a.*", "-i") == [Path("a.bin")]
