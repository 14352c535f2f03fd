"""A debug state and a folder of values, both of an independent model in float64, beside ours.

Without a mistake everything agrees; with each of many mistakes the operation that is named is the one that was spoiled.
"""

import io
import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmc_jax import kernels
from llmc_jax.base.errors import InputError
from llmc_jax.checkpoint.llmc import write_model
from llmc_jax.compare import activations, command, debug_state
from llmc_jax.compare.activations import Batch, Model, Step
from llmc_jax.compare.tensors import Limit, difference
from llmc_jax.config.model import ModelConfig
from llmc_jax.models.gpt2 import model as gpt2
from llmc_jax.models.gpt2.model import PLAIN, Execution
from llmc_jax.models.gpt2.operations import full_name
from llmc_jax.models.gpt2.tensors import Params, flat_size, num_parameters, views
from llmc_jax.ops import attention, layernorm
from tests import plain_model

CONFIG = ModelConfig(max_seq_len=7, vocab_size=13, padded_vocab_size=16, num_layers=3, num_heads=2, channels=8)
B, T = 2, 6
Patch = pytest.MonkeyPatch

pytestmark = pytest.mark.usefixtures("quick_compilation")


def batch_of(config: ModelConfig = CONFIG) -> Batch:
    tokens = np.random.default_rng(5).integers(0, config.vocab_size, (B, T + 1)).astype(np.int32)
    return Batch(tokens[:, :-1], tokens[:, 1:])


def weights(dtype: Any = np.float32) -> np.ndarray:
    """(flat_size,), wte's padded rows included."""
    return plain_model.random_flat(CONFIG, flat_size(CONFIG), seed=4).astype(np.float32).astype(dtype)


# The oracle: the plain model, in which every value may be disturbed, so that JAX's own derivative with respect to the
# disturbance is the gradient that reaches it. It holds no derivative written by hand.


def plain_values(flat: Any, disturbances: dict[str, Any], batch: Batch) -> tuple[Any, dict[str, Any]]:
    values: dict[str, Any] = {}

    def seen(name: str, value: Any) -> Any:
        values[name] = value + disturbances.get(name, 0.0)
        return values[name]

    return plain_model.loss(flat, *batch, CONFIG, seen), values


def oracle(flat: np.ndarray) -> dict[str, np.ndarray]:
    """Every value of the batch and the gradient of each, float64, by the names of a folder."""
    batch = batch_of()
    with jax.enable_x64(True):
        wide = jnp.asarray(flat, jnp.float64)
        shapes = jax.eval_shape(lambda: plain_values(wide, {}, batch)[1])
        undisturbed = {
            name: jnp.zeros(shape.shape)
            for name, shape in shapes.items()
            if not name.endswith(("_mean", "_rstd", "att", "attproj", "fcproj", "losses", "loss"))
        }

        @jax.jit
        def both(flat: Any, disturbances: Any) -> Any:
            return jax.grad(lambda f, d: plain_values(f, d, batch), argnums=(0, 1), has_aux=True)(flat, disturbances)

        (of_weights, of_values), values = both(wide, undisturbed)
    found = {name: np.asarray(value) for name, value in values.items()}
    for name, value in of_values.items():
        layer, dot, own = name.rpartition(".")
        found[f"{layer}{dot}d{own}"] = np.asarray(value)
    for name, tensor in plain_model.unflatten(np.asarray(of_weights), CONFIG).items():
        if name in ("wte", "wpe", "lnfw", "lnfb"):
            found[f"d{name}"] = tensor
        else:
            found |= {f"layer_{i:02d}.d{name}": tensor[i] for i in range(CONFIG.num_layers)}
    return found


@pytest.fixture(scope="module")
def theirs() -> dict[str, np.ndarray]:
    return oracle(weights())


def model_of(flat: np.ndarray, execution: Execution = PLAIN) -> Model:
    return Model(CONFIG, Params(*(jnp.asarray(tensor) for tensor in views(flat, CONFIG))), execution)


def found_steps(theirs: dict[str, np.ndarray], model: Model, tolerance: float = 2e-5) -> list[Step]:
    ours = activations.own_values(model, batch_of(), gradients=activations.has_gradients(theirs))
    return list(activations.steps(model, ours, theirs, tolerance))


