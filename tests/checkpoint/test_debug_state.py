"""llm.c's debug states: against struct, over mutated bytes. llm.c's own is compared in compare/test_debug_state.py."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmc_jax.base.errors import FormatError, InputError
from llmc_jax.checkpoint.debug_state import make_debug_state, read_debug_state
from llmc_jax.checkpoint.llmc import write_model
from llmc_jax.checkpoint.sources import flat_parameters, open_source
from llmc_jax.config.model import ModelConfig
from llmc_jax.data.tokenfile import write_token_file
from llmc_jax.models.layout import num_parameters
from tests import plain_model
from tests.checkpoint.damage import mutated, refused, spoil_what_is_written

TINY = ModelConfig(max_seq_len=6, vocab_size=5, padded_vocab_size=128, num_layers=2, num_heads=2, channels=4)
B, T, V, C = 2, 3, 5, 4
N = num_parameters(TINY)


def encode(seed: int = 0, loss: float = 1.5) -> tuple[bytes, np.ndarray]:
    """A file made of struct, and the gradients (N,) that it holds; unused header ints are not 0."""
    rng = np.random.default_rng(seed)
    gradient = rng.standard_normal(N).astype(np.float32)
    gradient[V * C : 128 * C] = 0
    ids = rng.integers(0, V, 2 * B * T).tolist()
    logits = rng.standard_normal(B * T * V).tolist()
    out = struct.pack("<256i", 20240327, 2, B, T, *range(-252, 0)) + struct.pack(f"<{2 * B * T}i", *ids)
    out += struct.pack(f"<{B * T * V}f", *logits) + struct.pack("<f", loss)
    return out + struct.pack(f"<{gradient.size}f", *gradient.tolist()), gradient


def test_reads_what_struct_wrote(tmp_path: Path) -> None:
    data, gradient = encode()
    path = tmp_path / "debug.bin"
    path.write_bytes(data)
    state = read_debug_state(path, TINY)
    assert state.x.tobytes() + state.y.tobytes() + state.logits.tobytes() == data[1024 : 1072 + 120]
    assert state.x.shape == state.y.shape == (B, T) and state.logits.shape == (B, T, V)
    assert state.loss == 1.5
    np.testing.assert_array_equal(state.gradient, gradient)
    assert state.gradient.dtype == state.logits.dtype == np.float32 and state.x.dtype == np.int32


# --- made of a model ---


@pytest.mark.slow
@pytest.mark.parametrize("version", [3, 5])
@pytest.mark.usefixtures("quick_compilation")
def test_a_debug_state_of_a_model(tmp_path: Path, version: int) -> None:
    """Loss, logits and gradients against the plain model, of the weights as stored, computed in float32."""
    flat = plain_model.random_flat(TINY, N, seed=1).astype(np.float32)
    flat[V * C : 128 * C] = 0
    write_model(tmp_path / "model.bin", TINY, flat, version=version)
    source = open_source(tmp_path / "model.bin")
    write_token_file(tmp_path / "tokens.bin", np.array([0, 4, 1, 1, 3, 2, 0, 1, 4]))
    loss, warnings = make_debug_state(source, tmp_path / "debug.bin", tmp_path / "tokens.bin", B, T)
    state = read_debug_state(tmp_path / "debug.bin", TINY)
    assert state.x.tolist() == [[0, 4, 1], [1, 3, 2]] and state.y.tolist() == [[4, 1, 1], [3, 2, 0]]
    assert warnings == () and np.float32(loss) == state.loss

    import jax

    with jax.enable_x64(True):
        wide = flat_parameters(source)[:N].astype(np.float64)
        both = jax.value_and_grad(lambda flat: plain_model.loss(flat, state.x, state.y, TINY))
        (loss, gradient), logits = jax.jit(lambda flat: (both(flat), plain_model.logits(flat, state.x, TINY)))(wide)
    assert abs(state.loss - float(loss)) <= 1e-6
    np.testing.assert_allclose(state.logits, np.asarray(logits)[..., :V], rtol=0, atol=1e-5)
    assert plain_model.relative_error(state.gradient, np.asarray(gradient)[:N]) <= 1e-5
    assert not state.gradient[V * C : 128 * C].any()


@pytest.mark.slow
def test_random_tokens_are_always_the_same(tmp_path: Path) -> None:
    write_model(tmp_path / "model.bin", TINY, plain_model.random_flat(TINY, N, seed=1).astype(np.float32))
    for name in ("a.bin", "b.bin"):
        make_debug_state(open_source(tmp_path / "model.bin"), tmp_path / name, None, B, T)
    raw, state = (tmp_path / "a.bin").read_bytes(), read_debug_state(tmp_path / "a.bin", TINY)
    assert raw == (tmp_path / "b.bin").read_bytes()
    assert state.x.ravel()[1:].tolist() == state.y.ravel()[:-1].tolist() and len(set(state.x.ravel().tolist())) > 2
    parts = [state.x, state.y, state.logits, np.float32(state.loss), state.gradient]
    assert raw == struct.pack("<256i", 20240327, 2, B, T, *[0] * 252) + b"".join(each.tobytes() for each in parts)


def test_what_cannot_be_made(tmp_path: Path) -> None:
    model, out = tmp_path / "model.bin", tmp_path / "out.bin"
    write_model(model, TINY, np.zeros(N, np.float32))
    write_token_file(tmp_path / "few.bin", np.array([1, 2, 3]))
    write_token_file(tmp_path / "large.bin", np.array([1, 2, 3, 5, 0, 1, 2, 3]))
    source = open_source(model)
    cases: list[tuple[tuple[Any, ...], str]] = [
        ((out, tmp_path / "few.bin", B, T), "holds 3 tokens; the batch takes 7"),
        ((out, tmp_path / "large.bin", B, T), "is id 5; with V=5 ids end at 4"),
        ((out, tmp_path / "none.bin", B, T), "none.bin: cannot be read"),
        ((out, None, B, 7), "T from 1 to 6"),
        ((out, None, 0, T), "B must be at least 1"),
        ((tmp_path / "none" / "x", None, B, T), "there is no folder"),
        ((tmp_path, None, B, T, True), "it is a folder"),
    ]
    for arguments, words in cases:
        with pytest.raises(InputError, match=words):
            make_debug_state(source, *arguments)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["few.bin", "large.bin", "model.bin"]
    out.write_text("mine")
    with pytest.raises(InputError, match=r"exists already; --force"):
        make_debug_state(source, out, None, B, T)
    assert out.read_text() == "mine"
    make_debug_state(source, out, None, B, T, force=True)
    assert read_debug_state(out, TINY).loss == pytest.approx(np.log(V), abs=1e-6)  # all logits are 0


def test_a_write_that_reads_back_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "model.bin", TINY, np.zeros(N, np.float32))
    spoil_what_is_written(monkeypatch)
    with pytest.raises(InputError, match=r"out\.bin: reads back differently"):
        make_debug_state(open_source(tmp_path / "model.bin"), tmp_path / "out.bin", None, B, T)
    assert [path.name for path in tmp_path.iterdir()] == ["model.bin"]


# --- bad files ---

GOOD = encode()[0]


def patched(at: int, *values: int) -> bytes:
    data = bytearray(GOOD)
    struct.pack_into(f"<{len(values)}i", data, at, *values)
    return bytes(data)


BAD = {
    "magic": (patched(0, 5), "starts with 5, expected magic 20240327"),
    "version 0": (patched(4, 0), "version 0 .* expected 2"),
    "version 1, of some weeks": (patched(4, 1), "version 1 .* expected 2"),
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
    with refused(path, words):
        read_debug_state(path, TINY)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_files(tmp_path: Path, data: st.DataObject) -> None:
    """FormatError, or every value is the one that stands in the file."""
    raw = mutated(data.draw, GOOD, st.integers(0, 15))
    path = tmp_path / "debug.bin"
    path.write_bytes(raw)
    try:
        state = read_debug_state(path, TINY)
    except FormatError as error:
        assert str(error).startswith(f"{path}: ") and "\n" not in str(error)
        return
    assert state.x.tobytes() + state.y.tobytes() + state.logits.tobytes() == raw[1024:1192]
    assert raw[1192:1196] == np.float32(state.loss).tobytes() or np.isnan(state.loss)
    assert state.gradient.tobytes() == raw[1196:]
    assert min(state.x.min(), state.y.min()) >= 0 and max(state.x.max(), state.y.max()) < V
