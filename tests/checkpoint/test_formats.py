"""Both formats of our training states: one way to read them, and that format 1 is read for ever."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from llmc_jax.base.errors import FormatError
from llmc_jax.checkpoint import arrays, command, convert, manifest, store
from llmc_jax.checkpoint.contents import Identity, Metadata
from llmc_jax.checkpoint.source import slices
from llmc_jax.checkpoint.sources import open_source
from llmc_jax.config.model import ModelConfig
from llmc_jax.models.gpt2.tensors import flat_size, num_parameters, tensor_specs
from tests.states import joined, unpack_format_1

OLD = ModelConfig(max_seq_len=8, vocab_size=31, padded_vocab_size=128, num_layers=1, num_heads=1, channels=4)
LARGER = ModelConfig(max_seq_len=16, vocab_size=31, padded_vocab_size=128, num_layers=2, num_heads=1, channels=32)
DTYPES = {"params": np.float32, "m": np.float32, "v": np.float32, "copy": ml_dtypes.bfloat16}


@pytest.fixture(scope="module")
def old_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with a checkpoint of step 3 in format 1, made by the version that wrote it; not to be changed."""
    return unpack_format_1(tmp_path_factory.mktemp("old"))


@pytest.fixture
def old(old_run: Path, tmp_path: Path) -> Path:
    """That checkpoint in a copy that may be spoilt."""
    return Path(shutil.copytree(old_run, tmp_path / "run")) / "state_00000003"


def raw_tensors(folder: Path) -> dict[str, np.ndarray]:
    """What the files of format 1 hold, by their layout alone."""
    found = {}
    for group, dtype in DTYPES.items():
        for spec in tensor_specs(OLD):
            path = folder / "tensors" / f"{group}.{spec.name}" / "/".join("c" + "0" * len(spec.shape))
            values = np.frombuffer(path.read_bytes()[:-20], dtype)
            found[f"{group}/{spec.name}"] = values.reshape(spec.shape)
    return found


def same(found: np.ndarray, expected: np.ndarray) -> bool:
    return (found.shape, found.dtype, found.tobytes()) == (expected.shape, expected.dtype, expected.tobytes())


def flip(path: Path, byte: int) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 1
    path.write_bytes(data)


# ----- format 1 -----------------------------------------------------------------------------------------------------


def test_either_format_gives_tensors_buffers_and_parts_of_them(old: Path, tmp_path: Path) -> None:
    """The same state in both, and what the files of format 1 hold."""
    tensors = raw_tensors(old)
    first = store.open_checkpoint(old)
    small = {name: first.read(name) for name in first.manifest.tensors if name.split("/")[0] not in DTYPES}
    assert small.keys() == {"step", "updates", "outliers/values", "outliers/count"}
    flat = joined(tensors, OLD)
    writing = store.begin(tmp_path, 3, {**flat, **small}, first.metadata.to_json())
    second = store.open_checkpoint(store.seal(writing).folder)
    assert (first.manifest.format, second.manifest.format) == (1, 2)
    assert second.metadata == first.metadata
    assert len(second.manifest.tensors) == 4 + len(small)
    for checkpoint in (first, second):
        for name, expected in {**tensors, **flat, **small}.items():
            assert same(checkpoint.read(name), expected), (checkpoint.folder, name)
        for start, stop in ((0, 1), (5, 700), (511, 513), (700, 900), (796, 900), (1023, 1025), (60_000, 65_536)):
            assert same(checkpoint.elements("copy", start, stop), flat["copy"][start:stop]), (start, stop)
        assert checkpoint.holds("m") and not checkpoint.holds("n")
        for name in ("n", "params/nothing", "n/wte"):
            with pytest.raises(FormatError, match=f"it holds no array {name}; its arrays are "):
                checkpoint.read(name)


