"""llm.c's debug states: against struct, over mutated bytes. llm.c's own is compared in compare/test_debug_state.py."""

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmc_jax.base.errors import FormatError
from llmc_jax.checkpoint.debug_state import read_debug_state
from llmc_jax.config.model import ModelConfig
from llmc_jax.models.gpt2.tensors import num_parameters

TINY = ModelConfig(max_seq_len=6, vocab_size=5, padded_vocab_size=128, num_layers=2, num_heads=2, channels=4)
B, T, V, C = 2, 3, 5, 4
N = num_parameters(TINY)


def encode(version: int, seed: int = 0, loss: float = 1.5) -> tuple[bytes, np.ndarray]:
    """A file made of struct, and the gradients (N,) that it holds; unused header ints are not 0."""
    rng = np.random.default_rng(seed)
    gradient = rng.standard_normal(N).astype(np.float32)
    gradient[V * C : 128 * C] = 0
    stored = gradient if version == 2 else np.concatenate([gradient[: V * C], gradient[128 * C :]])
    ids = rng.integers(0, V, 2 * B * T).tolist()
    logits = rng.standard_normal(B * T * V).tolist()
    out = struct.pack("<256i", 20240327, version, B, T, *range(-252, 0)) + struct.pack(f"<{2 * B * T}i", *ids)
    out += struct.pack(f"<{B * T * V}f", *logits) + struct.pack("<f", loss)
    return out + struct.pack(f"<{stored.size}f", *stored.tolist()), gradient


@pytest.mark.parametrize("version", [1, 2])
def test_reads_what_struct_wrote(tmp_path: Path, version: int) -> None:
    data, gradient = encode(version)
    path = tmp_path / "debug.bin"
    path.write_bytes(data)
    state = read_debug_state(path, TINY)
    assert state.x.ravel().tolist() == list(struct.unpack_from("<6i", data, 1024)) and state.x.shape == (B, T)
    assert state.y.ravel().tolist() == list(struct.unpack_from("<6i", data, 1048)) and state.y.shape == (B, T)
    assert state.logits.tobytes() == data[1072 : 1072 + 120] and state.logits.shape == (B, T, V)
    assert state.loss == 1.5 and state.version == version
    np.testing.assert_array_equal(state.gradient, gradient)
    assert state.gradient.dtype == state.logits.dtype == np.float32 and state.x.dtype == np.int32


# --- bad files ---

GOOD = encode(2)[0]


def patched(at: int, *values: int) -> bytes:
    data = bytearray(GOOD)
    struct.pack_into(f"<{len(values)}i", data, at, *values)
    return bytes(data)


BAD = {
    "magic": (patched(0, 5), "starts with 5, expected magic 20240327"),
    "version 0": (patched(4, 0), "version 0 .* is unknown"),
    "other version": (patched(4, 1), "too long"),
    "no rows": (patched(8, 0), "B=0, T=3"),
    "minus T": (patched(12, -1), "B=2, T=-1"),
    "T": (patched(12, 7), "T=7, but the model has 6 positions"),
    "absurd B": (patched(8, 2**31 - 1), "B=2147483647 .* cut off"),
    "a token": (patched(1024, 5), "x holds tokens from .* to 5, but the model knows 0 to 4"),
    "a negative token": (patched(1048, -2), "y holds tokens from -2"),
    "cut": (GOOD[:-1], "cut off"),
    "long": (GOOD + b"x", "too long"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused_in_one_line(tmp_path: Path, name: str) -> None:
    data, words = BAD[name]
    path = tmp_path / "debug.bin"
    path.write_bytes(data)
    with pytest.raises(FormatError, match=words) as caught:
        read_debug_state(path, TINY)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_files(tmp_path: Path, data: st.DataObject) -> None:
    """FormatError, or every value is the one that stands in the file."""
    raw = bytearray(GOOD)
    for at in data.draw(st.lists(st.one_of(st.integers(0, 15), st.integers(0, len(GOOD) - 1)), max_size=4)):
        raw[at] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        end = data.draw(st.integers(0, len(raw) + 100))
        raw = raw[:end] + bytes(max(0, end - len(raw)))
    path = tmp_path / "debug.bin"
    path.write_bytes(raw)
    try:
        state = read_debug_state(path, TINY)
    except FormatError as error:
        assert str(error).startswith(f"{path}: ") and "\n" not in str(error)
        return
    parts = [state.x, state.y, state.logits]
    assert b"".join(part.tobytes() for part in parts) == bytes(raw[1024:1192])
    assert bytes(raw[1192:1196]) == np.float32(state.loss).tobytes() or np.isnan(state.loss)
    assert state.gradient.tobytes() == bytes(raw[1196:])
    assert min(state.x.min(), state.y.min()) >= 0 and max(state.x.max(), state.y.max()) < V
