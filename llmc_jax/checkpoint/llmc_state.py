"""llm.c's training state, read and written: `state_%08d_%05d.bin` of each rank, `model_%08d.bin` and `DONE_%08d`.

Leaves out the model file itself (llmc.py) and our own checkpoints (store.py): what goes between the two is named arrays
and facts, as store.py takes and gives them.

    C channels, L layers, N parameters, n processes

A state file is little-endian, as train_gpt2.cu's `save_state` leaves it on a 64-bit machine:

    byte     0  int32     magic 20240527
             4  int32     version 1
             8  int32     n, processes               12  int32     rank
            16  int32     1: there are master weights, which is -w 1, the default, in fp32 as well
            20  int32     1: the loader shuffles, the default; 0 with -a 1
            40  int32     step
            80  uint64    rng_state                  88  uint64    rng_state_last_update
           120  uint64    current_shard_idx         128  uint64    current_sample_idx
          1024  float32   m, v and, if there are, master weights: S values each
           ...  only if the loader shuffles:
                uint64    shards, int32 shard_indices[shards], uint64 samples, int32 intra_shard_indices[samples]
                2520 bytes of mt19937_state: uint64 seed_ (never set: whatever lay in memory), int32 left_ at 8, uint32
                next_ at 12, uint32 state_[624] at 16, uint32 MATRIX_A[2] at 2512 (0 and 0x9908b0df)

S is N, or N/n where ZeRO-1 shared them out; no field says which, the size does. Then a rank holds, of each tensor in
order and of each of its layers, the rank-th n-th part: its share of a tensor at offset o stands at o/n.

The stream: n draws after the words were made, next_ is n and left_ is 625 - n, so NumPy's `pos` is next_. Freshly
seeded, left_ is 1 and next_ 0 where `pos` is 624: the same stream, since left_ = 1 makes new words before a draw.

rng_state, of stochastic rounding, is xorshift64* from 13371337 + rank: one draw in each micro-step's backward and, in
each update, one for each of the 16 tensors; rng_state_last_update is how it was before those 16. llm.c rounds the
16-bit weights from the master weights again with that, and does not read those of the model file.
"""

import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np

from llmc_jax import magics
from llmc_jax.checkpoint import llmc
from llmc_jax.checkpoint.binary import HEADER_BYTES, Values, read_at, read_header_ints
from llmc_jax.checkpoint.llmc import UNLAYERED
from llmc_jax.checkpoint.reading import opened, stamp_of
from llmc_jax.config import ModelConfig
from llmc_jax.errors import FormatError
from llmc_jax.params import TensorSpec, num_parameters, tensor_specs
from llmc_jax.rng import MT_WORDS, seed_words

if TYPE_CHECKING:
    from llmc_jax.checkpoint.sources import Source

WHAT = "a training state of llm.c"
VERSION = 1
GROUPS = ("m", "v", "params")  # in the order of the file; params: the master weights

# places in the header, as int32
PROCESSES, RANK, MASTER, SHUFFLE, STEP = 2, 3, 4, 5, 10
RNG_STATE, RNG_LAST_UPDATE, SHARD_INDEX, SAMPLE_INDEX = 20, 22, 30, 32  # two int32 each: a uint64

MT_BYTES = 2520
MATRIX_A = (0, 0x9908B0DF)

MODEL_NAME, STATE_NAME, DONE_NAME = "model_{:08d}.bin", "state_{:08d}_{:05d}.bin", "DONE_{:08d}"


class Loader(NamedTuple):
    """What a state file says of a shuffling loader. shuffle_rng: the 2520 bytes of its mt19937_state."""

    shard_indices: np.ndarray  # (shards,) int32, a permutation
    sample_indices: np.ndarray  # (samples,) int32, a permutation: the order within the current shard
    shuffle_rng: bytes


class StateFile(NamedTuple):
    """One rank's state file, checked; m, v and master are read when asked."""

    path: Path
    header: np.ndarray  # (256,) int32, as in the file
    num_processes: int
    rank: int
    use_master_weights: bool
    should_shuffle: bool
    step: int
    rng_state: int
    rng_state_last_update: int
    current_shard_idx: int
    current_sample_idx: int
    sharded: bool  # ZeRO-1: of each layer of each tensor, only this rank's n-th part
    m: Values
    v: Values
    master: Values | None
    loader: Loader | None  # None: not shuffling


def _uint64(header: np.ndarray, index: int) -> int:
    return int(header[index : index + 2].astype("<i4").view("<u8")[0])


def _flag(path: Path, header: np.ndarray, index: int, name: str) -> bool:
    value = int(header[index])
    if value not in (0, 1):
        raise FormatError(f"{path}: header int {index} ({name}) is {value}; it must be 0 or 1")
    return value == 1