# ----- the values ----------------------------------------------------------------------------------------------------


def test_every_value_agrees_with_the_plain_model_in_float64(theirs: dict[str, np.ndarray], op_by_op: None) -> None:
    with jax.enable_x64(True):
        found = found_steps(theirs, model_of(weights(np.float64)), tolerance=1e-12)
    bad = [
        (step.name, step.total.relative_norm, step.local.relative_norm)
        for step in found
        if not (step.total.agrees and step.local.agrees)
    ]
    assert not bad
    assert {step.name for step in found} == set(theirs) and len(found) == 119
    assert activations.first_step(found) is None


@pytest.mark.parametrize("dtype", [jnp.float32, pytest.param(jnp.bfloat16, marks=pytest.mark.slow)])
def test_the_values_are_those_of_loss_fn(dtype: Any) -> None:
    """Compiled as a user's: the gradients have the bits of jax.grad(loss_fn); the loss may differ in its sum."""
    config, batch = ModelConfig(7, 13, 16, 1, 2, 8), batch_of()
    flat = jnp.asarray(plain_model.random_flat(config, flat_size(config), seed=4), dtype)
    model = Model(config, views(flat, config), PLAIN)
    values = activations.own_values(model, batch, gradients=True)
    loss, gradient = jax.jit(jax.value_and_grad(lambda flat: gpt2.loss_fn(flat, *batch, config, PLAIN)))(flat)
    assert values["loss"] == pytest.approx(float(loss), rel=3e-7)
    expected = views(np.asarray(gradient, np.float32), config)
    for name in ("wpe", "wte", "lnfw", "lnfb"):
        np.testing.assert_array_equal(values[f"d{name}"], getattr(expected, name), err_msg=name)
    for name in gpt2.BlockParams._fields:
        for layer in range(config.num_layers):
            ours = values[full_name(f"d{name}", layer)]
            np.testing.assert_array_equal(ours, getattr(expected, name)[layer], err_msg=name)
    # The list of operations makes of the blocks' own inputs what the blocks made of them.
    again = list(activations.steps(model, values, values, 0.0))
    assert all(step.total.same_bits for step in again) and len(again) == 50
    assert all(step.local.relative_norm <= (1e-6 if dtype == jnp.float32 else 4e-3) for step in again)


# ----- mistakes ------------------------------------------------------------------------------------------------------


def spoiled_weight(name: str, index: Any, change: Callable[[np.ndarray], Any]) -> Callable[[Patch], Model]:
    def spoil(_patch: Patch) -> Model:
        flat = weights()
        tensor = getattr(views(flat, CONFIG), name)
        tensor[index] = change(tensor[index].copy())
        return model_of(flat)

    return spoil


def spoiled_operation(**wrong: Any) -> Callable[[Patch], Model]:
    return lambda _patch: model_of(weights(), Execution(kernels.XLA._replace(**wrong)))


def no_attention_scale(patch: Patch) -> Model:
    patch.setattr(attention, "math", SimpleNamespace(sqrt=lambda _: 1.0))
    return model_of(weights())


def no_mask(patch: Patch) -> Model:
    unmasked = vars(jnp) | {"where": lambda _mask, score, _infinity: score}
    patch.setattr(attention, "jnp", SimpleNamespace(**unmasked))
    return model_of(weights())


def large_eps(patch: Patch) -> Model:
    patch.setattr(layernorm, "EPS", 1e-3)
    return model_of(weights())


def no_residual(patch: Patch) -> Model:
    for module in (layernorm, activations):
        patch.setattr(module, "residual_forward", lambda x, f: f)
    return model_of(weights())


def exact_gelu(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=False)


def padding_counts(logits: jax.Array, y: jax.Array, _V: int) -> Any:
    return kernels.XLA.classifier_forward(logits, y, logits.shape[-1])


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


