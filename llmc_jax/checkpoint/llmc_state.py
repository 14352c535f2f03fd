"""llm.c's training state, read and written: `state_%08d_%05d.bin` of each rank, `model_%08d.bin` and `DONE_%08d`.

Leaves out the model file itself (llmc.py) and our own checkpoints (store.py): what goes between the two is named arrays
and metadata.

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

import base64
import math
import re
import struct
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from llmc_jax.base import magics
from llmc_jax.base.errors import FormatError, InputError
from llmc_jax.base.files import opened, refuse_existing, stamp_of, write_problem
from llmc_jax.base.numbers import plural
from llmc_jax.base.rng import MT_WORDS, seed_words, skip_u32
from llmc_jax.checkpoint import llmc
from llmc_jax.checkpoint.contents import Identity, Metadata
from llmc_jax.checkpoint.reading import HEADER_BYTES, Stored, Summed, read_at, read_header_ints
from llmc_jax.checkpoint.source import Source, gpt2_shape, slices
from llmc_jax.config.model import ModelConfig
from llmc_jax.models.gpt2.tensors import BY_NAME
from llmc_jax.models.layout import num_parameters, tensor_specs

WHAT = "a training state of llm.c"
VERSION = 1
TENSORS = 16  # each draws once from the rounding stream in an update
GROUPS = ("m", "v", "params")  # in the order of the file; params: the master weights
IN_FILE = {"params": "master"}  # their name in messages

OFFSETS = {
    "magic": 0, "version": 4, "num_processes": 8, "rank": 12, "use_master_weights": 16, "should_shuffle": 20,
    "step": 40, "rng_state": 80, "rng_state_last_update": 88, "current_shard_idx": 120, "current_sample_idx": 128,
}  # fmt: skip
HEADER = np.dtype({
    "names": [*OFFSETS], "offsets": [*OFFSETS.values()], "formats": ["<i4"] * 7 + ["<u8"] * 4, "itemsize": HEADER_BYTES
})  # fmt: skip
STREAM = np.dtype(  # mt19937_state
    [("seed_", "V8"), ("left_", "<i4"), ("next_", "<u4"), ("state_", "<u4", MT_WORDS), ("MATRIX_A", "<u4", 2)]
)
MATRIX_A = (0, 0x9908B0DF)
ORDERS = ("shard_indices", "intra_shard_indices")

MODEL_NAME, STATE_NAME, DONE_NAME = "model_{:08d}.bin", "state_{:08d}_{:05d}.bin", "DONE_{:08d}"


class StateFile(NamedTuple):
    """One rank's state file, checked; its values are read when asked."""

    path: Path
    header: np.void  # of HEADER, with all its bytes as in the file
    sharded: bool  # ZeRO-1: of each layer of each tensor, only this rank's n-th part
    values: dict[str, Stored]  # m, v and, if there are master weights, params
    place: dict[str, Any]  # of the loader: what `TokenLoader.restore` takes, without what llm.c does not store
    seed: bytes  # the first 8 of the shuffling stream, without a meaning

    def kind(self) -> tuple[int, ...]:
        """Return what is the same in all ranks of a run."""
        names = ("num_processes", "use_master_weights", "should_shuffle")
        return (*(int(self.header[name]) for name in names), int(self.sharded))


def _check_header(path: Path, header: np.void) -> None:
    bounds = {
        "version": (VERSION, VERSION),
        "num_processes": (1, llmc.INT32_MAX),
        "rank": (0, int(header["num_processes"]) - 1),
        "use_master_weights": (0, 1),
        "should_shuffle": (0, 1),
        "step": (0, llmc.INT32_MAX),
    }
    for name, (least, most) in bounds.items():
        if not least <= header[name] <= most:
            expected = f"it must be {least}" + f" to {most}" * (most != least)
            raise FormatError(f"{path}: header int {OFFSETS[name] // 4} ({name}) is {header[name]}; {expected}")