def _check_counts(path: Path, header: np.ndarray) -> None:
    if header[1] != VERSION:
        raise FormatError(f"{path}: version {header[1]} (header int 1) is unknown; llm.c's training states have 1")
    if header[PROCESSES] < 1:
        raise FormatError(f"{path}: header int 2 (num_processes) is {header[PROCESSES]}; it must be at least 1")
    if not 0 <= header[RANK] < header[PROCESSES]:
        raise FormatError(
            f"{path}: header int 3 (rank) is {header[RANK]}; of {header[PROCESSES]} processes it must be 0 to "
            f"{header[PROCESSES] - 1}"
        )
    if header[STEP] < 0:
        raise FormatError(f"{path}: header int 10 (step) is {header[STEP]}; it must be at least 0")


def _permutation(file: BinaryIO, path: Path, offset: int, name: str) -> tuple[np.ndarray, int]:
    """A uint64 count and that many int32 that permute 0 … count - 1; also the offset behind them."""
    size = stamp_of(file).size
    if offset + 8 > size:
        raise FormatError(f"{path}: ends at byte {size:,} before {name}; copy it again")
    (count,) = struct.unpack("<Q", read_at(file, path, offset, 8))
    if not 1 <= count <= (size - offset - 8) // 4:
        raise FormatError(
            f"{path}: byte {offset:,}: {count:,} {name}, but {size - offset - 8:,} bytes follow; the file is cut off, "
            "or belongs to another model"
        )
    order = np.frombuffer(read_at(file, path, offset + 8, 4 * count), "<i4").astype(np.int32)
    if not np.array_equal(np.sort(order), np.arange(count)):
        raise FormatError(f"{path}: byte {offset + 8:,}: {name} are not 0 to {count - 1} in some order; it is damaged")
    return order, offset + 8 + 4 * count


def _read_loader(file: BinaryIO, path: Path, offset: int) -> Loader:
    """The loader's part, which must end with the file."""
    shards, offset = _permutation(file, path, offset, "shard_indices")
    samples, offset = _permutation(file, path, offset, "intra_shard_indices")
    size, expected = stamp_of(file).size, offset + MT_BYTES
    if size != expected:
        raise FormatError(
            f"{path}: {size:,} bytes; with {len(shards):,} shards and {len(samples):,} samples it should have "
            f"{expected:,}; copy it again"
        )
    rng = read_at(file, path, offset, MT_BYTES)
    try:
        mt_to_numpy(rng)
    except ValueError as error:
        raise FormatError(f"{path}: byte {offset:,}: {error}") from None
    return Loader(shards, samples, rng)


def mt_to_numpy(raw: bytes) -> dict[str, Any]:
    """`rng.Mt19937.state()` of the 2520 bytes of an mt19937_state. Raises ValueError if it is damaged."""
    left, position = struct.unpack_from("<iI", raw, 8)
    key = np.frombuffer(raw, "<u4", MT_WORDS, 16).astype(np.uint32)
    if struct.unpack_from("<2I", raw, MT_BYTES - 8) != MATRIX_A:
        raise ValueError("MATRIX_A of the shuffling stream is not 0 and 0x9908b0df; it is damaged")
    if (left, position) == (1, 0):  # seeded, and nothing drawn yet
        if not np.array_equal(key, seed_words(int(key[0]))):
            raise ValueError("the shuffling stream is at its beginning, but its words come from no seed; it is damaged")
        position = MT_WORDS
    elif not 1 <= position <= MT_WORDS or left != MT_WORDS + 1 - position:
        raise ValueError(
            f"left_ is {left} and next_ {position} in the shuffling stream; they must add up to 625; it is damaged"
        )
    return {"key": key.tolist(), "pos": position, "next_normal": None}


def mt_from_numpy(state: Mapping[str, Any], seed_bytes: bytes = bytes(8)) -> bytes:
    """The 2520 bytes of llm.c's mt19937_state in the place of `rng.Mt19937.state()`; seed_bytes: its first 8."""
    key, position = np.array(state["key"], np.uint32), int(state["pos"])
    left, following = MT_WORDS + 1 - position, position
    if position == MT_WORDS and np.array_equal(key, seed_words(int(key[0]))):
        following = 0
    counters = struct.pack("<iI", left, following)
    return seed_bytes + counters + key.astype("<u4").tobytes() + struct.pack("<2I", *MATRIX_A)


