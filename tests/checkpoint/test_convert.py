"""The command convert_checkpoint.py: what it prints, what it refuses, that nothing is lost and nothing half there."""

import errno
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from llmc_jax.checkpoint import conversion, reading, store
from llmc_jax.checkpoint.convert import main, tensor_stats
from llmc_jax.checkpoint.llmc import open_model, write_model
from llmc_jax.checkpoint.source import Source
from llmc_jax.checkpoint.sources import flat_parameters, open_source
from llmc_jax.config.model import ModelConfig
from llmc_jax.data.tokenizers import bytes_tokenizer, write_tokenizer_bin
from llmc_jax.models.layout import num_parameters, tensor_specs, views
from tests.checkpoint.damage import flip, random_bits
from tests.checkpoint.test_sources import random_arrays, save

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ModelConfig(max_seq_len=8, vocab_size=50, padded_vocab_size=128, num_layers=2, num_heads=2, channels=16)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A version 3 file with random matrices, layernorm weights of 1, and an unknown header integer."""
    rng = np.random.default_rng(0)
    flat = rng.normal(0, 0.02, num_parameters(CONFIG)).astype(np.float32)
    tensors = views(flat, CONFIG)
    tensors.ln1w[:] = tensors.ln2w[:] = tensors.lnfw[:] = 1
    tensors.wte[CONFIG.vocab_size :] = 0
    header = np.zeros(256, np.int32)
    header[100] = 42
    path = tmp_path / "model.bin"
    write_model(path, CONFIG, flat, header=header)
    return path


def test_inspect(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(model)]) == 0
    out = capsys.readouterr().out
    assert f"version 3 (fp32), N={num_parameters(CONFIG):,}" in out
    assert "vocab_size 50 (padded 128)" in out
    rows = {line.split()[0]: line for line in out.splitlines() if line}
    for spec in tensor_specs(CONFIG):
        assert str(spec.shape) in rows[spec.name] and f"{1024 + 4 * spec.offset:,}" in rows[spec.name]
    assert rows["lnfw"].split()[-6:] == ["1", "1", "1", "0", "0", "0"]
    assert "warning" not in out


def test_stats_against_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts and chunks whose means differ by far more than the values in them do."""
    monkeypatch.setattr(reading, "CHUNK", 10)
    values = (np.random.default_rng(1).normal(size=95) + 1e4 * np.arange(95)).astype(np.float32)
    values[[3, 40]] = np.nan
    values[70] = -np.inf
    finite = values[np.isfinite(values)].astype(np.float64)
    found = tensor_stats([values[:33], values[33:90].reshape(3, 19), values[90:]])
    assert found[:2] == (finite.min(), finite.max()) and found[4:] == (2, 1)
    np.testing.assert_allclose(found[2:4], (finite.mean(), finite.std()), rtol=1e-13)
    assert np.isnan(tensor_stats([np.full(3, np.nan, np.float32)]).mean)


def test_a_file_is_replaced_with_force_alone_and_a_folder_never(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, before = tmp_path / "hf", model.read_bytes()
    assert main(["convert", str(model), str(folder), "--to", "hf"]) == 0
    listing = {path.name: path.read_bytes() for path in folder.iterdir()}
    capsys.readouterr()
    assert main(["convert", str(model), str(model), "--dtype", "bf16"]) == 2
    assert capsys.readouterr().err == f"convert_checkpoint.py: {model}: exists already; --force replaces it\n"
    assert model.read_bytes() == before
    assert main(["convert", str(model), str(model), "--dtype", "bf16", "--force"]) == 0
    assert open_model(model).version == 5
    assert main(["convert", str(model), str(folder), "--to", "hf", "--force"]) == 2
    assert "hf: exists already; remove it" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == listing
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "model.bin"]


