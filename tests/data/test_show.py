"""What `inspect` says of token files, and the commands that show and convert."""

import struct
from pathlib import Path

import pytest

from llmc_jax.base.errors import FormatError
from llmc_jax.data.command import main
from llmc_jax.data.show import describe, inspect_token_file
from llmc_jax.data.tokenfile import write_token_file

KINDS = ["gpt2-uint16", "llama3-uint32", "raw-int32"]


@pytest.mark.parametrize("kind", KINDS)
def test_an_inspection(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.bin"
    tokens = [256, *"née\n".encode(), 256, *b"x\x1b[0m"]
    write_token_file(path, tokens, kind)
    found = inspect_token_file(path, show=7)
    assert (found.kind, found.size, found.tokens) == (kind, path.stat().st_size, 12)
    assert (found.lowest, found.highest, found.documents, found.eot, found.vocab) == (10, 256, 2, 256, 257)
    assert found.first == tokens[:7]
    assert found.text == "<|endoftext|>née\n<|endoftext|>"
    assert "née\n              <|endoftext|>" in describe(found)
    assert inspect_token_file(path, tokenizer="none", show=3).text == "256 110 195 "
    assert "\x1b" not in inspect_token_file(path).text


@pytest.mark.parametrize(
    ("highest", "vocab", "eot"), [(256, 257, 256), (257, 50257, 50256), (50256, 50257, 50256), (50257, 128256, 128000)]
)
def test_the_ids_suggest_a_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, highest: int, vocab: int, eot: int
) -> None:
    monkeypatch.chdir(tmp_path)
    write_token_file("a.bin", [eot, 5, eot, highest] if eot <= highest else [5, highest], "llama3-uint32")
    found = inspect_token_file("a.bin")
    assert (found.vocab, found.eot) == (vocab, eot)
    if vocab != 257:  # no table here: ids, and why
        assert found.text == "".join(f"{token} " for token in found.first)
        assert "tokenizer" in found.note


def test_an_unusual_vocabulary_and_none(tmp_path: Path) -> None:
    write_token_file(tmp_path / "a.bin", [2**31, 5], "llama3-uint32")
    assert inspect_token_file(tmp_path / "a.bin").vocab == 2**31 + 1
    write_token_file(tmp_path / "a.bin", [])
    found = inspect_token_file(tmp_path / "a.bin")
    assert (found.tokens, found.lowest, found.documents, found.first) == (0, -1, 0, [])
    assert "none" in describe(found)


@pytest.mark.parametrize("kind", KINDS)
def test_ids_beyond_the_vocabulary(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.bin"
    write_token_file(path, [1] * 9 + [300, 299], kind)
    byte = {"gpt2-uint16": 1024 + 18, "llama3-uint32": 1024 + 36, "raw-int32": 36}[kind]
    with pytest.raises(FormatError, match=rf"token 9 \(byte {byte}\) is id 300; with V=257 ids end at 256"):
        inspect_token_file(path, tokenizer="bytes")
    assert inspect_token_file(path).tokens == 11


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_token_file(tmp_path / "a.bin", [256, *b"hello"])
    write_token_file(tmp_path / "b.bin", [256, *b"world"])
    assert main(["inspect", str(tmp_path / "*.bin"), "--first", "4"]) == 0
    shown = capsys.readouterr().out
    assert "<|endoftext|>hel\n" in shown and "<|endoftext|>wor\n" in shown
    assert main(["inspect", str(tmp_path / "c.bin")]) == 2
    (tmp_path / "c.bin").write_bytes(b"abc")
    assert main(["inspect", str(tmp_path / "c.bin")]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_tokenizer_commands(
    tmp_path: Path, small_bin: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["tokenizer", "write", "b.bin", "--tokenizer", "bytes"]) == 0
    data = Path("b.bin").read_bytes()
    assert struct.unpack("<4I", data[:16]) == (20240328, 2, 257, 256)
    assert data[1024:1028] == b"\x01\x00\x01\x01" and data.endswith(b"\x0d<|endoftext|>")
    assert main(["tokenizer", "write", "t.bin", "--tokenizer", str(small_bin)]) == 0
    assert Path("t.bin").read_bytes() == small_bin.read_bytes()
    assert main(["tokenizer", "write", "t.bin", "--tokenizer", str(small_bin)]) == 2
    assert "--force" in capsys.readouterr().err
    assert main(["tokenizer", "write", "n.bin", "--tokenizer", "none"]) == 2


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["prepare"], ["inspect"], ["tinyshakespeare"], ["tokenizer", "write"]):
        with pytest.raises(SystemExit) as caught:
            main([*arguments, "--help"])
        assert caught.value.code == 0
    for arguments in ([], ["no"], ["inspect"], ["list", "--no-such-flag"]):
        assert main(arguments) == 2 and len(capsys.readouterr().err.splitlines()) == 1
