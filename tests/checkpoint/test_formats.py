"""Our training states as they are read: tensors, buffers, parts of buffers, and what is wrong with them."""

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from llmc_jax.base.errors import FormatError
from llmc_jax.checkpoint import manifest, store
from llmc_jax.checkpoint.contents import Identity, Metadata
from llmc_jax.config.model import ModelConfig
from llmc_jax.models.gpt2.tensors import flat_size, num_parameters, tensor_specs
from tests.states import joined

OLD = ModelConfig(max_seq_len=8, vocab_size=31, padded_vocab_size=128, num_layers=1, num_heads=1, channels=4)
LARGER = ModelConfig(max_seq_len=16, vocab_size=31, padded_vocab_size=128, num_layers=2, num_heads=1, channels=32)
DTYPES = {"params": np.float32, "m": np.float32, "v": np.float32, "copy": ml_dtypes.bfloat16}


def same(found: np.ndarray, expected: np.ndarray) -> bool:
    return (found.shape, found.dtype, found.tobytes()) == (expected.shape, expected.dtype, expected.tobytes())


def flip(path: Path, byte: int) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 1
    path.write_bytes(data)


def test_tensors_buffers_and_parts_of_them(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors = {
        f"{group}/{spec.name}": rng.normal(size=spec.shape).astype(dtype)
        for group, dtype in DTYPES.items()
        for spec in tensor_specs(OLD)
    }
    small = {"step": np.array(3, np.int32), "outliers/values": rng.normal(size=(2, 8)).astype(np.float32)}
    flat = joined(tensors, OLD)
    stored = Metadata(3, Identity(OLD, "bf16", True)).to_json()
    checkpoint = store.open_checkpoint(store.seal(store.begin(tmp_path, 3, {**flat, **small}, stored)).folder)
    assert len(checkpoint.manifest.tensors) == 4 + len(small)
    for name, expected in {**tensors, **flat, **small}.items():
        assert same(checkpoint.read(name), expected), name
    for start, stop in ((0, 1), (5, 700), (511, 513), (700, 900), (796, 900), (1023, 1025), (60_000, 65_536)):
        assert same(checkpoint.elements("copy", start, stop), flat["copy"][start:stop]), (start, stop)
    assert checkpoint.holds("m") and not checkpoint.holds("n")
    for name in ("n", "params/nothing", "n/wte"):
        with pytest.raises(FormatError, match=f"it holds no array {name}; its arrays are "):
            checkpoint.read(name)


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
    monkeypatch.setattr(manifest, "THREADS", threads)
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
                with pytest.raises(FormatError, match=f"params: damaged: {words} are not what"):
                    checkpoint.read(f"params/{spec.name}")
            else:
                checkpoint.read(f"params/{spec.name}")
        assert str(store.check(larger)).startswith(f"tensors/params/c/0: damaged: {words} are")
        flip(larger / "tensors/params/c/0", byte)
    assert store.check(larger) is None


def test_damage_is_named(larger: Path) -> None:
    path = larger / "tensors/params/c/0"
    flip(path, path.stat().st_size - 21)
    first = flat_size(LARGER) // 64 * 63
    padding = f"elements {first:,} to {flat_size(LARGER) - 1:,} are not what was saved"
    assert store.check(larger) == f"tensors/params/c/0: damaged: {padding}"
    flip(path, 0)
    flip(path, 4 * (first - 1))
    words = "elements 0 to 1,023 are not what was saved (nor are 2 more of its 64 blocks)"
    assert store.check(larger) == f"tensors/params/c/0: damaged: {words}"
    flip(path, path.stat().st_size - 1)
    assert store.check(larger) == "tensors/params/c/0: damaged: does not end as the file of one chunk does"


def test_files_of_arrays_have_no_digest_of_their_own(larger: Path) -> None:
    """So that no process needs to have all of one."""
    said = json.loads((larger / "MANIFEST.json").read_text())
    assert not [path for path in said["files"] if "c" in path.split("/")]
    assert len(said["tensors"]["params"]["sha256"]) == 64
