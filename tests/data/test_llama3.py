"""Llama 3's tokenizer against the published pattern and a naive byte-pair encoder, on a small table of its format."""

import base64
import functools
import http.server
import itertools
import re
import threading
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import regex
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llmc_jax.base.errors import FormatError, InputError
from llmc_jax.data import llama3, tokenizers
from llmc_jax.data.command import main
from llmc_jax.data.documents import cut_documents
from llmc_jax.data.llama3 import llama3_tokenizer, model_tokenizer, read_ranks, special_tokens
from llmc_jax.data.tokenfile import open_token_file
from llmc_jax.data.tokenizers import Tokenizer, bin_tokenizer, load_tokenizer, usual_eot, write_tokenizer_bin

# As published (llama-models, models/llama3/tokenizer.py), without possessive quantifiers
PUBLISHED_PATTERN = regex.compile(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
# No pairs lead to some of these: only a whole word is one
WHOLE = (b"!\n\n", b"123", b"'LL", b"\n\n\n", b" \n", b"\n  ", b"qzx")
LIKELY = "  \n\n\t\r'sStTreVvmLlDdſ abcthe0123.,!?-_é漢🙂\u00a0\u2003\u0085\u3000\u200b\x1cqzx"
texts = st.text(st.one_of(st.sampled_from(LIKELY), st.characters(codec="utf-8")), max_size=60)


def naive_encode(text: str, pieces: tuple[bytes, ...]) -> list[int]:
    """A word that is a piece is that piece; else join the pair of the lowest rank until no pair has one."""
    ranks = {piece: rank for rank, piece in enumerate(pieces)}
    ids = []
    for word in PUBLISHED_PATTERN.findall(text):
        parts = [bytes([value]) for value in word.encode()]
        if word.encode() in ranks:
            parts = [word.encode()]
        while len(parts) > 1:
            rank, at = min((ranks.get(parts[i] + parts[i + 1], 1 << 30), i) for i in range(len(parts) - 1))
            if rank == 1 << 30:
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        ids += [ranks[part] for part in parts]
    return ids


def written(pieces: tuple[bytes, ...]) -> bytes:
    return b"".join(base64.b64encode(piece) + f" {rank}\n".encode() for rank, piece in enumerate(pieces))


@pytest.fixture(scope="session")
def ranks(small_pieces: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """303 pieces: the small table's without its end of text, and some that only a whole word can be."""
    return (*small_pieces[:-1], *WHOLE)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory, ranks: tuple[bytes, ...]) -> Path:
    path = tmp_path_factory.mktemp("llama") / "small.model"
    path.write_bytes(written(ranks))
    return path


@functools.cache
def once(path: Path) -> Tokenizer:
    return model_tokenizer(path)


# ----- encoding ------------------------------------------------------------------------------------------------------


@given(texts)
@example("THEY'LL the\n\n\n  dog's 12345!\n\n  ")
@example("a \n \n b\n")
@example("I'LLx a\n  ")
@settings(max_examples=200, deadline=None)
def test_text_is_encoded_as_published(model: Path, ranks: tuple[bytes, ...], text: str) -> None:
    tokenizer = once(model)
    ids = tokenizer.encode(text)
    assert ids.tolist() == naive_encode(text, ranks)
    assert tokenizer.decode(ids).decode() == text


def test_ids_behind_the_table_are_special(model: Path, ranks: tuple[bytes, ...]) -> None:
    tokenizer = once(model)
    assert (tokenizer.vocab_size, tokenizer.eot, tokenizer.name) == (303 + 256, 303, "small.model")
    assert tokenizer.encode("<|begin_of_text|><|eot_id|>").max() < 303  # in a text nothing is special
    assert tokenizer.encode_document("qzx").tolist() == [303, ranks.index(b"qzx")]
    assert tokenizer.decode([303, 304, 312, 558]) == (
        b"<|begin_of_text|><|end_of_text|><|eot_id|><|reserved_special_token_245|>"
    )
    assert len(set(special_tokens())) == 256


@given(blocks=st.lists(st.text(st.sampled_from("the   \n\té.!1"), max_size=5), max_size=20), longest=st.integers(1, 20))
@example(blocks=["he!", "\n\n", "the"], longest=1)
@settings(max_examples=300, deadline=None)
def test_where_documents_are_cut_does_not_show(model: Path, blocks: list[str], longest: int) -> None:
    tokenizer = once(model)
    pieces = cut_documents([(block, 0) for block in blocks], None, longest)
    parts = [tokenizer.encode(piece.text).tolist() for piece in pieces]
    assert list(itertools.chain.from_iterable(parts)) == tokenizer.encode("".join(blocks)).tolist()


@pytest.mark.parametrize("which", ["llama3", "gpt2"])
@given(text=st.text(st.sampled_from(" \n\t\u3000\x1cab."), max_size=20))
@settings(max_examples=200, deadline=None)
def test_long_runs_of_space_are_told_apart_where_words_end(model: Path, small_bin: Path, which: str, text: str) -> None:
    tokenizer = once(model) if which == "llama3" else gpt2_once(small_bin)
    usual = tokenizers._LONG_RUN_LLAMA3 if which == "llama3" else tokenizers._LONG_RUN
    ends = [match.end() for match in re.finditer(usual.pattern.replace("4096", "2"), text)]
    parts = [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]
    assert np.concatenate([tokenizer.encode(part) for part in parts]).tolist() == tokenizer.encode(text).tolist()


@functools.cache
def gpt2_once(path: Path) -> Tokenizer:
    return bin_tokenizer(path)


def test_a_million_spaces(model: Path) -> None:
    text = "the" + " " * 1_100_000 + "cat"
    ids, cat = once(model).encode(text).tolist(), once(model).encode(" cat").tolist()
    assert once(model).decode(ids).decode() == text
    assert ids[-len(cat) :] == cat


def test_as_llmc_s_file_it_encodes_alike(model: Path, ranks: tuple[bytes, ...], tmp_path: Path) -> None:
    table = once(model)
    write_tokenizer_bin(tmp_path / "t.bin", table.pieces, table.eot)
    text = "THEY'LL sit on 12345 mats!\n\n  And then?\n"
    assert bin_tokenizer(tmp_path / "t.bin").encode(text).tolist() == naive_encode(text, ranks)


# ----- the file ------------------------------------------------------------------------------------------------------


def test_the_order_of_the_lines_is_free(model: Path, ranks: tuple[bytes, ...], tmp_path: Path) -> None:
    lines = model.read_bytes().splitlines()
    (tmp_path / "r.model").write_bytes(b"\r\n".join(reversed(lines)))
    assert read_ranks(tmp_path / "r.model") == read_ranks(model) == ranks


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b"YQ== 0\nYg== 2\n", r":2: rank 2 in a table of 2 lines"),
        (b"YQ== 0\nYg== 0\n", r":2: rank 0 a second time"),
        (b"YQ== 0\nYg== 1 x\n", r":2: b'Yg== 1 x' is no piece"),
        (b"YQ== 0\nYg= 1\n", r":2: .*is no piece"),
        (b"YQ== 0\n\nYg== 1\n", r":2: .*is no piece"),
        (b"YQ== 0\n 1\n", r":2: .*is no piece"),
        (b"YQ== 0\nYg== -1\n", r":2: .*is no piece"),
        (b"YQ== 0\n" + base64.b64encode(b"a" * 256) + b" 1\n", r":2: .*is no piece"),
        (b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02", "is a SentencePiece model, as Llama 1 and 2"),
    ],
)
def test_what_is_no_table_is_refused_in_one_line(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.model"
    path.write_bytes(data)
    with pytest.raises(FormatError, match=message) as caught:
        model_tokenizer(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_another_rule_s_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "r50k_base.tiktoken").write_bytes(written(tuple(rank.to_bytes(2, "big") for rank in range(50256))))
    with pytest.raises(FormatError, match="is GPT-2's, which cuts text"):
        load_tokenizer(str(tmp_path / "r50k_base.tiktoken"))


def test_the_commands_take_it(
    model: Path, ranks: tuple[bytes, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tokenizer", "inspect", str(model)]) == 0
    assert re.search(r"559 ids.*\n.*id 303, '<\|begin_of_text\|>'", capsys.readouterr().out)
    assert main(["tokenizer", "encode", "qzx 123", "--tokenizer", str(model)]) == 0
    assert capsys.readouterr().out.split()[:3] == [str(token) for token in naive_encode("qzx 123", ranks)]
    (tmp_path / "a.txt").write_text("the cat sat on the mat!\n\n" * 9)
    words = [str(tmp_path / "a.txt"), "-o", str(tmp_path / "out"), "--val-tokens", "5", "--tokenizer", str(model)]
    assert main(["prepare", *words]) == 0
    with open_token_file(tmp_path / "out/a_val_000000.bin") as val:
        expected = [303, *naive_encode("the cat sat on the mat!\n\n" * 9, ranks)][:5]
        assert val.read(0, 5).tolist() == expected


# ----- choosing ------------------------------------------------------------------------------------------------------


def test_a_file_is_known_by_its_content(model: Path, small_bin: Path, tmp_path: Path) -> None:
    (tmp_path / "any.bin").write_bytes(model.read_bytes())
    found = load_tokenizer(str(tmp_path / "any.bin"), 559).tokenizer
    assert found is not None and found.pieces == once(model).pieces
    assert load_tokenizer(found.spec).tokenizer == found
    (tmp_path / "any.model").write_bytes(small_bin.read_bytes())
    other = load_tokenizer(str(tmp_path / "any.model")).tokenizer
    assert other is not None and other.vocab_size == 297
    with pytest.raises(InputError, match="cannot be read"):
        load_tokenizer("tokenizer.model/none.model")


@pytest.fixture()
def as_metas(model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> bytes:
    """The small table in the place of Meta's, and a folder without any."""
    data = model.read_bytes()
    monkeypatch.setattr(llama3, "MODEL_BYTES", len(data))
    monkeypatch.setattr(llama3, "MODEL_SHA256", tokenizers.hashlib.sha256(data).hexdigest())
    monkeypatch.setattr(tokenizers, "LLAMA3_VOCAB", 559)
    monkeypatch.setitem(tokenizers.PUBLIC, "llama3", ("Llama 3's", 559))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    return data


def test_the_table_is_found_where_it_may_be(as_metas: bytes, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"HF_TOKEN.*--tokenizer PATH"):
        load_tokenizer("llama3")
    missing = load_tokenizer("auto", 559)
    assert missing.tokenizer is None and "HF_TOKEN" in missing.note
    (tmp_path / "data").mkdir()
    for path in (tmp_path / "cache/llama3/tokenizer.model", tmp_path / "empty/tokenizer.model"):
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(as_metas.replace(b" 1\n", b" @\n").replace(b" 2\n", b" 1\n").replace(b" @\n", b" 2\n"))
        assert load_tokenizer("auto", 559).tokenizer is None  # another table of that size is none
        path.write_bytes(as_metas)
        for spec in ("auto", "llama3"):
            found = load_tokenizer(spec, 559).tokenizer
            assert found is not None and (found.name, found.spec, found.vocab_size) == ("llama3", "llama3", 559)
        path.unlink()
    path = tmp_path / "cache/llama3/tokenizer.model"
    path.write_bytes(as_metas.replace(b" 1\n", b" @\n").replace(b" 2\n", b" 1\n").replace(b" @\n", b" 2\n"))
    with pytest.raises(InputError, match="remove it"):
        load_tokenizer("llama3")
    path.unlink()
    (tmp_path / "data/tokenizer.model").write_bytes(as_metas)
    assert load_tokenizer("auto", 559, [tmp_path / "data"]).tokenizer is not None
    assert llama3_tokenizer(False, [tmp_path / "data"]).tokenizer is not None


class Hub(http.server.BaseHTTPRequestHandler):
    """A server of gated files: the path and login of each request, and the table for the one login that may."""

    asked: ClassVar[list[tuple[str, str | None]]] = []
    data = b""

    def do_GET(self) -> None:
        login = self.headers.get("Authorization")
        self.asked.append((self.path, login))
        if login != "Bearer hf_mine":
            self.send_error(401)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.data)))
        self.end_headers()
        self.wfile.write(self.data)


def test_the_table_is_downloaded_with_a_login_and_kept(
    as_metas: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("HF_HUB_OFFLINE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "no-login"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    Hub.data = as_metas
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
        with pytest.raises(InputError, match=r"401.*licence.*HF_TOKEN") as caught:
            load_tokenizer("llama3")
        assert "\n" not in str(caught.value)
        monkeypatch.setenv("HF_TOKEN", "hf_mine")
        found = load_tokenizer("llama3").tokenizer
        server.shutdown()
    assert found is not None and found == load_tokenizer("llama3").tokenizer  # the second time from the cache
    assert (tmp_path / "cache/llama3/tokenizer.model").read_bytes() == as_metas
    path = "/meta-llama/Llama-3.1-8B/resolve/main/original/tokenizer.model"
    assert Hub.asked == [(path, None), (path, "Bearer hf_mine")]


def test_without_a_table_the_size_says_what_begins_a_document() -> None:
    assert [usual_eot(vocab_size) for vocab_size in (257, 50257, 128256, 1000)] == [256, 50256, 128000, 999]


def test_the_model_s_vocabulary_is_looked_at_first() -> None:
    with pytest.raises(InputError, match=r"Llama 3's has 128256 ids.*V=50257"):
        load_tokenizer("llama3", 50257)
