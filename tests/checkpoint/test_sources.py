"""Any checkpoint opened alike: what each is taken for, and what is none of them. The formats have their own tests."""

import os
import shutil
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmc_jax.base.errors import FormatError, InputError
from llmc_jax.checkpoint import llmc, store
from llmc_jax.checkpoint.contents import Identity, Metadata
from llmc_jax.checkpoint.manifest import dtype_of
from llmc_jax.checkpoint.source import slices
from llmc_jax.checkpoint.sources import flat_parameters, open_source
from llmc_jax.config.model import CAUSAL, RELU, Attention, ModelConfig, parse_descriptor
from llmc_jax.models.family import shape_to_json
from llmc_jax.models.gpt2.init import random_parameters
from llmc_jax.models.layout import num_parameters, tensor_specs
from tests.checkpoint.damage import refused
from tests.states import joined

CONFIG = ModelConfig(max_seq_len=4, vocab_size=9, padded_vocab_size=128, num_layers=3, num_heads=2, channels=4)
HUGGING_FACE = Path(__file__).resolve().parents[1] / "golden" / "hugging_face"
Arrays = dict[str, np.ndarray]


def random_arrays(step: int, weights: str = "float32", copy: str | None = None, config: ModelConfig = CONFIG) -> Arrays:
    """The arrays of a training state; 16-bit weights as params or beside them."""
    rng = np.random.default_rng(step)
    arrays: Arrays = {"step": np.array(step, np.int32), "updates": np.array(step, np.int32)}
    groups = {"params": weights, "m": "float32", "v": "float32", **({"copy": copy} if copy else {})}
    for group, dtype in groups.items():
        for spec in tensor_specs(config):
            arrays[f"{group}/{spec.name}"] = rng.normal(size=spec.shape).astype(dtype_of(dtype))
    return arrays


def save(
    run: Path, step: int, arrays: Arrays, dtype: str = "fp32", config: ModelConfig = CONFIG, **metadata: Any
) -> Path:
    run.mkdir(exist_ok=True)
    stored = Metadata(step, Identity(config, dtype, True)).to_json() | metadata
    return store.seal(store.begin(run, step, joined(arrays, config), stored))


def assert_holds(path: Path, arrays: Arrays, groups: tuple[str, ...] = ("params", "m", "v")) -> None:
    source = open_source(path)
    assert source.groups == groups and source.config == CONFIG
    for group in groups:
        flat = flat_parameters(source, group)
        np.testing.assert_array_equal(flat, joined(arrays, CONFIG)[group].astype(np.float32))


def write_model(path: Path, config: ModelConfig = CONFIG) -> None:
    llmc.write_model(path, config, np.zeros(num_parameters(config), np.float32))


def test_a_model_whose_header_holds_a_brace(tmp_path: Path) -> None:
    """123 positions: the ninth byte is that with which a safetensors file's JSON begins."""
    config = replace(CONFIG, max_seq_len=ord("{"))
    write_model(tmp_path / "model.bin", config)
    assert open_source(tmp_path / "model.bin").config == config


