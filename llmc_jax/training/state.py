"""The state of training: everything that a step changes."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from llmc_jax.training.optimizer import LossScale, Optimizer
from llmc_jax.training.outliers import Outliers, init_outliers
from llmc_jax.training.rules.adamw import ADAMW

DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16, "fp16": jnp.float16}  # what a model may compute in


class TrainState(NamedTuple):
    """Everything that a step changes."""

    params: jax.Array  # (flat_size,) float32; in the compute dtype where there are no master weights
    buffers: dict[str, jax.Array]  # the optimizer's, by name: each (flat_size,) float32
    step: jax.Array  # () int32, steps taken, which the schedule counts
    updates: jax.Array  # () int32, the optimizer's t: the finite steps, also those that an outlier kept from updating
    copy: jax.Array | None = None  # (flat_size,) the parameters rounded to the compute dtype; None: they are in it
    loss_scale: LossScale | None = None  # None: the loss is not scaled
    outliers: Outliers | None = None  # None: none are looked for, and z-scores are NaN

    @property
    def weights(self) -> jax.Array:
        """Return the parameters that the model computes with."""
        return self.params if self.copy is None else self.copy

    @property
    def flat(self) -> dict[str, jax.Array]:
        """Everything of the parameters' shape, by the name that it has in a checkpoint."""
        copy = {} if self.copy is None else {"copy": self.copy}
        return {"params": self.params, **self.buffers, **copy}

    def with_flat(self, arrays: dict[str, jax.Array]) -> "TrainState":
        """Return the state with other arrays in the place of those of `flat`."""
        buffers = {name: arrays[name] for name in self.buffers}
        return self._replace(params=arrays["params"], buffers=buffers, copy=arrays.get("copy"))


def initial_state(
    params: jax.Array,
    dtype: Any = None,
    *,
    master_weights: bool = True,
    loss_scale: float | None = None,
    optimizer: Optimizer = ADAMW,
) -> TrainState:
    """Return the state before the first step, from a flat buffer (flat_size,) in float32.

    dtype: what the model computes in (None: params' own). Where it is another, the parameters stay in float32 beside a
    copy in dtype, or without master_weights are in dtype alone. loss_scale: the first one; None: no scaling.
    """
    wide = jnp.promote_types(params.dtype, jnp.float32)
    buffers = {name: jnp.zeros(params.shape, wide) for name in optimizer.buffers}
    low = params.astype(dtype or params.dtype)
    copy = low if master_weights and low.dtype != params.dtype else None
    start = params if master_weights else low
    scale = None if loss_scale is None else LossScale(jnp.asarray(loss_scale, jnp.float32), _zero())
    return TrainState(start, buffers, _zero(), _zero(), copy, scale, init_outliers(wide))


def _zero() -> jax.Array:
    """Return a count that begins; an array of its own each time, because a buffer can be donated only once."""
    return jnp.zeros((), jnp.int32)
