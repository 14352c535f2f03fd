"""llm.c's model files (magic 20240326): reads versions 1 to 5, writes versions 3 (fp32) and 5 (bf16).

A file is 256 little-endian int32 (the header) and the 16 tensors, nothing between and nothing after them. bfloat16 is
handled as the upper 16 bits of a float32, so no bit of a weight is lost on the way in or out, be it a NaN's payload.
A file is read whole (`read_model`) or one layer of one tensor at a time (`open_model`), and written from one buffer or
from pieces. Leaves out training states, debug states and Llama 3 files.

    C channels, L layers, NH heads, V vocabulary, Vp padded vocabulary, N parameters
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from llmc_jax import magics
from llmc_jax.checkpoint.binary import HEADER_BYTES, HEADER_INTS, Summed, read_header_ints
from llmc_jax.checkpoint.reading import CHUNK, Stamp, chunks, not_finite, opened, read_float32, stamp_of
from llmc_jax.config.model import ModelConfig, pad_vocab
from llmc_jax.errors import FormatError, InputError
from llmc_jax.files import complete_file, reason
from llmc_jax.models.gpt2.tensors import BY_NAME, num_parameters, tensor_specs

SHAPE_FIELDS = ("max_seq_len", "vocab_size", "num_layers", "num_heads", "channels")  # header ints 2..6
INT32_MAX = 2**31 - 1

V2_ORDERS = ("auto", "in-place", "end")


class Storage(NamedTuple):
    """What a version number means: bytes per layernorm value and per other value, and whether wte holds Vp rows."""

    layernorm_bytes: int
    other_bytes: int
    padded: bool
    words: str


STORAGE = {
    1: Storage(4, 4, False, "fp32, vocabulary not padded"),
    2: Storage(4, 2, False, "bf16 with fp32 layernorms, vocabulary not padded"),
    3: Storage(4, 4, True, "fp32"),
    4: Storage(4, 2, True, "bf16 with fp32 layernorms"),
    5: Storage(2, 2, True, "bf16"),
}
WRITABLE = (3, 5)


class Header(NamedTuple):
    """A checked header. ints: the 256 int32 as they stand in the file."""

    version: int
    config: ModelConfig
    ints: np.ndarray  # (256,) int32


class Piece(NamedTuple):
    """One tensor of a file: its shape there, bytes per value, byte offset in the file, element offset in the buffer."""

    name: str
    shape: tuple[int, ...]
    itemsize: int
    file_offset: int
    flat_offset: int
    size: int

    @property
    def dtype(self) -> str:
        return "fp32" if self.itemsize == 4 else "bf16"


class ModelFile(NamedTuple):
    """A model as read. order: where the layernorms stood ("end" only in version 2); warnings: one line each."""

    config: ModelConfig
    header: np.ndarray  # (256,) int32, as in the file
    version: int
    flat: np.ndarray  # (N,) float32, in the order of params.Params, wte padded to Vp rows
    order: str
    warnings: tuple[str, ...]


def bf16_to_fp32(bits: np.ndarray) -> np.ndarray:
    """Return float32 values of bfloat16 bit patterns (uint16, any shape). Exact: one is a float32's upper half."""
    return (np.asarray(bits, np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


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


def body_bytes(config: ModelConfig, version: int) -> int:
    """Return the bytes of the 16 tensors in a file of this version, in Python integers, which no header overflows."""
    return sum(piece.size * piece.itemsize for piece in file_layout(config, version))


def file_layout(config: ModelConfig, version: int, order: str = "in-place") -> tuple[Piece, ...]:
    """Return the 16 tensors in the order of the file. order: "in-place", or "end": the layernorms follow all others."""
    storage = STORAGE[version]
    specs = list(tensor_specs(config))
    if order == "end":
        specs.sort(key=lambda spec: BY_NAME[spec.name].kind == "layernorm")  # stable: both halves keep their own order
    pieces = []
    file_offset = HEADER_BYTES
    for spec in specs:
        shape = (config.vocab_size, config.channels) if spec.name == "wte" and not storage.padded else spec.shape
        size = shape[0] * (spec.size // spec.shape[0])
        itemsize = storage.layernorm_bytes if BY_NAME[spec.name].kind == "layernorm" else storage.other_bytes
        pieces.append(Piece(spec.name, shape, itemsize, file_offset, spec.offset, size))
        file_offset += size * itemsize
    return tuple(pieces)


def _parse_config(path: Path, ints: list[int], version: int) -> ModelConfig:
    shape = dict(zip(SHAPE_FIELDS, ints[2:7], strict=True))
    for index, (name, value) in enumerate(shape.items(), start=2):
        if value < 1:
            raise FormatError(f"{path}: header int {index} ({name}) is {value}; it must be at least 1")
    if shape["channels"] % shape["num_heads"]:
        raise FormatError(
            f"{path}: channels C={shape['channels']} (header int 6) is not a multiple of NH={shape['num_heads']} heads "
            "(int 5)"
        )
    padded = ints[7] if STORAGE[version].padded else pad_vocab(shape["vocab_size"])
    if padded < shape["vocab_size"]:
        raise FormatError(
            f"{path}: padded vocabulary Vp={padded} (header int 7) is smaller than V={shape['vocab_size']}; "
            f"version {version} stores Vp, usually V rounded up to a multiple of 128"
        )
    return ModelConfig(padded_vocab_size=padded, **shape)


def _check_size(path: Path, found: int, config: ModelConfig, version: int) -> None:
    expected = HEADER_BYTES + body_bytes(config, version)
    if found == expected:
        return
    fits = [v for v in STORAGE if HEADER_BYTES + body_bytes(config, v) == found]
    if fits:
        cause = f"that is the size of version {' or '.join(map(str, fits))}, so the version (header int 1) is wrong"
    else:
        cause = f"the file is {'cut off' if found < expected else 'too long'}, or its header is wrong"
    c = config
    raise FormatError(
        f"{path}: {found:,} bytes, but a version {version} model with L={c.num_layers} C={c.channels} V={c.vocab_size} "
        f"Vp={c.padded_vocab_size} T={c.max_seq_len} takes {expected:,}: {cause}"
    )


def _read_header(file: BinaryIO, path: Path) -> Header:
    ints = read_header_ints(file, path, magics.MODEL, "an llm.c model file")
    version = int(ints[1])
    if version not in STORAGE:
        raise FormatError(f"{path}: version {version} (header int 1) is unknown; llm.c's model files have 1 to 5")
    config = _parse_config(path, ints.tolist(), version)
    _check_size(path, stamp_of(file).size, config, version)
    return Header(version, config, ints)


def read_header(path: str | Path) -> Header:
    """Return the header of an llm.c model file, checked, and the file's size against it. Reads 1024 bytes.

    Raises FormatError if the file is missing, no llm.c model file, of an unknown version, or not as long as it says.
    Source: llm.c train_gpt2.py, `write_model`.
    """
    path = Path(path)
    with opened(path) as file:
        return _read_header(file, path)


def _plausible_share(file: BinaryIO, path: Path, config: ModelConfig, order: str) -> float:
    """Return the share of ln1w and ln2w, read by an order, that could be layernorm weights: 0.001 to 100."""
    good = total = 0
    for piece in file_layout(config, 2, order):
        if piece.name in ("ln1w", "ln2w"):
            values = np.empty(piece.size, np.float32)
            read_float32(file, path, piece.file_offset, piece.dtype, values)
            good += int(np.count_nonzero((values >= 1e-3) & (values <= 100)))
            total += piece.size
    return good / total


def _guess_v2_order(file: BinaryIO, path: Path, config: ModelConfig) -> str:
    """Return which of its two orders a version 2 file has.

    Layernorm weights start at 1, and hardly any turns negative in training. Read by the wrong order they come from the
    bf16 matrices, where half of the values are negative, so at most about half look right.
    """
    share = {order: _plausible_share(file, path, config, order) for order in ("in-place", "end")}
    for order, other in (("in-place", "end"), ("end", "in-place")):
        if share[order] >= 0.9 and share[other] <= 0.75:
            return order
    raise FormatError(
        f"{path}: version 2 has two tensor orders, and the layernorm weights do not tell which this is (plausible: "
        f'{share["in-place"]:.0%} in place, {share["end"]:.0%} at the end); say it: v2_order="in-place" or "end" '
        "(--v2-order)"
    )


class OpenModel(NamedTuple):
    """A model file to be read slice by slice. order: where the layernorms stand ("end" only in version 2)."""

    path: Path
    header: Header
    order: str
    pieces: dict[str, Piece]  # by name, in the order of the file
    stamp: Stamp


def open_model(path: str | Path, *, v2_order: str = "auto") -> OpenModel:
    """Check an llm.c model file of version 1 to 5 without reading its weights; `read_slice` gives them.

    Raises what `read_model` raises.
    """
    if v2_order not in V2_ORDERS:
        raise InputError(f"v2_order {v2_order!r}: expected one of {', '.join(V2_ORDERS)}")
    path = Path(path)
    with opened(path) as file:
        header = _read_header(file, path)
        order = v2_order if header.version == 2 else "in-place"
        if order == "auto":
            order = _guess_v2_order(file, path, header.config)
        pieces = {piece.name: piece for piece in file_layout(header.config, header.version, order)}
        return OpenModel(path, header, order, pieces, stamp_of(file))


def read_slice(model: OpenModel, tensor: str, layer: int = 0) -> np.ndarray:
    """Return one layer of a tensor, or the whole of one without layers (wte with Vp rows), float32 in its own shape.

    Takes the memory of the slice. Raises FormatError if the file changed since it was opened.
    """
    piece, config = model.pieces[tensor], model.header.config
    layered = BY_NAME[tensor].layered
    layers = config.num_layers if layered else 1
    assert 0 <= layer < layers, (tensor, layer)
    shape = piece.shape[1:] if layered else piece.shape
    rows = config.padded_vocab_size if tensor == "wte" else shape[0]
    out = np.zeros((rows, *shape[1:]), np.float32)
    count = piece.size // layers
    with opened(model.path, model.stamp) as file:
        offset = piece.file_offset + layer * count * piece.itemsize
        read_float32(file, model.path, offset, piece.dtype, out.reshape(-1)[:count])
    return out


def _warnings(flat: np.ndarray, config: ModelConfig) -> tuple[str, ...]:
    """Return what is allowed in a file, but never there in a sound one; see `oddities`."""
    bad = {}
    for spec in tensor_specs(config):
        values = flat[spec.offset : spec.offset + spec.size]
        bad[spec.name] = sum(map(not_finite, chunks(values)))
    C = config.channels
    extra = flat[config.vocab_size * C : config.padded_vocab_size * C].reshape(-1, C)
    rows = max(1, CHUNK // C)
    dirty = sum(map(dirty_rows, (extra[row : row + rows] for row in range(0, len(extra), rows))))
    return oddities(config, bad, dirty)


def dirty_rows(rows: np.ndarray) -> int:
    """Return how many rows hold anything but zeros."""
    return int(np.count_nonzero((rows != 0).any(axis=1)))


def oddities(config: ModelConfig, bad: Mapping[str, int], dirty: int, more: str = "") -> tuple[str, ...]:
    """Say what a sound model never holds: values that are not finite, by tensor, and padding rows that are not zero."""
    sizes = {spec.name: spec.size for spec in tensor_specs(config)}
    found = [f"{name}: {count:,} of {sizes[name]:,} values are NaN or infinite" for name, count in bad.items() if count]
    V, Vp = config.vocab_size, config.padded_vocab_size
    if dirty:
        found.append(f"wte: {dirty:,} of the {Vp - V:,} padding rows (V={V} to Vp-1={Vp - 1}) are not zero{more}")
    return tuple(found)


def read_model(path: str | Path, *, v2_order: str = "auto") -> ModelFile:
    """Read an llm.c model file of version 1 to 5 into one flat float32 buffer of N elements.

    Versions 1 and 2 hold V rows of wte; they are padded with zero rows to the next multiple of 128. v2_order matters
    for version 2 alone: "in-place" or "end" says where its layernorms stand, "auto" finds out from their values.
    Takes the memory of the buffer and a few chunks. NaN, infinities and padding rows that are not zero are kept and
    reported in `warnings`.

    Raises FormatError if the file is missing, cut off, too long or otherwise not what its header says, or if a version
    2 file's order is unclear; InputError if v2_order is none of the three.
    Source: llm.c train_gpt2.py, `write_model`, and its history of April 2024 for versions 1, 2 and 4.
    """
    model = open_model(path, v2_order=v2_order)
    version, config, ints = model.header
    flat = np.zeros(num_parameters(config), np.float32)
    with opened(model.path, model.stamp) as file:
        for piece in model.pieces.values():
            out = flat[piece.flat_offset : piece.flat_offset + piece.size]
            read_float32(file, model.path, piece.file_offset, piece.dtype, out)
    return ModelFile(config, ints, version, flat, model.order, _warnings(flat, config))


@contextmanager
def new_model_file(path: str | Path) -> Iterator[Path]:
    """Write a model through `files.complete_file`: what cannot be written becomes an InputError that names `path`."""
    path = Path(path)
    if path.is_dir():
        raise InputError(f"{path}: cannot be written: it is a folder; give a file name")
    if not path.parent.is_dir():
        raise InputError(f"{path}: cannot be written: there is no folder {path.parent}; make it first")
    try:
        with complete_file(path) as temporary:
            yield temporary
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {reason(error)}") from error


def make_header(config: ModelConfig, version: int, header: np.ndarray | None = None) -> np.ndarray:
    """Return the 256 int32 of a header: ints 0..7 from the arguments, the others from `header` (zero without one)."""
    if version not in WRITABLE:
        raise InputError(f"llm.c model file version {version}: can write 3 (fp32) and 5 (bf16)")
    fields = [magics.MODEL, version, *(getattr(config, name) for name in SHAPE_FIELDS), config.padded_vocab_size]
    if max(fields) > INT32_MAX:
        raise InputError(f"{config}: the header of an llm.c model file holds numbers up to {INT32_MAX:,}")
    ints = np.zeros(HEADER_INTS, np.int32) if header is None else np.array(header, np.int32)
    assert ints.shape == (HEADER_INTS,)
    ints[:8] = fields
    return ints


def dump_pieces(
    file: BinaryIO | Summed, config: ModelConfig, pieces: Iterable[np.ndarray], version: int, header: np.ndarray | None
) -> None:
    """Write a model to an open file from float32 arrays that make up the N parameters, in the order of params.Params.

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

    flat: float32, the N parameters in the order of params.Params; what lies beyond N (the buffer's padding) is not
    written. header: 256 int32 of a file read before, whose ints from 8 on are kept. The file appears under its name
    only when it is complete and on the disk.

    Raises InputError if it cannot be written (folder missing, no permission, disk full) or version is neither.
    Source: llm.c train_gpt2.cu, `gpt2_write_to_checkpoint`.
    """
    with new_model_file(path) as temporary, temporary.open("xb") as file:
        dump_pieces(file, config, [flat[: num_parameters(config)]], version, header)
