"""All kernels together, interpreted, give the model."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmc_jax import kernels
from llmc_jax.config.model import ModelConfig
from llmc_jax.kernels.functions import PLAIN, TWINS
from llmc_jax.models.execution import Execution
from llmc_jax.models.gpt2 import model as gpt2
from llmc_jax.models.layout import flat_size
from llmc_jax.ops.table import XLA, Operations
from llmc_jax.training.optimizer import Optimizer
from llmc_jax.training.rules.adamw import ADAMW
from llmc_jax.training.state import initial_state
from llmc_jax.training.step import StepOptions, train_step
from tests import plain_model
from tests.comparisons import QUICK, gradient_errors, random_batch, step_numbers

pytestmark = pytest.mark.slow


def model_inputs(config: ModelConfig, B: int, T: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    batch = random_batch(config.vocab_size, 1, B, T)
    return plain_model.random_flat(config, flat_size(config), seed=3), batch.inputs[0], batch.targets[0]


loss_and_gradient = jax.jit(jax.value_and_grad(gpt2.loss_fn), static_argnums=(3, 4), compiler_options=QUICK)


def of_model(execution: Execution, config: ModelConfig, dtype: Any, B: int, T: int) -> tuple[float, np.ndarray]:
    flat, inputs, targets = model_inputs(config, B, T)
    loss, gradient = loss_and_gradient(jnp.asarray(flat, dtype), inputs, targets, config, execution)
    return float(loss), np.asarray(gradient).astype(np.float64)


XLA_ALONE = {"classifier_forward", "linear_forward", "linear_backward"}  # operations without another implementation
TINY = ModelConfig(max_seq_len=64, vocab_size=61, padded_vocab_size=128, num_layers=1, num_heads=1, channels=64)
DTYPES = {"bf16": (jnp.bfloat16, 2.0**-8), "fp16": (jnp.float16, 2.0**-11)}  # with the relative error of one rounding


def all_kernels(target: str) -> tuple[Operations, Optimizer]:
    """In interpret mode."""
    found = kernels.pallas_functions(target, interpret=True)
    assert set(found) == set(PLAIN) - XLA_ALONE - (set() if target == "sm_90" else set(TWINS))
    return kernels.assembled(found)


@pytest.mark.parametrize(("target", "dtype"), [("sm_80", "fp16"), ("sm_90", "bf16")])
def test_all_kernels_together_give_the_model(target: str, dtype: str) -> None:
    """Loss and gradient of a whole model whose every operation is a kernel, beside fp32."""
    kind, u = DTYPES[dtype]
    found = of_model(Execution(all_kernels(target)[0]), TINY, kind, 1, 64)
    expected = of_model(Execution(), TINY, jnp.float32, 1, 64)
    errors = gradient_errors(found, expected, TINY)
    assert max(errors.values()) < 4 * u, errors


def test_a_step_by_kernels_alone() -> None:
    """Norm, clipping and update too, in the buffers that the step takes over."""
    flat, *tokens = model_inputs(TINY, 1, 64)
    numbers = step_numbers(lr=1e-2, warmup=0, total=1, final=1.0, weight_decay=0.1, grad_clip=0.1)

    def stepped(op: Operations, optimizer: Optimizer, dtype: Any) -> tuple[Any, Any]:
        state = initial_state(jnp.array(flat, jnp.float32), dtype)
        options = StepOptions("constant", "matrices", Execution(op), optimizer=optimizer)
        return train_step(state, *(each[None] for each in tokens), numbers, TINY, options)

    (found, told), (expected, rightly) = stepped(*all_kernels("sm_90"), jnp.bfloat16), stepped(XLA, ADAMW, None)
    u = DTYPES["bf16"][1]
    assert float(told.loss) == pytest.approx(float(rightly.loss), rel=u)
    assert float(told.norm) == pytest.approx(float(rightly.norm), rel=u)
    assert float(rightly.norm) > 0.2  # it was clipped
    assert plain_model.relative_error(found.buffers["m"], expected.buffers["m"]) < 4 * u
    np.testing.assert_array_equal(found.copy, found.params.astype(jnp.bfloat16))
    # Adam's first step is the sign of the gradient, whose error makes some small ones turn.
    moved, rightly_moved = (np.asarray(state.params, np.float64) - flat for state in (found, expected))
    turned = np.abs(moved - rightly_moved) > 1e-4
    assert turned.mean() < 0.01 and np.abs(moved).max() > 5e-3
    assert not np.asarray(found.params)[flat == 0].any()  # the buffer's padding
