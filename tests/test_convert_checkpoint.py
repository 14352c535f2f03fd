"""The command convert_checkpoint.py: what it prints, what it refuses, and that it never leaves half a file."""

import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from llmc_jax.checkpoint import convert
from llmc_jax.checkpoint.convert import main, tensor_stats
from llmc_jax.checkpoint.llmc import fp32_to_bf16, read_model, write_model
from llmc_jax.config import ModelConfig
from llmc_jax.params import num_parameters, tensor_specs

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ModelConfig(max_seq_len=8, vocab_size=50, padded_vocab_size=128, num_layers=2, num_heads=2, channels=16)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A version 3 file with random matrices, layernorm weights of 1, and an unknown header integer."""
    rng = np.random.default_rng(0)
    flat = rng.normal(0, 0.02, num_parameters(CONFIG)).astype(np.float32)
    for spec in tensor_specs(CONFIG):
        if spec.name in ("ln1w", "ln2w", "lnfw"):
            flat[spec.offset : spec.offset + spec.size] = 1
    flat[CONFIG.vocab_size * CONFIG.channels : CONFIG.padded_vocab_size * CONFIG.channels] = 0
    header = np.zeros(256, np.int32)
    header[100] = 42
    path = tmp_path / "model.bin"
    write_model(path, CONFIG, flat, header=header)
    return path


def as_version_2_end(model: Path, out: Path) -> None:
    """The same model as a version 2 file with its layernorms at the end, put together tensor by tensor."""
    read = read_model(model)
    parts = {s.name: read.flat[s.offset : s.offset + s.size] for s in tensor_specs(CONFIG)}
    parts["wte"] = parts["wte"][: CONFIG.vocab_size * CONFIG.channels]
    late = ["ln1w", "ln1b", "ln2w", "ln2b", "lnfw", "lnfb"]
    header = [20240326, 2, 8, 50, 2, 2, 16] + [0] * 249
    body = b"".join(fp32_to_bf16(parts[name]).tobytes() for name in parts if name not in late)
    out.write_bytes(struct.pack("<256i", *header) + body + b"".join(parts[name].tobytes() for name in late))


def test_inspect(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(model)]) == 0
    out = capsys.readouterr().out
    assert f"version 3 (fp32), N={num_parameters(CONFIG):,}" in out
    assert "vocab_size 50 (padded 128)" in out and "[100]=42" in out
    rows = {line.split()[0]: line for line in out.splitlines() if line}
    for spec in tensor_specs(CONFIG):
        assert str(spec.shape) in rows[spec.name] and f"{1024 + 4 * spec.offset:,}" in rows[spec.name]
    assert rows["lnfw"].split()[-6:] == ["1", "1", "1", "0", "0", "0"]
    assert rows["ok:"] == "ok: every value is finite, and the padding rows of wte are zero"


def test_inspect_warns(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    read = read_model(model)
    read.flat[60 * CONFIG.channels] = np.nan
    write_model(model, CONFIG, read.flat)
    assert main(["inspect", str(model)]) == 0
    out = capsys.readouterr().out
    assert "warning: wte: 1 of 2,048 values are NaN or infinite" in out
    assert "warning: wte: 1 of the 78 padding rows (V=50 to Vp-1=127) are not zero" in out and "ok:" not in out


def test_inspect_version_2(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    as_version_2_end(model, tmp_path / "v2.bin")
    assert main(["inspect", str(tmp_path / "v2.bin")]) == 0
    out = capsys.readouterr().out
    assert "version 2 (bf16 with fp32 layernorms, vocabulary not padded, layernorms at the end)" in out
    names = [line.split()[0] for line in out.splitlines() if "bf16 " in line[25:40] or "fp32 " in line[25:40]]
    assert names[-7:] == ["fcprojb", "ln1w", "ln1b", "ln2w", "ln2b", "lnfw", "lnfb"]
    assert "(50, 16)" in out


def test_stats_against_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "CHUNK", 10)
    values = (np.random.default_rng(1).normal(size=95) + 1e4).astype(np.float32)
    values[[3, 40]] = np.nan
    values[70] = -np.inf
    finite = values[np.isfinite(values)].astype(np.float64)
    found = tensor_stats(values)
    assert found[:2] == (finite.min(), finite.max()) and found[4:] == (2, 1)
    np.testing.assert_allclose(found[2:4], (finite.mean(), finite.std()), rtol=1e-13)
    assert np.isnan(tensor_stats(np.full(3, np.nan, np.float32)).mean)


def test_convert_there_and_back(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """3 -> 3 is the same file; 3 -> 5 rounds; 5 -> 3 -> 5 is the same file."""
    assert main(["convert", str(model), str(tmp_path / "3.bin"), "--version", "3"]) == 0
    assert (tmp_path / "3.bin").read_bytes() == model.read_bytes()
    assert "values equal" in capsys.readouterr().out
    assert main(["convert", str(model), str(tmp_path / "5.bin"), "--version", "5"]) == 0
    out = capsys.readouterr().out
    assert "read    " in out and "wrote   " in out and "values rounded to bf16, largest relative change 0.0038" in out
    expected = fp32_to_bf16(read_model(model).flat).tobytes()
    assert (tmp_path / "5.bin").read_bytes()[1024:] == expected
    assert main(["convert", str(tmp_path / "5.bin"), str(tmp_path / "53.bin"), "--version", "3"]) == 0
    assert main(["convert", str(tmp_path / "53.bin"), str(tmp_path / "535.bin"), "--version", "5"]) == 0
    assert (tmp_path / "535.bin").read_bytes() == (tmp_path / "5.bin").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["3.bin", "5.bin", "53.bin", "535.bin", "model.bin"]


def test_convert_version_2(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    as_version_2_end(model, tmp_path / "v2.bin")
    for option in ([], ["--v2-order", "end"]):
        assert main(["convert", str(tmp_path / "v2.bin"), str(tmp_path / "a.bin"), "--version", "5", *option]) == 0
        (tmp_path / "a.bin").unlink()
    assert "layernorms at the end" in capsys.readouterr().out
    wrong = ["convert", str(tmp_path / "v2.bin"), str(tmp_path / "b.bin"), "--version", "5", "--v2-order", "in-place"]
    assert main(wrong) == 0
    ln1w = next(s for s in tensor_specs(CONFIG) if s.name == "ln1w")
    assert not np.allclose(read_model(tmp_path / "b.bin").flat[ln1w.offset : ln1w.offset + ln1w.size], 1)


def test_never_overwrites_without_force(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = model.read_bytes()
    assert main(["convert", str(model), str(model), "--version", "5"]) == 2
    assert capsys.readouterr().err == f"convert_checkpoint.py: {model}: exists already; --force replaces it\n"
    assert model.read_bytes() == before
    assert main(["convert", str(model), str(model), "--version", "5", "--force"]) == 0
    assert read_model(model).version == 5


def test_bad_input_is_one_line(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = tmp_path / "short.bin"
    short.write_bytes(model.read_bytes()[:-1])
    out = tmp_path / "out.bin"
    for argv in (
        ["inspect", str(tmp_path / "none.bin")],
        ["inspect", str(short)],
        ["convert", str(short), str(out), "--version", "3"],
        ["convert", str(model), str(tmp_path / "no" / "out.bin"), "--version", "3"],
        ["convert", str(model), str(tmp_path), "--version", "3", "--force"],
    ):
        assert main(argv) == 2
        err = capsys.readouterr().err
        assert err.startswith("convert_checkpoint.py: ") and err.count("\n") == 1 and "Traceback" not in err
    assert sorted(tmp_path.iterdir()) == [model, short]


def test_a_disk_that_lies_is_noticed(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bit flipped between writing and reading back: no output, exit 2."""
    real = convert.read_model

    def rotten(path: Path, *, v2_order: str = "auto") -> object:
        read = real(path, v2_order=v2_order)
        if path != model:
            read.flat.view(np.uint32)[4321] ^= 1 << flip
        return read

    monkeypatch.setattr(convert, "read_model", rotten)
    for version, flip in (("3", 0), ("5", 18)):  # noqa: B007 (flip is read by `rotten`)
        assert main(["convert", str(model), str(tmp_path / "out.bin"), "--version", version]) == 2
        assert "what was read back differs" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [model]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # casts of signalling NaNs
