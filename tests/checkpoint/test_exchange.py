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
from llmc_jax.checkpoint.sources import flat_parameters, open_source
from llmc_jax.config.model import parse_descriptor
from llmc_jax.models.family import shape_to_json
from llmc_jax.models.layout import num_parameters, tensor_specs, views
from tests.checkpoint.damage import refused

ROOT = Path(__file__).resolve().parents[2]
SHAPE = "L2-NH2-C8-V31-T16"
CONFIG = parse_descriptor(SHAPE)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of random weights; not to be changed."""
    out = tmp_path_factory.mktemp("orbax") / "out"
    conversion.to_orbax(open_source(SHAPE), out, "fp32")
    return out


def test_orbax_alone_reads_the_named_tensors(written: Path) -> None:
    import orbax.checkpoint as ocp

    tree, weights = ocp.PyTreeCheckpointer().restore(written), views(flat_parameters(open_source(SHAPE)), CONFIG)
    assert {name: (array.shape, array.tobytes()) for name, array in tree.items()} == {
        name: (array.shape, array.tobytes()) for name, array in weights._asdict().items()
    }


def foreign(folder: Path, change: dict[str, Any], about: Any, kind: Any = np.asarray) -> Path:
    """A folder that another program has written with orbax. kind: makes its arrays."""
    import orbax.checkpoint as ocp

    tree = {spec.name: kind(np.full(spec.shape, 2.5, np.float32)) for spec in tensor_specs(CONFIG)}
    ocp.PyTreeCheckpointer().save(folder, args=ocp.args.PyTreeSave(tree | change, custom_metadata=about))
    return folder


def test_what_another_program_wrote_of_arrays_on_a_device(tmp_path: Path) -> None:
    source = open_source(foreign(tmp_path / "x", {}, {"model": shape_to_json(CONFIG)}, jnp.asarray))
    assert source.config == CONFIG and source.dtype == "fp32"
    assert (flat_parameters(source)[: num_parameters(CONFIG)] == 2.5).all()


def test_opening_and_reading_start_no_device(written: Path) -> None:
    """A run opens its model before its processes connect, and before its kernels are tried."""
    code = (
        f"import sys; from llmc_jax.checkpoint.sources import open_source; source = open_source({str(written)!r}); "
        "source.read('params', 'wte', 0); assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize(
    ("change", "model", "words"),
    [
        ({}, None, "does not say the model's shape"),
        ({}, {"channels": 8}, "does not say the model's shape"),
        ({"wpe": np.zeros((16, 4), np.float32)}, shape_to_json(CONFIG), r"wpe is float32\(16, 4\); expected \(16, 8\)"),
        ({"wpe": np.zeros((16, 8), np.int32)}, shape_to_json(CONFIG), r"wpe is int32\(16, 8\)"),
        (
            {"wpe": np.zeros((16, 8), ml_dtypes.bfloat16)},
            shape_to_json(CONFIG),
            "bfloat16 and float32; expected one dtype",
        ),
    ],
)
def test_another_tree_is_refused(tmp_path: Path, change: dict[str, Any], model: Any, words: str) -> None:
    folder = foreign(tmp_path / "x", change, model and {"model": model})
    with refused(folder, words):
        open_source(folder)


def test_a_damaged_folder_is_named(written: Path, tmp_path: Path) -> None:
    (tmp_path / exchange.METADATA).write_bytes(b"{")
    with pytest.raises(InputError, match=rf"^{tmp_path / exchange.METADATA}: "):
        open_source(tmp_path)
    copy = Path(shutil.copytree(written, tmp_path / "copy"))
    shutil.rmtree(copy / "wpe")
    with pytest.raises(FormatError, match=rf"^{copy}: \w+ cannot be read: "):
        flat_parameters(open_source(copy))
