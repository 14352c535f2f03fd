"""Two checkpoints beside each other: what differs is found and placed, in every format, a layer at a time, in words."""

from pathlib import Path

import numpy as np
import pytest

from llmc_jax.checkpoint.llmc import bf16_to_fp32, fp32_to_bf16, write_model
from llmc_jax.checkpoint.source import Source, slices
from llmc_jax.compare import checkpoints
from llmc_jax.config.model import ModelConfig
from llmc_jax.models.layout import num_parameters, tensor_specs, views
from tests import plain_model
from tests.checkpoint.damage import memory_below
from tests.compare.running import compare, compared

CONFIG = ModelConfig(max_seq_len=6, vocab_size=11, padded_vocab_size=128, num_layers=3, num_heads=2, channels=8)


def weights(config: ModelConfig = CONFIG, seed: int = 0) -> np.ndarray:
    return plain_model.random_flat(config, num_parameters(config), seed).astype(np.float32)


def written(path: Path, flat: np.ndarray, config: ModelConfig = CONFIG, version: int = 3) -> Path:
    write_model(path, config, flat, version=version)
    return path


def memory_source(config: ModelConfig, groups: dict[str, np.ndarray], step: int | None = None) -> Source:
    """A checkpoint that holds flat arrays."""

    def read(group: str, tensor: str, layer: int) -> np.ndarray:
        found = getattr(views(groups[group], config), tensor)
        return found if tensor in ("wte", "wpe", "lnfw", "lnfb") else found[layer]

    return Source(Path("memory"), "state", config, "fp32", step, tuple(groups), read, ())


def test_a_file_and_its_copy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = written(tmp_path / "a.bin", weights()), written(tmp_path / "b.bin", weights())
    status, result = compared(tmp_path, "checkpoints", a, b)
    assert status == 0 and result["agrees"] and result["same_bits"]
    assert [row["name"] for row in result["tensors"]] == [spec.name for spec in tensor_specs(CONFIG)]
    out = capsys.readouterr().out
    assert "All 16 tensors have the same bits." in out and out.count("same bits") == 17


def test_one_value_is_found_and_placed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flat = weights()
    changed = flat.copy()
    views(changed, CONFIG).fcw[1, 17, 3] += 0.25
    views(changed, CONFIG).lnfb[5] = -views(flat, CONFIG).lnfb[5]
    a, b = written(tmp_path / "a.bin", changed), written(tmp_path / "b.bin", flat)
    status, result = compared(tmp_path, "checkpoints", a, b)
    assert status == 4 and not result["agrees"] and not result["same_bits"]
    other = {row["name"]: row for row in result["tensors"] if not row["agrees"]}
    assert list(other) == ["fcw", "lnfb"]
    fcw, lnfb = other["fcw"], other["lnfb"]
    assert (fcw["worst_index"], fcw["differing_values"], fcw["differing_layers"]) == ([1, 17, 3], 1, [1])
    x, y = (float(views(side, CONFIG).fcw[1, 17, 3]) for side in (changed, flat))
    assert fcw["worst_values"] == [x, y] and fcw["largest_error"] == abs(x - y)
    assert (lnfb["worst_index"], lnfb["differing_bits"], lnfb["differing_layers"]) == ([5], 1, [])
    out = capsys.readouterr().out
    assert "[1,17,3]" in out and "2 of 16 tensors differ (2 values)." in out


