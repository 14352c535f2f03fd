"""Tokenizers against a naive byte-pair encoder, tiktoken's own table, and an independent decoder of tokenizer files."""

import hashlib
import struct
from pathlib import Path

import numpy as np
import pytest
import regex
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llmc_jax.base.errors import FormatError, InputError
from llmc_jax.data import tokenizers
from llmc_jax.data.download import Remote
from llmc_jax.data.tokenizers import (
    bin_tokenizer,
    bytes_tokenizer,
    drawable,
    gpt2_tokenizer,
    known_eot,
    load_tokenizer,
    read_tokenizer_bin,
    sample_text,
    usual_eot,
    write_tokenizer_bin,
)

# As published with GPT-2 (encoder.py of openai/gpt-2), without possessive quantifiers
PUBLISHED_PATTERN = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
SHA256_V1 = "72c44782644dccc955e1b775d0d7552a594bbb54bfc6141e31373324d486956d"
SHA256_V2 = "6f3abc21e444e4e8300e225f4e03da48ea121cf17e30f67009b8dad7a66c2f13"

LIKELY = "  \n\n\t\r'strevmld abcthe012.,!?-é漢🙂\u00a0\u2003\u0085\u3000\u200b\x1c"
texts = st.text(st.one_of(st.sampled_from(LIKELY), st.characters()), max_size=80)


def naive_encode(text: str, pieces: tuple[bytes, ...]) -> list[int]:
    """GPT-2's algorithm as published: within each word, join the pair of the lowest rank until no pair has one."""
    ranks = {piece: token for token, piece in enumerate(pieces[:-1])}
    ids = []
    for word in PUBLISHED_PATTERN.findall(text):
        parts = [bytes([value]) for value in word.encode()]
        while True:
            pairs = [(ranks.get(parts[i] + parts[i + 1], 1 << 30), i) for i in range(len(parts) - 1)]
            rank, at = min(pairs, default=(1 << 30, 0))
            if rank == 1 << 30:
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        ids += [ranks[part] for part in parts]
    return ids


@given(texts.filter(lambda text: text.isprintable() or text < "\ud800"))
@example("they'll the\n\n\n  dog's   ")
@example("\n \n")
@settings(max_examples=300, deadline=None)
def test_a_table_alone_encodes_as_the_published_algorithm(
    small_bin: Path, small_pieces: tuple[bytes, ...], text: str
) -> None:
    text = text.encode("utf-8", "replace").decode()  # no halves of surrogate pairs
    tokenizer = bin_tokenizer(small_bin)
    ids = tokenizer.encode(text)
    assert ids.tolist() == naive_encode(text, small_pieces)
    assert ids.dtype == np.uint16
    assert tokenizer.decode(ids).decode() == text


@given(st.binary(max_size=100))
def test_bytes_are_their_own_ids(data: bytes) -> None:
    tokenizer = bytes_tokenizer()
    assert tokenizer.encode(data).tolist() == list(data)
    assert tokenizer.decode(tokenizer.encode(data)) == data
    assert (tokenizer.vocab_size, tokenizer.eot) == (257, 256)


@pytest.mark.parametrize("text", ["a\ud800b", "\udc00", "\ud83d\ude42"])
def test_surrogates(small_bin: Path, text: str) -> None:
    expected = "🙂" if len(text) == 2 else text.replace("\ud800", "\ufffd").replace("\udc00", "\ufffd")
    for tokenizer in (bytes_tokenizer(), bin_tokenizer(small_bin)):
        assert tokenizer.decode(tokenizer.encode(text)).decode() == expected


def test_text_that_is_no_utf8(small_bin: Path) -> None:
    with pytest.raises(InputError, match="byte 2 is 0xff"):
        bin_tokenizer(small_bin).encode(b"ab\xff")
    assert bin_tokenizer(small_bin).encode("é".encode()).tolist() == bin_tokenizer(small_bin).encode("é").tolist()


@pytest.mark.parametrize("ids", [[0, 257], [-1]])
def test_an_unknown_id(ids: list[int]) -> None:
    with pytest.raises(InputError, match=rf"the bytes tokenizer has ids 0 to 256; found {ids[-1]}"):
        bytes_tokenizer().decode(ids)


