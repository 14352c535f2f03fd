"""Checkpoint folders: round trips, every kind of damage, a death or an error at every step of writing, retention."""

import gc
import hashlib
import json
import os
import shutil
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmc_jax.base import files, own_file
from llmc_jax.base.errors import FormatError, InputError
from llmc_jax.checkpoint import manifest, store
from llmc_jax.checkpoint.arrays import array_file
from llmc_jax.checkpoint.contents import FORMAT
from llmc_jax.machine import algorithms
from tests.checkpoint.damage import flip, memory_below, random_bits
from tests.crash_points import Point, watched

DTYPES = [np.dtype(name) for name in ("bfloat16", "float16", "float32", "float64", "int32", "int64", "uint32")]


def facts_of(step: int, val_loss: Any = 3.5) -> dict[str, Any]:
    return {"format": FORMAT, "step": step, "val_loss": val_loss, "loader": {"order": [2, 0, 1]}}


def arrays_of(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    return {
        "params/wte": rng.normal(size=(6, 4)).astype(np.float32),
        "m/lnfw": np.zeros(4, np.float32),  # equal to zarr's fill value, which must be stored all the same
        "copy/wte": rng.normal(size=(6, 4)).astype(ml_dtypes.bfloat16),
        "v": rng.normal(size=65_536).astype(np.float16),  # of a flat buffer's size: in 64 blocks
        "step": np.array(step, np.int32),
    }


def two_arrays(value: float) -> dict[str, np.ndarray]:
    return {"x": np.full(8, value, np.float32), "step": np.array(value, np.int32)}


def manifest_of(folder: Path) -> dict[str, Any]:
    said = json.loads((folder / "MANIFEST.json").read_text())
    assert isinstance(said, dict)
    return said


def digests(folder: Path) -> dict[str, list[str]]:
    """Of the arrays' blocks, from the manifest."""
    return {name: tensor["sha256"] for name, tensor in manifest_of(folder)["tensors"].items()}


def digests_of(arrays: dict[str, np.ndarray]) -> dict[str, list[str]]:
    found = {}
    for name, array in arrays.items():
        raw, count = array.tobytes(), 1 if array.size % 65_536 else 64
        size = len(raw) // count
        found[name] = [hashlib.sha256(raw[k * size : (k + 1) * size]).hexdigest() for k in range(count)]
    return found


def save(run: Path, step: int, arrays: dict[str, np.ndarray], val_loss: Any = 3.5) -> Path:
    return store.seal(store.begin(run, step, arrays, facts_of(step, val_loss)))


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with the checkpoints of steps 100 and 200; to be copied."""
    run = tmp_path_factory.mktemp("template")
    for step, loss in ((100, 3.5), (200, 3.25)):
        save(run, step, arrays_of(step), loss)
    return run


@pytest.fixture(scope="module")
def small_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with two arrays each."""
    run = tmp_path_factory.mktemp("small")
    for step, loss in ((100, 3.5), (200, 3.25)):
        save(run, step, two_arrays(step), loss)
    return run


@pytest.fixture
def run(template: Path, tmp_path: Path) -> Path:
    """A copy of the template that may be spoilt."""
    return Path(shutil.copytree(template, tmp_path / "run"))


# ----- what is written ----------------------------------------------------------------------------------------------


def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = {
        f"{dtype.name}/s{len(shape)}": random_bits(48, len(shape)).view(dtype)[: int(np.prod(shape))].reshape(shape)
        for dtype in DTYPES
        for shape in ((), (1,), (3, 5), (2, 3, 4))
    }
    monkeypatch.chdir(tmp_path)
    writing = store.begin(Path("..", tmp_path.name), 7, arrays, facts_of(7))  # as -o ../run
    for module in ("orbax", "orbax.checkpoint"):  # reading, back or later, needs none of it
        monkeypatch.setitem(sys.modules, module, None)
    folder = store.seal(writing)
    assert store.check(folder) is None
    checkpoint = store.open_checkpoint(folder)
    assert checkpoint.stored == facts_of(7)
    assert list(checkpoint.manifest.tensors) == list(arrays)
    for name, array in arrays.items():
        found, tensor = checkpoint.read(name), checkpoint.manifest.tensors[name]
        assert (found.shape, found.dtype.name) == (array.shape, array.dtype.name) == (tensor.shape, tensor.dtype), name
        assert found.tobytes() == array.tobytes(), name


def test_the_folder_is_what_the_documentation_says(template: Path) -> None:
    """By json and hashlib alone."""
    folder = template / "state_00000100"
    said, arrays = manifest_of(folder), arrays_of(100)
    assert said["format"] == 2 and said["step"] == 100
    assert [len(digests) for digests in digests_of(arrays).values()] == [1, 1, 1, 64, 1]
    for name, digests in digests_of(arrays).items():
        shape, dtype = list(arrays[name].shape), arrays[name].dtype.name
        assert said["tensors"][name] == {"shape": shape, "dtype": dtype, "sha256": digests, "parts": 1}
    files = {str(p.relative_to(folder)): p for p in folder.rglob("*") if p.is_file() and p.name != "MANIFEST.json"}
    for name, array in arrays.items():
        path = "/".join(("tensors", name.replace("/", "."), "c", *"0" * array.ndim))
        assert files.pop(path).read_bytes()[:-20] == array.tobytes()
    assert said["files"].keys() == files.keys()
    for name, path in files.items():
        data = path.read_bytes()
        assert said["files"][name] == {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    digest = said.pop("sha256")
    assert digest == hashlib.sha256(json.dumps(said, indent=1).encode() + b"\n").hexdigest()
    assert (template / "DONE_00000100").read_bytes() == b""
    assert sorted(os.listdir(template)) == ["DONE_00000100", "DONE_00000200", "state_00000100", "state_00000200"]


def test_entries_tell_step_size_and_loss(template: Path) -> None:
    folders = [template / "state_00000100", template / "state_00000200"]
    sizes = [sum(path.stat().st_size for path in files_of(folder)) for folder in folders]
    first = store.Entry(100, folders[0], sizes[0], 3.5, None)
    second = store.Entry(200, folders[1], sizes[1], 3.25, None)
    assert list(store.entries(template)) == list(store.entries(template, deep=False)) == [first, second]
    assert list(store.entries(template / "nowhere")) == []


@pytest.mark.parametrize("loss", [None, float("nan"), float("inf"), 10**400, "low", [1]])
def test_a_loss_that_cannot_be_compared_is_none(tmp_path: Path, loss: Any) -> None:
    tiny(tmp_path, 7, loss)
    (entry,) = store.entries(tmp_path)
    assert (entry.val_loss, entry.problem) == (None, None)


# ----- while it is written ------------------------------------------------------------------------------------------


def test_begin_leaves_no_reference_to_the_arrays(tmp_path: Path) -> None:
    """A reference that is left keeps a donated buffer alive, and JAX then copies without a word."""
    arrays = {name: array.view() for name, array in arrays_of(5).items()}
    watched = [weakref.ref(array) for array in arrays.values()]
    bases = [array.base for array in arrays.values()]
    counts = [sys.getrefcount(base) for base in bases]
    gc.collect()
    gc.disable()
    try:
        writing = store.begin(tmp_path, 5, arrays, facts_of(5))
        del arrays
        assert all(reference() is None for reference in watched)
        assert [sys.getrefcount(base) for base in bases] == [count - 1 for count in counts]
        store.seal(writing)
    finally:
        gc.enable()


def test_a_failed_begin_leaves_no_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error may be kept; it holds nothing of the frames that had the array."""

    def fail(folder: Path, name: str, tensor: Any, array: np.ndarray) -> None:
        mine = array.view()
        raise ValueError(f"No space left on device, with {mine.size} elements in this frame")

    monkeypatch.setattr(store, "write_array", fail)
    array = np.ones(4, np.float32)
    count = sys.getrefcount(array)
    with pytest.raises(InputError, match="No space left on device") as caught:
        store.begin(tmp_path, 5, {"x": array}, facts_of(5))
    kept = caught.value.with_traceback(None)
    del caught
    gc.collect()
    assert sys.getrefcount(array) == count and kept.__cause__ is None
    assert list(tmp_path.iterdir()) == []


def test_what_is_written_wrongly_never_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The digests are of what was in memory: a value that changes on its way to the disk is noticed."""
    real = store.write_array

    def spoil(folder: Path, each: str, tensor: Any, array: np.ndarray) -> Any:
        written = real(folder, each, tensor, array)
        if each == "v":
            flip(folder / array_file(each, tensor), -21)
        return written

    monkeypatch.setattr(store, "write_array", spoil)
    writing = store.begin(tmp_path, 5, arrays_of(5), facts_of(5))
    with pytest.raises(InputError, match=r"step 5 .*v/c/.* reads back differently"):
        store.seal(writing)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["run.json", "tensors/params.wte/c/0/0", "tensors/v/c/0", "tensors/v/zarr.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damage_between_begin_and_seal(run: Path, path: str, damage: str) -> None:
    before = list(store.entries(run))
    writing = store.begin(run, 200, arrays_of(1), facts_of(200))
    spoil(writing.folder / path, damage)
    how = {"flip": "reads back differently", "cut": "holds .* bytes", "remove": "No such file"}[damage]
    with pytest.raises(InputError, match=rf"^{run}: the checkpoint of step 200 cannot be written: .*{path}:? {how}"):
        store.seal(writing)
    assert list(store.entries(run)) == before and not list(run.glob(".*"))


def spoil(path: Path, damage: str) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 4
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(data if damage == "flip" else data[: len(data) // 2])


def test_everything_is_synced_before_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file and folder, then the name, then DONE_, each on the disk before the next."""
    events: list[str] = []
    fsync, rename = os.fsync, os.rename

    def synced(descriptor: int) -> None:
        events.append(os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path))
        fsync(descriptor)

    def renamed(source: Any, target: Any) -> None:
        events.append(f"{os.path.relpath(source, tmp_path)} -> {os.path.relpath(target, tmp_path)}")
        rename(source, target)

    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("names of open files are read from /proc")
    writing = store.begin(tmp_path, 5, two_arrays(5), facts_of(5))
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    folder, hidden = store.seal(writing), writing.folder.name
    at = events.index(f"{hidden} -> {folder.name}")
    assert set(events[:at]) == {f"{hidden}/{path.relative_to(folder)}" for path in folder.rglob("*")} | {hidden}
    kind, hidden_done, last = events[at + 1 :]
    assert (kind, last) == (".", ".") and hidden_done.startswith(".DONE_00000005.")


# ----- death and errors at every step -------------------------------------------------------------------------------


class Killed(BaseException):
    """What stands for SIGKILL."""


def chaos(folder: Path, after: int, failure: BaseException, action: Callable[[], Any]) -> bool:
    """Run the action with a failure at its `after`-th change of the folder; return whether it came to that.

    A dead process does nothing more, so after `Killed` every further change is refused too; else it is one error. What
    happens inside of a hidden folder is not counted.
    """
    left, struck = after, False

    def at(_: Point) -> None:
        nonlocal left, struck
        left -= 1
        if left == 0 or (struck and isinstance(failure, Killed)):
            struck = True
            raise failure

    with suppress(Killed), watched(folder, at):
        action()
    return struck


def struck(
    template: Path, folder: Path, action: Callable[[Path], Any], failure: BaseException | None = None
) -> Iterator[Path]:
    """Copies of the template in which the action was killed, or failed, at its first change, its second, and so on."""
    for after in range(1, 200):
        run = Path(shutil.copytree(template, folder / f"run{after}"))
        more = chaos(run, after, failure or Killed(), partial(action, run))
        yield run
        shutil.rmtree(run)
        if not more:
            return
    raise AssertionError("there is no end to the changes")


@pytest.mark.parametrize("step", [200, 300])
def test_killed_at_any_moment_of_a_save(small_template: Path, tmp_path: Path, step: int) -> None:
    """A new checkpoint, and one that replaces another: afterwards the newest is the old or the new one, and whole."""
    new = two_arrays(1)
    outcomes = []
    for run in struck(small_template, tmp_path, lambda run: save(run, step, new, 1.0)):
        store.clean(run)
        newest = store.newest_good(run, lambda line: None)
        assert newest is not None
        outcomes.append(newest.val_loss)
        assert newest.step == (step if newest.val_loss == 1.0 else 200)
        assert digests(newest.folder) == digests_of(new if newest.val_loss == 1.0 else two_arrays(200))
        assert digests(run / "state_00000100") == digests_of(two_arrays(100))
        assert store.check(run / "state_00000100") is None
        assert not list(run.glob(".*"))
    assert outcomes == sorted(outcomes, reverse=True) and set(outcomes) == {3.25, 1.0} and len(outcomes) > 6


@pytest.mark.parametrize("step", [200, 300])
def test_an_error_at_any_moment_of_a_save(small_template: Path, tmp_path: Path, step: int) -> None:
    """It is said in one line, and everything is as it was before."""
    said: list[str] = []
    outcomes, before = [], list(store.entries(small_template))

    def action(run: Path) -> None:
        try:
            save(run, step, two_arrays(1), 1.0)
        except InputError as error:
            said.append(str(error))

    for run in struck(small_template, tmp_path, action, OSError(28, "No space left on device")):
        entries = [entry._replace(folder=small_template / entry.folder.name) for entry in store.entries(run)]
        if said:
            assert said.pop() == f"{run}: the checkpoint of step {step} cannot be written: No space left on device"
            assert entries == before
        else:  # the new one is complete, and at most the old one could not be removed
            assert entries[-1].val_loss == 1.0 and not any(entry.problem for entry in entries)
            store.clean(run)
        outcomes.append(entries[-1].val_loss)
        assert not list(run.glob(".*"))
    assert outcomes[-1] == 1.0 and len(outcomes) > 6


def test_killed_at_any_moment_of_a_pruning(tmp_path: Path) -> None:
    template = tmp_path / "template"
    template.mkdir()
    for step in (1, 2, 3, 4):
        tiny(template, step, float(step))
        (template / f"model_{step:08d}.bin").touch()
    prune, good = partial(store.prune, keep=2, major_every=0), []
    for run in struck(template, tmp_path, prune):
        store.clean(run)
        good.append({e.step for e in store.entries(run) if e.problem is None})
        assert good[-1] >= {1, 3, 4} and not list(run.glob(".*"))
        prune(run)
        assert [e.step for e in store.entries(run)] == [1, 3, 4]
        assert sorted(p.name for p in run.glob("model_*")) == [f"model_{step:08d}.bin" for step in (1, 3, 4)]
    assert len(good) > 3


# ----- damage -------------------------------------------------------------------------------------------------------


def test_one_flipped_bit_in_any_file_is_found(run: Path) -> None:
    """Of every file 6 random bits, and the first and the last."""
    folder = run / "state_00000100"
    rng = np.random.default_rng(0)
    tried = 0
    for path in files_of(folder):
        data = path.read_bytes()
        for bit in (0, 8 * len(data) - 1, *map(int, rng.choice(8 * len(data), 6, replace=False))):
            flipped = bytearray(data)
            flipped[bit // 8] ^= 1 << bit % 8
            path.write_bytes(flipped)
            problem = store.check(folder)
            assert problem is not None and path.name in problem and "\n" not in problem, (path, bit)
            tried += 1
        path.write_bytes(data)
    assert store.check(folder) is None and tried > 80


def test_every_bit_of_a_manifest_counts(template: Path) -> None:
    raw = (template / "state_00000100" / "MANIFEST.json").read_bytes()
    assert manifest.dump_manifest(manifest.parse_manifest(raw)) == raw
    short = manifest.dump_manifest(manifest.parse_manifest(raw)._replace(tensors={}))
    for bit in range(8 * len(short)):
        flipped = bytearray(short)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FormatError):
            manifest.parse_manifest(bytes(flipped))


def files_of(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file())


@pytest.mark.parametrize("damage", ["cut", "grown", "empty", "missing", "folder", "link", "pipe"])
def test_files_that_are_not_what_they_were(run: Path, damage: str) -> None:
    folder = run / "state_00000100"
    for path in files_of(folder):
        data = path.read_bytes()
        path.unlink()
        if damage == "folder":
            path.mkdir()
        elif damage == "link":
            (run / "elsewhere").write_bytes(data)
            path.symlink_to(run / "elsewhere")
        elif damage == "pipe":
            os.mkfifo(path)
        elif damage != "missing":
            path.write_bytes({"cut": data[:-1], "grown": data + b"\0", "empty": b""}[damage])
        for deep in (False, True):
            first, second = store.entries(run, deep=deep)
            assert first.problem is not None and path.name in first.problem, (path, deep)
            assert second.problem is None
        with pytest.raises(FormatError, match="state_00000100: "):
            checkpoint = store.open_checkpoint(folder)
            for name in arrays_of(100):
                checkpoint.read(name)
            raise FormatError(f"{folder}: {store.check(folder)}")  # the tensors read here do not need this file
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        path.write_bytes(data)
    assert store.check(folder) is None


def test_what_is_missing_is_told(run: Path) -> None:
    (run / "DONE_00000200").unlink()
    (run / "DONE_00000300").touch()
    first, second, third = store.entries(run)
    assert (first.problem, first.done) == (None, True)
    assert (second.problem, second.done) == (None, False)  # the digests say what the file says
    assert (third.problem, third.done) == ("there is DONE_00000300, but no folder state_00000300", True)
    os.rename(run / "state_00000100", run / "state_00000300")
    assert [e.problem for e in store.entries(run)][-1] == "it holds step 100"


def resign(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest and give it the digest of what it now says, as nobody but an attacker would."""
    body = manifest_of(folder)
    del body["sha256"]
    change(body)
    (folder / "MANIFEST.json").write_bytes(sign(body))


def sign(body: Any) -> bytes:
    digest = hashlib.sha256(json.dumps(body, indent=1).encode() + b"\n").hexdigest()
    return json.dumps({**body, "sha256": digest}, indent=1).encode() + b"\n"


@pytest.mark.parametrize(
    "change",
    [
        {"files": {"../x": {"size": 1, "sha256": "0" * 64}}},
        {"files": {"/x": {"size": 1, "sha256": "0" * 64}}},
        {"files": {"MANIFEST.json": {"size": 1, "sha256": "0" * 64}}},
        {"files": {"x": {"size": -1, "sha256": "0" * 64}}},
        {"tensors": {"../a": {"shape": [3], "dtype": "float32", "sha256": ["0" * 64], "parts": 1}}},
        {"tensors": {"a": {"shape": [3], "dtype": "object", "sha256": ["0" * 64], "parts": 1}}},
        {"tensors": {"a": {"shape": [3], "dtype": "float32", "sha256": ["0" * 63], "parts": 1}}},
        {"tensors": {"a": {"shape": [65_536], "dtype": "float32", "sha256": ["0" * 64], "parts": 1}}},
        *(
            {"tensors": {"v": {"shape": [65_536], "dtype": "float16", "sha256": ["0" * 64] * 64, "parts": parts}}}
            for parts in (0, 2, -64, 64.0, "64", None, [64])
        ),
        {"tensors": {"params/wte": {"shape": [6, 4], "dtype": "float32", "sha256": ["0" * 64], "parts": 64}}},
        {"tensors": {"v": {"shape": [64, 1024], "dtype": "float16", "sha256": ["0" * 64] * 64, "parts": 64}}},
        {"step": -1},
        {"files": {}},
    ],
)
def test_fields_that_no_manifest_has(run: Path, change: dict[str, Any]) -> None:
    """With a digest that agrees. Nothing outside of the folder is looked at."""
    folder = run / "state_00000100"

    def spoil(body: dict[str, Any]) -> None:
        for name, value in change.items():
            body[name] = {**body[name], **value} if value and isinstance(value, dict) else value

    resign(folder, spoil)
    assert store.check(folder) == "MANIFEST.json: its fields are not those of format 2"


@pytest.mark.parametrize(
    "shape", [[10**12], [-1], [2**62, 8], [6, 4, 1], [24], [6.0, 4], "6", [True, 24], [1] * 33, [0], [65_536]]
)
def test_absurd_shapes_allocate_nothing(run: Path, shape: Any) -> None:
    """In a manifest with a digest that agrees."""
    folder = run / "state_00000100"
    resign(folder, lambda body: body["tensors"]["params/wte"].update(shape=shape))
    with memory_below(10e6), pytest.raises(FormatError, match="state_00000100: "):
        store.open_checkpoint(folder).read("params/wte")


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff\xfe{}", b"null", b"[]", b"{}", b"[" * 100_000, b'{"step": ' + b"9" * 5000 + b"}", b'{"sha256": NaN}'],
)
def test_rubbish_in_either_file(run: Path, data: bytes) -> None:
    folder = run / "state_00000100"
    was = (folder / "MANIFEST.json").read_bytes()
    (folder / "MANIFEST.json").write_bytes(data)
    assert str(store.check(folder)).startswith("MANIFEST.json: damaged")
    (folder / "MANIFEST.json").write_bytes(was)
    (folder / "run.json").write_bytes(data)
    assert "run.json" in str(store.check(folder))
    digest = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    resign(folder, lambda body: body["files"].update({"run.json": digest}))
    assert "run.json" in str(store.check(folder))
    with pytest.raises(FormatError):
        store.open_checkpoint(folder)


def test_a_huge_manifest_is_not_read(run: Path) -> None:
    path = run / "state_00000100" / "MANIFEST.json"
    os.truncate(path, 10**11)  # sparse
    with memory_below(1e8):
        assert str(store.check(path.parent)).startswith("MANIFEST.json: is larger than")


def test_another_format_is_named(run: Path) -> None:
    for other in (1, 3, 0, True, "2"):
        resign(run / "state_00000100", lambda body, other=other: body.update(format=other))
        problem = f"MANIFEST.json: format {other!r}; this program reads format 2"
        assert store.check(run / "state_00000100") == problem


def test_removed_while_it_is_read(run: Path) -> None:
    found = []
    for entry in store.entries(run):
        found.append(entry.step)
        if len(found) == 1:
            shutil.rmtree(run / "state_00000200")
            (run / "DONE_00000200").unlink()
    assert found == [100]


# ----- which one to go on from --------------------------------------------------------------------------------------


def test_the_newest_good_one(run: Path, tmp_path: Path) -> None:
    said: list[str] = []
    found = store.newest_good(run, said.append)
    assert found is not None and found.step == 200 and said == []
    flip(run / "state_00000200" / "tensors" / "step" / "c", 0)
    shutil.copytree(run / "state_00000100", run / "state_00000300")
    (run / "DONE_00000100").unlink()
    found = store.newest_good(run, said.append)
    assert found is not None and (found.step, found.done) == (100, False)
    assert said == [
        f"{run}/state_00000300: it holds step 100",
        f"{run}/state_00000200: tensors/step/c: damaged: elements 0 to 0 are not what was saved",
    ]
    (run / "state_00000100" / "run.json").unlink()
    assert store.newest_good(run, said.append) is None
    assert said[-1] == f"{run}/state_00000100: run.json: is missing"
    assert store.newest_good(tmp_path / "nowhere", said.append) is None


def test_names_that_are_not_ours(run: Path) -> None:
    for name in ("state_100", "state_0000000300", "state_00000300x", "DONE_300", "state_٠٠٠٠٠٣٠٠"):
        (run / name).mkdir()
    for name in ("DONE_00000400", "model_00000400.bin", "state_00000400_00000.bin", "state_00000400_00001.bin"):
        (run / name).touch()  # llm.c's
    assert store.steps(run) == [100, 200]
    (run / "DONE_100000000").touch()  # nine digits
    assert store.steps(run) == [100, 200, 100_000_000]
    (run / "file").touch()
    with pytest.raises(InputError, match="file: cannot be read"):
        store.steps(run / "file")


# ----- retention ----------------------------------------------------------------------------------------------------


def tiny(run: Path, step: int, val_loss: Any = None, content: bytes = b"content") -> None:
    """A checkpoint without arrays, but for one file that can be spoilt, in a millisecond."""
    folder = run / f"state_{step:08d}"
    (folder / "tensors").mkdir(parents=True)
    (folder / "tensors" / "file").write_bytes(content)
    (folder / "run.json").write_text(json.dumps(facts_of(step, val_loss)))
    files = {}
    for path in ("tensors/file", "run.json"):
        data = (folder / path).read_bytes()
        files[path] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / "MANIFEST.json").write_bytes(sign({"format": FORMAT, "step": step, "tensors": {}, "files": files}))
    (run / f"DONE_{step:08d}").touch()


SOUND = ("good", "not done")  # the second has lost its DONE_ file
HEALTH = ("good", "good", "good", "flipped", "cut", "not done")
CHECKPOINTS = st.lists(
    st.tuples(st.sampled_from(HEALTH), st.sampled_from([None, 1.0, 2.0, 3.0, float("nan")])), max_size=8
)


def make(run: Path, checkpoints: list[tuple[str, float | None]]) -> None:
    for number, (health, loss) in enumerate(checkpoints, 1):
        tiny(run, number, loss)
        path = run / f"state_{number:08d}" / "tensors" / "file"
        if health == "not done":
            (run / f"DONE_{number:08d}").unlink()
        elif health != "good":
            path.write_bytes(b"Content" if health == "flipped" else b"con")


def expected_rest(
    checkpoints: list[tuple[str, float | None]], keep: int, major_every: int, least: int
) -> tuple[set[int], set[int]]:
    """What is left, and the good ones of it, by the rules as they are documented."""
    everything = set(range(1, len(checkpoints) + 1))
    good = [n for n in everything if checkpoints[n - 1][0] in SOUND]
    last = sorted(good)[-max(keep, least) :]
    if keep == 0 or len(last) < max(keep, least):
        return everything, set(good)
    rated = [n for n in good if checkpoints[n - 1][1] is not None and checkpoints[n - 1][1] == checkpoints[n - 1][1]]
    best = {min(rated, key=lambda n: (checkpoints[n - 1][1], n))} if rated else set()
    majors = {n for n in everything if major_every and n % major_every == 0}
    rest = {n for n in everything if n >= last[0]} | majors | best
    return rest, rest & set(good)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(CHECKPOINTS, st.integers(0, 4), st.integers(0, 3), st.integers(1, 3), st.booleans())
def test_pruning_keeps_what_the_rules_say(
    tmp_path_factory: pytest.TempPathFactory,
    checkpoints: list[tuple[str, float | None]],
    keep: int,
    major_every: int,
    least: int,
    know: bool,
) -> None:
    run = tmp_path_factory.mktemp("prune")
    make(run, checkpoints)
    good = {number for number, (health, _) in enumerate(checkpoints, 1) if health in SOUND}
    known = set(good) if know else set()
    rest, good_rest = expected_rest(checkpoints, keep, major_every, least)
    removed = store.prune(run, keep=keep, major_every=major_every, least=least, known_good=known)
    assert removed == sorted(set(range(1, len(checkpoints) + 1)) - rest)
    assert {int(path.name[6:]) for path in run.glob("state_*")} == rest
    assert {e.step for e in store.entries(run) if e.problem is None} == good_rest
    assert len(good_rest) >= min(least, len(good))
    assert known <= good_rest and not list(run.glob(".*"))
    assert store.prune(run, keep=keep, major_every=major_every, least=least, known_good=known) == []
    shutil.rmtree(run)


def test_pruning_reads_what_it_does_not_know_and_only_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(1, 6):
        tiny(tmp_path, step, float(step))
    read: list[int] = []
    real = store.check
    monkeypatch.setattr(store, "check", lambda folder: read.append(int(folder.name[6:])) or real(folder))
    known = {5}
    assert store.prune(tmp_path, keep=2, major_every=0, known_good=known) == [2, 3]
    assert read == [4, 1] and known == {5, 4, 1}
    tiny(tmp_path, 6, 6.0)
    known.add(6)
    read.clear()
    assert store.prune(tmp_path, keep=2, major_every=0, known_good=known) == [4]
    assert read == [] and known == {6, 5, 1}


def test_pruning_takes_the_exported_model_along_and_spares_what_others_put_there(tmp_path: Path) -> None:
    for step in (0, 1, 2, 3):
        tiny(tmp_path, step)
        (tmp_path / f"model_{step:08d}.bin").touch()
    (tmp_path / "state_00000000" / "notes.txt").write_text("mine")
    theirs = ["DONE_00000009", "model_00000009.bin", "state_00000009_00000.bin", "state_00000000/notes.txt"]
    for name in theirs:
        (tmp_path / name).touch()
    (tmp_path / "elsewhere").mkdir()
    os.rename(tmp_path / "state_00000001", tmp_path / "elsewhere" / "state")
    (tmp_path / "state_00000001").symlink_to(tmp_path / "elsewhere" / "state")  # moved to a larger disk
    assert [e.step for e in store.entries(tmp_path) if e.problem is None] == [1, 2, 3]
    assert store.prune(tmp_path, keep=1, major_every=0) == [1]
    assert not (tmp_path / "model_00000001.bin").exists() and (tmp_path / "model_00000002.bin").exists()
    assert all((tmp_path / name).exists() for name in theirs)
    assert not os.path.lexists(tmp_path / "state_00000001")


# ----- leftovers ----------------------------------------------------------------------------------------------------


def test_done_files_are_written_again_where_the_digests_hold(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(run / "state_00000200", run / "state_00000300")  # holds another step
    for done in run.glob("DONE_*"):
        done.unlink()
    os.mkfifo(run / "DONE_00000100")
    (run / "DONE_00000200").symlink_to("nowhere")
    synced: list[str] = []
    monkeypatch.setattr(files, "sync", lambda path: synced.append(path.name))
    assert store.restore_done(run) == [100, 200]
    assert [name.startswith(".DONE_") for name in synced] == [True, False] * 2
    assert sorted(path.name for path in run.glob("DONE_*")) == ["DONE_00000100", "DONE_00000200"]
    assert all(path.is_file() and not path.is_symlink() and not path.stat().st_size for path in run.glob("DONE_*"))
    assert store.restore_done(run) == []
    assert store.restore_done(run / "nowhere") == []


def add(folder: Path) -> None:
    shutil.copytree(folder.with_name("state_00000200"), folder)
    (folder / "notes.txt").write_text("mine")


@pytest.mark.parametrize("put", [add, lambda folder: folder.write_text("mine")])
@pytest.mark.parametrize("fails", [False, True])
def test_what_a_user_put_under_a_checkpoints_name_stays(run: Path, put: Callable[[Path], None], fails: bool) -> None:
    """It makes room for the checkpoint, and is where it was if that cannot be written."""
    put(run / "state_00000300")
    before = sorted(path.name for path in (run / "state_00000300").glob("*"))
    writing = store.begin(run, 300, arrays_of(3), facts_of(300))
    if fails:
        (run / "DONE_00000300").mkdir()
        with pytest.raises(InputError, match="Is a directory"):
            store.seal(writing)
        (moved,) = run.glob("state_00000300*")
        assert moved.name == "state_00000300"
    else:
        store.seal(writing)
        store.clean(run)
        assert store.check(run / "state_00000300") is None
        (moved,) = run.glob("state_00000300?*")
    assert sorted(path.name for path in moved.glob("*")) == before
    assert (moved if moved.is_file() else moved / "notes.txt").read_text() == "mine"


def test_clean_removes_leftovers_and_nothing_else(run: Path, tmp_path: Path) -> None:
    store.begin(run, 300, arrays_of(3), facts_of(3) | {"step": 300})  # and the process dies
    ours = ("model_00000300.bin", "DONE_00000300", "curves.png", "report.html", "find_lr.json", "find_lr.png")
    for name in (*ours, own_file.kept_copy(12 * "a", "optimizer"), algorithms.name_of(b"", ".txt")):
        (run / f".{name}.0123abcd.tmp").touch()
    shutil.copytree(run / "state_00000100", run / ".state_00000100.0123abcd.old")
    mine = [".state_00000300.tmp", ".state_300.0123abcd.tmp", ".hidden", "main.log", ".state_00000300.0123abcd.bak"]
    for name in mine:
        (run / name).touch()
    before = set(os.listdir(run))
    store.clean(run)
    gone = before - set(os.listdir(run))
    assert len(gone) == 10 and all(name[0] == "." for name in gone) and not gone & set(mine)
    assert [e.problem for e in store.entries(run)] == [None, None]
    store.clean(tmp_path / "nowhere")