def _permutation(file: BinaryIO, path: Path, offset: int, name: str) -> tuple[list[int], int]:
    """Return a uint64 count and that many int32 that permute 0 … count - 1; also the offset behind them."""
    left = stamp_of(file).size - offset - 8
    count = struct.unpack("<Q", read_at(file, path, offset, 8))[0] if left >= 0 else 0
    if not 1 <= count <= left // 4:
        raise FormatError(f"{path}: byte {offset:,}: {count:,} {name}, but {max(left, 0):,} bytes follow; is it whole?")
    order = np.frombuffer(read_at(file, path, offset + 8, 4 * count), "<i4")
    if not np.array_equal(np.sort(order), np.arange(count)):
        raise FormatError(f"{path}: byte {offset + 8:,}: {name} are not 0 to {count - 1} in some order; it is damaged")
    return order.tolist(), offset + 8 + 4 * count


def _read_loader(file: BinaryIO, path: Path, offset: int) -> tuple[dict[str, Any], bytes]:
    """Return the shuffling of a loader's place, and the stream's first 8 bytes. They must end with the file."""
    place: dict[str, Any] = {"shuffle": True}
    for name in ORDERS:
        place[name], offset = _permutation(file, path, offset, name)
    size, expected = stamp_of(file).size, offset + STREAM.itemsize
    if size != expected:
        shards, samples = (len(place[name]) for name in ORDERS)
        words = f"with {shards:,} shards and {samples:,} samples it should have {expected:,}; copy it again"
        raise FormatError(f"{path}: {size:,} bytes; {words}")
    stream = read_at(file, path, offset, STREAM.itemsize)
    try:
        place["shuffle_rng"] = mt_to_numpy(stream)
    except ValueError as error:
        raise FormatError(f"{path}: byte {offset:,}: {error}") from None
    return place, stream[:8]


def mt_to_numpy(raw: bytes) -> dict[str, Any]:
    """Return `rng.Mt19937.state()` of the 2520 bytes of an mt19937_state. Raises ValueError if it is damaged."""
    found = np.frombuffer(raw, STREAM)[0]
    left, position, key = int(found["left_"]), int(found["next_"]), found["state_"]
    if tuple(found["MATRIX_A"]) != MATRIX_A:
        raise ValueError("MATRIX_A of the shuffling stream is not 0 and 0x9908b0df; it is damaged")
    if (left, position) == (1, 0):  # seeded, and nothing drawn yet
        if not np.array_equal(key, seed_words(int(key[0]))):
            raise ValueError("the shuffling stream is at its beginning, but its words come from no seed; it is damaged")
        position = MT_WORDS
    elif not 1 <= position <= MT_WORDS or left != MT_WORDS + 1 - position:
        raise ValueError(f"left_ is {left} and next_ {position} in the shuffling stream; they must add up to 625")
    return {"key": key.tolist(), "pos": position, "next_normal": None}


def mt_from_numpy(state: Mapping[str, Any], seed_bytes: bytes = bytes(8)) -> bytes:
    """Return the 2520 bytes of llm.c's mt19937_state in the place of `rng.Mt19937.state()`; seed_bytes: its first 8."""
    key, position = np.array(state["key"], np.uint32), int(state["pos"])
    left, following = MT_WORDS + 1 - position, position
    if position == MT_WORDS and np.array_equal(key, seed_words(int(key[0]))):
        following = 0
    return np.array((seed_bytes, left, following, key, MATRIX_A), STREAM).tobytes()


def read_state_file(path: str | Path, config: ModelConfig) -> StateFile:
    """Open one rank's training state, which belongs to a model of this shape. Reads the header and the loader's part.

    How many parameters the file holds follows from the shape, the header's processes and the file's size: all N, or
    N / n where ZeRO-1 shared them out. Raises FormatError if the file is missing, no such state, damaged, or does not
    fit the shape. Source: llm.c train_gpt2.cu, `save_state` and `load_state`.
    """
    path = Path(path)
    with opened(path) as file:
        header = read_header_ints(file, path, magics.TRAINING_STATE, WHAT).astype("<i4").view(HEADER)[0]
        _check_header(path, header)
        count, shuffling, seed = _read_body(file, path, config, header)
        stamp = stamp_of(file)
    groups = GROUPS if header["use_master_weights"] else GROUPS[:2]
    values = {
        group: Stored(path, stamp, IN_FILE.get(group, group), "fp32", (count,), HEADER_BYTES + 4 * count * i)
        for i, group in enumerate(groups)
    }
    counters = (int(header[name]) for name in ("rank", "num_processes", "current_shard_idx", "current_sample_idx"))
    place = _plain_place(*counters) | shuffling
    _check_position(path, place)
    return StateFile(path, header, count != num_parameters(config), values, place, seed)


