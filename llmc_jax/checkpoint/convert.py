"""The commands of convert_checkpoint.py: look into an llm.c model file, and turn one version into another.

Leaves out training states and Hugging Face files.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

import numpy as np

from llmc_jax.checkpoint.llmc import (
    CHUNK,
    STORAGE,
    V2_ORDERS,
    WRITABLE,
    ModelFile,
    Piece,
    dump_model,
    file_layout,
    make_header,
    new_model_file,
    read_model,
)
from llmc_jax.errors import InputError
from llmc_jax.stopping import open_missing_streams, print_error

DESCRIPTION = """\
Look into llm.c's model files (model_*.bin, gpt2_124M.bin) and convert between their versions.
Reads versions 1 to 5, writes 3 (fp32) and 5 (bf16). Training states and Hugging Face files are not understood."""


class Stats(NamedTuple):
    """What a tensor's values are like; min to std are of the finite ones (NaN where there are none)."""

    min: float
    max: float
    mean: float
    std: float
    nan: int
    inf: int


def _chunks(values: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, values.size, CHUNK):
        yield values[start : start + CHUNK]


def _finite_chunks(values: np.ndarray) -> Iterator[np.ndarray]:
    for chunk in _chunks(values):
        finite = chunk[np.isfinite(chunk)].astype(np.float64)
        if finite.size:
            yield finite


def tensor_stats(values: np.ndarray) -> Stats:
    """Statistics of a float32 array (1-D), accumulated in float64 a chunk at a time; two passes, so std is exact."""
    nan = sum(int(np.count_nonzero(np.isnan(chunk))) for chunk in _chunks(values))
    inf = sum(int(np.count_nonzero(np.isinf(chunk))) for chunk in _chunks(values))
    count = values.size - nan - inf
    if not count:
        return Stats(np.nan, np.nan, np.nan, np.nan, nan, inf)
    low = min(float(chunk.min()) for chunk in _finite_chunks(values))
    high = max(float(chunk.max()) for chunk in _finite_chunks(values))
    mean = sum(float(chunk.sum()) for chunk in _finite_chunks(values)) / count
    variance = sum(float(((chunk - mean) ** 2).sum()) for chunk in _finite_chunks(values)) / count
    return Stats(low, high, mean, variance**0.5, nan, inf)


def _headline(path: Path, model: ModelFile) -> str:
    words = STORAGE[model.version].words + (", layernorms at the end" if model.order == "end" else "")
    return f"{path}: llm.c model, version {model.version} ({words}), N={model.flat.size:,}"


def _table_row(piece: Piece, flat: np.ndarray) -> str:
    stats = tensor_stats(flat[piece.flat_offset : piece.flat_offset + piece.size])
    numbers = " ".join(f"{value:>11.4g}" for value in stats[:4])
    kind = "fp32" if piece.itemsize == 4 else "bf16"
    return (
        f"{piece.name:<9} {piece.shape!s:<18} {kind} {piece.file_offset:>14,} {numbers} {stats.nan:>7,} {stats.inf:>7,}"
    )


def inspect(path: Path, v2_order: str) -> None:
    """Print what a model file holds: its shape and, for each tensor in the file's order, place and statistics."""
    model = read_model(path, v2_order=v2_order)
    c = model.config
    print(_headline(path, model))
    print(
        f"max_seq_len {c.max_seq_len}, vocab_size {c.vocab_size} (padded {c.padded_vocab_size}), "
        f"num_layers {c.num_layers}, num_heads {c.num_heads}, channels {c.channels}, {path.stat().st_size:,} bytes"
    )
    extra = np.flatnonzero(model.header[8:]) + 8
    if extra.size:
        print(f"header ints that llm.c leaves zero: {', '.join(f'[{i}]={model.header[i]}' for i in extra[:8])}")
    print(
        f"\n{'tensor':<9} {'shape':<18} type {'byte':>14} {'min':>11} {'max':>11} {'mean':>11} {'std':>11} {'NaN':>7} "
        f"{'inf':>7}"
    )
    for piece in file_layout(c, model.version, model.order):
        print(_table_row(piece, model.flat))
    print()
    _print_warnings(model, sys.stdout)
    if not model.warnings:
        print("ok: every value is finite, and the padding rows of wte are zero")