def test_format_1_is_verified_shown_and_converted(
    old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["verify", str(old.parent)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 checkpoint, all good"
    assert command.main(["show", str(old)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["format", "1"] in rows and ["params/wte", "float32", "512", "(128,", "4)"] in rows
    tensors, source = raw_tensors(old), open_source(old.parent)
    assert source.groups == ("params", "m", "v", "copy")
    for group in source.groups:
        for piece in slices(OLD):
            found = source.read(group, piece.tensor, piece.layer)
            assert np.array_equal(found.reshape(-1), tensors[f"{group}/{piece.tensor}"].reshape(-1).astype("f4"))
    assert convert.main(["convert", str(old), str(tmp_path / "3.bin"), "--version", "3"]) == 0
    values = b"".join(tensors[f"params/{spec.name}"].tobytes() for spec in tensor_specs(OLD))
    assert (tmp_path / "3.bin").read_bytes()[1024:] == values
    assert convert.main(["convert", str(old), str(tmp_path / "llmc"), "--to", "llmc-state"]) == 0
    assert convert.main(["convert", str(tmp_path / "llmc"), str(tmp_path / "back"), "--to", "state"]) == 0
    back = store.open_checkpoint(tmp_path / "back" / "state_00000003")
    for group, flat in joined(tensors, OLD).items():
        assert same(back.read(group), flat)


def test_a_flipped_bit_in_format_1_is_found(old: Path) -> None:
    """In any file."""
    rng = np.random.default_rng(0)
    assert store.check(old) is None
    for path in sorted(path for path in old.rglob("*") if path.is_file())[::7]:
        byte = int(rng.integers(path.stat().st_size))
        flip(path, byte)
        name = path.relative_to(old).as_posix()
        assert str(store.check(old)).startswith(f"{name}: damaged: "), (path, byte)
        if path.parts[-2] == "0" and byte < path.stat().st_size - 20:
            array = path.relative_to(old / "tensors").parts[0].replace(".", "/")
            with pytest.raises(FormatError, match=f"state_00000003: {array}: damaged: what is read is not what was"):
                store.open_checkpoint(old).read(array.split("/")[0] if array.split("/")[0] in DTYPES else array)
        flip(path, byte)
    assert store.check(old) is None


def test_every_bit_of_a_manifest_of_format_1_counts(old: Path) -> None:
    raw = (old / "MANIFEST.json").read_bytes()
    found = manifest.parse_manifest(raw)
    assert (found.format, found.step, len(found.tensors["params/wte"].sha256)) == (1, 3, 1)
    for bit in np.random.default_rng(0).choice(8 * len(raw), 300, replace=False).tolist():
        flipped = bytearray(raw)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FormatError):
            manifest.parse_manifest(bytes(flipped))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.pop("m/qkvb"), "it holds no array m/qkvb"),
        (lambda tensors: tensors.update({"m/qkvb": tensors["m/lnfb"]}), r"m/qkvb has shape \(4,\); by run\.json it m"),
        (lambda tensors: tensors.update({"m/lnfb": tensors["copy/lnfb"]}), "the tensors of m are of bfloat16 and fl"),
    ],
)
def test_a_buffer_of_format_1_that_is_not_the_models(
    old: Path, change: Callable[[dict[str, manifest.Tensor]], object], words: str
) -> None:
    checkpoint = store.open_checkpoint(old)
    change(checkpoint.manifest.tensors)
    with pytest.raises(FormatError, match=words):
        checkpoint.read("m")


# ----- format 2 -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def larger_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with a checkpoint of step 1 whose tensors reach over many blocks; not to be changed."""
    run = tmp_path_factory.mktemp("larger")
    flat = np.arange(flat_size(LARGER), dtype=np.float32)
    flat[num_parameters(LARGER) :] = 0
    held = {"params": flat, "step": np.array(1, np.int32), "updates": np.array(1, np.int32)}
    store.seal(store.begin(run, 1, held, Metadata(1, Identity(LARGER, "fp32", True)).to_json()))
    return run


@pytest.fixture
def larger(larger_run: Path, tmp_path: Path) -> Path:
    """That checkpoint in a copy that may be spoilt."""
    return Path(shutil.copytree(larger_run, tmp_path / "run")) / "state_00000001"


@pytest.mark.parametrize("threads", [1, 3, 64])
def test_a_part_is_read_and_compared_by_its_blocks_alone(
    larger: Path, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrays, "WORTH_A_THREAD", 1)
    monkeypatch.setattr(arrays, "THREADS", threads)
    checkpoint, block = store.open_checkpoint(larger), flat_size(LARGER) // 64
    for spec in tensor_specs(LARGER):
        expected = np.arange(spec.offset, spec.offset + spec.size, dtype=np.float32).reshape(spec.shape)
        assert same(checkpoint.read(f"params/{spec.name}"), expected)
    rng = np.random.default_rng(0)
    for damaged in rng.choice(64, 5, replace=False).tolist():
        byte = 4 * (damaged * block + int(rng.integers(block))) + 1
        flip(larger / "tensors/params/c/0", byte)
        words = f"elements {damaged * block:,} to {(damaged + 1) * block - 1:,}"
        for spec in tensor_specs(LARGER):
            if spec.offset < (damaged + 1) * block and damaged * block < spec.offset + spec.size:
                with pytest.raises(FormatError, match=f"params: damaged: {words}, in .*{spec.name}.*, are not what"):
                    checkpoint.read(f"params/{spec.name}")
            else:
                checkpoint.read(f"params/{spec.name}")
        assert str(store.check(larger)).startswith(f"tensors/params/c/0: damaged: {words}, in ")
        flip(larger / "tensors/params/c/0", byte)
    assert store.check(larger) is None


def test_damage_is_named(larger: Path) -> None:
    path = larger / "tensors/params/c/0"
    flip(path, path.stat().st_size - 21)
    first = flat_size(LARGER) // 64 * 63
    padding = f"elements {first:,} to {flat_size(LARGER) - 1:,}, in the padding, are not what was saved"
    assert store.check(larger) == f"tensors/params/c/0: damaged: {padding}"
    flip(path, 0)
    flip(path, 4 * (first - 1))
    words = "elements 0 to 1,023, in wte, are not what was saved (nor are 2 more of its 64 blocks)"
    assert store.check(larger) == f"tensors/params/c/0: damaged: {words}"
    flip(path, path.stat().st_size - 1)
    assert store.check(larger) == "tensors/params/c/0: damaged: does not end as the file of one chunk does"


def test_files_of_arrays_have_no_digest_of_their_own(larger: Path) -> None:
    """So that no process needs to have all of one."""
    said = json.loads((larger / "MANIFEST.json").read_text())
    assert not [path for path in said["files"] if "c" in path.split("/")]
    assert len(said["tensors"]["params"]["sha256"]) == 64
