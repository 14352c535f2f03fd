"""What `inspect` says of token files, and the commands that show and convert."""

import os
import struct
from pathlib import Path
from typing import Any

import pytest

from llmc_jax.base.errors import FormatError
from llmc_jax.data.command import main
from llmc_jax.data.show import describe
from llmc_jax.data.tokenfile import KINDS, write_token_file


def told(path: str, **options: Any) -> dict[str, str]:
    """Return what `describe` says of a file, by the names of its lines."""
    rows = [line for line in describe(path, **options).splitlines()[1:] if not line.startswith("   ")]
    return {line[2:12].rstrip(): line[14:] for line in rows}


@pytest.mark.parametrize("kind", KINDS)
def test_an_inspection(kind: str) -> None:
    path = Path("a.bin")
    tokens = [256, *"née\n".encode(), 256, *b"x\x1b[0m"]
    write_token_file(path, tokens, kind)
    found = told("a.bin", show=7)
    assert (found["format"], found["tokens"]) == (f"{kind}, {path.stat().st_size:,} bytes", "12")
    assert (found["ids"], found["documents"]) == ("10 to 256 (V=257)", "2 (end-of-text id 256)")
    assert found["first ids"] == " ".join(map(str, tokens[:7]))
    assert describe(path, show=7).endswith("  first text  <|endoftext|>née\n              <|endoftext|>")
    assert told("a.bin", tokenizer="none", show=3)["first text"] == "256 110 195 "
    assert "\x1b" not in describe(path)


@pytest.mark.parametrize(
    ("highest", "vocab", "eot"), [(256, 257, 256), (257, 50257, 50256), (50256, 50257, 50256), (50257, 128256, 128000)]
)
def test_the_ids_suggest_a_vocabulary(highest: int, vocab: int, eot: int) -> None:
    write_token_file("a.bin", [eot, 5, eot, highest] if eot <= highest else [5, highest], "llama3-uint32")
    found = told("a.bin")
    assert f"(V={vocab})" in found["ids"] and f"id {eot})" in found["documents"]
    if vocab != 257:  # no table here: ids, and why
        assert found["first text"] == f"{found['first ids']} "
        assert "tokenizer" in found["tokenizer"]


def test_an_unusual_vocabulary_and_none() -> None:
    write_token_file(Path("a.bin"), [2**31, 5], "llama3-uint32")
    assert told("a.bin")["ids"] == f"5 to {2**31} (V={2**31 + 1})"
    write_token_file(Path("a.bin"), [])
    found = told("a.bin")
    assert [found[name] for name in ("tokens", "ids", "first ids")] == ["0", "none", ""]
    assert found["documents"].startswith("0 ")


def test_ids_beyond_the_vocabulary() -> None:
    write_token_file("a.bin", [1] * 9 + [300, 299])
    with pytest.raises(FormatError, match=r"token 9 \(byte 1042\) is id 300; with V=257 ids end at 256"):
        describe("a.bin", tokenizer="bytes")
    assert told("a.bin")["tokens"] == "11"


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
