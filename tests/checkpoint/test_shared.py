"""Checkpoints that several processes write together: the bytes of one process's, in a file for each block."""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmc_jax.base.errors import FormatError, InputError
from llmc_jax.checkpoint import arrays as array_files
from llmc_jax.checkpoint import manifest, store
from llmc_jax.checkpoint.contents import Identity, Metadata
from llmc_jax.config.model import ModelConfig
from llmc_jax.models.layout import flat_size, num_parameters, tensor_specs
from tests.checkpoint.damage import flip
from tests.checkpoint.test_store import manifest_of

MODEL = ModelConfig(max_seq_len=16, vocab_size=31, padded_vocab_size=128, num_layers=2, num_heads=1, channels=32)
SIZE = flat_size(MODEL)
BLOCK = SIZE // 64
METADATA = Metadata(7, Identity(MODEL, "bf16", True)).to_json()
DAMAGED = np.random.default_rng(0)


def made_arrays() -> dict[str, np.ndarray]:
    """A state: flat buffers with zeros in their padding, and small arrays."""
    rng = np.random.default_rng(0)
    flat = rng.normal(size=(3, SIZE)).astype(np.float32)
    flat[:, num_parameters(MODEL) :] = 0
    return {
        "params": flat[0],
        "m": flat[1],
        "copy": flat[2].astype(ml_dtypes.bfloat16),
        "step": np.array(7, np.int32),
        "outliers/values": rng.normal(size=(2, 128)).astype(np.float32),
    }


ARRAYS = made_arrays()
FLAT = ("params", "m", "copy")
BUFFERS = {name: (SIZE, ARRAYS[name].dtype.name) for name in FLAT}
SMALL = {name: array for name, array in ARRAYS.items() if name not in FLAT}


def blocks_of(name: str, numbers: Sequence[int]) -> dict[int, np.ndarray]:
    return {k: ARRAYS[name][k * BLOCK : (k + 1) * BLOCK] for k in numbers}


def begin(run: Path) -> store.Writing:
    return store.begin(run, 7, SMALL, METADATA, BUFFERS, 64)


def write(folder: Path, process: int, processes: int) -> dict[str, dict[int, str]]:
    """What one process does; returns what it tells the one that seals."""
    own = store.own_blocks(process, processes)
    digests = {name: store.write_blocks(folder, name, blocks_of(name, own), 64) for name in FLAT}
    for name, found in digests.items():
        store.read_back(folder, name, BUFFERS[name], found, 64)
    return digests


def save_shared(run: Path, order: Sequence[int]) -> Path:
    """order: of the processes."""
    writing = begin(run)
    said = [write(writing.folder, process, len(order)) for process in order]
    return store.seal(writing, digests=json.loads(json.dumps(said)))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state folder that one process writes; not to be changed."""
    return store.seal(store.begin(tmp_path_factory.mktemp("alone"), 7, ARRAYS, METADATA))


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state folder that four processes write; not to be changed."""
    return save_shared(tmp_path_factory.mktemp("template"), range(4))


@pytest.fixture(autouse=True)
def _without_syncing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Syncing some hundred files is what would take the time here; one test looks at it."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(array_files, "WORTH_A_THREAD", 1)  # else blocks of this size are read by one
    monkeypatch.setattr(os, "posix_fadvise", lambda *_: None, raising=False)


# ----- what is written ----------------------------------------------------------------------------------------------


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 80).flatmap(lambda n: st.permutations(range(n))))
def test_any_number_of_processes_in_any_order_writes_the_same(
    alone: Path, tmp_path_factory: pytest.TempPathFactory, order: list[int]
) -> None:
    """The digests and small files of one process, and in the blocks' files, one after the other, its arrays."""
    run = tmp_path_factory.mktemp("many")
    folder = save_shared(run, order)
    expected, found = manifest_of(alone), manifest_of(folder)
    assert list(found["tensors"]) == list(expected["tensors"]) == list(ARRAYS)
    for name, tensor in expected["tensors"].items():
        assert found["tensors"][name] == (tensor | {"parts": 64} if name in FLAT else tensor)
    for name in FLAT:
        files = [(folder / f"tensors/{name}/c/{k}").read_bytes() for k in range(64)]
        assert b"".join(file[:-20] for file in files) == ARRAYS[name].tobytes()
        assert len({file[-20:] for file in files}) == 1
    same = expected["files"].keys() - {f"tensors/{name}/zarr.json" for name in FLAT}
    assert found["files"].keys() == expected["files"].keys()
    assert {path: found["files"][path] for path in same} == {path: expected["files"][path] for path in same}
    small = "tensors/outliers.values/c/0/0"
    assert (folder / small).read_bytes() == (alone / small).read_bytes()
    assert sorted(os.listdir(run)) == ["DONE_00000007", "state_00000007"] and store.check(folder) is None
    shutil.rmtree(run)