def test_what_cannot_be_cut_into_words_is_refused(small_bin: Path, small_pieces: tuple[bytes, ...]) -> None:
    with pytest.raises(InputError, match="a million spaces"):
        bin_tokenizer(small_bin).encode("the" + " " * 1_100_000 + "cat")
    table = tokenizers.Table((*small_pieces[:-1], tokenizers.LLAMA3_BEGIN), 296)
    with pytest.raises(InputError, match="Llama 3"):
        tokenizers.table_tokenizer("l", table, "l").encode("the")


def test_tables_that_only_decode() -> None:
    singles = tuple(bytes([value]) for value in range(256))
    write_tokenizer_bin(Path("few.bin"), (b"a", b"b", b"ab", b"<e>"), 3)
    write_tokenizer_bin(Path("twice.bin"), (*singles, b"ab", b"ab", b"<e>"), 258)
    few = bin_tokenizer(Path("few.bin"))
    assert few.decode([2, 0]) == b"aba"
    with pytest.raises(InputError, match="254 of the 256 single bytes, 0x00 first"):
        few.encode("ab")
    with pytest.raises(InputError, match="two ids stand for the same bytes"):
        bin_tokenizer("twice.bin").encode("ab")


def decode_table(data: bytes) -> tuple[int, list[bytes]] | None:
    """An independent reader of the format; None where the bytes are not a tokenizer file."""
    if len(data) < 1024:
        return None
    magic, version, vocab, eot = struct.unpack("<4I", data[:16])
    if magic != 20240328 or version not in (1, 2):
        return None
    if version == 1:
        eot = 50256
    rest, pieces = data[1024:], []
    while rest:
        length, rest = rest[0], rest[1:]
        if length == 0 or length > len(rest):
            return None
        pieces.append(rest[:length])
        rest = rest[length:]
    if len(pieces) != vocab or eot >= vocab or (version == 1 and vocab != 50257):
        return None
    return eot, pieces


@st.composite
def mutated_tables(draw: st.DrawFn) -> bytes:
    pieces = draw(st.lists(st.binary(min_size=1, max_size=20), min_size=1, max_size=8))
    eot = draw(st.integers(0, len(pieces) - 1))
    version = draw(st.sampled_from([2, 2, 2, 1, 0, 3]))
    header = struct.pack("<256I", 20240328, version, len(pieces), eot, *[0] * 252)
    data = bytearray(header + b"".join(bytes([len(piece)]) + piece for piece in pieces))
    for _ in range(draw(st.integers(0, 2))):
        place = st.one_of(st.integers(0, 16), st.integers(1020, len(data) - 1))
        data[min(draw(place), len(data) - 1)] = draw(st.sampled_from([0, 1, 2, 3, 255]))
    end = draw(st.one_of(st.just(len(data)), st.integers(0, len(data))))
    return bytes(data[:end]) + draw(st.sampled_from([b"", b"", b"\x00", b"\x01a", b"\x05"]))


@given(mutated_tables())
@settings(max_examples=500, deadline=None)
def test_mutated_tables_are_read_exactly_or_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "mutated.bin"
    path.write_bytes(data)
    expected = decode_table(data)
    if expected is None:
        with pytest.raises(FormatError):
            read_tokenizer_bin(path)
    else:
        pieces, eot = read_tokenizer_bin(path)
        assert (eot, list(pieces)) == expected


def test_places_where_no_table_can_be_written_or_read() -> None:
    with pytest.raises(InputError, match="cannot be written"):
        write_tokenizer_bin("no/t.bin", (b"a",), 0)
    for absent, reason in (("none.bin", "No such file"), (".", "Is a directory")):
        with pytest.raises(InputError, match=reason):
            read_tokenizer_bin(absent)


@pytest.mark.parametrize("pieces", [(), (b"",), (b"a" * 256,)])
def test_what_the_format_cannot_hold_is_not_written(pieces: tuple[bytes, ...]) -> None:
    with pytest.raises(AssertionError):
        write_tokenizer_bin(Path("t.bin"), pieces, 0)
    assert list(Path().iterdir()) == []