# A mistake, the value that is named, and what else must disagree of itself (others must not).
MISTAKES: dict[str, tuple[Callable[[Patch], Model], str, set[str] | None]] = {
    "attention's scale forgotten": (no_attention_scale, "layer_00.att", None),
    "no mask": (no_mask, "layer_00.att", None),
    "layernorm's epsilon": (large_eps, "layer_00.ln1_rstd", None),
    "no residual connection": (no_residual, "layer_00.residual2", None),
    "the other GELU": (
        spoiled_operation(gelu_forward=exact_gelu), "layer_00.fch_gelu", {f"layer_0{i}.fch_gelu" for i in range(3)},
    ),
    "padded logits count": (spoiled_operation(classifier_forward=padding_counts), "losses", {"losses"}),
    "a transposed weight": (
        spoiled_weight("attprojw", 1, np.transpose), "layer_01.attproj", {"layer_01.attproj", "layer_01.datty"},
    ),
    "one weight of one layer": (
        spoiled_weight("fcprojw", (2, 3, 17), lambda w: w + 0.05), "layer_02.fcproj",
        {"layer_02.fcproj", "layer_02.dfch_gelu"},
    ),
    "one bias": (spoiled_weight("qkvb", (1, 20), lambda b: b + 0.05), "layer_01.qkv", {"layer_01.qkv"}),
    "queries and values exchanged": (
        spoiled_weight("qkvw", 0, lambda w: np.roll(w, 8, axis=0)), "layer_00.qkv", {"layer_00.qkv", "layer_00.dln1"},
    ),
    "a position": (spoiled_weight("wpe", (4, 0), lambda w: w + 0.1), "encoded", {"encoded"}),
    "a token's row": (
        spoiled_weight("wte", int(batch_of().x[1, 3]), lambda row: row * 1.1), "encoded", {"encoded", "logits", "dlnf"},
    ),
    "a weight of the last layernorm": (
        spoiled_weight("lnfw", 2, lambda w: w * 1.01), "lnf", {"lnf", "layer_02.dresidual3", "layer_02.dfcprojb"},
    ),
    "GELU's derivative": (
        spoiled_operation(gelu_backward=no_gelu_derivative), "layer_02.dfch", {f"layer_0{i}.dfch" for i in range(3)},
    ),
    "attention's scale forgotten backwards": (
        spoiled_operation(attention_backward=no_score_scale), "layer_02.dqkv", {f"layer_0{i}.dqkv" for i in range(3)},
    ),
    "the stream's gradient ends at a layernorm": (
        spoiled_operation(residual_layernorm_backward=stream_ends), "layer_02.dresidual2",
        {f"layer_0{i}.{name}" for i in range(3) for name in ("dresidual2", "dattprojb")}
        | {f"layer_0{i}.{name}" for i in range(2) for name in ("dresidual3", "dfcprojb")} | {"dencoded"},
    ),
    "wte's gradient without the embedding's": (spoiled_operation(embedding_backward=head_alone), "dwte", {"dwte"}),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_operation_with_the_mistake_is_named(
    mistake: str, theirs: dict[str, np.ndarray], monkeypatch: Patch, op_by_op: None
) -> None:
    spoil, name, alone = MISTAKES[mistake]
    if not activations.has_gradients(alone or ()):  # the forward pass says it all
        theirs = {name: value for name, value in theirs.items() if not activations.has_gradients([name])}
    found = found_steps(theirs, spoil(monkeypatch))
    first = activations.first_step(found)
    assert first is not None and found[first].name == name
    assert not found[first].total.agrees and not found[first].local.agrees
    assert all(step.total.agrees for step in found[:first])
    if alone is not None:  # what was handed a wrong input disagrees in total, and not of itself
        assert {step.name for step in found if not step.local.agrees} == alone
        if name not in ("losses", "dwte"):
            assert sum(not step.total.agrees and step.local.agrees for step in found) >= 3


def test_nan_is_named_where_it_begins(theirs: dict[str, np.ndarray], monkeypatch: Patch, op_by_op: None) -> None:
    model = spoiled_weight("fcb", (1, 21), lambda _: np.nan)(monkeypatch)
    found = found_steps(theirs, model)
    first = activations.first_step(found)
    assert first is not None and found[first].name == "layer_01.fch"
    assert found[first].total.worst_index == (0, 0, 21) and found[first].total.not_finite == B * T
    words = debug_state._first_words(found, first, 2e-5)
    assert "linear_forward, output layer_01.fch" in words


def test_nan_of_the_other_side(theirs: dict[str, np.ndarray], op_by_op: None) -> None:
    spoiled = dict(theirs)
    spoiled["layer_02.atty"] = theirs["layer_02.atty"].copy()
    spoiled["layer_02.atty"][1, 2, 5] = np.nan
    found = found_steps(spoiled, model_of(weights()))
    first = activations.first_step(found)
    assert first is not None and found[first].name == "layer_02.atty" and found[first].total.worst_index == (1, 2, 5)


def test_what_a_folder_lacks_is_computed_for_it(
    theirs: dict[str, np.ndarray], monkeypatch: Patch, op_by_op: None
) -> None:
    """With the stream and the logits alone, the layer is found, and what lies between is said."""
    few = {name: theirs[name] for name in theirs if name.endswith("residual3") or name == "logits"}
    few = {name: value for name, value in few.items() if "dres" not in name}
    found = found_steps(few, spoiled_weight("fcw", (1, 5, 2), lambda w: w + 0.3)(monkeypatch))
    assert [step.name for step in found] == ["layer_00.residual3", "layer_01.residual3", "layer_02.residual3", "logits"]
    assert [step.local.agrees for step in found] == [True, False, True, True]
    assert [step.total.agrees for step in found] == [True, False, False, False]
    between = ("ln1", "qkv", "atty", "attproj", "residual2", "ln2", "fch", "fch_gelu", "fcproj")
    assert found[1].covers == tuple(f"layer_01.{name}" for name in between)
    assert found[3].covers == ("lnf",)
    assert "The folder lacks values in between: layer_01.ln1, layer_01.qkv" in debug_state._first_words(found, 1, 2e-5)


def test_errors_that_add_up_are_told_from_one_that_is_made() -> None:
    right, wrong = (difference(np.float32(a), np.float32(1), Limit(0.01)) for a in (1, 1.1))
    step = Step("lnf", "layernorm_forward", right, right, ())
    drifted = step._replace(name="logits", total=wrong)
    made = step._replace(name="losses", local=wrong)
    assert activations.first_step([step, step]) is None
    assert activations.first_step([step, drifted]) == 1
    assert activations.first_step([step, drifted, made]) == 2  # the one that can be put right
    assert "does not originate there" in debug_state._first_words([step, drifted], 1, 2e-5)


# ----- the command ---------------------------------------------------------------------------------------------------


def write_state(path: Path, values: dict[str, np.ndarray], batch: Batch) -> Path:
    """A debug state of version 2, by struct, from the values of the oracle."""
    header = struct.pack("<256i", 20240327, 2, B, T, *[0] * 252)
    floats = [values["logits"].ravel(), values["loss"].ravel()]
    for name in plain_model.shapes(CONFIG):
        if name in ("wte", "wpe", "lnfw", "lnfb"):
            floats.append(values[f"d{name}"].ravel())
        else:
            floats += [values[f"layer_{i:02d}.d{name}"].ravel() for i in range(CONFIG.num_layers)]
    body = np.concatenate(floats).astype("<f4")
    path.write_bytes(header + np.concatenate(batch).astype("<i4").tobytes() + body.tobytes())
    return path


def write_values(folder: Path, values: dict[str, np.ndarray]) -> Path:
    folder.mkdir()
    for name, value in values.items():
        np.save(folder / f"{name}.npy", value)
    return folder


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    write_model(tmp_path / "model.bin", CONFIG, weights()[: num_parameters(CONFIG)])
    return tmp_path / "model.bin"


def compare(*words: str | Path) -> int:
    return command.run(command.make_parser().parse_args(["debug-state", *map(str, words)]))


def compared(tmp_path: Path, *words: str | Path) -> tuple[int, dict[str, Any]]:
    status = compare(*words, "--json", tmp_path / "result.json")
    return status, json.loads((tmp_path / "result.json").read_text())


@pytest.fixture(autouse=True)
def _plain_jax(monkeypatch: Patch) -> None:
    """The command sets up JAX for a process of its own; the tests' is theirs."""
    monkeypatch.setattr(debug_state.jax_setup, "configure", lambda **_: None)


def test_a_right_debug_state(
    tmp_path: Path, model_file: Path, theirs: dict[str, np.ndarray], op_by_op: None, capsys: pytest.CaptureFixture[str]
) -> None:
    state = write_state(tmp_path / "state.bin", theirs, batch_of())
    status, result = compared(tmp_path, model_file, state)
    assert status == 0 and result["agrees"] and result["first"] is None
    assert all(row["agrees"] and row["relative_norm"] < 1e-5 for row in result["tensors"])
    assert [row["name"] for row in result["tensors"][:4]] == ["logits", "loss", "lnfw", "lnfb"]
    assert {row["name"] for row in result["tensors"][2:]} == set(Params._fields)
    assert "Logits, loss and all 16 gradients agree" in capsys.readouterr().out


def test_bf16_by_its_own_tolerances(
    tmp_path: Path, model_file: Path, theirs: dict[str, np.ndarray], op_by_op: None
) -> None:
    """Which a model in bf16 is compared by without a word, as llm.c's test of it does."""
    state = write_state(tmp_path / "state.bin", theirs, batch_of())
    write_model(tmp_path / "bf16.bin", CONFIG, weights()[: num_parameters(CONFIG)], version=5)
    status, result = compared(tmp_path, tmp_path / "bf16.bin", state)
    assert status == 0 and result["dtype"] == "bf16" and result["tolerances"] == "test_gpt2.cu in BF16"
    assert 1e-3 < max(row["relative_norm"] for row in result["tensors"]) < 0.1
    assert compare(model_file, state, "--dtype", "bf16", "--tolerances", "fp32") == 4


def spoiled(theirs: dict[str, np.ndarray], name: str, index: Any, add: float) -> dict[str, np.ndarray]:
    values = {key: value.copy() for key, value in theirs.items()}
    values[name][index] += add
    return values


def test_a_wrong_gradient_is_placed(
    tmp_path: Path, model_file: Path, theirs: dict[str, np.ndarray], op_by_op: None, capsys: pytest.CaptureFixture[str]
) -> None:
    values = spoiled(theirs, "layer_01.dfcw", (17, 3), 2.0)
    values = spoiled(values, "layer_00.dfcprojb", 4, 2.0)
    values = spoiled(values, "layer_02.dln1b", 1, 2.0)
    state = write_state(tmp_path / "state.bin", values, batch_of())
    status, result = compared(tmp_path, model_file, state)
    assert status == 4 and not result["agrees"]
    rows = {row["name"]: row for row in result["tensors"]}
    assert {name for name, row in rows.items() if not row["agrees"]} == {"fcw", "fcprojb", "ln1b"}
    fcw = rows["fcw"]
    assert (fcw["worst_index"], fcw["beyond"]) == ([1, 17, 3], 1) and fcw["largest_error"] == pytest.approx(2)
    right = float(theirs["layer_01.dfcw"][17, 3])
    assert fcw["worst_values"] == pytest.approx([right, right + 2], abs=1e-5)
    assert fcw["share"] == pytest.approx(2 / (1e-6 + 0.079 * abs(right + 2)), rel=1e-4)
    assert (result["first"]["name"], result["first"]["layer"]) == ("ln1b", 2)  # the backward begins with the last layer
    out = capsys.readouterr().out
    assert "3 of 18 fail" in out and "the gradient of ln1b of layer 2" in out and "worst at [1]" in out
    assert "--against FOLDER names the operation" in out


@pytest.mark.parametrize(
    ("name", "index", "first"),
    [("logits", (1, 2, 5), "logits"), ("loss", (), "loss"), ("dlnfb", 3, "lnfb"), ("dwte", (2, 1), "wte")],
)
def test_what_fails_first(
    name: str, index: Any, first: str, tmp_path: Path, model_file: Path, theirs: dict[str, np.ndarray], op_by_op: None
) -> None:
    values = spoiled(spoiled(theirs, name, index, 1.0), "dwte", (3, 3), 1.0)
    status, result = compared(tmp_path, model_file, write_state(tmp_path / "state.bin", values, batch_of()))
    assert status == 4 and (result["first"]["name"], result["first"]["layer"]) == (first, None)


@pytest.mark.parametrize(
    ("name", "index", "row"), [("logits", (1, 2, 5), "logits"), ("loss", (), "loss"), ("layer_00.dqkvb", 2, "qkvb")]
)
def test_nan_is_a_failure(
    name: str, index: Any, row: str, tmp_path: Path, model_file: Path, theirs: dict[str, np.ndarray], op_by_op: None,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """By the widest tolerances too. llm.c's own test lets it pass in the logits."""
    values = spoiled(theirs, name, index, np.nan)
    state = write_state(tmp_path / "state.bin", values, batch_of())
    status, result = compared(tmp_path, model_file, state, "--tolerances", "bf16")
    assert status == 4 and result["first"]["name"] == row and result["first"]["not_finite"] == 1
    assert [each["name"] for each in result["tensors"] if not each["agrees"]] == [row]
    assert "FAILS: 1 NaN or infinite" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("tolerances", "name", "absolute", "relative"),
    [
        ("cpu", "logits", 1e-2, 0), ("cpu", "wte", 2e-2, 0), ("fp32cu", "loss", 1e-2, 0), ("fp32cu", "qkvb", 1e-2, 0),
        ("fp32", "loss", 1e-5, 0), ("fp32", "wpe", 1e-6, 0.079), ("bf16", "logits", 25.0, 0),
        ("bf16", "qkvb", 0.035, 0.079), ("bf16", "fcprojb", 0.01, 0.079),
    ],
)  # fmt: skip
def test_llm_c_s_tolerances(tolerances: str, name: str, absolute: float, relative: float) -> None:
    limits = debug_state.TOLERANCES[tolerances][1]
    limit = limits[name]
    for share, agrees in ((0.999, True), (1.001, False)):
        b = np.array([2.0])
        assert difference(b + share * (absolute + relative * 2.0), b, limit).agrees == agrees
    assert limit.strict == (name in ("logits", "loss"))
    assert set(limits) == {"logits", "loss", *Params._fields}


def test_dump_and_against(
    tmp_path: Path, model_file: Path, theirs: dict[str, np.ndarray], op_by_op: None, capsys: pytest.CaptureFixture[str]
) -> None:
    state = write_state(tmp_path / "state.bin", theirs, batch_of())
    assert compare(model_file, state, "--dump", tmp_path / "dump", "--gradients") == 0
    index = json.loads((tmp_path / "dump" / "index.json").read_text())
    names = [row["name"] for row in index["arrays"]]
    assert set(names) == {*theirs, "x", "y", "dwte_head"} and (index["dtype"], index["B"], index["T"]) == ("fp32", B, T)
    place = {name: at for at, name in enumerate(names)}
    order = [
        "x", "y", "encoded", "layer_00.ln1", "layer_00.qkv", "layer_00.att", "layer_00.atty", "layer_00.residual3",
        "layer_02.fch", "lnf", "logits", "losses", "dlogits", "dlnf", "layer_02.dfcprojw", "layer_00.dqkvw", "dwte",
    ]  # fmt: skip
    assert order == sorted(order, key=place.__getitem__)
    for name, value in theirs.items():
        written = np.load(tmp_path / "dump" / f"{name}.npy")
        assert written.dtype == np.float32 and written.shape == value.shape
        np.testing.assert_allclose(written, value, rtol=0, atol=2e-5 * max(1.0, float(np.abs(value).max())))
    assert [row["shape"] for row in index["arrays"][2:]] == [
        list(theirs.get(n, theirs["dwte"]).shape) for n in names[2:]
    ]
    status, result = compared(tmp_path, model_file, state, "--against", tmp_path / "dump")
    assert status == 0 and result["against"]["agrees"] and len(result["against"]["values"]) == len(names) - 2
    assert all(row["total"]["same_bits"] for row in result["against"]["values"])
    status, result = compared(tmp_path, model_file, state, "--against", tmp_path / "dump", "--dtype", "bf16")
    assert status == 0 and result["against"]["tolerance"] == 1e-2
    capsys.readouterr()
    assert compare(model_file, state, "--dump", tmp_path / "forward") == 0
    assert not list((tmp_path / "forward").glob("*.d[a-z]*.npy")) and (tmp_path / "forward/logits.npy").is_file()
    assert "arrays and index.json" in capsys.readouterr().out


def test_against_names_the_operation(
    tmp_path: Path, model_file: Path, theirs: dict[str, np.ndarray], op_by_op: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another program's folder, float64, without an index, with columns of padding; our model has one wrong weight."""
    state = write_state(tmp_path / "state.bin", theirs, batch_of())
    padded = dict(theirs, logits=np.pad(theirs["logits"], ((0, 0), (0, 0), (0, 3)), constant_values=7.0))
    padded["dwte"] = theirs["dwte"][: CONFIG.vocab_size]
    folder = write_values(tmp_path / "theirs", padded | {"x": batch_of().x.astype(np.int64), "notes": np.ones(3)})
    assert compare(model_file, state, "--against", folder, "--all") == 0
    out = capsys.readouterr().out
    assert (
        "All 119 values agree" in out
        and "notes.npy: not the name of a value; ignored" in out
        and "layer_02.dqkvb" in out
    )
    flat = weights()
    views(flat, CONFIG).attprojw[1] = views(flat, CONFIG).attprojw[1].T.copy()
    write_model(model_file, CONFIG, flat[: num_parameters(CONFIG)])
    status, result = compared(tmp_path, model_file, state, "--against", folder)
    assert status == 4 and (result["against"]["first"], result["against"]["made_there"]) == ("layer_01.attproj", True)
    assert result["first"]["name"] == "logits"
    out = capsys.readouterr().out
    assert "First operation that disagrees: linear_forward, output layer_01.attproj" in out
    assert "The error originates there" in out and "LOCAL ERROR" in out and "propagated" in out


def test_the_golden_debug_state(shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What llm.c's own CPU program computed, by the strictest of its tolerances."""
    folder = shared / "golden"
    if not folder.is_dir():
        pytest.skip("../shared/golden is not here")
    assert compare(folder / "model.bin", folder / "debug_state.bin", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["tolerances"] == "test_gpt2.cu in FP32" and result["agrees"]
    assert all(row["relative_norm"] < 1e-5 for row in result["tensors"])


# ----- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gradients"], "--gradients needs --dump"),
        (["--operation-tolerance", "1"], "--operation-tolerance needs --against"),
        (["--all"], "--all needs --against"),
        (["--json", "result"], "must end in .json"),
        (["--dump", "full"], "exists already; name a new folder"),
        (["--dump", "none/new"], "there is no folder"),
        (["--against", "none"], "no such folder"),
        (["--against", "model.bin"], "a file; expected one of .npy files"),
        (["--against", "full"], "has no value under a name such as encoded.npy"),
        (["--strict-kernels", "--kernels", "pallas"], "there is no GPU"),
    ],
)
def test_bad_flags_are_one_line_and_leave_nothing(
    words: list[str], said: str, tmp_path: Path, model_file: Path, theirs: dict[str, np.ndarray], monkeypatch: Patch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").touch()
    state = write_state(tmp_path / "state.bin", theirs, batch_of())
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InputError, match=said) as caught:
        compare(model_file, state, *words)
    assert "\n" not in str(caught.value) and sorted(tmp_path.rglob("*")) == before


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def header(text: str, data: bytes = b"") -> bytes:
    raw = text.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(raw)) + raw + data


GOOD = np.zeros((B, T, 8), np.float32)
WHOLE = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({B}, {T}, 8), }}"
NOT_WHOLE = "not a whole, plain array of NumPy's"
BAD_ARRAYS = {
    "empty": (b"", NOT_WHOLE),
    "a pickle": (header(WHOLE.replace("<f4", "|O"), b"\x80\x04N."), NOT_WHOLE),
    "a program": (header("__import__('os').abort()"), NOT_WHOLE),
    "deep": (header("(" * 3000), NOT_WHOLE),
    "cut off": (npy(GOOD)[:-4], NOT_WHOLE),
    "more behind": (npy(GOOD) + b"ends", "4 bytes follow the array"),
    "beyond all": (header(WHOLE.replace(f"({B},", f"({10**30},")), NOT_WHOLE),
    "another shape": (npy(GOOD[:, :5]), r"shape \(2, 5, 8\); expected \(2, 6, 8\)"),
    "integers": (npy(GOOD.astype(np.int32)), "type <i4; expected float32, float64, float16"),
    "bfloat16": (header(WHOLE.replace("<f4", "|V2"), bytes(GOOD.nbytes // 2)), "bfloat16 is to be written as float32"),
}


@pytest.mark.parametrize("name", BAD_ARRAYS)
def test_bad_arrays_are_refused_in_one_line(tmp_path: Path, name: str) -> None:
    raw, said = BAD_ARRAYS[name]
    (tmp_path / "encoded.npy").write_bytes(raw)
    with pytest.raises(InputError, match=said) as caught:
        activations.read_folder(tmp_path, CONFIG, batch_of())
    assert str(caught.value).startswith(f"{tmp_path}/encoded.npy: ") and "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400 + len(str(tmp_path))


def test_the_forms_in_which_an_array_may_stand(tmp_path: Path) -> None:
    values = np.random.default_rng(1).normal(size=(B, T, 8)).astype(np.float32)
    for form in (values, values.astype(np.float64), values.astype(">f4"), np.asfortranarray(values)):
        (tmp_path / "encoded.npy").write_bytes(npy(form))
        folder = activations.read_folder(tmp_path, CONFIG, batch_of())
        np.testing.assert_array_equal(folder.values["encoded"], values)
        assert folder.dtype == "fp32"
    (tmp_path / "encoded.npy").write_bytes(npy(values.astype(np.float16)))
    folder = activations.read_folder(tmp_path, CONFIG, batch_of())
    assert folder.dtype == "fp16" and folder.values["encoded"].dtype == np.float32


def test_another_batch_is_refused(tmp_path: Path, theirs: dict[str, np.ndarray]) -> None:
    other = batch_of().y.copy()
    other[0, 0] ^= 1
    folder = write_values(tmp_path / "theirs", {"logits": theirs["logits"], "x": batch_of().x, "y": other})
    with pytest.raises(InputError, match=r"y\.npy: other tokens than the debug state has"):
        activations.read_folder(folder, CONFIG, batch_of())


BAD_INDEXES = {
    "cut off": ('{"format": 1', "not JSON"),
    "deep": ("[" * 100_000, "nested too deeply"),
    "a list": ("[]", "not a JSON object, but list"),
    "odd dtype": ('{"format": 1, "dtype": ["fp32"]}', "expected one of fp32, bf16, fp16, fp64"),
}


@pytest.mark.parametrize("name", BAD_INDEXES)
def test_bad_indexes_are_refused_in_one_line(tmp_path: Path, name: str) -> None:
    text, said = BAD_INDEXES[name]
    np.save(tmp_path / "encoded.npy", GOOD)
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(InputError, match=said) as caught:
        activations.read_folder(tmp_path, CONFIG, batch_of())
    assert str(caught.value).startswith(f"{tmp_path}/index.json: ") and "\n" not in str(caught.value)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_mutated_folders_are_read_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    raw = bytearray(npy(np.arange(B * T * 8, dtype=np.float32).reshape(B, T, 8)))
    for _ in range(data.draw(st.integers(0, 3))):
        raw[data.draw(st.integers(0, 140))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        raw = raw[: data.draw(st.integers(0, len(raw)))]
    (tmp_path / "encoded.npy").write_bytes(raw)
    index = data.draw(
        st.fixed_dictionaries({}, optional={"B": JSON_VALUES, "dtype": st.just("bf16") | JSON_VALUES}) | JSON_VALUES
    )
    (tmp_path / "index.json").write_text(json.dumps(index))
    try:
        folder = activations.read_folder(tmp_path, CONFIG, batch_of())
    except InputError as error:
        assert "\n" not in str(error)
    else:
        assert folder.values["encoded"].shape == (B, T, 8) and folder.dtype in activations.ALLOWED
        assert math.isfinite(activations.allowed("fp32", folder.dtype))


def test_a_dump_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: Patch, theirs: dict[str, np.ndarray]
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(activations.np, "save", full)
    values = {"x": batch_of().x, "y": batch_of().y, "logits": theirs["logits"]}
    with pytest.raises(InputError, match=r"dump: cannot be written .No space left on device"):
        activations.write_folder(tmp_path / "dump", model_of(weights()), values, "fp32")
    assert list(tmp_path.iterdir()) == []
