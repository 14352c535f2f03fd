"""Each file of examples/models: its forward against a plain one, its backward against JAX's, its decoder and tables."""

import re
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmc_jax.models import gradients, program, recompute
from llmc_jax.models.execution import PLAIN, Execution
from llmc_jax.models.family import Family, load, parsed
from llmc_jax.models.gpt2.model import forward_stream
from llmc_jax.models.layout import flat_size, pieces, separate, tensor_specs, tensors_of, views
from llmc_jax.models.work import Shape, array_bytes, products_flops
from llmc_jax.plan.moments import kept_for_backward
from llmc_jax.plan.program import Program
from tests.plain_model import relative_error
from tests.programs import products_flops as counted_in

FOLDER = Path(__file__).resolve().parents[2] / "examples/models"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
SHAPE, B, T, V = "L2-NH2-C8-V11-T6", 2, 6, 11
TOLERANCE = 1e-12  # relative, in float64
TOKENS = np.random.default_rng(2).integers(0, V, (B, T + 1)).astype(np.int32)
INPUTS, TARGETS = TOKENS[:, :-1], TOKENS[:, 1:]

pytestmark = pytest.mark.usefixtures("quick_compilation")
every_example = pytest.mark.parametrize("name", NAMES)
AS_GPT_2 = ("frozen_block", "mlp_ratio", "no_positions", "qkv_zero")  # other tensors or starts, the same computation
OTHER_OPERATIONS = ("eps", "no_affine", "no_norm", "no_residual", "relu", "relu_squared", "rms_norm")
NOT_CAUSAL = ("batch_norm", "linformer")


def examples_but(*slow: str) -> Any:
    """All examples, of which some are slow."""
    marks = {name: [pytest.mark.slow] if name in slow else [] for name in NAMES}
    return pytest.mark.parametrize("name", [pytest.param(name, marks=marks[name]) for name in NAMES])


class Example(NamedTuple):
    """A family, its shape, and random weights for it: no gain is 1, no bias 0."""

    family: Family
    shape: Any
    flat: np.ndarray  # (flat_size,) float64


@cache
def example(name: str) -> Example:
    family = load(FOLDER / f"{name}.py")
    shape = parsed(SHAPE + "-KV1" * (name == "rotary"), family)
    rng, flat = np.random.default_rng(1), np.zeros(flat_size(shape))
    for spec in tensor_specs(shape):
        width = 1.5 / np.sqrt(spec.shape[-1]) if spec.tensor.matrix else 0.3
        flat[spec.offset :][: spec.size] = rng.normal(spec.tensor.start == "one", width, spec.size)
    return Example(family, shape, flat)


# ----- the forward ----------------------------------------------------------------------------------------------------


def layernorm(x: Any, w: Any, b: Any, eps: float = 1e-5, axis: Any = -1) -> Any:
    mean, var = jnp.mean(x, axis, keepdims=True), jnp.var(x, axis, keepdims=True)
    return (x - mean) / jnp.sqrt(var + eps) * w + b


def rms_norm(x: Any, w: Any, b: Any) -> Any:
    return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5) * w


def mlp(x: Any, p: dict[str, Any], act: Callable[[Any], Any] = jax.nn.gelu) -> Any:
    return act(x @ p["fcw"].T + p["fcb"]) @ p["fcprojw"].T + p["fcprojb"]


def swiglu(x: Any, p: dict[str, Any]) -> Any:
    gate = x @ p["gatew"].T
    return (gate / (1 + jnp.exp(-gate)) * (x @ p["fcw"].T + p["fcb"])) @ p["fcprojw"].T + p["fcprojb"]


def softmax(q: Any, k: Any, v: Any, p: Any) -> Any:
    """One head's attention: (B, T, HS) each."""
    score = q @ jnp.swapaxes(k, 1, 2) / np.sqrt(q.shape[-1])
    return jax.nn.softmax(score, where=jnp.tril(jnp.ones((T, T), bool))) @ v


def rotary(q: Any, k: Any, v: Any, p: Any) -> Any:
    """Channels as complex numbers, turned by exp(i angle)."""

    def turned(x: Any) -> Any:
        half = x.shape[-1] // 2
        angle = jnp.arange(T)[:, None] * 10000.0 ** (-2 * jnp.arange(half) / x.shape[-1])
        z = (x[..., :half] + 1j * x[..., half:]) * jnp.exp(1j * angle)
        return jnp.concatenate([z.real, z.imag], axis=-1)

    return softmax(turned(q), turned(k), v, p)