def _read_body(file: BinaryIO, path: Path, config: ModelConfig, header: np.void) -> tuple[int, dict[str, Any], bytes]:
    """Return how many parameters each array of the file holds, and what `_read_loader` returns, if it shuffles."""
    size, N, processes = stamp_of(file).size, num_parameters(config), int(header["num_processes"])
    arrays, shuffles = 2 + int(header["use_master_weights"]), bool(header["should_shuffle"])
    counts = [N, N // processes] if processes > 1 and N % processes == 0 else [N]
    ends = [HEADER_BYTES + 4 * arrays * count for count in counts]
    problem = None
    for count, end in zip(counts, ends, strict=True):
        if not shuffles and size == end:
            return count, {}, bytes(8)
        if shuffles and size > end:
            try:
                return count, *_read_loader(file, path, end)
            except FormatError as error:
                problem = problem or error  # the whole reading's: a sharded file is seldom that long
    more = " and the loader's position" if shuffles else ""
    raise problem or FormatError(
        f"{path}: {size:,} bytes, but the state of a model with {llmc.shape_words(config)} takes "
        f"{' or, with ZeRO-1, '.join(f'{end:,}' for end in ends)}{more}: the file is cut off, or of another model"
    )


def _check_position(path: Path, place: Mapping[str, Any]) -> None:
    """Check the loader's two counters: within its orders, or at least numbers that a loader can have."""
    shards, samples = (len(place[name]) or 1 << 31 for name in ORDERS)
    shard, sample = place["current_shard_idx"], place["current_sample_idx"]
    if shard >= shards or sample > samples:
        words = f"the loader stands at shard {shard:,}, sample {sample:,}, but there are {shards:,} and {samples:,}"
        raise FormatError(f"{path}: {words}; it is damaged")


def _plain_place(rank: int, n: int, shard: int, sample: int) -> dict[str, Any]:
    return {
        "process_rank": rank, "num_processes": n, "shuffle": False, "current_shard_idx": shard,
        "current_sample_idx": sample, "shard_indices": [], "intra_shard_indices": [], "shuffle_rng": None,
    }  # fmt: skip


# --- a folder ---


class LlmcState(NamedTuple):
    """One step of a folder of llm.c: the model file and the states of all ranks, in order."""

    step: int
    model: llmc.ModelFile
    ranks: tuple[StateFile, ...]

    @property
    def has_master(self) -> bool:
        """Return whether there are master weights; if they are not the params, the model's are."""
        return "params" in self.ranks[0].values

    def read(self, group: str, tensor: str, layer: int) -> np.ndarray:
        """Return a slice as that of a `Source` does; ZeRO-1's parts put together."""
        if group not in self.ranks[0].values:
            return self.model.read(tensor, layer)
        spec = next(spec for spec in tensor_specs(self.model.config) if spec.name == tensor)
        shape = spec.shape[1:] if BY_NAME[tensor].layered else spec.shape
        size, n = math.prod(shape), len(self.ranks) if self.ranks[0].sharded else 1
        start = spec.offset + layer * size
        parts = [rank.values[group].read(start // n, size // n) for rank in self.ranks[:n]]
        return (parts[0] if len(parts) == 1 else np.concatenate(parts)).reshape(shape)


def finished_steps(folder: Path) -> list[int]:
    """Return the steps of a folder of llm.c that have a DONE_ file and a state of rank 0, ascending."""
    names = {entry.name for entry in folder.iterdir()}
    steps = {int(match[1]) for name in names if (match := re.fullmatch(r"DONE_([0-9]{8,10})", name))}
    return sorted(step for step in steps if STATE_NAME.format(step, 0) in names)


def read_folder(folder: str | Path, step: int | None = None) -> LlmcState:
    """Return what llm.c wrote at a step (None: the newest that is complete): headers and loaders, no weights yet.

    Raises FormatError if there is none, or a rank's file is missing, damaged or does not belong to the others.
    """
    folder = Path(folder)
    steps = finished_steps(folder)
    if not steps or step not in (None, *steps):
        which, found = "" if step is None else f" of step {step}", ", ".join(map(str, steps[-5:])) or "none"
        words = f"no complete training state of llm.c{which} (DONE_*, model_*.bin, state_*_*.bin)"
        raise FormatError(f"{folder}: {words}; complete are: {found}")
    step = steps[-1] if step is None else step
    model = llmc.open_model(folder / MODEL_NAME.format(step))
    if model.version not in llmc.WRITABLE:
        raise FormatError(f"{model.path}: version {model.version}; beside a training state llm.c writes 3 or 5")
    first = read_state_file(folder / STATE_NAME.format(step, 0), model.config)
    ranks, processes = [first], int(first.header["num_processes"])
    for rank in range(1, processes):
        path = folder / STATE_NAME.format(step, rank)
        if not path.exists():
            raise FormatError(
                f"{folder}: {path.name} is missing: the run had {processes} processes; copy all their files"
            )
        ranks.append(read_state_file(path, model.config))
    for rank, state in enumerate(ranks):
        if (state.header["step"], state.header["rank"]) != (step, rank):
            found = f"step {state.header['step']}, rank {state.header['rank']}"
            raise FormatError(f"{state.path}: holds {found}, unlike its name; it was renamed or damaged")
        if state.kind() != first.kind():
            words = "other processes, master weights, shuffling or shards"
            raise FormatError(f"{state.path}: says {words} than {first.path.name}; they are of different runs")
    if first.sharded and (problem := _indivisible(model.config, processes)):
        raise FormatError(f"{first.path}: looks like ZeRO-1 shards of {processes} processes, but {problem}")
    return LlmcState(step, model, tuple(ranks))


def _indivisible(config: ModelConfig, n: int) -> str | None:
    """Return which tensor's layers cannot be shared out among n processes."""
    for piece in slices(config):
        size = math.prod(piece.shape)
        if size % n:
            return f"a layer of {piece.tensor} has {size:,} values, not a multiple of {n}"
    return None


def open_llmc_state(folder: str | Path, step: int | None = None) -> Source:
    """Return what llm.c wrote at a step (None: the newest that is complete), opened for reading layer by layer.

    Where there are master weights, they are the params; bf16 weights beside them are the copy. Raises FormatError as
    `read_folder` does.
    """
    state = read_folder(folder, step)
    config, dtype = state.model.config, state.model.dtype
    groups = ("params", "m", "v", "copy") if state.has_master and dtype == "bf16" else ("params", "m", "v")
    return Source(Path(folder), "llmc-state", config, dtype, state.step, groups, state.read, (), opened=state)


# --- to a checkpoint of ours ---


class OurState(NamedTuple):
    """A training state in our terms: what is read when asked, the rest, and what the user should know.

    source: its groups are those of the state.
    """

    source: Source
    metadata: Metadata
    updates: int
    warnings: tuple[str, ...] = ()


def to_state(source: Source) -> OurState:
    """Return what `open_llmc_state` opened as a checkpoint of ours.

    metadata.loader is what `TokenLoader.restore` takes, without what llm.c does not store: B, T and the lengths of the
    shards; of several processes {"ranks": [...]}. metadata.origin keeps every byte without a meaning here, and where
    the random streams stood, for `write_llmc_state`. Reads all weights once, to see whether they are finite.
    """
    state: LlmcState = source.opened
    loaders = [rank.place for rank in state.ranks]
    metadata = Metadata(
        state.step,
        Identity(source.config, source.dtype, state.has_master),
        loader=loaders[0] if len(loaders) == 1 else {"ranks": loaders},
        origin={"kind": "llm.c", "llmc": _origin(state)},
    )
    found = [*state.model.tensors.values()]
    for rank in state.ranks if state.ranks[0].sharded else state.ranks[:1]:  # else all hold the same
        found += rank.values.values()
    warnings = tuple(f"{stored.path.name}: {warning}" for stored in found for warning in stored.warnings())
    return OurState(source, metadata, state.step, warnings)  # llm.c corrects AdamW's bias by the step's number


def _origin(state: LlmcState) -> dict[str, Any]:
    """Return what `write_llmc_state` needs to write the same bytes again."""
    return {
        "step": state.step,
        "processes": len(state.ranks),
        "zero": int(state.ranks[0].sharded),
        "master": state.has_master,
        "model_header": _text(state.model.header.astype("<i4").tobytes()),
        "ranks": [{"header": _text(rank.header.tobytes()), "seed": _text(rank.seed)} for rank in state.ranks],
    }


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode("ascii")


# --- from a checkpoint of ours ---


class Plan(NamedTuple):
    """What will be written of a state."""

    state: OurState
    master: bool
    processes: int
    zero: bool
    loaders: list[Mapping[str, Any]]
    origin: dict[str, Any]  # of the state that llm.c wrote and this came from; else empty
    kept: list[dict[str, str]]  # what each rank's file held that has no meaning here; empty if there were other ranks


def write_llmc_state(
    folder: str | Path,
    state: OurState,
    *,
    processes: int | None = None,
    zero: bool | None = None,
    force: bool = False,
) -> tuple[list[Path], tuple[str, ...]]:
    """Write a checkpoint of ours as llm.c's model_*, state_*_* and DONE_* files, from which it resumes with -y 1.

    Return the files in the order they were written, and what the user should know.
    processes: for how many, zero: whether ZeRO-1 shares m, v and master weights out; None for both: as they came from
    llm.c, else 1 and no. Read from llm.c and not trained in between, every file comes out as it was. Master weights
    are written for fp32 too, as llm.c's -w 1 (its default) demands, unless they came without.

    Takes the memory of one slice. DONE_* comes last, so an interrupted writing leaves nothing that llm.c would load.
    Raises InputError if a file is there already (without force), cannot be written, or the state cannot be llm.c's.
    """
    folder = Path(folder)
    warnings: list[str] = []
    plan = _plan(state, processes, zero, warnings)
    step = state.metadata.step
    model, done = folder / MODEL_NAME.format(step), folder / DONE_NAME.format(step)
    states = [folder / STATE_NAME.format(step, rank) for rank in range(plan.processes)]
    for path in (model, *states, done):
        refuse_existing(path, force)
    if problem := write_problem(folder):
        raise InputError(f"{folder}: cannot be written: {problem}")
    with ExitStack() as stack:  # what was there before stays until all of the new is on the disk
        temporaries = [stack.enter_context(llmc.new_file(path)) for path in (model, *states)]
        _write_model(temporaries[0], plan)
        _write_states(temporaries[1:], plan, warnings)
        done.unlink(missing_ok=True)
    with llmc.new_file(done) as temporary:
        temporary.touch()
    read_folder(folder, step)
    return [model, *states, done], tuple(dict.fromkeys(warnings))


def _plan(state: OurState, processes: int | None, zero: bool | None, warnings: list[str]) -> Plan:
    metadata, updates, has_copy = state.metadata, state.updates, "copy" in state.source.groups
    config, dtype, step = gpt2_shape(metadata.identity.model, llmc.FILES), metadata.identity.dtype, metadata.step
    if metadata.identity.optimizer != "adamw":
        raise InputError(f"llm.c's states are AdamW's, not {metadata.identity.optimizer}'s; take --to llmc, a model")
    origin = metadata.origin.get("llmc", {})
    master = has_copy or (dtype == "fp32" and origin.get("master", True))
    if dtype == "fp16" and not has_copy:
        raise InputError("the state is in fp16 without master weights, which no file of llm.c can hold")
    if dtype == "fp16":
        warnings.append("fp16: the model file holds the master weights rounded to bf16, and the loss scale is left out")
    if updates != step:
        warnings.append(
            f"AdamW has counted {updates:,} updates in {step:,} steps; llm.c counts every step, so its next bias "
            f"correction is that of update {step + 1:,}, here it is that of {updates + 1:,}"
        )
    loader = metadata.loader or {"ranks": []}
    places = loader.get("ranks", [loader])
    n = processes if processes is not None else origin.get("processes", len(places) or 1)
    if n < 1:
        raise InputError(f"{n} processes: there must be at least 1")
    zero = zero if zero is not None else n == origin.get("processes") and bool(origin.get("zero"))
    zero = zero and n > 1
    if zero and (problem := _indivisible(config, n)):
        raise InputError(f"ZeRO-1 over {n} processes: {problem}; take another number, or no ZeRO-1")
    kept = origin["ranks"] if origin.get("processes") == n else []
    if len(places) != n:
        held = f"the state holds {plural(len(places), 'position')} in the data, and {n} are wanted"
        warnings.append(f"{held}: llm.c will read its files from the beginning, unshuffled")
        places = [_plain_place(rank, n, 0, 0) for rank in range(n)]
    return Plan(state, master, n, zero, places, origin, kept)


def _micro_steps(options: Mapping[str, Any], n: int) -> int:
    """Return the micro-batches of one update in each of n processes; 1 where the options are not known or give none."""
    B, T, total = (options.get(name, 0) for name in ("batch_size", "sequence_length", "total_batch_size"))
    return max(1, total // (B * T * n)) if B and T else 1


def _header(plan: Plan, rank: int, warnings: list[str]) -> bytes:
    """Return the first 1024 bytes of a rank's file: what is known here over what was read."""
    metadata, loader = plan.state.metadata, plan.loaders[rank]
    header, steps = np.zeros(1, HEADER)[0], metadata.step
    header["rng_state"] = header["rng_state_last_update"] = 13371337 + rank
    if plan.kept:
        header = np.frombuffer(bytearray(base64.b64decode(plan.kept[rank]["header"])), HEADER)[0]
        steps -= plan.origin["step"]
    known = (magics.TRAINING_STATE, VERSION, plan.processes, rank, plan.master, loader["shuffle"], metadata.step)
    for name, value in zip(OFFSETS, known, strict=False):
        header[name] = value
    counters = metadata.counters
    updates = steps - (metadata.step - plan.state.updates if counters is None else counters.skipped)
    if steps > 0:
        draws = steps * _micro_steps(metadata.options, plan.processes) + TENSORS * updates
        start = int(header["rng_state"])
        header["rng_state"] = skip_u32(start, draws)
        if updates:
            header["rng_state_last_update"] = skip_u32(start, draws - TENSORS)
        if updates != steps:
            warnings.append("llm.c's rounding stream is written as if the last step had made an update")
    for name in ("current_shard_idx", "current_sample_idx"):
        header[name] = loader[name]
    return header.tobytes()


def _tail(plan: Plan, rank: int) -> bytes:
    """Return what follows the values in a rank's file."""
    loader = plan.loaders[rank]
    if not loader["shuffle"]:
        return b""
    seed = base64.b64decode(plan.kept[rank]["seed"]) if plan.kept else bytes(8)
    orders = (np.array(loader[name], "<i4") for name in ORDERS)
    stream = mt_from_numpy(loader["shuffle_rng"], seed)
    return b"".join([*(struct.pack("<Q", order.size) + order.tobytes() for order in orders), stream])


def _write_model(path: Path, plan: Plan) -> None:
    source, dtype = plan.state.source, plan.state.metadata.identity.dtype
    before = plan.origin.get("model_header")
    header = None if before is None else np.frombuffer(base64.b64decode(before), "<i4")
    group = "copy" if dtype == "bf16" and plan.master else "params"
    weights = (source.read(group, piece.tensor, piece.layer) for piece in slices(source.config))
    with path.open("xb") as file:
        summed = Summed(file)
        llmc.dump_pieces(summed, gpt2_shape(source.config, llmc.FILES), weights, 3 if dtype == "fp32" else 5, header)
        summed.check(path)


def _write_states(paths: list[Path], plan: Plan, warnings: list[str]) -> None:
    """Write every rank's file, all of them at once, so that each slice is read once."""
    source = plan.state.source
    with ExitStack() as stack:
        files = [Summed(stack.enter_context(path.open("xb"))) for path in paths]
        for rank, file in enumerate(files):
            file.write(_header(plan, rank, warnings))
        for group in GROUPS if plan.master else GROUPS[:2]:
            for piece in slices(source.config):
                values = source.read(group, piece.tensor, piece.layer).reshape(-1)
                shares = np.split(values, len(files)) if plan.zero else [values] * len(files)
                for file, share in zip(files, shares, strict=True):
                    file.write(np.ascontiguousarray(share).data.cast("B"))
        for rank, (file, path) in enumerate(zip(files, paths, strict=True)):
            file.write(_tail(plan, rank))
            file.check(path)
