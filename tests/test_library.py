"""What `import llmc_jax` offers: its names, what they compute beside something independent, and what they refuse."""

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import llmc_jax
from llmc_jax import library
from llmc_jax.base.errors import InputError
from llmc_jax.config.train import TrainConfig
from llmc_jax.generate import heads
from llmc_jax.generate.model import Model, flat_weights
from llmc_jax.run.inputs import resolve_model
from llmc_jax.training.state import TrainState
from tests import plain_model

pytestmark = pytest.mark.usefixtures("quick_compilation")

ROOT = Path(__file__).resolve().parents[1]
SHAPE = "L2-NH2-C16-V257-T32"
T, V = 32, 257


@pytest.fixture(scope="module")
def model() -> Model:
    return llmc_jax.load(SHAPE)


@pytest.fixture(scope="module")
def rows() -> np.ndarray:
    """Ids (3, T + 1): as many as a row can have."""
    return np.random.default_rng(1).integers(0, V, (3, T + 1))


# ----- the names ----------------------------------------------------------------------------------------------------


def test_the_package_comes_without_jax_until_it_is_used() -> None:
    code = (
        "import sys, llmc_jax; names = dir(llmc_jax); assert names == llmc_jax.__all__; assert llmc_jax.__version__; "
        "llmc_jax.InputError, llmc_jax.ModelConfig; assert not {'jax', 'numpy', 'tornado'} & set(sys.modules); "
        "llmc_jax.ops.gelu.gelu_forward; assert 'jax' in sys.modules; assert 'llmc_jax.library' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_type_checkers_see_the_names_that_are_listed() -> None:
    tree = ast.parse((ROOT / "llmc_jax/__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    seen = [alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    seen += [
        node.target.id for node in block.body if isinstance(node, ast.AnnAssign) if isinstance(node.target, ast.Name)
    ]
    assert sorted(seen) == sorted(llmc_jax.__all__)


@pytest.mark.parametrize("name", llmc_jax.__all__)
def test_each_name_is_there_and_explained(name: str) -> None:
    assert len(getattr(llmc_jax, name).__doc__.splitlines()[0]) > 20


def test_the_page_s_table_names_them_and_nothing_else() -> None:
    page = (ROOT / "docs/library.md").read_text(encoding="utf-8")
    first_cells = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(first_cells))) == sorted(llmc_jax.__all__)


def test_another_name_is_no_attribute() -> None:
    for holder in (llmc_jax, llmc_jax.ops):
        with pytest.raises(AttributeError, match="nothing_of_this_name"):
            holder.nothing_of_this_name  # noqa: B018


# ----- what is computed ---------------------------------------------------------------------------------------------


def test_loss_is_that_of_the_logits(model: Model, rows: np.ndarray) -> None:
    found = np.asarray(llmc_jax.logits(model, rows[:, :-1]), np.float64)
    likelihoods = np.exp(found) / np.exp(found).sum(axis=-1, keepdims=True)
    plain = -np.log(np.take_along_axis(likelihoods, rows[:, 1:, None], axis=-1)).mean()
    assert llmc_jax.loss(model, rows) == pytest.approx(plain, rel=1e-6)


@pytest.mark.slow
def test_the_gradient_is_that_of_the_plain_model(model: Model, rows: np.ndarray) -> None:
    loss, gradient = llmc_jax.loss_and_gradient(model, rows)
    assert loss == pytest.approx(llmc_jax.loss(model, rows), rel=1e-6)
    flat = flat_weights(model.weights, model.config)
    expected = jax.jit(jax.grad(plain_model.loss), static_argnums=3)(flat, rows[:, :-1], rows[:, 1:], model.config)
    for name, tensor in plain_model.unflatten(expected, model.config).items():
        assert plain_model.relative_error(getattr(gradient, name), tensor) < 1e-5, name


def test_a_row_is_a_batch_of_one(model: Model, rows: np.ndarray) -> None:
    alone = llmc_jax.logits(model, rows[0, :T].tolist())
    assert (alone.shape, alone.dtype) == ((T, V), jnp.float32)
    np.testing.assert_array_equal(alone, llmc_jax.logits(model, jnp.asarray(rows[:1, :T]))[0])


def test_text_and_ids(model: Model) -> None:
    ids = llmc_jax.encode(model, "naïve")
    assert (ids.dtype, ids.tolist()) == (np.int32, list("naïve".encode()))
    assert llmc_jax.decode(model, ids) == "naïve" and llmc_jax.decode(model, ids[:3]) == "na\ufffd"
    assert llmc_jax.decode(model, []) == "" and llmc_jax.encode(model, "").shape == (0,)


# ----- generating ---------------------------------------------------------------------------------------------------


def test_the_likeliest_tokens_are_those_of_the_logits(model: Model) -> None:
    ids = [65, 66, 67]
    found = llmc_jax.complete(model, ids, tokens=np.int32(3), temperature=0)
    text = list(ids)
    for token, logprob in zip(found.ids, found.logprobs, strict=True):
        logits = llmc_jax.logits(model, (text + [0] * T)[:T])[len(text) - 1]  # no row sees what follows it
        assert token == int(logits.argmax())
        assert logprob == pytest.approx(float(jax.nn.log_softmax(logits)[token]), abs=1e-5)
        text.append(token)
    assert (found.end, llmc_jax.decode(model, found.ids)) == ("length", found.text)


