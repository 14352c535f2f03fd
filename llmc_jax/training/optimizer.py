"""What an optimizer is to the step: what it keeps, its update, its numbers; and what every one of them shares."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from llmc_jax.config.model import ModelConfig
from llmc_jax.config.train import TrainConfig
from llmc_jax.models.gpt2.tensors import BY_NAME, tensor_specs
from llmc_jax.models.tensors import FLAT_MULTIPLE


class Optimizer(NamedTuple):
    """An optimizer. Static: another one is another program."""

    name: str
    buffers: tuple[str, ...]  # what it keeps beside the parameters: each (flat_size,), at least float32, zero at first
    update: Callable[..., Any]  # (params, *buffers, gradient, …) -> (params, *buffers, copy), as adamw.adamw_update
    global_norm: Callable[[jax.Array], jax.Array]
    numbers: Callable[[TrainConfig], Any]  # what `update` takes as `numbers`


def global_norm(gradient: jax.Array) -> jax.Array:
    """Return the L2 norm of a flat gradient (flat_size,), a scalar in at least float32.

    Summed row by row, then over the rows: one running float32 sum over 10^8 squares would lose digits.
    """
    rows = gradient.reshape(-1, FLAT_MULTIPLE // 16).astype(jnp.promote_types(gradient.dtype, jnp.float32))
    return jnp.sqrt(jnp.sum(jnp.sum(rows * rows, axis=1)))


def clip_scale(norm: jax.Array, limit: jax.Array) -> jax.Array:
    """Return what to multiply the gradient by so that its norm is at most `limit`; limit <= 0: no clipping."""
    return jnp.where((limit > 0) & (norm > limit), limit / norm, 1.0).astype(norm.dtype)


def decay_ranges(config: ModelConfig, rule: str) -> tuple[tuple[int, int], ...]:
    """Return the ranges [start, stop) of the flat buffer that weight decay applies to, neighbours joined.

    rule: 'matrices' as train_gpt2.cu (wte, wpe and the weight matrices), or 'all' as train_gpt2.c.
    """
    ranges: list[tuple[int, int]] = []
    for spec in tensor_specs(config):
        if rule == "all" or BY_NAME[spec.name].matrix:
            start = spec.offset
            if ranges and ranges[-1][1] == start:
                start = ranges.pop()[0]
            ranges.append((start, spec.offset + spec.size))
    return tuple(ranges)