def test_rounding_check_covers_special_values() -> None:
    bits = np.arange(0, 2**32, 4099, dtype=np.uint64).astype(np.uint32)
    before = bits.view(np.float32)
    after = (fp32_to_bf16(before).astype(np.uint32) << 16).view(np.float32)
    assert convert._largest_change(before, after, exact=False) == np.inf  # some round up to infinity
    small = np.abs(np.nan_to_num(before, nan=1.0)) < 3e38
    change = convert._largest_change(before[small], after[small], exact=False)
    assert change is not None and change >= 2**-8
    for wrong in (after * np.float32(1.01), -after, np.zeros_like(after)):
        assert convert._largest_change(before, wrong, exact=False) is None


def test_as_a_program(model: Path, tmp_path: Path) -> None:
    """The script itself: its help, a conversion, and the exit status of bad input."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}

    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(ROOT / "convert_checkpoint.py"), *argv]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env)

    assert "Reads versions 1 to 5, writes 3 (fp32) and 5 (bf16)." in run("--help").stdout
    assert run("convert", "model.bin", "out.bin", "--version", "5").returncode == 0
    bad = run("inspect", "nothing.bin")
    assert (bad.returncode, bad.stdout, bad.stderr) == (2, "", "convert_checkpoint.py: nothing.bin: no such file\n")
