"""Checkpoints of orbax's: what is written and read there, and what is refused."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from llmc_jax.base.errors import FormatError, InputError
from llmc_jax.checkpoint import conversion, exchange
from llmc_jax.checkpoint.source import slices
from llmc_jax.checkpoint.sources import open_source
from llmc_jax.config.model import parse_descriptor
from llmc_jax.models.gpt2.tensors import tensor_specs

ROOT = Path(__file__).resolve().parents[2]
SHAPE = "L2-NH2-C8-V31-T16"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of random weights; not to be changed."""
    out = tmp_path_factory.mktemp("orbax") / "out"
    conversion.to_orbax(open_source(SHAPE), out, "fp32")
    return out


def test_orbax_alone_reads_the_named_tensors(written: Path) -> None:
    import orbax.checkpoint as ocp

    tree, source = ocp.PyTreeCheckpointer().restore(written), open_source(SHAPE)
    assert {name: array.shape for name, array in tree.items()} == {
        spec.name: spec.shape for spec in tensor_specs(source.config)
    }
    for piece in slices(source.config):
        found = tree[piece.tensor]
        found = found if found.shape == piece.shape else found[piece.layer]
        assert found.tobytes() == source.read("params", piece.tensor, piece.layer).tobytes()


def foreign(folder: Path, change: dict[str, Any], about: Any, kind: Any = np.asarray) -> Path:
    """A folder that another program has written with orbax. kind: makes its arrays."""
    import orbax.checkpoint as ocp

    tree = {spec.name: kind(np.full(spec.shape, 2.5, np.float32)) for spec in tensor_specs(parse_descriptor(SHAPE))}
    ocp.PyTreeCheckpointer().save(folder, args=ocp.args.PyTreeSave(tree | change, custom_metadata=about))
    return folder


def test_what_another_program_wrote_of_arrays_on_a_device(tmp_path: Path) -> None:
    shape = parse_descriptor(SHAPE)
    source = open_source(foreign(tmp_path / "x", {}, {"model": vars(shape)}, jnp.asarray))
    assert source.config == shape and source.dtype == "fp32"
    assert all((source.read("params", piece.tensor, piece.layer) == 2.5).all() for piece in slices(shape))


def test_opening_and_reading_start_no_device(written: Path) -> None:
    """A run opens its model before its processes connect, and before its kernels are tried."""
    code = (
        f"import sys; from llmc_jax.checkpoint.sources import open_source; source = open_source({str(written)!r}); "
        "source.read('params', 'wte', 0); assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize(
    ("change", "about", "words"),
    [
        ({}, None, "does not say the model's shape"),
        ({}, {"model": {"channels": 8}}, "does not say the model's shape"),
        ({"wpe": np.zeros((16, 4), np.float32)}, "own", r"wpe is float32\(16, 4\); expected \(16, 8\)"),
        ({"wpe": np.zeros((16, 8), np.int32)}, "own", r"wpe is int32\(16, 8\)"),
        ({"wpe": np.zeros((16, 8), ml_dtypes.bfloat16)}, "own", "bfloat16 and float32; expected one dtype"),
    ],
)
def test_another_tree_is_refused(tmp_path: Path, change: dict[str, Any], about: Any, words: str) -> None:
    shape = parse_descriptor(SHAPE)
    folder = foreign(tmp_path / "x", change, {"model": vars(shape)} if about == "own" else about)
    with pytest.raises(FormatError, match=words) as error:
        open_source(folder)
    assert str(error.value).startswith(f"{folder}: ")


def test_a_damaged_folder_is_named(written: Path, tmp_path: Path) -> None:
    (tmp_path / exchange.METADATA).write_bytes(b"{")
    with pytest.raises(InputError, match=rf"^{tmp_path / exchange.METADATA}: "):
        open_source(tmp_path)
    copy = Path(shutil.copytree(written, tmp_path / "copy"))
    shutil.rmtree(copy / "wpe")
    with pytest.raises(FormatError, match=rf"^{copy}: \w+ cannot be read: "):
        source = open_source(copy)
        [source.read("params", piece.tensor, piece.layer) for piece in slices(source.config)]


def test_without_orbax_it_says_what_to_install(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    with pytest.raises(InputError, match="pip install 'orbax-checkpoint"):
        open_source(written)
