"""llm.c's model files (magic 20240326): reads versions 1, 3 and 5, writes 3 (fp32) and 5 (bf16).

A file is 256 little-endian int32 (the header) and the 16 tensors, nothing between and nothing after them. bfloat16 is
handled as the upper 16 bits of a float32, so no bit of a weight is lost on the way in or out, be it a NaN's payload.
A file is read one layer of one tensor at a time, and written from one buffer or from pieces. Leaves out training
states, debug states and Llama 3 files.

    C channels, L layers, NH heads, V vocabulary, Vp padded vocabulary, N parameters
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

import numpy as np

from llmc_jax.base import magics
from llmc_jax.base.errors import FormatError, InputError
from llmc_jax.base.files import Stamp, complete_file, opened, reason, refuse_irregular, stamp_of
from llmc_jax.checkpoint.reading import (
    HEADER_BYTES,
    HEADER_INTS,
    Stored,
    Summed,
    check_size,
    chunks,
    not_finite,
    read_header_ints,
)
from llmc_jax.config.model import ModelConfig, ModelShape, pad_vocab
from llmc_jax.models.gpt2.tensors import BY_NAME
from llmc_jax.models.layout import num_parameters, tensor_specs, views

SHAPE_FIELDS = ("max_seq_len", "vocab_size", "num_layers", "num_heads", "channels")  # header ints 2..6
INT32_MAX = 2**31 - 1


# Of each version the dtype. 1, of llm.c's first weeks, holds V rows of wte, the others Vp. 2 and 4 existed for days.
DTYPES = {1: "fp32", 3: "fp32", 5: "bf16"}
WRITABLE = (3, 5)
FILES = "llm.c's files"


@dataclass(frozen=True)
class ModelFile:
    """A model file whose header was checked; its values are read when asked.

    header: (256,) int32, as in the file.
    """

    path: Path
    stamp: Stamp
    version: int
    config: ModelConfig
    header: np.ndarray

    @cached_property
    def tensors(self) -> dict[str, Stored]:
        """Return the 16 tensors by name, in the order and with the shapes that they have in the file."""
        found, offset = {}, HEADER_BYTES
        for spec in tensor_specs(self.config):
            unpadded = spec.name == "wte" and self.version == 1
            shape = (self.config.vocab_size, self.config.channels) if unpadded else spec.shape
            found[spec.name] = Stored(self.path, self.stamp, spec.name, self.dtype, shape, offset)
            offset = found[spec.name].end
        return found

    @property
    def size(self) -> int:
        """Return the bytes that such a file must have, in Python integers, which no header overflows."""
        return max(tensor.end for tensor in self.tensors.values())

    @property
    def dtype(self) -> str:
        """Return the dtype of the weights, "fp32" or "bf16"."""
        return DTYPES[self.version]

    def read(self, tensor: str, layer: int = 0) -> np.ndarray:
        """Return one layer of a tensor, or the whole of one without layers, float32 in its own shape; of wte Vp rows.

        Takes the memory of the slice. Raises FormatError if the file changed since it was opened.
        """
        stored = self.tensors[tensor]
        if BY_NAME[tensor].layered:
            return stored.layer(layer)
        return with_padding(stored.whole(), self.config) if tensor == "wte" else stored.whole()


def shape_words(config: ModelConfig) -> str:
    """Return the shape that decides how long a file is, for messages."""
    c = config
    return f"L={c.num_layers} C={c.channels} V={c.vocab_size} Vp={c.padded_vocab_size} T={c.max_seq_len}"


def with_padding(wte: np.ndarray, config: ModelConfig) -> np.ndarray:
    """Return wte (Vp, C), float32, from its first rows: those of the padded vocabulary are zero."""
    missing = config.padded_vocab_size - len(wte)
    return np.pad(wte, ((0, missing), (0, 0))) if missing else wte


def bf16_to_fp32(bits: np.ndarray) -> np.ndarray:
    """Return float32 values of bfloat16 bit patterns (uint16, any shape). Exact: one is a float32's upper half."""
    return (np.asarray(bits, np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def widened(values: np.ndarray) -> np.ndarray:
    """Return a float32, bfloat16 or float16 array as float32, exactly, bfloat16 on the bits; float32 as it is."""
    if values.dtype in (np.float32, np.float16):
        return values.astype(np.float32, copy=False)
    return bf16_to_fp32(np.ascontiguousarray(values).view(np.uint16))


def fp32_to_bf16(values: np.ndarray) -> np.ndarray:
    """Return bfloat16 bit patterns (uint16) of float32 values, rounded to nearest, ties to even.

    Values beyond the largest bfloat16 become infinite, as IEEE 754 rounds. A NaN stays a NaN and keeps the upper 7 bits
    of its payload (PyTorch would write 0x7FC0 for each); where those are all zero the quiet bit is set, since the
    pattern would otherwise mean infinity.
    """
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    upper = bits >> np.uint32(16)
    # Adding 0x7FFF, or 0x8000 where the last kept bit is odd, carries into the upper half exactly when that is nearest.
    rounded = (bits + (np.uint32(0x7FFF) + (upper & np.uint32(1)))) >> np.uint32(16)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    payload_lost = (upper & np.uint32(0x7F)) == 0
    nan = np.where(payload_lost, upper | np.uint32(0x40), upper)
    return np.where(is_nan, nan, rounded).astype(np.uint16)


def open_model(path: str | Path) -> ModelFile:
    """Check the header of an llm.c model file, and the file's size against it. Reads 1024 bytes.

    Raises FormatError if the file is missing, no llm.c model file, of another version, or not as long as it says.
    Source: llm.c train_gpt2.py, `write_model`, and its history of April 2024 for version 1.
    """
    path = Path(path)
    with opened(path) as file:
        header, stamp = read_header_ints(file, path, magics.MODEL, "an llm.c model file"), stamp_of(file)
    version = int(header[1])
    if version not in DTYPES:
        raise FormatError(f"{path}: version {version} (header int 1) cannot be read; expected 1, or 3 or 5 as today")
    shape = dict(zip(SHAPE_FIELDS, header[2:7].tolist(), strict=True))
    padded = pad_vocab(shape["vocab_size"]) if version == 1 else int(header[7])
    try:
        config = ModelConfig(padded_vocab_size=padded, **shape)
    except InputError as error:
        raise FormatError(f"{path}: header ints 2 to {6 if version == 1 else 7}: {error}") from None
    model = ModelFile(path, stamp, version, config, header)
    words = f"a version {version} model with {shape_words(config)}"
    check_size(path, stamp.size, model.size, words, "its header is wrong")
    return model


def warnings_of(flat: np.ndarray, config: ModelShape) -> tuple[str, ...]:
    """Return what the N weights of a flat buffer hold that a sound model never does; see `oddities`."""
    tensors = views(flat, config)._asdict()
    return oddities(config, {name: sum(map(not_finite, chunks(each.reshape(-1)))) for name, each in tensors.items()})


def oddities(config: ModelShape, bad: Mapping[str, int]) -> tuple[str, ...]:
    """Return a warning for each tensor with values that are not finite. bad: how many each has."""
    sizes = {spec.name: spec.size for spec in tensor_specs(config)}
    return tuple(
        f"{name}: {count:,} of {sizes[name]:,} values are NaN or infinite" for name, count in bad.items() if count
    )


@contextmanager
def new_file(path: str | Path) -> Iterator[Path]:
    """Yield a path to write to; at the end it becomes `path`, whole. Raises InputError if that cannot be written."""
    path = Path(path)
    refuse_irregular(path)
    if not path.parent.is_dir():
        raise InputError(f"{path}: cannot be written: there is no folder {path.parent}; make it first")
    try:
        with complete_file(path) as temporary:
            yield temporary
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {reason(error)}") from error


def make_header(config: ModelConfig, version: int, header: np.ndarray | None = None) -> np.ndarray:
    """Return the 256 int32 of a header: ints 0..7 from the arguments, the others from `header` (zero without one)."""
    assert version in WRITABLE, version
    fields = [magics.MODEL, version, *(getattr(config, name) for name in SHAPE_FIELDS), config.padded_vocab_size]
    ints = np.zeros(HEADER_INTS, np.int32) if header is None else np.array(header, np.int32)
    assert ints.shape == (HEADER_INTS,)
    ints[:8] = fields
    return ints


def dump_pieces(
    file: BinaryIO | Summed, config: ModelConfig, pieces: Iterable[np.ndarray], version: int, header: np.ndarray | None
) -> None:
    """Write a model to an open file from float32 arrays that make up the N parameters, in the order of Params.

    The other arguments are write_model's.
    """
    file.write(make_header(config, version, header).astype("<i4").tobytes())
    missing = num_parameters(config)
    for piece in pieces:
        assert piece.dtype == np.float32, piece.dtype
        flat = np.ascontiguousarray(piece).reshape(-1)
        missing -= flat.size
        for part in chunks(flat):
            file.write((part.view(np.uint32).astype("<u4") if version == 3 else fp32_to_bf16(part).astype("<u2")).data)
    assert missing == 0, missing


def write_model(
    path: str | Path, config: ModelConfig, flat: np.ndarray, *, version: int = 3, header: np.ndarray | None = None
) -> None:
    """Write a model as an llm.c model file, version 3 (fp32) or 5 (bf16, rounded to nearest even).

    flat: float32, the N parameters in the order of Params; what lies beyond N (the buffer's padding) is not
    written. header: 256 int32 of a file read before, whose ints from 8 on are kept. The file appears under its name
    only when it is complete and on the disk.

    Raises InputError if it cannot be written (folder missing, no permission, disk full).
    Source: llm.c train_gpt2.cu, `gpt2_write_to_checkpoint`.
    """
    with new_file(path) as temporary, temporary.open("xb") as file:
        dump_pieces(file, config, [flat[: num_parameters(config)]], version, header)
