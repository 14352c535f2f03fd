"""A debug state of an independent model in float64 beside ours.

Without a mistake everything agrees; each of many mistakes is found, and named by the first tensor that shows it.
"""

import json
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmc_jax import kernels
from llmc_jax.base.errors import InputError
from llmc_jax.checkpoint.llmc import write_model
from llmc_jax.compare import debug_state
from llmc_jax.compare.tensors import difference
from llmc_jax.config.model import ModelConfig
from llmc_jax.models.execution import PLAIN, Execution
from llmc_jax.models.gpt2.tensors import Params
from llmc_jax.models.layout import flat_size, num_parameters, views
from llmc_jax.ops import layernorm
from tests import plain_model
from tests.compare.running import compare, compared

CONFIG = ModelConfig(max_seq_len=7, vocab_size=13, padded_vocab_size=16, num_layers=3, num_heads=2, channels=8)
B, T = 2, 6
Patch = pytest.MonkeyPatch

pytestmark = pytest.mark.usefixtures("quick_compilation")


def batch_of() -> tuple[np.ndarray, np.ndarray]:
    tokens = np.random.default_rng(5).integers(0, CONFIG.vocab_size, (B, T + 1)).astype(np.int32)
    return tokens[:, :-1], tokens[:, 1:]


def weights() -> np.ndarray:
    """(flat_size,), wte's padded rows included."""
    return plain_model.random_flat(CONFIG, flat_size(CONFIG), seed=4).astype(np.float32)


@pytest.fixture(scope="module")
def theirs() -> dict[str, np.ndarray]:
    """Logits, loss and gradients of the plain model, float64, differentiated by JAX; by the names of the tensors."""
    batch = batch_of()
    with jax.enable_x64(True):
        of_loss = jax.value_and_grad(lambda flat: plain_model.loss(flat, *batch, CONFIG))
        both = jax.jit(lambda flat: (of_loss(flat), plain_model.logits(flat, batch[0], CONFIG)))
        (loss, gradient), logits = both(jnp.asarray(weights(), jnp.float64))
    gradients = plain_model.unflatten(np.asarray(gradient), CONFIG)
    return {"logits": np.asarray(logits), "loss": np.asarray(loss), **gradients}


# ----- mistakes ------------------------------------------------------------------------------------------------------


Spoil = Callable[[Patch], tuple[np.ndarray, Execution]]  # gives the weights, and what runs the operations


def spoiled_weight(name: str, index: Any, change: Callable[[np.ndarray], Any]) -> Spoil:
    def spoil(_patch: Patch) -> tuple[np.ndarray, Execution]:
        flat = weights()
        tensor = getattr(views(flat, CONFIG), name)
        tensor[index] = change(tensor[index].copy())
        return flat, PLAIN

    return spoil


def spoiled_operation(**wrong: Any) -> Spoil:
    return lambda _patch: (weights(), Execution(kernels.XLA._replace(**wrong)))


def epsilon(patch: Patch) -> tuple[np.ndarray, Execution]:
    patch.setattr(layernorm, "EPS", 1e-3)
    return weights(), PLAIN


def padding_counts(logits: jax.Array, y: jax.Array, dlosses: jax.Array, _V: int) -> Any:
    return kernels.XLA.classifier(logits, y, dlosses, logits.shape[-1])


def head_alone(dout: jax.Array, tokens: jax.Array, dwte: jax.Array) -> Any:
    return dwte, kernels.XLA.embedding_backward(dout, tokens, dwte)[1]


def no_gelu_derivative(dout: jax.Array, x: jax.Array) -> Any:
    return dout, kernels.XLA.gelu_backward(dout, x)[1]


def no_score_scale(dout: jax.Array, *saved: Any) -> Any:
    dqkv, dbias = kernels.XLA.attention_backward(dout, *saved)
    dqk, dv = jnp.split(dqkv, [2 * dout.shape[-1]], axis=-1)
    return jnp.concatenate([dqk * CONFIG.head_size**0.5, dv], axis=-1), dbias


def stream_ends(d: jax.Array, *rest: Any) -> Any:
    return kernels.XLA.residual_layernorm_backward(0 * d, *rest)