def test_tolerance(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """bf16 beside the float32 it was rounded from: half a unit of the last of 8 bits."""
    flat = weights()
    a, b = written(tmp_path / "a.bin", flat, version=5), written(tmp_path / "b.bin", flat)
    largest = float(np.abs(bf16_to_fp32(fp32_to_bf16(flat)).astype(np.float64) - flat).max())
    assert compare("checkpoints", a, b) == 4
    assert compare("checkpoints", a, b, "--tolerance", str(largest)) == 0
    assert "All 16 tensors agree within" in capsys.readouterr().out
    assert compare("checkpoints", a, b, "--tolerance", str(largest * 0.999)) == 4
    assert "1 of 16 tensors differ by more than" in capsys.readouterr().out
    status, result = compared(tmp_path, "checkpoints", a, b, "--tolerance", "1")
    assert status == 0 and result["agrees"] and not result["same_bits"]
    assert max(row["largest_error"] for row in result["tensors"]) == largest
    assert [result[side]["dtype"] for side in "ab"] == ["bf16", "fp32"]


def test_other_shapes_are_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    longer = ModelConfig(9, 11, 128, 3, 2, 8)
    flat = np.zeros(num_parameters(longer), np.float32)
    for ours, theirs in zip(views(weights(), CONFIG), views(flat, longer), strict=True):
        theirs[: len(ours)] = ours
    a, b = written(tmp_path / "a.bin", weights()), written(tmp_path / "b.bin", flat, longer)
    status, result = compared(tmp_path, "checkpoints", a, b)
    assert status == 4 and result["shapes"] == ["the models differ: max_seq_len 6 and 9 (A and B)"]
    assert [row["name"] for row in result["tensors"] if not row["agrees"]] == ["wpe"]
    out = capsys.readouterr().out
    assert out.count("SHAPE DIFFERS") == 1 and "[6,8] and [9,8]" in out and result["shapes"][0] in out
    assert "1 of 16 differ in shape and are not compared." in out


def test_the_same_tensors_of_another_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The number of heads is in no shape."""
    heads = ModelConfig(6, 11, 128, 3, 4, 8)
    a, b = written(tmp_path / "a.bin", weights()), written(tmp_path / "b.bin", weights(), heads)
    status, result = compared(tmp_path, "checkpoints", a, b)
    assert status == 4 and not result["agrees"] and not result["same_bits"]
    assert "The tensors agree, but the models differ: num_heads 2 and 4" in capsys.readouterr().out


def test_m_and_v_are_compared_where_both_have_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    p, m, v = (weights(seed=seed) for seed in (1, 2, 3))
    other = v.copy()
    views(other, CONFIG).ln2w[0, 7] = 9
    views(other, CONFIG).ln2w[2, 1] = 5
    sources = {
        "a": memory_source(CONFIG, {"params": p, "m": m, "v": v, "copy": p}, 10),
        "b": memory_source(CONFIG, {"params": p, "m": m, "v": other}, 20),
        "c": memory_source(CONFIG, {"params": p}),
    }
    monkeypatch.setattr(checkpoints, "open_source", lambda path, **_: sources[path.name])
    status, result = compared(tmp_path, "checkpoints", "a", "b")
    assert status == 4 and len(result["tensors"]) == 48
    (row,) = (row for row in result["tensors"] if not row["agrees"])
    assert (row["group"], row["name"], row["differing_layers"]) == ("v", "ln2w", [0, 2])
    out = capsys.readouterr().out
    assert "step 10; holds weights, m, v, 16-bit copy" in out and "only A holds: 16-bit copy; not compared" in out
    line = next(line for line in out.splitlines() if "DIFFERS" in line)
    assert line.split()[:3] == ["v", "ln2w", "[3,8]"] and " 0,2 " in line
    status, result = compared(tmp_path, "checkpoints", "c", "a")
    assert status == 0 and len(result["tensors"]) == 16
    assert "only B holds: m, v, 16-bit copy; not compared" in capsys.readouterr().out


def test_one_layer_at_a_time() -> None:
    """Nothing asks for more than a layer of a tensor, and memory stays at a few of them."""
    config = ModelConfig(8, 16, 16, 12, 2, 64)
    flat = weights(config)
    source = memory_source(config, {"params": flat, "m": flat})
    largest = max(int(np.prod(piece.shape)) for piece in slices(config))
    rows = list(checkpoints.compare(source, source))  # what is made once
    # Some float64 and float32 copies of one slice; all takes 12 times that.
    with memory_below(64 * largest + 200_000):
        again = list(checkpoints.compare(source, source))
    assert rows == again and all(row.agrees for row in rows) and len(rows) == 32