@pytest.fixture()
def no_network(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces downloads by a failure; the list holds what was asked for."""
    asked: list[str] = []

    def refuse(source: Remote, target: Path) -> Path:
        asked.append(source.url)
        raise InputError(f"{source.what}: cannot be downloaded (no network); {source.advice}")

    monkeypatch.setattr("llmc_jax.data.download.fetch", refuse)
    return asked


def test_without_table_and_network_one_line_says_how_to_get_it(no_network: list[str]) -> None:
    words = r"no network.*--tokenizer PATH.*TIKTOKEN_CACHE_DIR.*--tokenizer bytes"
    with pytest.raises(InputError, match=words) as caught:
        load_tokenizer("gpt2")
    assert "\n" not in str(caught.value)
    choice = load_tokenizer("auto", 50257)
    assert choice.tokenizer is None and "neither in tiktoken's cache" in choice.note
    assert len(no_network) == 1  # auto never asks the network


MERGES = "#version: 0.2\nt h\nĠ th\nÃ ©\n".encode()


def test_merges_in_a_cache_become_pieces_unless_they_are_damaged(
    no_network: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = hashlib.sha1(tokenizers.MERGES_URL.encode()).hexdigest()
    assert name == "6d1cbeee0f20b3d9449abfede4726ed8212e3aee"  # what tiktoken calls it
    Path("tiktoken").mkdir()
    Path("tiktoken", name).write_bytes(MERGES)
    monkeypatch.setattr(tokenizers, "MERGES_SHA256", hashlib.sha256(MERGES).hexdigest())
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "tiktoken")
    pieces = gpt2_tokenizer(allow_network=False).pieces
    assert pieces[256:] == (b"th", b" th", "é".encode(), b"<|endoftext|>")
    assert pieces[:3] == (b"!", b'"', b"#")
    assert (pieces[187], pieces[188], pieces[220], pieces[255]) == (b"\xff", b"\x00", b" ", b"\xad")
    assert sorted(pieces[:256]) == [bytes([value]) for value in range(256)]
    monkeypatch.delenv("TIKTOKEN_CACHE_DIR")
    monkeypatch.setenv("DATA_GYM_CACHE_DIR", "tiktoken")
    assert gpt2_tokenizer(allow_network=False).pieces == pieces
    for damaged in (b"", MERGES[:-1]):
        Path("tiktoken", name).write_bytes(damaged)
        with pytest.raises(InputError, match="--tokenizer PATH"):
            gpt2_tokenizer(allow_network=False)


def test_a_download_is_kept_for_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizers, "MERGES_SHA256", hashlib.sha256(MERGES).hexdigest())

    def bring(source: Remote, target: Path) -> Path:
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(MERGES)
        return target

    monkeypatch.setattr("llmc_jax.data.download.fetch", bring)
    assert gpt2_tokenizer().vocab_size == 260
    assert gpt2_tokenizer(allow_network=False).vocab_size == 260
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")  # switched off: works, but is not kept
    assert gpt2_tokenizer().vocab_size == 260
    with pytest.raises(InputError, match="switched off"):
        gpt2_tokenizer(allow_network=False)
    Path("file").touch()
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "file/cache")  # where nothing can be written
    assert gpt2_tokenizer().vocab_size == 260


def test_choices(small_bin: Path) -> None:
    assert load_tokenizer("auto", 257).tokenizer == bytes_tokenizer()
    assert load_tokenizer("bytes", 257).tokenizer == bytes_tokenizer()
    assert load_tokenizer("none", 5) == (None, "no tokenizer was asked for", None)
    found = load_tokenizer(str(small_bin), 297).tokenizer
    assert found is not None and found.pieces == read_tokenizer_bin(small_bin).pieces
    assert load_tokenizer(found.spec).tokenizer == found
    unknown = load_tokenizer("auto", 1000)
    assert unknown.tokenizer is None and "V=1000" in unknown.note


@pytest.mark.parametrize(("spec", "ids"), [("bytes", 257), ("small", 297), ("gpt2", 50257)])
def test_a_tokenizer_may_have_fewer_ids_than_the_model_never_more(small_bin: Path, spec: str, ids: int) -> None:
    spec = str(small_bin) if spec == "small" else spec
    with pytest.raises(InputError, match=rf"has {ids} ids.*V={ids - 1}"):
        load_tokenizer(spec, ids - 1)
    if ids < 300:
        padded = load_tokenizer(spec, 512)
        assert padded.tokenizer is not None and padded.tokenizer.vocab_size == ids and f"{ids} of V=512" in padded.note
        assert load_tokenizer(spec, ids).note == ("bytes" if spec == "bytes" else spec)


@pytest.mark.parametrize(
    ("V", "ids", "end"),
    [(257, 257, 256), (50257, 50257, 50256), (50304, 50257, 50256), (50260, 50260, 50256), (128256, 128256, 128000)],
)
def test_what_a_vocabularys_size_tells(V: int, ids: int, end: int) -> None:
    """Without a table: which ids are drawn, and which ends a text. 50304 is GPT-2's vocabulary, padded."""
    assert (drawable(None, V), usual_eot(V), known_eot(V)) == (ids, end, end)
    assert (drawable(None, 512), usual_eot(512), known_eot(512)) == (512, 511, None)
    assert drawable(bytes_tokenizer(), V) == 257


def test_gpt2s_table_in_a_padded_model() -> None:
    """The data's folder comes before the current one; what is called gpt2 must be GPT-2's by digest."""
    Path("data").mkdir()
    for folder, order in (("data", "<H"), (".", ">H")):
        pieces = tuple(struct.pack(order, token) for token in range(50257))
        write_tokenizer_bin(f"{folder}/gpt2_tokenizer.bin", pieces, 50256)
    here, of_data = (load_tokenizer("auto", 50304, folders).tokenizer for folders in ([], [Path("data")]))
    assert here is not None and of_data is not None
    assert (here.pieces[1], of_data.pieces[1]) == (b"\0\1", b"\1\0")
    assert here.name == "gpt2_tokenizer.bin" and here.eot == 50256
    assert load_tokenizer("auto", 50258).tokenizer is None


@pytest.mark.parametrize(
    ("spec", "message"), [("gpt3", "expected auto, bytes, gpt2"), ("no/such.bin", "cannot be read")]
)
def test_a_tokenizer_that_is_not_known(spec: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_tokenizer(spec)


def test_samples() -> None:
    """A broken character is shown, an escape is not."""
    assert sample_text(bytes_tokenizer(), b"a\xc3\xa9\x1b[31m\xe6\xbc") == "aé[31m\ufffd"
    assert sample_text(None, [256, 72]) == "256 72 "
    assert sample_text(bytes_tokenizer(), [256, *"né".encode()]) == "<|endoftext|>né"


def test_written_tables_are_llmc_s(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(shared / "data" / "tiktoken"))
    tokenizer = gpt2_tokenizer(allow_network=False)
    assert bin_tokenizer(shared / "data" / "gpt2_tokenizer.bin").pieces == tokenizer.pieces
    write_tokenizer_bin(Path("t.bin"), tokenizer.pieces, tokenizer.eot)
    data = Path("t.bin").read_bytes()
    assert hashlib.sha256(data).hexdigest() == SHA256_V2
    data = data[:4] + struct.pack("<3I", 1, 50257, 0) + data[16:]  # version 1 says nothing of the end of text
    assert hashlib.sha256(data).hexdigest() == SHA256_V1
    Path("t.bin").write_bytes(data)
    assert read_tokenizer_bin(Path("t.bin")) == (tokenizer.pieces, 50256)


def test_the_file_encodes_real_text_as_tiktoken(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(shared / "data" / "tiktoken"))
    import tiktoken

    oracle = tiktoken.get_encoding("gpt2")
    tokenizer = bin_tokenizer(shared / "data" / "gpt2_tokenizer.bin")
    text = (shared / "data" / "tinyshakespeare_input.txt").read_text()
    hard = "  \n\n \t x 🙂👩‍👩‍👧 漢字かな Ünï'll 'LL 's 123456 \u00a0\u2003 \r\n <|endoftext|> \ufeff ÃÂÃÂ \x00\x1c"
    hard += " " * 100
    for sample in (text, hard, (shared / "data" / "hellaswag_val_sample1000.jsonl").read_text()):
        assert np.array_equal(tokenizer.encode(sample), oracle.encode_ordinary(sample))
        assert tokenizer.decode(tokenizer.encode(sample)).decode() == sample

    @given(texts)
    @settings(max_examples=300, deadline=None)
    def check(sample: str) -> None:
        assert tokenizer.encode(sample).tolist() == oracle.encode_ordinary(sample)

    check()