def test_a_stream_is_the_completion_in_pieces(model: Model) -> None:
    whole = llmc_jax.complete(model, "ABC", tokens=8, seed=7)
    streamed = list(llmc_jax.stream(model, b"ABC", samples=2, tokens=8, seed=7))
    assert [(each.position, each.sample) for each in streamed[:4]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    parts, other = ([each for each in streamed if each.sample == number] for number in (0, 1))
    assert "".join(each.text for each in parts) == whole.text
    assert [each.token for each in parts] == list(whole.ids) != [each.token for each in other]
    assert [each.end for each in parts] == [""] * (len(parts) - 1) + [whole.end]
    stop = whole.text[3]
    stopped = llmc_jax.complete(model, "ABC", tokens=8, seed=7, stops=stop)
    assert (stopped.end, stopped.text) == ("stop", whole.text.partition(stop)[0])


def test_attention_weights_are_those_of_the_layer(model: Model, rows: np.ndarray) -> None:
    found = llmc_jax.attention_weights(model, rows[0, :9], layer=1)
    np.testing.assert_array_equal(found, heads.attention_weights(model, rows[0, :9].tolist(), 1))


# ----- training -----------------------------------------------------------------------------------------------------


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the compiled step is called with; in its place the weights are halved. (The page trains with it.)"""
    calls: list[tuple[Any, ...]] = []

    def train_step(state: TrainState, *arguments: Any) -> tuple[TrainState, None]:
        calls.append(arguments)
        return state._replace(params=state.params * 0.5, step=state.step + 1), None

    monkeypatch.setattr(library, "train_step", train_step)
    return calls


def test_a_step_has_the_ids_and_the_options(model: Model, rows: np.ndarray, steps: list[tuple[Any, ...]]) -> None:
    state, step = llmc_jax.begin(model, learning_rate=0.01, steps=8, final_lr_fraction=0.5, weight_decay=0.1)
    for ids in (rows, rows[:, None]):  # (B, n); (A, B, n): micro-batches
        state, _ = step(state, ids)
    (inputs, targets, numbers, config, options), (micro, *_) = steps
    np.testing.assert_array_equal(np.concatenate([inputs[0], targets[0, :, -1:]], axis=1), rows)
    np.testing.assert_array_equal(micro, rows[:, None, :-1])
    schedule = numbers.schedule
    assert (schedule.learning_rate, schedule.total_steps, schedule.final_fraction) == (0.01, 8, 0.5)
    assert (options.schedule, options.decay, numbers.optimizer.weight_decay) == ("cosine", "matrices", 0.1)
    assert config == model.config
    with pytest.raises(InputError, match="found 34 in a row"):
        step(state, [list(range(34))])


def test_what_comes_out_is_a_model_that_can_be_saved(
    model: Model, rows: np.ndarray, steps: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    before = llmc_jax.loss(model, rows)
    state, step = llmc_jax.begin(model)
    better = llmc_jax.trained(model, step(state, rows)[0])
    assert better.step == 1 and llmc_jax.loss(model, rows) == before  # the model stays as it was
    np.testing.assert_array_equal(better.weights.fcw[1], model.weights.fcw[1] * 0.5)

    file = tmp_path / "model.bin"
    llmc_jax.save(better, file)
    again = llmc_jax.load(file)
    jax.tree.map(np.testing.assert_array_equal, again.weights, better.weights)
    assert resolve_model(TrainConfig(model=str(file))).config == model.config  # train.py -e
    with pytest.raises(InputError, match=r"model\.bin: exists already"):
        llmc_jax.save(model, file)
    llmc_jax.save(model, file, force=True)
    assert llmc_jax.loss(llmc_jax.load(file), rows) == before


def test_a_model_in_16_bits_is_trained_with_master_weights(tmp_path: Path) -> None:
    low = llmc_jax.load(SHAPE, dtype="bf16")
    state, _ = llmc_jax.begin(low)
    assert (state.params.dtype, state.weights.dtype) == (jnp.float32, jnp.bfloat16)
    better = llmc_jax.trained(low, state)
    assert better.dtype == "bf16"
    llmc_jax.save(better, tmp_path / "model.bin")
    assert llmc_jax.load(tmp_path / "model.bin", dtype="bf16").weights.wte.tolist() == better.weights.wte.tolist()


# ----- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([1, 257], "found 257; this model's are 0 to 256"),
        ([-1, 2], "found -1"),
        ([1.0, 2.0], "found float64"),
        ([[1, 2], [3]], "differ in length"),
        ([[[1, 2]]], r"of shape \(1, 1, 2\)"),
        ([], "found 0 in a row"),
        ([1], "found 1 in a row; expected 2 to 33"),
        (list(range(34)), "found 34 in a row; expected 2 to 33"),
    ],
)
def test_ids_that_the_model_cannot_take(ids: Any, words: str, model: Model) -> None:
    with pytest.raises(InputError, match=rf"^ids: .*{words}") as raised:
        llmc_jax.loss_and_gradient(model, ids)
    assert "\n" not in str(raised.value)


def test_arguments_that_cannot_be(model: Model, tmp_path: Path) -> None:
    for wrong in (
        lambda: llmc_jax.load(SHAPE, dtype="fp8"),
        lambda: llmc_jax.load(tmp_path / "none.bin"),
        lambda: llmc_jax.encode(model, 7),
        lambda: llmc_jax.encode(llmc_jax.load(SHAPE, tokenizer="none"), "text"),
        lambda: llmc_jax.decode(model, [300]),
        lambda: llmc_jax.logits(model, list(range(33))),
        lambda: llmc_jax.attention_weights(model, [1, 2], layer=2),
        lambda: llmc_jax.complete(model, "text", tokens=0),
        lambda: llmc_jax.stream(model, "text", temperature=-1.0),
        lambda: llmc_jax.begin(model, learning_rate=-1.0),
        lambda: llmc_jax.begin(model, final_lr_fraction=0.1),
        lambda: llmc_jax.save(model, tmp_path / "none/model.bin"),
    ):
        with pytest.raises(InputError) as raised:
            wrong()
        assert "\n" not in str(raised.value)