def read_state_file(path: str | Path, config: ModelConfig) -> StateFile:
    """One rank's training state, which belongs to a model of this shape. Reads the header and the loader's part.

    How many parameters the file holds follows from the shape, the header's processes and the file's size: all N, or
    N / n where ZeRO-1 shared them out. Raises FormatError if the file is missing, no such state, damaged, or does not
    fit the shape. Source: llm.c train_gpt2.cu, `save_state` and `load_state`.
    """
    path = Path(path)
    with opened(path) as file:
        header = read_header_ints(file, path, magics.TRAINING_STATE, WHAT)
        _check_counts(path, header)
        master = _flag(path, header, MASTER, "use_master_weights")
        shuffle = _flag(path, header, SHUFFLE, "should_shuffle")
        count, loader = _read_body(file, path, config, int(header[PROCESSES]), 3 if master else 2, shuffle)
        stamp = stamp_of(file)
    starts = [HEADER_BYTES + 4 * count * i for i in range(3)]
    values = [Values(path, stamp, start, count) for start in starts]
    state = StateFile(
        path, header, int(header[PROCESSES]), int(header[RANK]), master, shuffle, int(header[STEP]),
        _uint64(header, RNG_STATE), _uint64(header, RNG_LAST_UPDATE), _uint64(header, SHARD_INDEX),
        _uint64(header, SAMPLE_INDEX), count != num_parameters(config), values[0], values[1],
        values[2] if master else None, loader,
    )  # fmt: skip
    _check_position(state)
    return state