def _print_warnings(model: ModelFile, stream: TextIO) -> None:
    for line in model.warnings:
        print(f"warning: {line}", file=stream)


def _largest_change(before: np.ndarray, after: np.ndarray, exact: bool) -> float | None:
    """The largest |after - before| / |before|, or None if after is not what before becomes in the new version.

    exact: the bits must agree. Otherwise after must be a neighbour of before in bf16: 8 significant bits, so within
    2^-8 of it, or within 2^-134 below the normal numbers, and infinite only from 2^128 - 2^119 up.
    """
    worst = 0.0
    for old, new in zip(_chunks(before), _chunks(after), strict=True):
        if exact:
            if not np.array_equal(old.view(np.uint32), new.view(np.uint32)):
                return None
            continue
        with np.errstate(invalid="ignore"):  # signalling NaNs
            x, y = old.astype(np.float64), new.astype(np.float64)
        finite = np.isfinite(x) & np.isfinite(y)
        overflow = np.isfinite(x) & np.isinf(y)
        kept = np.isnan(x) & np.isnan(y) | np.isinf(x) & (x == y)
        kept |= overflow & (np.abs(x) >= 2.0**128 - 2.0**119) & (np.sign(x) == np.sign(y))
        distance = np.abs(np.where(finite, y, 0) - np.where(finite, x, 0))
        near = distance <= np.maximum(np.abs(np.where(finite, x, 0)) * 2.0**-8, 2.0**-134)
        if not np.all(np.where(finite, near, kept)):
            return None
        if overflow.any():
            worst = np.inf
        nonzero = finite & (x != 0)
        worst = max(worst, float((distance[nonzero] / np.abs(x[nonzero])).max(initial=0.0)))
    return worst


def _check_written(written: Path, out: Path, model: ModelFile, version: int) -> str:
    """Read a file that was just written and say, in words, how it compares with the model; raise if it does not."""
    back = read_model(written)
    same_header = np.array_equal(back.header, make_header(model.config, version, model.header))
    change = _largest_change(model.flat, back.flat, exact=version == 3)
    if back.config != model.config or not same_header or change is None:
        raise InputError(f"{out}: not written: what was read back differs from what was written; is the disk sound?")
    if change == 0:
        return f"header right, all {back.flat.size:,} values equal"
    return f"header right, all {back.flat.size:,} values rounded to bf16, largest relative change {change:.2g}"


def convert(source: Path, out: Path, version: int, v2_order: str, force: bool) -> None:
    """Write a model file anew in another version; it appears as `out` once it was read back and compared."""
    if out.exists() and not force:
        raise InputError(f"{out}: exists already; --force replaces it")
    model = read_model(source, v2_order=v2_order)
    print(f"read    {_headline(source, model)}")
    _print_warnings(model, sys.stderr)
    with new_model_file(out) as temporary:
        with temporary.open("xb") as file:
            dump_model(file, model.config, model.flat, version, model.header)
        checked = _check_written(temporary, out, model, version)
    print(f"wrote   {out}: version {version} ({STORAGE[version].words}), {out.stat().st_size:,} bytes")
    print(f"checked {out}: read back, {checked}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="convert_checkpoint.py",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    look = commands.add_parser("inspect", help="print shape, tensors and their statistics", allow_abbrev=False)
    look.add_argument("file", type=Path, metavar="FILE")
    turn = commands.add_parser("convert", help="write a model file as version 3 or 5", allow_abbrev=False)
    turn.add_argument("source", type=Path, metavar="IN")
    turn.add_argument("out", type=Path, metavar="OUT")
    turn.add_argument("--version", type=int, required=True, choices=WRITABLE, help="3: fp32; 5: bf16")
    turn.add_argument("--force", action="store_true", help="replace OUT if it exists")
    for command in (look, turn):
        command.add_argument(
            "--v2-order",
            choices=V2_ORDERS,
            default="auto",
            help="where the layernorms of a version 2 file stand; auto tells by their values (default)",
        )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status: 0 done, 2 bad input (one line on stderr)."""
    open_missing_streams()
    args = _parser().parse_args(argv)
    try:
        if args.command == "inspect":
            inspect(args.file, args.v2_order)
        else:
            convert(args.source, args.out, args.version, args.v2_order, args.force)
    except InputError as error:
        print_error(f"convert_checkpoint.py: {error}")
        return 2
    return 0