def test_a_descriptor_is_the_random_weights_that_training_begins_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But a file of that name is what it holds."""
    monkeypatch.chdir(tmp_path)
    source = open_source("L2-NH2-C16-V97-T8")
    assert (source.kind, source.dtype, source.step, source.groups) == ("random", "fp32", None, ("params",))
    assert "random" in source.warnings[0]
    pieces = slices(source.config)
    assert all(source.read("params", piece.tensor, piece.layer).shape == piece.shape for piece in pieces)
    np.testing.assert_array_equal(flat_parameters(source), random_parameters(source.config))
    assert open_source("d12").config == parse_descriptor("d12")  # and draws nothing yet
    with pytest.raises(InputError, match=r"d13: no such file$"):
        open_source("d13")
    write_model(tmp_path / "d12")
    assert open_source("d12").kind == "llmc-model"


@pytest.mark.parametrize(
    ("dtype", "weights", "copy"),
    [
        ("fp32", "float32", None),
        ("bf16", "float32", "bfloat16"),
        ("fp16", "float32", "float16"),
        ("bf16", "bfloat16", None),
    ],
)
def test_a_state_of_ours(tmp_path: Path, dtype: str, weights: str, copy: str | None) -> None:
    arrays = random_arrays(3, weights, copy)
    folder = save(tmp_path / "run", 3, arrays, dtype)
    groups = ("params", "m", "v", "copy") if copy else ("params", "m", "v")
    assert_holds(folder, arrays, groups)
    source = open_source(tmp_path / "run")
    assert (source.kind, source.dtype, source.step, source.path) == ("state", dtype, 3, folder)


def test_a_state_holds_all_that_its_optimizer_keeps(tmp_path: Path) -> None:
    """Whatever it is called, and of each buffer the size is checked."""
    arrays = {name.replace("m/", "b/"): each for name, each in random_arrays(3).items() if not name.startswith("v/")}
    folder = save(tmp_path / "run", 3, arrays, optimizer="momentum")
    assert_holds(folder, arrays, ("params", "b"))
    assert store.open_checkpoint(folder).metadata.identity.optimizer == "momentum"
    short = save(tmp_path / "short", 3, arrays | {"c": np.zeros(5, np.float32)})
    with pytest.raises(FormatError, match=r"state_00000003: c has shape \(5,\)"):
        open_source(short)


def test_the_newest_good_one_of_a_run(tmp_path: Path) -> None:
    run, first = tmp_path / "run", random_arrays(1)
    save(run, 1, first)
    newer = save(run, 2, random_arrays(2))
    assert (open_source(run).step, open_source(run, step=1).step) == (2, 1)
    with pytest.raises(InputError, match="no training state of step 3"):
        open_source(run, step=3)
    (newer / "run.json").write_text("{}")
    assert_holds(run, first)
    assert any("state_00000002" in line for line in open_source(run).warnings)
    with pytest.raises(FormatError, match=r"state_00000002: .*"):
        open_source(run, step=2)
    shutil.rmtree(run / "state_00000001")
    with pytest.raises(FormatError, match="no training state in it is complete and sound"):
        open_source(run)


def test_a_state_under_another_name_and_metadata_of_another_model(tmp_path: Path) -> None:
    arrays = random_arrays(1)
    save(tmp_path / "run", 1, arrays).rename(tmp_path / "best")
    assert_holds(tmp_path / "best", arrays)
    with pytest.raises(InputError, match="was asked for, but this holds one"):
        open_source(tmp_path / "best", step=2)
    for other, words in (
        (
            {"model": shape_to_json(CONFIG) | {"channels": 64}},
            r"has shape \(65536,\); by run\.json it must be \(196608,\)",
        ),
        ({"model": None}, "run.json is not that of"),
        ({"dtype": "fp8"}, "run.json is not that of"),
    ):
        save(tmp_path / "other", 1, arrays, **other)
        with pytest.raises(FormatError, match=words):
            open_source(tmp_path / "other")
    with pytest.raises(FormatError, match="params is of int32"):
        open_source(save(tmp_path, 2, random_arrays(1, "int32")))


@pytest.mark.parametrize(("said", "attention"), [("relu", RELU), ("flash", CAUSAL)])
def test_an_older_state_says_its_attention_among_the_options_alone(said: str, attention: Attention) -> None:
    stored = Metadata(1, Identity(CONFIG, "fp32", True), options={"attention": said}).to_json()
    assert "attention" not in stored["model"]
    assert Metadata.from_json(stored, Path("x")).identity.model == replace(CONFIG, attention=attention)


def header(*ints: int, big: bool = False) -> bytes:
    return struct.pack(f"{'>' if big else '<'}256i", *ints, *[0] * (256 - len(ints)))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not a checkpoint that is known here: it is empty; known are llm.c's"),
        (b"hello", "it begins with b'hello'; known are llm.c's"),
        (header(20240327, 2, 4, 64), "a debug state of llm.c"),
        (header(20240326, 3, big=True), "an llm.c model file, but big-endian"),
        (header(20240326, 9), "version 9"),
        (b"PK\x03\x04" + bytes(26) + b"x.npy", "a checkpoint that is known here"),  # a zip
        (b"\x80\x04\x95" + bytes(100), "a checkpoint that is known here"),  # a pickle that PyTorch did not write
        (struct.pack("<Q", 2) + b"{}", "no config.json beside it"),
    ],
)
def test_files_that_are_none(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "file.bin"
    path.write_bytes(data)
    with refused(path, words):
        open_source(path)


def test_places_that_are_none(tmp_path: Path) -> None:
    empty, models, other, nanogpt = (tmp_path / name for name in ("empty", "models", "other", "nanogpt"))
    for folder in (empty, models, other, nanogpt):
        folder.mkdir()
    for file in (other / "notes.txt", nanogpt / "samples.txt", nanogpt / "ckpt.pt"):
        file.write_text("a")
    write_model(models / "model_00000009.bin")
    os.mkfifo(tmp_path / "pipe")
    for path, words in (
        (tmp_path / "none", "no such file"),
        (Path("a\0b"), "cannot be read"),
        (tmp_path / "pipe", "not a regular file"),
        (empty, "without a checkpoint, but with nothing; known are"),
        (other, r"without a checkpoint, but with notes\.txt; known are"),
        (models, r"holds models, but no training state; name one of them: .*model_00000009\.bin"),
        (nanogpt, r"ckpt\.pt: not a checkpoint that is known here"),  # which is opened all the same
    ):
        with pytest.raises(InputError, match=words):
            open_source(path)
    for path in (models / "model_00000009.bin", HUGGING_FACE):
        with pytest.raises(InputError, match="was asked for, but this holds one"):
            open_source(path, step=9)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_bytes_are_refused_or_read(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Files that begin as one of the formats and go on as anything: FormatError or InputError, nothing else."""
    begin = data.draw(
        st.sampled_from([
            b"", header(20240326, 3, 4, 9, 3, 2, 4, 128)[:64], header(20240326, 2, 1, 1, 1, 1, 1),
            b"PK\x03\x04ab/data.pkl",
            b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", struct.pack("<Q", 30) + b'{"a":', header(20240527, 1, 1),
        ])
    )  # fmt: skip
    path = tmp_path_factory.getbasetemp() / data.draw(st.sampled_from(["a.bin", "a.pt", "a.safetensors"]))
    path.write_bytes(begin + data.draw(st.binary(max_size=200)))
    with pytest.raises(InputError) as caught:
        open_source(path)
    assert "\n" not in str(caught.value)