def _read_body(
    file: BinaryIO, path: Path, config: ModelConfig, processes: int, arrays: int, shuffle: bool
) -> tuple[int, Loader | None]:
    """How many parameters each array of the file holds, and the loader's part."""
    size, N = stamp_of(file).size, num_parameters(config)
    counts = [N, N // processes] if processes > 1 and N % processes == 0 else [N]
    ends = {HEADER_BYTES + 4 * arrays * count: count for count in counts}
    if not shuffle:
        if size in ends:
            return ends[size], None
        raise _misfit(path, size, config, list(ends), shuffle)
    problems = []
    for end, count in ends.items():
        if end >= size:
            continue
        try:
            return count, _read_loader(file, path, end)
        except FormatError as error:
            problems.append(error)
    # Where both could be meant, the error of the file's whole reading counts: a sharded file is seldom that long.
    raise problems[0] if problems else _misfit(path, size, config, list(ends), shuffle)


def _misfit(path: Path, size: int, config: ModelConfig, ends: list[int], shuffle: bool) -> FormatError:
    c = config
    more = " and the loader's position" if shuffle else ""
    return FormatError(
        f"{path}: {size:,} bytes, but the state of a model with L={c.num_layers} C={c.channels} "
        f"Vp={c.padded_vocab_size} T={c.max_seq_len} takes {' or, with ZeRO-1, '.join(f'{end:,}' for end in ends)}"
        f"{more}: the file is cut off, or belongs to another model"
    )


def _check_position(state: StateFile) -> None:
    """The loader's two counters: within its orders, or at least numbers that a loader can have."""
    shards, samples = 1 << 31, 1 << 31
    if state.loader is not None:
        shards, samples = len(state.loader.shard_indices), len(state.loader.sample_indices)
    if state.current_shard_idx >= shards or state.current_sample_idx > samples:
        raise FormatError(
            f"{state.path}: the loader stands at shard {state.current_shard_idx:,}, sample "
            f"{state.current_sample_idx:,} (header ints 30 to 33), but there are {shards:,} and {samples:,}; it is "
            "damaged"
        )


# --- a folder ---


class LlmcState(NamedTuple):
    """One step of a folder of llm.c: the model file and the states of all ranks, in order."""

    folder: Path
    step: int
    model: llmc.OpenModel
    ranks: tuple[StateFile, ...]

    @property
    def config(self) -> ModelConfig:
        return self.model.header.config

    @property
    def dtype(self) -> str:
        """What the model computes in: "fp32" or "bf16"."""
        return "fp32" if self.model.header.version == 3 else "bf16"

    @property
    def has_master(self) -> bool:
        """Whether the ranks hold float32 weights: with -w 1, in fp32 as well."""
        return self.ranks[0].use_master_weights

    @property
    def has_copy(self) -> bool:
        """Whether the model file's weights are bf16 beside float32 ones."""
        return self.has_master and self.dtype == "bf16"


def finished_steps(folder: Path) -> list[int]:
    """The steps of a folder of llm.c that have a DONE_ file and a state of rank 0, ascending."""
    try:
        names = {entry.name for entry in folder.iterdir()}
    except OSError as error:
        raise FormatError(f"{folder}: cannot be read: {error.strerror or error}") from None
    steps = {int(match[1]) for name in names if (match := re.fullmatch(r"DONE_([0-9]{8,10})", name))}
    return sorted(step for step in steps if STATE_NAME.format(step, 0) in names)


def read_folder(folder: str | Path, step: int | None = None) -> LlmcState:
    """What llm.c wrote at a step (None: the newest that is complete): headers and loaders, no weights yet.

    Raises FormatError if there is none, or a rank's file is missing, damaged or does not belong to the others.
    """
    folder = Path(folder)
    steps = finished_steps(folder)
    if step is None and not steps:
        begun = sorted(path.name for path in folder.glob("state_*_00000.bin"))
        more = f"; {begun[-1]} is there, but its DONE_ file is not: it was never finished" if begun else ""
        raise FormatError(f"{folder}: no complete training state of llm.c (DONE_*, model_*.bin, state_*_*.bin){more}")
    if step is not None and step not in steps:
        found = ", ".join(map(str, steps[-5:])) or "none"
        raise FormatError(f"{folder}: no complete training state of step {step}; complete are: {found}")
    step = steps[-1] if step is None else step
    model = llmc.open_model(folder / MODEL_NAME.format(step))
    version, config, _ = model.header
    if version not in llmc.WRITABLE:
        raise FormatError(f"{model.path}: version {version}; beside a training state llm.c writes 3 or 5")
    first = read_state_file(folder / STATE_NAME.format(step, 0), config)
    present = {path.name for path in folder.glob(f"state_{step:08d}_*.bin")}
    names = [STATE_NAME.format(step, rank) for rank in range(min(first.num_processes, len(present) + 1))]
    missing = [name for name in names if name not in present]
    if missing:
        raise FormatError(
            f"{folder}: {missing[0]} is missing: the run had {first.num_processes} processes, each with a state of its "
            "own; copy them all"
        )
    ranks = (first, *(read_state_file(folder / name, config) for name in names[1:]))
    for rank, state in enumerate(ranks):
        _check_rank(state, rank, step, first)
    return LlmcState(folder, step, model, ranks)


def _check_rank(state: StateFile, rank: int, step: int, first: StateFile) -> None:
    if (state.step, state.rank) != (step, rank):
        raise FormatError(
            f"{state.path}: holds step {state.step}, rank {state.rank}, unlike its name; it was renamed or damaged"
        )
    for name in ("num_processes", "use_master_weights", "should_shuffle", "sharded"):
        if getattr(state, name) != getattr(first, name):
            raise FormatError(
                f"{state.path}: {name} is {getattr(state, name)}, but {getattr(first, name)} in {first.path.name}; the "
                "files are of different runs"
            )


def layers_of(spec: TensorSpec) -> int:
    """Layers that a tensor holds: 1 for those outside the blocks."""
    return 1 if spec.name in UNLAYERED else spec.shape[0]


def _group_values(state: StateFile, group: str) -> Values:
    values = {"m": state.m, "v": state.v, "params": state.master}[group]
    assert values is not None
    return values


def read_layer(state: LlmcState, group: str, spec: TensorSpec, layer: int) -> np.ndarray:
    """One layer of a tensor of m, v or the master weights, 1-D float32; ZeRO-1's parts put together."""
    size = spec.size // layers_of(spec)
    start = spec.offset + layer * size
    if not state.ranks[0].sharded:
        return _group_values(state.ranks[0], group).read(start, size)
    n = len(state.ranks)
    _check_divisible(state.ranks[0].path, spec, n)
    return np.concatenate([_group_values(rank, group).read(start // n, size // n) for rank in state.ranks])


def _check_divisible(path: Path, spec: TensorSpec, n: int) -> None:
    size = spec.size // layers_of(spec)
    if size % n:
        raise FormatError(
            f"{path}: looks like ZeRO-1 shards of {n} processes, but a layer of {spec.name} has {size:,} values, no "
            f"multiple of {n}; it does not belong to this model"
        )


def open_llmc_state(folder: str | Path, step: int | None = None) -> "Source":
    """What llm.c wrote at a step (None: the newest that is complete), opened for reading layer by layer.

    Where there are master weights, they are the params; bf16 weights beside them are the copy. Raises FormatError as
    `read_folder` does.
    """
    from llmc_jax.checkpoint.sources import Source

    state = read_folder(folder, step)
    specs = {spec.name: spec for spec in tensor_specs(state.config)}

    def read(group: str, tensor: str, layer: int) -> np.ndarray:
        spec = specs[tensor]
        if group == "copy" or (group == "params" and not state.has_master):
            return llmc.read_slice(state.model, tensor, layer)
        return read_layer(state, group, spec, layer).reshape(spec.shape if tensor in UNLAYERED else spec.shape[1:])

    groups = ("params", "m", "v", "copy") if state.has_copy else ("params", "m", "v")
    return Source(state.folder, "llmc-state", state.config, state.dtype, state.step, groups, read, ())
