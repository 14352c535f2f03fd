"""What `inspect` says of token files, and the commands that show and convert."""

import os
import struct
from pathlib import Path

import pytest

from llmc_jax.base.errors import FormatError
from llmc_jax.data.command import main
from llmc_jax.data.show import describe, inspect_token_file
from llmc_jax.data.tokenfile import KINDS, write_token_file


@pytest.mark.parametrize("kind", KINDS)
def test_an_inspection(kind: str) -> None:
    path = Path("a.bin")
    tokens = [256, *"née\n".encode(), 256, *b"x\x1b[0m"]
    write_token_file(path, tokens, kind)
    found = inspect_token_file(path, show=7)
    assert (found.kind, found.size, found.tokens) == (kind, path.stat().st_size, 12)
    assert (found.lowest, found.highest, found.documents, found.eot, found.vocab) == (10, 256, 2, 256, 257)
    assert (found.first, found.text) == (tokens[:7], "<|endoftext|>née\n<|endoftext|>")
    assert "née\n              <|endoftext|>" in describe(found)
    assert inspect_token_file(path, tokenizer="none", show=3).text == "256 110 195 "
    assert "\x1b" not in inspect_token_file(path).text


@pytest.mark.parametrize(
    ("highest", "vocab", "eot"), [(256, 257, 256), (257, 50257, 50256), (50256, 50257, 50256), (50257, 128256, 128000)]
)
def test_the_ids_suggest_a_vocabulary(highest: int, vocab: int, eot: int) -> None:
    write_token_file("a.bin", [eot, 5, eot, highest] if eot <= highest else [5, highest], "llama3-uint32")
    found = inspect_token_file("a.bin")
    assert (found.vocab, found.eot) == (vocab, eot)
    if vocab != 257:  # no table here: ids, and why
        assert found.text == "".join(f"{token} " for token in found.first)
        assert "tokenizer" in found.note


def test_an_unusual_vocabulary_and_none() -> None:
    write_token_file(Path("a.bin"), [2**31, 5], "llama3-uint32")
    assert inspect_token_file("a.bin").vocab == 2**31 + 1
    write_token_file(Path("a.bin"), [])
    found = inspect_token_file(Path("a.bin"))
    assert (found.tokens, found.lowest, found.documents, found.first) == (0, -1, 0, [])
    assert "none" in describe(found)


def test_ids_beyond_the_vocabulary() -> None:
    write_token_file("a.bin", [1] * 9 + [300, 299])
    with pytest.raises(FormatError, match=r"token 9 \(byte 1042\) is id 300; with V=257 ids end at 256"):
        inspect_token_file("a.bin", tokenizer="bytes")
    assert inspect_token_file("a.bin").tokens == 11


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    write_token_file(Path("a.bin"), [256, *b"hello"])
    write_token_file(Path("b.bin"), [256, *b"world"])
    assert main(["inspect", "*.bin", "--first", "4"]) == 0
    shown = capsys.readouterr().out
    assert "<|endoftext|>hel\n" in shown and "<|endoftext|>wor\n" in shown
    assert main(["inspect", "c.bin"]) == 2
    Path("c.bin").write_bytes(b"abc")
    assert main(["inspect", "c.bin"]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_tokenizer_commands(small_bin: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tokenizer", "write", "b.bin", "--tokenizer", "bytes"]) == 0
    data = Path("b.bin").read_bytes()
    assert struct.unpack("<4I", data[:16]) == (20240328, 2, 257, 256)
    assert data[1024:1028] == b"\x01\x00\x01\x01" and data.endswith(b"\x0d<|endoftext|>")
    assert main(["tokenizer", "write", "t.bin", "--tokenizer", str(small_bin)]) == 0
    assert Path("t.bin").read_bytes() == small_bin.read_bytes()
    assert sorted(os.listdir()) == ["b.bin", "t.bin"]
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
