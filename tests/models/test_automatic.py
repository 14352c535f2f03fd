"""Gradients that JAX makes of a family without a backward: right in float64, and through the run's operations."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmc_jax.models import program
from llmc_jax.models.execution import Execution
from llmc_jax.models.gradients import flatten_gradients
from llmc_jax.models.layout import flat_size, initial, views
from llmc_jax.ops.table import XLA
from tests.comparisons import (
    GRADIENT_TOLERANCE,
    QUICK,
    GradientCase,
    expected_gradient,
    gradient_errors,
    gradient_of,
    random_batch,
)
from tests.families import AUTOMATIC, TOY, shape_of
from tests.plain_model import relative_error

pytestmark = pytest.mark.usefixtures("quick_compilation")

GPT2, DEEP = (shape_of(f"L{layers}-NH2-C16-V61-T16", AUTOMATIC) for layers in (1, 2))
SMALL = shape_of("toy-V61-C8-T16", TOY)


def unseen(function: Any) -> Any:
    """A function that JAX can call and not differentiate, as it cannot a kernel. Numbers stand behind the arrays."""

    def refused(*_: Any) -> Any:
        raise AssertionError(f"JAX looks into {function.__name__}")

    def call(*given: Any) -> Any:
        count = sum(isinstance(each, jax.Array) for each in given)
        opaque = jax.custom_vjp(lambda *arrays: function(*arrays, *given[count:]))
        opaque.defvjp(refused, refused)
        return opaque(*given[:count])

    return call


# As a GPU's: each has its backward, and JAX sees into none of them but products.
KERNELS = XLA._replace(**{name: unseen(each) for name, each in XLA._asdict().items() if each and "linear" not in name})


def test_gpt2s_gradient_is_the_plain_models() -> None:
    case = GradientCase(GPT2, 1, 2, 12, Execution(KERNELS, logit_rows=8))
    found = gradient_of(case, lambda *batch: program.loss_fn(*batch, GPT2, case.execution))
    errors = gradient_errors(found, expected_gradient(case), GPT2)
    assert max(errors.values()) < GRADIENT_TOLERANCE, errors


def test_a_backward_of_the_run_is_called() -> None:
    """One that gives nothing leaves the tensors below it without a gradient."""
    op = XLA._replace(gelu_backward=lambda dout, x: (jnp.zeros_like(x), dout[0, 0]))
    case = GradientCase(GPT2, 1, 2, 12, Execution(op))
    _, gradient = gradient_of(case, lambda *batch: program.loss_fn(*batch, GPT2, case.execution))
    found = views(gradient, GPT2)
    assert not found.fcw.any() and not found.fcb.any() and found.fcprojw.all() and found.qkvw.all()


@pytest.mark.parametrize("shape", [SMALL, DEEP], ids=["toy", "gpt2"])
def test_the_gradients_by_tensor_are_those_of_the_loss(shape: Any) -> None:
    """And JAX's of the mean of the losses, which the head makes without its gradients. Each layer's is handed on."""
    execution, weight = Execution(logit_rows=8), 0.5
    batch = random_batch(61, 1, 2, 16)
    tokens, targets = batch.inputs[0], batch.targets[0]
    layers = []

    def by_tensor(flat: jax.Array) -> tuple[jax.Array, jax.Array]:
        seen = lambda block: layers.append(len(block)) or block  # noqa: E731
        loss, found = program.loss_and_gradients(flat, tokens, targets, shape, execution, weight, seen, True)
        return loss, flatten_gradients(found, shape, flat.dtype)

    def plain(flat: jax.Array) -> jax.Array:
        return weight * program.mean_loss(flat, tokens, targets, shape)

    def whole(flat: jax.Array) -> jax.Array:
        return program.loss_fn(flat, tokens, targets, shape, execution, weight)

    with jax.enable_x64(True):
        flat = jnp.asarray(np.random.default_rng(0).normal(0.1, 0.3, flat_size(shape)))
        functions = (by_tensor, jax.value_and_grad(whole), jax.value_and_grad(plain))
        ours, loss_fn, expected = jax.jit(lambda flat: [each(flat) for each in functions], compiler_options=QUICK)(flat)
    assert layers == ([] if shape is SMALL else [12, 12])
    for found in (ours, loss_fn):
        assert abs(float(found[0]) / float(expected[0]) - 1) < 1e-14
        assert relative_error(found[1], expected[1]) < GRADIENT_TOLERANCE


def test_without_a_loss_jax_makes_all_gradients(tmp_path: Path) -> None:
    """Of a program that still has a `loss_and_gradients` by hand, which keeps no gradient of it."""
    text = "from llmc_jax.models.gpt2.family import FAMILY as GPT2\nfrom llmc_jax.models.gpt2.program import PROGRAM\n"
    file = tmp_path / "half.py"
    file.write_text(f"{text}FAMILY = GPT2._replace(name='half', program=lambda: PROGRAM._replace(loss=None))\n")
    shape = shape_of("L1-NH2-C16-V61-T16", file)
    inputs, targets = random_batch(61, 1, 2, 8)
    batch = jnp.asarray(initial(shape, 1)), inputs[0], targets[0]
    loss, found = program.loss_and_gradients(*batch, shape, Execution(), 1.0)
    right, gradient = jax.value_and_grad(program.mean_loss)(*batch, shape)
    assert float(loss) == pytest.approx(float(right), rel=1e-6)
    np.testing.assert_allclose(flatten_gradients(found, shape, jnp.float32), gradient, rtol=1e-4, atol=1e-6)
