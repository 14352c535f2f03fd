"""llm.c's training states: against an encoder made of struct, against figures of llm.c's own code, over mutated bytes.

The encoder follows the description of the format in llm.c's train_gpt2.cu. RECORDED comes from a C++ program that was
built of llm.c's own headers and of the text of its `save_state`, `gpt2_update` and the rest, on memory of the CPU.
"""

import errno
import hashlib
import itertools
import json
import os
import random
import shutil
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmc_jax.base.errors import FormatError, InputError
from llmc_jax.base.files import opened
from llmc_jax.base.rng import Mt19937, random_u32
from llmc_jax.checkpoint import reading
from llmc_jax.checkpoint.contents import Counters, Identity, Metadata
from llmc_jax.checkpoint.llmc_state import (
    OurState,
    mt_from_numpy,
    mt_to_numpy,
    open_llmc_state,
    read_folder,
    read_state_file,
    to_state,
    write_llmc_state,
)
from llmc_jax.checkpoint.source import Source
from llmc_jax.checkpoint.sources import flat_parameters
from llmc_jax.config.model import ModelConfig
from llmc_jax.data.loader import TokenLoader
from llmc_jax.data.tokenfile import write_token_file
from llmc_jax.models.layout import num_parameters, tensor_specs
from tests.checkpoint.damage import memory_below, mutated, random_bits, refused, spoil_what_is_written

CONFIG = ModelConfig(max_seq_len=16, vocab_size=96, padded_vocab_size=128, num_layers=2, num_heads=2, channels=16)
UNLAYERED = ("wte", "wpe", "lnfw", "lnfb")
N = num_parameters(CONFIG)


class Kind(NamedTuple):
    """What a folder of llm.c is like."""

    dtype: str = "fp32"
    processes: int = 1
    zero: bool = False
    master: bool = True
    shuffle: bool = True
    step: int = 7


# --- llm.c's files, made of struct ---


def mt_words(seed: int, draws: int) -> tuple[int, int, list[int]]:
    """left_, next_ and state_ of llm.c's generator after so many draws, by CPython's Mersenne twister."""
    words = [seed]
    for j in range(1, 624):
        words.append((1812433253 * (words[-1] ^ words[-1] >> 30) + j) % 2**32)
    if draws == 0:
        return 1, 0, words
    source = random.Random()
    source.setstate((3, (*words, 624), None))
    for _ in range(draws):
        source.getrandbits(32)
    *words, used = source.getstate()[1]
    return 625 - used, used, list(words)


