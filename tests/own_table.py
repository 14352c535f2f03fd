"""A tokenizer of nobody else's with as many ids as GPT-2's: single bytes, then the pairs of bytes in an odd order."""

from pathlib import Path

from llmc_jax.data.tokenizers import END_OF_TEXT, Table, Tokenizer, table_tokenizer, write_tokenizer_bin

V = 50257
TEXT = "the cat sat on the mat, and then the dog sat on the cat. "
PADDED = 512  # the V of a model that has more rows than SMALL has ids


def pieces(size: int = V) -> tuple[bytes, ...]:
    singles = [bytes([value * 77 % 256]) for value in range(256)]
    pairs = [bytes([k * 31 % 256, (k // 256 * 57 + k) % 256]) for k in range(size - 257)]
    return (*singles, *pairs, END_OF_TEXT)


def made_tokenizer(size: int = V) -> Tokenizer:
    return table_tokenizer("own.bin", Table(pieces(size), size - 1), "own.bin")


def write_own(path: Path, size: int = V) -> Path:
    write_tokenizer_bin(path, pieces(size), size - 1)
    return path
