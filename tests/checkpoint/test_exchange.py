"""Checkpoints of orbax's: what is written and read there, and what is refused."""

import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from llmc_jax.base.errors import FormatError, InputError
from llmc_jax.checkpoint import conversion, convert, exchange
from llmc_jax.checkpoint.source import slices
from llmc_jax.checkpoint.sources import open_source
from llmc_jax.config.model import parse_descriptor
from llmc_jax.models.gpt2.tensors import tensor_specs

SHAPE = "L2-NH2-C8-V31-T16"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of random weights; not to be changed."""
    out = tmp_path_factory.mktemp("orbax") / "out"
    conversion.to_orbax(open_source(SHAPE), out, "fp32", force=False)
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


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_there_and_back_the_bits_are_the_same(tmp_path: Path, dtype: str) -> None:
    model, back = tmp_path / "a.bin", tmp_path / "b.bin"
    version = ["--version", "3" if dtype == "fp32" else "5"]
    assert convert.main(["convert", SHAPE, str(model), *version]) == 0
    assert convert.main(["convert", str(model), str(tmp_path / "out"), "--to", "orbax"]) == 0
    assert open_source(tmp_path / "out").dtype == dtype
    assert convert.main(["convert", str(tmp_path / "out"), str(back), *version]) == 0
    assert model.read_bytes() == back.read_bytes()


def test_what_a_conversion_wrote_is_replaced_and_nothing_else(written: Path, tmp_path: Path) -> None:
    out, source = tmp_path / "out", open_source(SHAPE)
    conversion.to_orbax(source, out, "fp32", force=False)
    with pytest.raises(InputError, match="exists already"):
        conversion.to_orbax(source, out, "fp32", force=False)
    conversion.to_orbax(source, out, "bf16", force=True)
    assert open_source(out).dtype == "bf16"
    (out / "notes.txt").touch()
    with pytest.raises(InputError, match=r"notes\.txt"):
        conversion.to_orbax(source, out, "fp32", force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def foreign(folder: Path, change: dict[str, Any], about: Any) -> Path:
    """A folder that another program has written with orbax."""
    import orbax.checkpoint as ocp

    tree = {spec.name: np.zeros(spec.shape, np.float32) for spec in tensor_specs(parse_descriptor(SHAPE))}
    ocp.PyTreeCheckpointer().save(folder, args=ocp.args.PyTreeSave(tree | change, custom_metadata=about))
    return folder


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
    (tmp_path / "_METADATA").write_bytes(b"{")
    with pytest.raises(FormatError, match=rf"^{tmp_path}: orbax cannot read it: "):
        open_source(tmp_path)


def test_without_orbax_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "orbax", None)
    monkeypatch.setattr(exchange.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="pip install 'orbax-checkpoint"):
        conversion.to_orbax(open_source(SHAPE), tmp_path / "out", "fp32", force=False)
    assert not list(tmp_path.iterdir())