def shares(values: np.ndarray, n: int, rank: int) -> list[float]:
    """A rank's values under ZeRO-1, element by element: of each layer of each tensor its n-th part."""
    out = [0.0] * (N // n)
    for spec in tensor_specs(CONFIG):
        layers = 1 if spec.name in UNLAYERED else CONFIG.num_layers
        size = spec.size // layers
        part = size // n
        for layer in range(layers):
            for i in range(part):
                out[spec.offset // n + layer * part + i] = values[spec.offset + layer * size + rank * part + i]
    return out


def encode_state(kind: Kind, rank: int, arrays: list[np.ndarray], seed: int = 0) -> bytes:
    """A rank's state file; arrays: m, v and with master weights those, each (N,) float32. Unused ints are not 0."""
    rng = random.Random(seed + rank)
    ints = [rng.randrange(-(2**31), 2**31) for _ in range(256)]
    ints[:6] = [20240527, 1, kind.processes, rank, int(kind.master), int(kind.shuffle)]
    ints[10] = kind.step
    header = bytearray(struct.pack("<256i", *ints))
    struct.pack_into("<QQ", header, 80, rng.randrange(1, 2**64), rng.randrange(1, 2**64))
    struct.pack_into("<QQ", header, 120, 1 if kind.shuffle else 2, 5)
    out = [bytes(header)]
    for values in arrays:
        mine = values.tobytes()
        if kind.zero:
            mine = np.array(shares(values.view(np.uint32), kind.processes, rank), "<u4").tobytes()
        out.append(mine)
    if kind.shuffle:
        order = np.random.default_rng(seed + rank)
        for count in (3, 11):
            out.append(struct.pack(f"<Q{count}i", count, *order.permutation(count).tolist()))
        left, following, words = mt_words(42 + rank, 700 + rank)
        out.append(struct.pack("<8siI624I2I", rng.randbytes(8), left, following, *words, 0, 0x9908B0DF))
    return b"".join(out)


def random_values(seed: int, bits: bool = False) -> np.ndarray:
    """(N,) float32: numbers, or every kind of bit pattern."""
    if bits:
        return random_bits(N, seed).view(np.float32)
    return np.random.default_rng(seed).standard_normal(N).astype(np.float32)


def make_folder(folder: Path, kind: Kind, seed: int = 0, bits: bool = False) -> list[np.ndarray]:
    """A folder of llm.c; returns m, v, and the master weights or those of the model, float32."""
    folder.mkdir(exist_ok=True)
    m, v, weights = (random_values(seed + i, bits) for i in range(3))
    low = (weights.view(np.uint32) >> 16).astype("<u2")  # truncated: not what rounding the master weights would give
    header = [20240326, 3 if kind.dtype == "fp32" else 5, 16, 96, 2, 2, 16, 128, *range(900, 1148)]
    body = weights.tobytes() if kind.dtype == "fp32" else low.tobytes()
    (folder / f"model_{kind.step:08d}.bin").write_bytes(struct.pack("<256i", *header) + body)
    for rank in range(kind.processes):
        data = encode_state(kind, rank, [m, v, weights][: 3 if kind.master else 2], seed)
        (folder / f"state_{kind.step:08d}_{rank:05d}.bin").write_bytes(data)
    (folder / f"DONE_{kind.step:08d}").touch()
    if not kind.master and kind.dtype == "bf16":
        weights = (low.astype(np.uint32) << 16).view(np.float32)
    return [m, v, weights]


def tensor(values: np.ndarray, name: str) -> np.ndarray:
    spec = next(spec for spec in tensor_specs(CONFIG) if spec.name == name)
    return values[spec.offset : spec.offset + spec.size].reshape(spec.shape)


def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    return one.shape == other.shape and one.tobytes() == other.tobytes()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


KINDS = {
    "fp32": Kind(),
    "fp32, -w 0": Kind(master=False),
    "fp32, -a 1": Kind(shuffle=False),
    "bf16": Kind("bf16"),
    "bf16, -w 0": Kind("bf16", master=False),
    "two ranks": Kind("bf16", 2),
    "two ranks, ZeRO-1": Kind("bf16", 2, zero=True),
    "four ranks, ZeRO-1, fp32, -w 0": Kind("fp32", 4, zero=True, master=False),
    "eight ranks, ZeRO-1, -a 1": Kind("bf16", 8, zero=True, shuffle=False),
}


@pytest.mark.parametrize("bits", [False, True], ids=["numbers", "bits"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_read_and_written_again_it_is_the_same(tmp_path: Path, kind: Kind, bits: bool) -> None:
    """Unknown ints, uninitialised bytes and NaN payloads included, by way of JSON as in a checkpoint of ours."""
    m, v, weights = make_folder(tmp_path / "theirs", kind, seed=3, bits=bits)
    ours = to_state(open_llmc_state(tmp_path / "theirs"))
    assert bool(ours.warnings) == bits
    for group, values in {"m": m, "v": v, "params": weights}.items():
        assert same_bits(flat_parameters(ours.source, group)[:N], values)
    assert (ours.metadata.step, ours.updates, ours.source.dtype) == (7, 7, kind.dtype)
    assert ours.source.stored_dtype("params") == ("fp32" if kind.master else kind.dtype)
    metadata = Metadata.from_json(json.loads(json.dumps(ours.metadata.to_json())), tmp_path)
    paths, warnings = write_llmc_state(tmp_path / "again", ours._replace(metadata=metadata))
    assert contents(tmp_path / "theirs") == contents(tmp_path / "again")
    assert warnings == () and paths[-1].name == "DONE_00000007"


# --- llm.c's own figures ---


class Recorded(NamedTuple):
    """SHA-256 (16 digits) of each rank's header and loader part, seed_ set to 0, as llm.c's code wrote them.

    B=2, T=16; files: numbers of tokens of the shards, each a count from 0; micro_steps: of one update and process.
    """

    files: tuple[int, ...]
    processes: int
    zero: bool
    master: bool
    shuffle: bool
    micro_steps: int
    step: int
    digests: tuple[str, ...]


SHARDS = (700, 500, 900)
RECORDED = {
    "first epoch": Recorded(SHARDS, 1, False, True, True, 3, 7, ("3adf450ffb8fd94b",)),
    "second epoch": Recorded(SHARDS, 1, False, True, True, 3, 30, ("baff0fe663a87edb",)),
    "two ranks": Recorded(SHARDS, 2, True, True, True, 2, 5, ("91b16b3b96559302", "53e04565edcb9ddb")),
    "two ranks, second epoch": Recorded(SHARDS, 2, True, True, True, 2, 21, ("c94ef87ffbccd323", "c2a277eda129bda3")),
    "four ranks, -w 0": Recorded(
        SHARDS, 4, False, False, True, 1, 9,
        ("0754f4386ddb4d7c", "b878bb42a95bb668", "a2a650c5a64fea82", "10149ab73f3dd45b"),
    ),
    "-a 1": Recorded(SHARDS, 1, False, True, False, 4, 12, ("7d78921a5503248c",)),
    "nothing drawn": Recorded((40,), 1, False, True, True, 1, 1, ("15eac9d4b59cefab",)),
}  # fmt: skip


def loaders(folder: Path, case: Recorded, processes: int, batches: int) -> list[TokenLoader]:
    """A loader for each rank, after so many batches."""
    for i, count in enumerate(case.files):
        if not (folder / f"s{i}.bin").exists():
            write_token_file(folder / f"s{i}.bin", np.arange(count))
    made = []
    for rank in range(processes):
        loader = TokenLoader(
            str(folder / "s*.bin"), 2, 16, vocab_size=1000, shuffle=case.shuffle, flag="-i", process_rank=rank,
            num_processes=processes,
        )  # fmt: skip
        for _ in range(batches):
            loader.next_batch()
        made.append(loader)
    return made


def our_state(metadata: Metadata, weights: str = "float32", copy: str = "", updates: int | None = None) -> OurState:
    """A state of ours with random values. weights, copy: their dtypes."""
    values = {group: random_values(i) for i, group in enumerate(("params", "m", "v"))}
    values["params"] = values["params"].astype(weights)
    if copy:
        values["copy"] = values["params"].astype(copy)

    def read(group: str, name: str, layer: int) -> np.ndarray:
        found = tensor(values[group], name)
        return np.array(found if name in UNLAYERED else found[layer], np.float32)

    source = Source(Path("ours"), "state", CONFIG, metadata.identity.dtype, metadata.step, tuple(values), read, ())
    return OurState(source, metadata, metadata.step if updates is None else updates)


def our_metadata(folder: Path, case: Recorded, dtype: str, **more: Any) -> Metadata:
    """Of a run that stands where the case does."""
    states = [loader.state() for loader in loaders(folder, case, case.processes, case.step * case.micro_steps)]
    tokens = 2 * 16 * case.processes * case.micro_steps
    options = {"batch_size": 2, "sequence_length": 16, "total_batch_size": tokens, "seed": 42}
    place = states[0] if len(states) == 1 else {"ranks": states}
    return Metadata(case.step, Identity(CONFIG, dtype, True), **{"options": options, "loader": place, **more})


def digests(folder: Path, case: Recorded) -> tuple[str, ...]:
    found = []
    for rank in range(case.processes):
        data = (folder / f"state_{case.step:08d}_{rank:05d}.bin").read_bytes()
        body = 1024 + 4 * (3 if case.master else 2) * (N // case.processes if case.zero else N)
        found.append(hashlib.sha256(data[:1024] + data[body:]).hexdigest()[:16])
    return tuple(found)


@pytest.mark.parametrize("case", RECORDED.values(), ids=RECORDED)
def test_a_run_begun_here_is_handed_over_as_llm_c_would_stand(tmp_path: Path, case: Recorded) -> None:
    """Header (random states included) and loader of every rank."""
    metadata = our_metadata(tmp_path, case, "fp32" if case.processes == 1 else "bf16")
    weights = "float32" if case.master else "bfloat16"  # with no copy beside them: no master weights
    copy = "bfloat16" if case.processes > 1 and case.master else ""
    write_llmc_state(tmp_path / "out", our_state(metadata, weights, copy), zero=case.zero)
    assert digests(tmp_path / "out", case) == case.digests


@pytest.mark.parametrize("begin", [3, 5, 20])
def test_trained_on_here_it_stands_where_llm_c_would(tmp_path: Path, begin: int) -> None:
    """Taken over at a step, trained on to step 21: as llm.c's own; the loaders continue what was read."""
    case = RECORDED["two ranks, second epoch"]
    metadata = our_metadata(tmp_path, case._replace(step=begin), "bf16")
    write_llmc_state(tmp_path / "at", our_state(metadata, copy="bfloat16"), zero=True)
    for path in (tmp_path / "at").glob("state_*"):  # bytes without a meaning
        raw = bytearray(path.read_bytes())
        raw[200:204], raw[-2520:-2512] = b"kept", b"whatever"
        path.write_bytes(raw)
    ours = to_state(open_llmc_state(tmp_path / "at"))
    now = replace(ours.metadata, step=21, options=metadata.options)
    places = loaders(tmp_path, case, 2, 0)
    for rank, loader in enumerate(places):
        loader.restore(now.loader if rank else now.loader["ranks"][0])  # its own rank's, or out of all of them
        loader.next_batch((21 - begin) * case.micro_steps)
    now = replace(now, loader={"ranks": [loader.state() for loader in places]})
    write_llmc_state(tmp_path / "out", our_state(now, copy="bfloat16"))
    for path in (tmp_path / "out").glob("state_*"):
        raw = bytearray(path.read_bytes())
        assert raw[200:204] == b"kept" and raw[-2520:-2512] == b"whatever"
        raw[200:204], raw[-2520:-2512] = bytes(4), bytes(8)
        path.write_bytes(raw)
    assert digests(tmp_path / "out", case) == case.digests


@pytest.mark.parametrize("draws", [0, 1, 2, 623, 624, 625, 1248, 5000])
def test_the_shuffling_stream_both_ways(draws: int) -> None:
    """left_ and next_, by another Mersenne twister: after n draws n and 625 - n; seeded, 0 and 1."""
    left, following, words = mt_words(43, draws)
    raw = struct.pack("<8siI624I2I", b"whatever", left, following, *words, 0, 0x9908B0DF)
    state = mt_to_numpy(raw)
    assert mt_from_numpy(state, b"whatever") == raw
    ours, same = Mt19937(1), Mt19937(43)
    ours.restore(state)
    same.raw(draws)
    assert ours.raw(2000).tolist() == same.raw(2000).tolist()


# --- what cannot be kept ---


# Of 7 steps 2 updated nothing. Not finite: AdamW counts 5 steps. Outliers: all. A checkpoint that says no number: 2.
@pytest.mark.parametrize(("counted", "counters"), [(5, Counters(2)), (7, Counters(2)), (5, None)])
def test_updates_that_were_skipped(tmp_path: Path, counted: int, counters: Counters | None) -> None:
    metadata = our_metadata(tmp_path, RECORDED["first epoch"], "fp32", counters=counters)
    _, warnings = write_llmc_state(tmp_path / "out", our_state(metadata, updates=counted))
    assert any("of update 8, here it is that of 6" in line for line in warnings) == (counted == 5)
    plain = read_folder(tmp_path / "out").ranks[0]
    states = [13371337]
    for _ in range(7 * 3 + 5 * 16):
        states.append(random_u32(states[-1])[1])
    assert struct.unpack("<2Q", plain.header.tobytes()[80:96]) == (states[-1], states[-17])


def test_another_number_of_places_in_the_data(tmp_path: Path) -> None:
    state = our_state(our_metadata(tmp_path, RECORDED["-a 1"], "fp32"))
    _, warnings = write_llmc_state(tmp_path / "out", state, processes=2)
    words = "the state holds 1 position in the data, and 2 are wanted: llm.c will read its files from the beginning"
    assert any(line.startswith(words) for line in warnings)
    places = [rank.place for rank in read_folder(tmp_path / "out").ranks]
    assert [(p["shuffle"], p["current_shard_idx"], p["current_sample_idx"]) for p in places] == [(False, 0, 0)] * 2


def test_what_cannot_be_written(tmp_path: Path) -> None:
    case, out = RECORDED["first epoch"], tmp_path / "out"
    state, half = (our_state(our_metadata(tmp_path, case, dtype)) for dtype in ("fp32", "fp16"))
    with pytest.raises(InputError, match="not a multiple of 3"):
        write_llmc_state(out, state, processes=3, zero=True)
    with pytest.raises(InputError, match="0 processes"):
        write_llmc_state(out, state, processes=0)
    with pytest.raises(InputError, match="fp16 without master weights"):
        write_llmc_state(out, half)
    assert not out.exists()
    write_llmc_state(out, state)
    with pytest.raises(InputError, match=r"model_00000007.bin: exists already; --force"):
        write_llmc_state(out, state)
    write_llmc_state(out, state, force=True)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="file: cannot be written"):
        write_llmc_state(tmp_path / "file", state)


def test_fp16_goes_out_as_bf16(tmp_path: Path) -> None:
    state = our_state(our_metadata(tmp_path, RECORDED["first epoch"], "fp16"), copy="float16")
    _, warnings = write_llmc_state(tmp_path / "out", state)
    assert any(line.startswith("fp16") for line in warnings)
    source, weights = open_llmc_state(tmp_path / "out"), tensor(random_values(0), "wpe")
    expected = weights.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert source.dtype == "bf16" and same_bits(source.read("copy", "wpe", 0), expected)
    assert same_bits(source.read("params", "wpe", 0), weights)


@pytest.mark.parametrize("at", [0, 1, 40])
def test_a_full_disk_leaves_what_was_there(tmp_path: Path, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    make_folder(tmp_path / "theirs", Kind("bf16", 2, zero=True))
    ours = to_state(open_llmc_state(tmp_path / "theirs"))
    out = Path(shutil.copytree(tmp_path / "theirs", tmp_path / "out"))
    before = contents(out)
    real, calls = reading.Summed.write, itertools.count()

    def full(self: Any, data: bytes) -> None:
        if next(calls) == at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(self, data)

    monkeypatch.setattr(reading.Summed, "write", full)
    with pytest.raises(InputError, match="cannot be written: No space left"):
        write_llmc_state(out, ours, force=True)
    assert contents(out) == before


def test_what_reads_back_otherwise_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_folder(tmp_path / "theirs", Kind())
    ours = to_state(open_llmc_state(tmp_path / "theirs"))
    spoil_what_is_written(monkeypatch)
    with pytest.raises(InputError, match="reads back differently"):
        write_llmc_state(tmp_path / "out", ours)
    assert list((tmp_path / "out").iterdir()) == []


# --- folders ---


def test_the_newest_complete_step_is_taken(tmp_path: Path) -> None:
    for step in (5, 10, 20):
        make_folder(tmp_path, Kind(step=step))
    (tmp_path / "DONE_00000020").unlink()
    (tmp_path / "DONE_00000030").touch()  # of a checkpoint that was deleted but for this
    assert read_folder(tmp_path).step == 10
    assert read_folder(tmp_path, 5).step == 5
    with pytest.raises(FormatError, match=r"no complete training state of llm\.c of step 20 .*; complete are: 5, 10"):
        read_folder(tmp_path, 20)


def test_a_folder_that_is_not_complete(tmp_path: Path) -> None:
    make_folder(tmp_path, Kind("bf16", 4, zero=True))
    for name, words in (
        ("state_00000007_00002.bin", "state_00000007_00002.bin is missing: the run had 4 processes"),
        ("model_00000007.bin", "model_00000007.bin: no such file"),
        ("DONE_00000007", r"no complete training state of llm\.c .*: none"),
    ):
        (tmp_path / name).unlink()
        with pytest.raises(FormatError, match=words):
            read_folder(tmp_path)


def test_ranks_that_do_not_belong_together(tmp_path: Path) -> None:
    make_folder(tmp_path, Kind("bf16", 2))
    path, other = tmp_path / "state_00000007_00001.bin", Kind("bf16", 2, shuffle=False)
    for data, words in (
        ((tmp_path / "state_00000007_00000.bin").read_bytes(), "holds step 7, rank 0, unlike its name"),
        (encode_state(other, 1, [random_values(i) for i in range(3)]), "_00000.bin; they are of different runs"),
    ):
        path.write_bytes(data)
        with pytest.raises(FormatError, match=words):
            read_folder(tmp_path)


def test_not_finite_values_are_reported(tmp_path: Path) -> None:
    make_folder(tmp_path, Kind("bf16"))
    path = tmp_path / "state_00000007_00000.bin"
    raw = bytearray(path.read_bytes())
    raw[1024 + 4 * N : 1024 + 4 * N + 8] = struct.pack("<2I", 0x7FC00001, 0xFF800000)
    path.write_bytes(raw)
    assert to_state(open_llmc_state(tmp_path)).warnings == (f"{path.name}: v: 2 of {N:,} values are NaN or infinite",)


def test_a_file_that_changes_while_it_is_read(tmp_path: Path) -> None:
    make_folder(tmp_path, Kind("bf16", 2, zero=True))
    path = tmp_path / "state_00000007_00001.bin"
    good = path.read_bytes()
    for data in (good[:-1], good[:1500], good + b"x", b""):
        path.write_bytes(good)
        source = open_llmc_state(tmp_path)
        path.write_bytes(data)
        with pytest.raises(FormatError, match="changed while it was being read"):
            source.read("m", "qkvw", 1)
    path.unlink()
    with pytest.raises(FormatError, match="no such file"):
        source.read("v", "wte", 0)


def test_files_that_are_shortened_behind_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at a file's size and the end of reading: an error; what was read before is not touched by it."""
    make_folder(tmp_path, Kind("bf16", 1))
    source = open_llmc_state(tmp_path)
    kept = {group: source.read(group, "wte", 0) for group in ("v", "copy")}
    before = {group: array.tobytes() for group, array in kept.items()}
    for name in ("state_00000007_00000.bin", "model_00000007.bin"):
        os.truncate(tmp_path / name, 1100)
    monkeypatch.setattr(reading, "opened", lambda path, _: opened(path))  # as if it had been looked at before
    for group in kept:
        with pytest.raises(FormatError, match=r"ended at byte 1,100 while being read"):
            source.read(group, "wte", 0)
    assert {group: array.tobytes() for group, array in kept.items()} == before


# --- bad files ---

GOOD = encode_state(Kind("bf16", 2), 1, [random_values(i) for i in range(3)])
BODY = 1024 + 12 * N


def patched(at: int, form: str, *values: Any) -> bytes:
    data = bytearray(GOOD)
    struct.pack_into(form, data, at, *values)
    return bytes(data)


BAD = {
    "header alone": (GOOD[:1024], "1,024 bytes, but the state of a model with L=2 C=16 V=96 Vp=128 T=16 takes"),
    "wrong magic": (patched(0, "<i", 17), "starts with 17, expected magic 20240527"),
    "version": (patched(4, "<i", 2), r"\(version\) is 2; it must be 1"),
    "no processes": (patched(8, "<i", 0), r"num_processes\) is 0"),
    "rank": (patched(12, "<i", 2), r"\(rank\) is 2; it must be 0 to 1"),
    "master": (patched(16, "<i", 7), r"use_master_weights\) is 7; it must be 0 to 1"),
    "step": (patched(40, "<i", -3), r"header int 10 \(step\) is -3"),
    "shard index": (patched(120, "<Q", 3), "stands at shard 3, sample 5"),
    "sample index": (patched(128, "<Q", 12), "stands at shard 1, sample 12"),
    "absurd index": (patched(120, "<Q", 2**64 - 1), "stands at shard 18,446,744,073,709,551,615"),
    "no shards": (patched(BODY, "<Q", 0), "0 shard_indices"),
    "absurd shards": (patched(BODY, "<Q", 2**63), "9,223,372,036,854,775,808 shard_indices"),
    "shard twice": (patched(BODY + 8, "<3i", 0, 1, 1), "shard_indices are not 0 to 2 in some order"),
    "matrix": (patched(len(GOOD) - 4, "<I", 5), "MATRIX_A"),
    "left": (patched(len(GOOD) - 2512, "<i", 0), "they must add up to 625"),
    "no seed": (patched(len(GOOD) - 2512, "<iI", 1, 0), "its words come from no seed"),
    "cut": (GOOD[:-1], "it should have"),
    "body cut": (GOOD[: BODY - 4], "bytes"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused_in_one_line(tmp_path: Path, name: str) -> None:
    data, words = BAD[name]
    path = tmp_path / "state.bin"
    path.write_bytes(data)
    with refused(path, words):
        read_state_file(path, CONFIG)


def test_sizes_are_compared_before_memory_is_taken(tmp_path: Path) -> None:
    """A sparse file of 40 GB that promises ten billion shards; and one that says so without being that long."""
    path = tmp_path / "state.bin"
    path.write_bytes(patched(BODY, "<Q", 2**33))
    with memory_below(1 << 20), pytest.raises(FormatError):
        read_state_file(path, CONFIG)
    path.write_bytes(GOOD[:1024])
    os.truncate(path, 40 << 30)
    with memory_below(1 << 20), pytest.raises(FormatError):
        read_state_file(path, CONFIG)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_files(tmp_path: Path, data: st.DataObject) -> None:
    """Bytes of the header and the loader's part changed, the end cut or added to: FormatError, or all is in order."""
    raw = mutated(data.draw, GOOD, st.integers(0, 135) | st.integers(BODY, len(GOOD) - 1))
    path = tmp_path / "state.bin"
    path.write_bytes(raw)
    try:
        state = read_state_file(path, CONFIG)
    except FormatError as error:
        assert str(error).startswith(f"{path}: ") and "\n" not in str(error)
        return
    tail, place = 0, state.place
    if place["shuffle"]:
        shards, samples = len(place["shard_indices"]), len(place["intra_shard_indices"])
        tail = 8 + 4 * shards + 8 + 4 * samples + 2520
        assert place["current_shard_idx"] < shards and place["current_sample_idx"] <= samples
        assert mt_from_numpy(place["shuffle_rng"], state.seed) == raw[-2520:]
    assert len(raw) == 1024 + 4 * len(state.values) * state.values["m"].size + tail
    processes = place["num_processes"]
    assert state.values["m"].size == N or (state.sharded and state.values["m"].size * processes == N)
    assert state.values["m"].read(3, 2).tobytes() == raw[1036:1044]