def linear(q: Any, k: Any, v: Any, p: Any) -> Any:
    weight = jnp.tril((jax.nn.elu(q) + 1) @ jnp.swapaxes(jax.nn.elu(k) + 1, 1, 2))  # (B, T, T)
    return weight / jnp.sum(weight, -1, keepdims=True) @ v


def projected(q: Any, k: Any, v: Any, p: dict[str, Any]) -> Any:
    k, v = p["keysw"] @ k, p["valuesw"] @ v
    return jax.nn.softmax(q @ jnp.swapaxes(k, 1, 2) / np.sqrt(q.shape[-1])) @ v


def attention(x: Any, p: dict[str, Any], attend: Callable[..., Any], num_heads: int) -> Any:
    size = x.shape[-1] // num_heads
    of_heads = jnp.split(x @ p["qkvw"].T + p["qkvb"], len(p["qkvb"]) // size, -1)
    KV = (len(of_heads) - num_heads) // 2
    keys, values = of_heads[num_heads:-KV], of_heads[-KV:]
    heads = [attend(of_heads[n], keys[n * KV // num_heads], values[n * KV // num_heads], p) for n in range(num_heads)]
    return jnp.concatenate(heads, -1) @ p["attprojw"].T + p["attprojb"]


def plain(
    params: Any, num_heads: int = 2, norm: Any = layernorm, attend: Any = softmax, mlp: Any = mlp, skip: float = 1,
    scale: float = 1, post: bool = False, head: str = "wte", layers: int = 2,
) -> Any:  # fmt: skip
    """Return the logits (B, T, V) of a GPT-2, or of what differs from it in these."""
    everything = params._asdict()
    last = everything["lnfw"], everything["lnfb"]
    x = everything["wte"][INPUTS] + everything["wpe"][:T]
    of_layers = [{name: value[i] for name, value in everything.items() if len(value) == 2} for i in range(layers)]
    if post:
        x = norm(x, of_layers[0]["ln1w"], of_layers[0]["ln1b"])
    for p, above in zip(of_layers, [*of_layers[1:], None], strict=True):
        if post:
            x = norm(x + attention(x, p, attend, num_heads), p["ln2w"], p["ln2b"])
            x = norm(x + mlp(x, p), *((above["ln1w"], above["ln1b"]) if above else last))
        else:
            x = skip * x + scale * attention(norm(x, p["ln1w"], p["ln1b"]), p, attend, num_heads)
            x = skip * x + scale * mlp(norm(x, p["ln2w"], p["ln2b"]), p) if mlp else x
    return (x if post else norm(x, *last)) @ everything[head][:V].T


EXPECTED: dict[str, Callable[..., Any]] = {
    "batch_norm": partial(plain, norm=partial(layernorm, axis=(0, 1))),
    "eps": partial(plain, norm=partial(layernorm, eps=1e-2)),
    "frozen_block": plain,
    "linear_attention": partial(plain, attend=linear),
    "linformer": partial(plain, attend=projected),
    "mlp_ratio": plain,
    "no_affine": partial(plain, norm=lambda x, w, b: layernorm(x, 1, 0)),
    "no_mlp": partial(plain, mlp=None),
    "no_norm": partial(plain, norm=lambda x, w, b: x),
    "no_positions": plain,
    "no_residual": partial(plain, skip=0),
    "only_n_layers": partial(plain, layers=1),
    "post_ln": partial(plain, post=True),
    "qkv_zero": plain,
    "relu": partial(plain, mlp=partial(mlp, act=jax.nn.relu)),
    "relu_squared": partial(plain, mlp=partial(mlp, act=lambda x: jax.nn.relu(x) ** 2)),
    "residual_scale": partial(plain, scale=0.5),
    "rms_norm": partial(plain, norm=rms_norm),
    "rotary": partial(plain, attend=rotary),
    "swiglu": partial(plain, mlp=swiglu),
    "untied_head": partial(plain, head="headw"),
}


@every_example
def test_the_forward_is_what_the_file_says(name: str, op_by_op: None) -> None:
    """And GPT-2's gives something else, where the example computes something else."""
    _, shape, flat = example(name)
    with jax.enable_x64(True):
        params = tensors_of(jnp.asarray(flat), shape)
        expected = EXPECTED[name](params)
        assert relative_error(program.logits(params, INPUTS, shape)[..., :V], expected) <= TOLERANCE


@pytest.mark.parametrize("name", NOT_CAUSAL)
def test_some_are_not_causal(name: str, op_by_op: None) -> None:
    _, shape, flat = example(name)
    changed = INPUTS.copy()
    changed[:, -1] = (changed[:, -1] + 1) % V
    with jax.enable_x64(True):
        params = tensors_of(jnp.asarray(flat), shape)
        before, after = (program.logits(params, each, shape)[:, 0] for each in (INPUTS, changed))
        assert relative_error(after, before) > 1e-3


# ----- the backward ---------------------------------------------------------------------------------------------------

FROZEN_ALL_THE_SAME = ("frozen_block", "no_positions", "rotary")  # there is a gradient, which is not followed


@examples_but(*AS_GPT_2)
def test_the_backward_is_jax_s_of_the_forward(name: str, op_by_op: None) -> None:
    """Of each tensor, whatever is computed again. What gets no gradient is frozen."""
    _, shape, flat = example(name)
    given = INPUTS, TARGETS, shape
    with jax.enable_x64(True):
        weights = jnp.asarray(flat)
        mean, expected = jax.value_and_grad(program.mean_loss)(weights, *given)
        levels = Execution(recompute=2), Execution(recompute_blocks=2)
        found = [jax.grad(program.loss_fn)(weights, *given, execution) for execution in levels]
        loss, by_tensor = program.loss_and_gradients(weights, *given, PLAIN, 1.0)
        found.append(gradients.flatten_gradients(by_tensor, shape, np.float64))
    assert float(loss) == pytest.approx(float(mean), rel=TOLERANCE)
    expected = np.asarray(expected)
    for gradient in found:
        for ours, theirs in zip(views(np.asarray(gradient), shape), views(expected, shape), strict=True):
            # what is 0 but for rounding is compared with the whole
            assert np.linalg.norm(ours - theirs) <= TOLERANCE * max(
                np.linalg.norm(theirs), 1e-3 * np.linalg.norm(expected)
            )
    nothing = 1e-14 * np.linalg.norm(expected)
    silent = {each for each in pieces(shape) if np.linalg.norm(expected[each.start : each.stop]) <= nothing}
    frozen = {each for each in pieces(shape) if each.frozen}
    assert silent == (set() if name in FROZEN_ALL_THE_SAME else frozen)
    assert frozen or name not in FROZEN_ALL_THE_SAME


@every_example
def test_16_bits_stay_16_bits(name: str) -> None:
    _, shape, flat = example(name)
    narrow = jax.ShapeDtypeStruct(flat.shape, jnp.bfloat16)
    loss_fn = jax.value_and_grad(partial(program.loss_fn, shape=shape, execution=Execution(recompute=2)))
    loss, gradient = jax.eval_shape(loss_fn, narrow, INPUTS, TARGETS)
    assert (loss.dtype, gradient.dtype) == (jnp.float32, jnp.bfloat16)


@every_example
def test_heads_can_be_looked_at(name: str) -> None:
    _, shape, flat = example(name)
    if (weights := program.program_of(shape).attention_weights) is not None:
        params = views(jnp.asarray(flat, jnp.float32), shape)
        found = jax.eval_shape(lambda params: weights(params, INPUTS[:1], shape, PLAIN, 0), params)
        assert (found.shape, found.dtype) == ((2, T, T), jnp.float32)


@pytest.mark.slow
def test_queries_and_keys_that_are_zero_learn_nothing(op_by_op: None) -> None:
    family, shape, _ = example("qkv_zero")
    flat = family.initial(shape, 42).astype(np.float64)
    with jax.enable_x64(True):
        qkvw = views(np.asarray(jax.grad(program.loss_fn)(jnp.asarray(flat), INPUTS, TARGETS, shape)), shape).qkvw
    assert not qkvw[:, : 2 * shape.channels].any() and qkvw[:, 2 * shape.channels :].any(axis=(1, 2)).all()


# ----- decoding -------------------------------------------------------------------------------------------------------


@examples_but(*AS_GPT_2, *OTHER_OPERATIONS)
def test_token_after_token_is_the_whole_forward(name: str, op_by_op: None) -> None:
    """So no position sees a later one."""
    _, shape, flat = example(name)
    decoder, length = program.decoder_of(shape), 3
    if name in NOT_CAUSAL:
        assert decoder is recompute.DECODER
        return
    with jax.enable_x64(True):
        params = separate(jnp.asarray(flat), shape)
        expected = program.logits(tensors_of(jnp.asarray(flat), shape), INPUTS, shape)[..., :V]
        prompt = np.where(np.arange(4) < length, INPUTS[:, :4], 7)  # another token behind it, which must not count
        logits, cache = decoder.prefill(params, prompt, np.int32(length), T, shape, PLAIN)
        empty = decoder.empty(shape, B, T, jnp.float64)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), empty) == jax.tree.map(lambda x: (x.shape, x.dtype), cache)
        assert sum(each.nbytes for each in jax.tree.leaves(cache)) == decoder.bytes(shape, B, T, 8)
        for position in range(length, T):
            assert relative_error(logits, expected[:, position - 1]) <= TOLERANCE
            logits, cache = decoder.decode(params, INPUTS[:, position], np.int32(position), cache, shape)
        assert relative_error(logits, expected[:, -1]) <= TOLERANCE


# ----- the start, and what is counted ---------------------------------------------------------------------------------


@every_example
def test_what_starts_at_zero(name: str) -> None:
    family, shape, _ = example(name)
    start = views(family.initial(shape, 42), shape)
    usual = {each.name for each in family.tensors(shape) if each.start == "zero"}
    own = {"no_positions": {"wpe"}, "qkv_zero": {"qkvw"}, "rotary": {"wpe"}}.get(name, set())
    assert {each for each, values in start._asdict().items() if not values.any()} == usual | own
    for each in (start.wte, start.headw) if name == "untied_head" else (start.wte,):
        assert each[:V].any(axis=1).all() and not each[V:].any()


@pytest.mark.parametrize("recompute", [0, 2])
@pytest.mark.parametrize("name", ["linear_attention", "mlp_ratio", "no_mlp", "swiglu"])
def test_the_tables_are_what_the_model_does(name: str, recompute: int) -> None:
    """Compare the bytes that its forward keeps, and its products of matrices."""
    _, shape, flat = example(name)
    how, execution = Shape(B, T, recompute=recompute), Execution(recompute=recompute)
    params, tokens = jax.ShapeDtypeStruct(flat.shape, jnp.float32), jax.ShapeDtypeStruct((B, T), jnp.int32)
    kept = jax.eval_shape(lambda flat: forward_stream(views(flat, shape), INPUTS, shape, execution)[1], params)
    behind = (array_bytes(name, shape, how) for name in ("residual", "lnf_mean", "lnf_rstd"))
    bytes_kept = sum(each.size * each.dtype.itemsize for each in jax.tree.leaves(kept))
    assert bytes_kept == kept_for_backward(shape, how) + sum(behind)
    if name == "linear_attention":  # whose sums over positions the table leaves out
        return
    step = jax.jit(jax.value_and_grad(program.loss_fn), static_argnums=(3, 4))
    lowered = step.lower(params, tokens, tokens, shape, execution)
    sums_over_rows = 2 * B * T * shape.padded_vocab_size  # the classifier's, a product on a CPU
    counted = sum(counted_in(Program(lowered.as_text(dialect="hlo"))).values())
    assert counted == products_flops(shape, how) + sums_over_rows


def test_the_page_has_a_row_of_each_file() -> None:
    rows = re.findall(r"^\| \[(\w+)\.py\]\(\1\.py\) \|", (FOLDER / "README.md").read_text(encoding="utf-8"), re.M)
    assert sorted(rows) == NAMES == sorted(EXPECTED)


def test_products_of_ours_that_an_example_does_without() -> None:
    """Those whose part is the example's own: another function in GELU's place, or a block that has no such product."""
    both = {"linear_gelu_backward", "linear_gelu_forward"}
    found = {name: gone for name in NAMES if (gone := set(program.replaced(example(name).shape)))}
    own = ("linformer", "no_mlp", "post_ln", "relu", "relu_squared", "residual_scale", "swiglu")
    assert found == dict.fromkeys(own, both) | {"rotary": {"linear_gelu_forward"}}