@pytest.mark.parametrize("processes", [1, 2, 3, 8, 63, 64, 65, 512])
def test_each_block_has_one_process(processes: int) -> None:
    shares = [store.own_blocks(p, processes) for p in range(processes)]
    assert [k for share in shares for k in share] == list(range(64))
    assert max(map(len, shares)) - min(map(len, shares[:64])) <= 1
    if processes <= 64:
        assert all(k * processes // 64 == p for p, share in enumerate(shares) for k in share)


def write_by_orbax(folder: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write named arrays as orbax does when it is told to leave them as they are."""
    import orbax.checkpoint as ocp
    from etils import epath

    tree: dict[str, Any] = {}
    for name, array in arrays.items():
        *path, last = name.split("/")
        branch = tree
        for word in path:
            branch = branch.setdefault(word, {})
        branch[last] = array
    folder.mkdir()
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=True, use_compression=False)
    handler.save(epath.Path(folder), args=ocp.args.PyTreeSave(tree))


def test_what_is_written_by_hand_is_what_orbax_writes(alone: Path, tmp_path: Path) -> None:
    """Byte by byte: an array in one file, of every dtype, number of axes and depth of name, and what says so."""
    arrays = {
        f"{dtype}/{'/'.join('abc'[: len(shape)])}".strip("/"): np.ones(shape, manifest.dtype_of(dtype))
        for dtype in manifest.DTYPES
        for shape in ((3,), (2, 3), (2, 3, 4))
    } | {"s/i": np.array(3, np.int32), "z": np.zeros(2, np.float32), "s/f": np.array(2.5, np.float32)}
    arrays = {name: array for name, array in arrays.items() if not any(o.startswith(f"{name}/") for o in arrays)}
    orbax, hand = tmp_path / "orbax", tmp_path / "hand"
    orbax.mkdir()
    write_by_orbax(orbax / "tensors", arrays)
    tensors = {name: manifest.describe(array) for name, array in arrays.items()}
    array_files.describe_arrays(hand, tensors)
    for name, array in arrays.items():
        array_files.write_array(hand, name, tensors[name], array)
    assert manifest.sizes_in(hand) == manifest.sizes_in(orbax) and len(manifest.sizes_in(hand)) == 2 * len(arrays) + 1
    for path in manifest.sizes_in(hand):
        assert (hand / path).read_bytes() == (orbax / path).read_bytes(), path


def test_orbax_alone_reads_it(template: Path, alone: Path) -> None:
    import orbax.checkpoint as ocp

    for folder in (template, alone):
        tree = ocp.PyTreeCheckpointer().restore(folder / "tensors")
        assert sorted(tree) == ["copy", "m", "outliers", "params", "step"] and tree["step"] == 7
        for name in FLAT:
            assert tree[name].dtype == ARRAYS[name].dtype and tree[name].tobytes() == ARRAYS[name].tobytes()
        np.testing.assert_array_equal(tree["outliers"]["values"], ARRAYS["outliers/values"])


@pytest.mark.parametrize("order", [1, -1])
def test_blocks_of_one_file_make_the_same_checkpoint(alone: Path, tmp_path: Path, order: int) -> None:
    """As one process writes them: byte for byte what is written whole, whichever block comes first."""
    writing = store.begin(tmp_path, 7, SMALL, METADATA, BUFFERS)
    digests: dict[str, dict[int, str]] = {name: {} for name in FLAT}
    for name in FLAT:
        for half in (range(32), range(32, 64))[::order]:
            digests[name] |= store.write_blocks(writing.folder, name, blocks_of(name, half[::order]))
        store.read_back(writing.folder, name, BUFFERS[name], digests[name])
    folder = store.seal(writing, digests=[digests])
    sizes = manifest.sizes_in(alone)
    assert manifest.sizes_in(folder) == sizes and store.check(folder) is None
    assert all((folder / path).read_bytes() == (alone / path).read_bytes() for path in sizes)


# ----- while it is written ------------------------------------------------------------------------------------------


def test_a_block_that_is_written_twice_or_never_is_named(tmp_path: Path) -> None:
    writing = begin(tmp_path)
    said = [write(writing.folder, p, 2) for p in range(2)]
    with pytest.raises(InputError, match=r"^.*step 7 cannot be written: .*tensors/m/c/40: File exists$"):
        store.write_blocks(writing.folder, "m", blocks_of("m", [40]), 64)
    with pytest.raises(InputError, match="step 7 cannot be written: block 32 of params was written by no processes"):
        store.seal(writing, digests=said[:1])
    assert list(tmp_path.iterdir()) == []
    writing = begin(tmp_path)
    said = [write(writing.folder, p, 2) for p in range(2)]
    with pytest.raises(InputError, match="block 0 of params was written by 2 processes; expected one"):
        store.seal(writing, digests=[*said, said[0]])
    assert list(tmp_path.iterdir()) == []


def test_a_block_that_is_read_back_differently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writing = begin(tmp_path)
    monkeypatch.setattr(store, "sync_file", lambda path: flip(path, 5))
    with pytest.raises(InputError, match="the checkpoint of step 7 cannot be written: params reads back differently"):
        write(writing.folder, 3, 64)
    assert writing.folder.is_dir()  # others may be writing


def test_there_must_be_room_for_all_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = sum(BUFFERS[name][0] * ARRAYS[name].itemsize for name in FLAT)
    free = shutil.disk_usage(tmp_path)._replace(free=store.ROOM + size)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    with pytest.raises(InputError, match="step 7 cannot be written: it takes 1 MB and 17 MB must stay free"):
        begin(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_everything_is_synced_before_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block when `write_blocks` returns, and everything before the folder gets its name."""
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("names of open files are read from /proc")
    synced: set[str] = set()
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.add(os.readlink(f"/proc/self/fd/{descriptor}")))
    rename = os.rename

    def renamed(source: Any, target: Any) -> None:
        assert {str(path) for path in writing.folder.rglob("*")} <= synced
        rename(source, target)

    writing = begin(tmp_path)
    assert {str(path) for path in writing.folder.rglob("*") if path.is_dir()} <= synced
    said = [write(writing.folder, 0, 1)]
    assert {str(writing.folder / f"tensors/{name}/c/{k}") for name in FLAT for k in range(64)} <= synced
    synced.clear()
    synced |= {str(writing.folder / f"tensors/{name}/c/{k}") for name in FLAT for k in range(64)}
    monkeypatch.setattr(os, "rename", renamed)
    store.seal(writing, digests=said)


# ----- reading and damage -------------------------------------------------------------------------------------------


@pytest.fixture(params=["shared", "alone"])
def either(request: pytest.FixtureRequest, template: Path, alone: Path, tmp_path: Path) -> Path:
    """The state folder of four processes, or that of one, in a copy that may be spoilt."""
    folder = template if request.param == "shared" else alone
    return Path(shutil.copytree(folder.parent, tmp_path / "either")) / folder.name


def test_arrays_tensors_and_parts_of_them_are_read(either: Path) -> None:
    checkpoint = store.open_checkpoint(either)
    tensors = {
        f"{name}/{spec.name}": ARRAYS[name][spec.offset : spec.offset + spec.size].reshape(spec.shape)
        for name in FLAT
        for spec in tensor_specs(MODEL)
    }
    for name, array in {**ARRAYS, **tensors}.items():
        found = checkpoint.read(name)
        assert (found.shape, found.dtype, found.tobytes()) == (array.shape, array.dtype, array.tobytes())
    for start, stop in ((0, 1), (BLOCK - 1, BLOCK + 1), (5, 7 * BLOCK), (3 * BLOCK, 4 * BLOCK), (SIZE - 1, SIZE)):
        assert checkpoint.elements("copy", start, stop).tobytes() == ARRAYS["copy"][start:stop].tobytes()
    for name in ("n", "params/nothing", "n/wte"):
        with pytest.raises(FormatError, match=f"it holds no array {name}; its arrays are "):
            checkpoint.read(name)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "k"), [("params", 0), ("m", 17), ("copy", 63)])