def test_bad_input_is_one_line(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = tmp_path / "short.bin"
    short.write_bytes(model.read_bytes()[:-1])
    out = tmp_path / "out.bin"
    for argv in (
        ["inspect", str(tmp_path / "none.bin")],
        ["inspect", str(short)],
        ["convert", str(model), str(tmp_path / "no" / "out.bin"), "--dtype", "fp32"],
        ["convert", str(model), str(tmp_path), "--dtype", "fp32", "--force"],
        ["convert", str(model), str(tmp_path / "out")],
        ["convert", str(model), str(tmp_path / "no" / "out"), "--to", "hf"],
        ["convert", str(model), str(out), "--step", "3"],
        ["convert", str(model), str(out), "--tokenizer", "t.bin"],
        ["convert", str(model), str(out), "--to", "hf", "--tokenizer", str(tmp_path / "none.bin")],
    ):
        assert main(argv) == 2
        err = capsys.readouterr().err
        assert err.startswith("convert_checkpoint.py: ") and err.count("\n") == 1 and "Traceback" not in err
    assert sorted(tmp_path.iterdir()) == [model, short]


@pytest.mark.parametrize("target", ["llmc", "hf"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_disk_that_lies_is_noticed(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, target: str,
    dtype: str,
) -> None:  # fmt: skip
    """One bit flipped between writing and reading back, in the weights or the padding rows: no output, exit 2."""
    padding = [1024 + 127 * 16 * reading.ITEMSIZE[dtype]] if target == "llmc" else []
    for byte in (-1, -999, *padding):

        def rotten(path: Path, byte: int = byte) -> Source:
            flip(path if target == "llmc" else path / "model.safetensors", byte)
            return open_source(path)

        monkeypatch.setattr(conversion, "open_source", rotten)
        assert main(["convert", str(model), str(tmp_path / "out"), "--to", target, "--dtype", dtype]) == 2
        assert "not written: what was read back differs" in capsys.readouterr().err
        assert list(tmp_path.iterdir()) == [model]


# Between formats


def bits(path: Path, group: str = "params") -> bytes:
    """Every value of a group, without the padding rows of wte."""
    source = open_source(path)
    flat = flat_parameters(source, group)
    views(flat, source.config).wte[source.config.vocab_size :] = 0
    return flat.tobytes()


def digest_line(text: str) -> str:
    return next(line.split()[1] for line in text.splitlines() if line.startswith("digest  "))


@pytest.fixture
def odd_model(tmp_path: Path) -> Path:
    """A model with every kind of bit pattern in its weights: NaN payloads, infinities, subnormals, -0."""
    flat = random_bits(num_parameters(CONFIG), 5).view(np.float32).copy()
    views(flat, CONFIG).wte[CONFIG.vocab_size :] = 0
    path = tmp_path / "odd.bin"
    write_model(path, CONFIG, flat)
    return path


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # casts of signalling NaNs
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_format_to_every_format(
    odd_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: str
) -> None:
    """No bit of a weight is lost on any of the ways, and each says the same digest, which `inspect` prints too."""
    start = tmp_path / "start.bin"
    assert main(["convert", str(odd_model), str(start), "--dtype", dtype]) == 0
    expected = bits(start)
    capsys.readouterr()
    assert main(["inspect", str(start), "--json"]) == 0
    digest = json.loads(capsys.readouterr().out)["digest"]
    formats = ("llmc", "hf", "orbax")
    for first in formats:
        there = tmp_path / f"from-{first}"
        assert main(["convert", str(start), str(there), "--to", first]) == 0
        out, err = capsys.readouterr()
        assert digest_line(out) == digest and "values are NaN or infinite" in err, first
        assert bits(there) == expected
        for second in formats:
            back = tmp_path / f"{first}-{second}"
            assert main(["convert", str(there), str(back), "--to", second]) == 0, capsys.readouterr().err
            assert digest_line(capsys.readouterr().out) == digest, (first, second)
            assert bits(back) == expected
            if second == "llmc":
                assert back.read_bytes() == start.read_bytes()
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run in bf16 after 7 steps, whose copy is not what rounding would give, as with stochastic rounding."""
    arrays = random_arrays(7, copy="bfloat16", config=CONFIG)
    return save(tmp_path / "run", 7, arrays, "bf16", CONFIG).parent


@pytest.mark.parametrize(
    ("target", "flags", "group"),
    [("llmc", ["--dtype", "fp32"], "params"), ("llmc", [], "copy"), ("hf", ["--dtype", "bf16"], "copy")],
)
def test_a_16_bit_run_gives_its_copy_or_its_master_weights(
    run: Path, tmp_path: Path, target: str, flags: list[str], group: str
) -> None:
    out = tmp_path / "out"
    assert main(["convert", str(run), str(out), "--to", target, *flags]) == 0
    assert bits(out) == bits(run, group)


def test_training_states_there_and_back(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llmc, back = tmp_path / "llmc", tmp_path / "back"
    assert main(["convert", str(run), str(llmc), "--to", "llmc-state"]) == 0
    assert main(["convert", str(llmc), str(back), "--to", "state"]) == 0
    for folder in (llmc, back):
        for group in ("params", "m", "v", "copy"):
            assert bits(folder, group) == bits(run, group)
        assert open_source(folder).step == 7
    checkpoint = store.open_checkpoint(back / "state_00000007")
    assert checkpoint.read("step") == 7 == checkpoint.read("updates")
    assert [entry.problem for entry in store.entries(back)] == [None]
    capsys.readouterr()
    for path, kind in ((run, "state"), (llmc, "llmc-state")):
        assert main(["inspect", str(path), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (list(found["tensors"]), found["kind"]) == (["params", "m", "v", "copy"], kind)
        assert found["tensors"]["copy"]["fcw"]["type"] == "bf16" and found["tensors"]["m"]["fcw"]["type"] == "fp32"


def test_what_becomes_no_training_state(
    model: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llmc, out = str(tmp_path / "llmc"), str(tmp_path / "x")
    assert main(["convert", str(run), llmc, "--to", "llmc-state"]) == 0
    capsys.readouterr()
    for argv, words in (
        ([str(model), out, "--to", "state"], "not a training state; a run begins from it with train.py -e"),
        ([str(model), out, "--to", "llmc-state"], "not a training state"),
        ([str(run), out, "--to", "llmc-state", "--dtype", "fp32"], "a training state stays bf16"),
        ([str(run), out, "--to", "state"], "is a training state of llmc-jax already"),
        ([llmc, str(run), "--to", "state"], "state_00000007: exists already; --force replaces it"),
        ([str(run), out, "--to", "hf", "--step", "3"], "no training state of step 3"),
    ):
        assert main(["convert", *argv]) == 2
        assert words in capsys.readouterr().err
    assert main(["convert", llmc, str(run), "--to", "state", "--force"]) == 0
    assert main(["convert", str(run), out, "--to", "hf", "--step", "7"]) == 0


def test_a_full_disk_leaves_nothing(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["convert", str(run), str(tmp_path / "llmc"), "--to", "llmc-state"]) == 0
    capsys.readouterr()
    before = sorted(tmp_path.iterdir())
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(conversion.hugging_face, "write_archive", full)
    monkeypatch.setattr(conversion.store, "write_blocks", full)
    for target in ("hf", "state"):
        assert main(["convert", str(tmp_path / "llmc"), str(tmp_path / "out"), "--to", target]) == 2
        assert "out: cannot be written (No space left on device)" in capsys.readouterr().err
        assert sorted(tmp_path.iterdir()) == before


def test_padding_rows_that_are_not_zero(model: Path, tmp_path: Path) -> None:
    """Kept in llm.c's files, dropped in Hugging Face's."""
    flat = flat_parameters(open_source(model))
    flat[60 * CONFIG.channels] = 3
    write_model(model, CONFIG, flat)
    assert main(["convert", str(model), str(tmp_path / "again.bin")]) == 0
    assert (tmp_path / "again.bin").read_bytes()[1024:] == model.read_bytes()[1024:]
    assert main(["convert", str(model), str(tmp_path / "hf"), "--to", "hf"]) == 0
    assert not open_source(tmp_path / "hf").read("params", "wte", 0)[50:].any()


def test_tokenizers_travel_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model of bytes gets its tokenizer by its V; llm.c's file holds none."""
    config = replace(CONFIG, vocab_size=257, padded_vocab_size=384)
    write_model(tmp_path / "257.bin", config, np.zeros(num_parameters(config), np.float32))
    assert main(["convert", str(tmp_path / "257.bin"), str(tmp_path / "257"), "--to", "hf"]) == 0
    names = ["config.json", "generation_config.json", "merges.txt", "model.safetensors", "tokenizer_config.json"]
    assert sorted(path.name for path in (tmp_path / "257").iterdir()) == [*names, "vocab.json"]
    table = str(tmp_path / "t.bin")
    write_tokenizer_bin(table, bytes_tokenizer().pieces, 256)
    assert main(["convert", str(tmp_path / "257"), str(tmp_path / "more.bin"), "--tokenizer", table]) == 2
    assert "only what --to hf writes holds a tokenizer" in capsys.readouterr().err
    small = replace(CONFIG, vocab_size=100)
    write_model(tmp_path / "100.bin", small, np.zeros(num_parameters(small), np.float32))
    argv = ["convert", str(tmp_path / "100.bin"), str(tmp_path / "100"), "--to", "hf"]
    assert main([*argv, "--tokenizer", table]) == 2
    assert "has 257 ids, but the model's vocabulary is V=100" in capsys.readouterr().err
    assert main(argv) == 0
    assert "note    no tokenizer is written: no tokenizer is known for V=100" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_memory_is_that_of_a_layer(tmp_path: Path) -> None:
    """A model of 390 MB in 40 layers: each way takes far less than the model."""
    config = ModelConfig(64, 512, 512, num_layers=40, num_heads=2, channels=448)
    write_model(tmp_path / "m.bin", config, np.ones(num_parameters(config), np.float32))
    assert (tmp_path / "m.bin").stat().st_size > 380e6
    code = (  # the peak of this process since it began; ru_maxrss begins with the peak of the one that started it
        "import sys; from llmc_jax.checkpoint.convert import main; status = main(sys.argv[1:]); "
        "print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0], file=sys.stderr); sys.exit(status)"
    )
    peaks = {}
    for argv in (["m.bin", "5.bin", "--dtype", "bf16"], ["m.bin", "hf", "--to", "hf"], ["hf", "3.bin", "--to", "llmc"]):
        done = subprocess.run(
            [sys.executable, "-c", code, "convert", *argv],
            capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True,
        )  # fmt: skip
        peaks[argv[1]] = int(done.stderr.split()[-1]) * 1024  # bytes; some 100 MB and 50 MB
    assert max(peaks.values()) < 200e6, peaks


def test_stopped_by_ctrl_c(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "check_written", Mock(side_effect=KeyboardInterrupt))
    for target in ("llmc", "hf"):
        assert main(["convert", str(model), str(tmp_path / "out"), "--to", target]) == 130
        assert list(tmp_path.iterdir()) == [model]