# A mistake, and what disagrees first: a tensor's name and its layer.
MISTAKES: dict[str, tuple[Spoil, str, int | None]] = {
    "layernorm's epsilon": (epsilon, "logits", None),
    "the other GELU": (spoiled_operation(gelu_forward=partial(jax.nn.gelu, approximate=False)), "logits", None),
    "padded logits count": (spoiled_operation(classifier=padding_counts), "loss", None),
    "a transposed weight": (spoiled_weight("attprojw", 1, np.transpose), "logits", None),
    "one weight of one layer": (spoiled_weight("fcprojw", (2, 3, 17), lambda w: w + 0.05), "logits", None),
    "a weight of the last layernorm": (spoiled_weight("lnfw", 2, lambda w: w * 1.01), "logits", None),
    "GELU's derivative": (spoiled_operation(gelu_backward=no_gelu_derivative), "fcw", 2),
    "attention's scale forgotten backwards": (spoiled_operation(attention_backward=no_score_scale), "qkvw", 2),
    "the stream's gradient ends at a layernorm": (
        spoiled_operation(residual_layernorm_backward=stream_ends), "attprojb", 2
    ),
    "wte's gradient without the embedding's": (spoiled_operation(embedding_backward=head_alone), "wte", None),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_fails_where_it_shows_first(
    mistake: str, theirs: dict[str, np.ndarray], monkeypatch: Patch, op_by_op: None
) -> None:
    spoil, name, layer = MISTAKES[mistake]
    flat, execution = spoil(monkeypatch)
    ours = debug_state._tensors(CONFIG, *debug_state.computed(jnp.asarray(flat), *batch_of(), CONFIG, execution))
    found = debug_state.compare(ours, theirs, debug_state.TOLERANCES["fp32"][1])
    first = debug_state.first_failure(found, ours, theirs, CONFIG)
    assert first is not None and (first["name"], first["layer"]) == (name, layer)


# ----- the command ---------------------------------------------------------------------------------------------------


def write_state(path: Path, values: dict[str, np.ndarray]) -> Path:
    """A debug state of version 2, by struct."""
    header = struct.pack("<256i", 20240327, 2, B, T, *[0] * 252) + np.concatenate(batch_of()).astype("<i4").tobytes()
    body = [values[name].astype("<f4").tobytes() for name in ("logits", "loss", *Params._fields)]
    path.write_bytes(header + b"".join(body))
    return path


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    write_model(tmp_path / "model.bin", CONFIG, weights()[: num_parameters(CONFIG)])
    return tmp_path / "model.bin"


@pytest.fixture(autouse=True)
def _plain_jax(monkeypatch: Patch) -> None:
    """The command sets up JAX for a process of its own; the tests' is theirs."""
    monkeypatch.setattr(debug_state.jax_setup, "configure", lambda **_: None)


def test_a_right_debug_state(
    tmp_path: Path, model_file: Path, theirs: dict[str, np.ndarray], op_by_op: None, capsys: pytest.CaptureFixture[str]
) -> None:
    state = write_state(tmp_path / "state.bin", theirs)
    status, result = compared(tmp_path, "debug-state", model_file, state)
    assert status == 0 and result["agrees"] and result["first"] is None
    assert all(row["agrees"] and row["relative_norm"] < 1e-5 for row in result["tensors"])
    assert [row["name"] for row in result["tensors"][:4]] == ["logits", "loss", "lnfb", "lnfw"]
    assert {row["name"] for row in result["tensors"][2:]} == set(Params._fields)
    assert "Logits, loss and all 16 gradients agree" in capsys.readouterr().out


@pytest.mark.slow
def test_bf16_by_its_own_tolerances(tmp_path: Path, theirs: dict[str, np.ndarray]) -> None:
    """Which a model in bf16 is compared by without a word, as llm.c's test of it does."""
    state = write_state(tmp_path / "state.bin", theirs)
    write_model(tmp_path / "bf16.bin", CONFIG, weights()[: num_parameters(CONFIG)], version=5)
    status, result = compared(tmp_path, "debug-state", tmp_path / "bf16.bin", state)
    assert status == 0 and result["dtype"] == "bf16" and result["tolerances"] == "test_gpt2.cu in BF16"
    assert 1e-3 < max(row["relative_norm"] for row in result["tensors"]) < 0.1


def spoiled(theirs: dict[str, np.ndarray], places: dict[str, Any], add: float) -> dict[str, np.ndarray]:
    values = {key: value.copy() for key, value in theirs.items()}
    for name, index in places.items():
        values[name][index] += add
    return values


def test_a_wrong_gradient_is_placed(
    tmp_path: Path, model_file: Path, theirs: dict[str, np.ndarray], op_by_op: None, capsys: pytest.CaptureFixture[str]
) -> None:
    values = spoiled(theirs, {"fcw": (1, 17, 3), "fcprojb": (0, 4), "ln1b": (2, 1)}, 2.0)
    status, result = compared(tmp_path, "debug-state", model_file, write_state(tmp_path / "state.bin", values))
    assert status == 4 and not result["agrees"]
    rows = {row["name"]: row for row in result["tensors"]}
    assert {name for name, row in rows.items() if not row["agrees"]} == {"fcw", "fcprojb", "ln1b"}
    fcw = rows["fcw"]
    assert (fcw["worst_index"], fcw["beyond"]) == ([1, 17, 3], 1) and fcw["largest_error"] == pytest.approx(2)
    right = float(theirs["fcw"][1, 17, 3])
    assert fcw["worst_values"] == pytest.approx([right, right + 2], abs=1e-5)
    assert fcw["share"] == pytest.approx(2 / (1e-6 + 0.079 * abs(right + 2)), rel=1e-4)
    assert (result["first"]["name"], result["first"]["layer"]) == ("ln1b", 2)  # the backward begins with the last layer
    out = capsys.readouterr().out
    assert "3 of 18 fail" in out and "the gradient of ln1b of layer 2" in out and "worst at [1]" in out


@pytest.mark.slow
@pytest.mark.parametrize(("name", "index"), [("logits", (1, 2, 5)), ("loss", ()), ("qkvb", (0, 2))])
def test_nan_is_a_failure(
    name: str, index: Any, tmp_path: Path, model_file: Path, theirs: dict[str, np.ndarray], op_by_op: None
) -> None:
    """By the widest tolerances too. llm.c's own test lets it pass in the logits."""
    state = write_state(tmp_path / "state.bin", spoiled(theirs, {name: index}, np.nan))
    status, result = compared(tmp_path, "debug-state", model_file, state, "--dtype", "bf16")
    assert status == 4 and result["first"]["name"] == name and result["first"]["not_finite"] == 1
    assert [each["name"] for each in result["tensors"] if not each["agrees"]] == [name]


@pytest.mark.parametrize(
    ("tolerances", "name", "absolute", "relative"),
    [
        ("fp32", "logits", 1e-3, 0), ("fp32", "loss", 1e-5, 0), ("fp32", "wpe", 1e-6, 0.079),
        ("bf16", "logits", 25.0, 0),
        ("bf16", "qkvb", 0.035, 0.079), ("bf16", "fcprojb", 0.01, 0.079),
    ],
)  # fmt: skip
def test_llm_c_s_tolerances(tolerances: str, name: str, absolute: float, relative: float) -> None:
    limit = debug_state.TOLERANCES[tolerances][1][name]
    for share, agrees in ((0.999, True), (1.001, False)):
        b = np.array([2.0])
        assert difference(b + share * (absolute + relative * 2.0), b, limit).agrees == agrees
    assert limit.strict == (name in ("logits", "loss"))


def test_the_golden_debug_state(shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What llm.c's own CPU program computed, by the strictest of its tolerances."""
    folder = shared / "golden"
    if not folder.is_dir():
        pytest.skip("../shared/golden is not here")
    assert compare("debug-state", folder / "model.bin", folder / "debug_state.bin", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["tolerances"] == "test_gpt2.cu in FP32" and result["agrees"]
    assert all(row["relative_norm"] < 1e-5 for row in result["tensors"])


def test_kernels_that_are_not_here(tmp_path: Path, model_file: Path, theirs: dict[str, np.ndarray]) -> None:
    state = write_state(tmp_path / "state.bin", theirs)
    with pytest.raises(InputError, match="there is no GPU"):
        compare("debug-state", model_file, state, "--strict-kernels", "--kernels", "pallas")