def test_a_flipped_bit_is_found_and_named_wherever_it_is_read(either: Path, name: str, k: int) -> None:
    length, start = ARRAYS[name].itemsize * BLOCK, 0
    path = either / f"tensors/{name}/c/{k}"
    if not path.exists():
        path, start = path.with_name("0"), k * length
    shown, checkpoint = path.relative_to(either), store.open_checkpoint(either)
    words = f"damaged: elements {k * BLOCK:,} to {(k + 1) * BLOCK - 1:,} are not what was saved"
    for byte in (0, int(DAMAGED.integers(length)), length - 1):
        flip(path, start + byte)
        assert store.check(either) == f"{shown}: {words}"
        for spec in tensor_specs(MODEL):
            if spec.offset < (k + 1) * BLOCK and k * BLOCK < spec.offset + spec.size:
                with pytest.raises(FormatError, match=f"state_00000007: {name}: {words}"):
                    checkpoint.read(f"{name}/{spec.name}")
            else:
                checkpoint.read(f"{name}/{spec.name}")
        flip(path, start + byte)
    for byte in range(path.stat().st_size - 20, path.stat().st_size, 9):
        flip(path, byte)
        assert store.check(either) == f"{shown}: damaged: does not end as the file of one chunk does"
        flip(path, byte)
    flip(either / "tensors/step/c", 0)
    with pytest.raises(FormatError, match="state_00000007: step: damaged: elements 0 to 0 are not what was saved"):
        checkpoint.read("step")


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "processes"), [("shared", 3), ("alone", 3), ("shared", 70)])
def test_processes_share_the_checking(
    template: Path, alone: Path, tmp_path: Path, processes: int, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte is read by one of them, and each damage found by one."""
    run, read = tmp_path / "run", []
    folder = Path(shutil.copytree((template if layout == "shared" else alone).parent, run)) / alone.name
    real = store.damaged_blocks

    def damaged(folder: Path, name: str, tensor: manifest.Tensor, start: int, stop: int) -> list[int]:
        if start < stop:
            read.append((name, start, stop))
        return real(folder, name, tensor, start, stop)

    def finders() -> dict[int, str]:
        found = {p: store.entry(run, 7, share=(p, processes)).problem for p in range(processes)}
        return {p: problem for p, problem in found.items() if problem is not None}

    monkeypatch.setattr(store, "damaged_blocks", damaged)
    assert finders() == {}
    for name, array in ARRAYS.items():
        parts = sorted((start, stop) for found, start, stop in read if found == name)
        assert [start for start, _ in parts] == [0, *(stop for _, stop in parts[:-1])] and parts[-1][1] == array.size
    owner = next(p for p in range(processes) if 40 in store.own_blocks(p, processes))
    path, byte = (folder / "tensors/m/c/40", 17) if layout == "shared" else (folder / "tensors/m/c/0", 160 * BLOCK + 17)
    flip(path, byte)
    assert list(finders()) == [owner] and f"elements {40 * BLOCK:,} to" in finders()[owner]
    flip(path, byte)
    flip(folder / "tensors/step/c", 0)
    assert finders() == {0: "tensors/step/c: damaged: elements 0 to 0 are not what was saved"}
    flip(folder / "tensors/step/c", 0)
    path.unlink()
    assert {0: f"{path.relative_to(folder)}: is missing"}.items() <= finders().items()
    (folder / "MANIFEST.json").unlink()
    assert set(finders()) == set(range(processes))
