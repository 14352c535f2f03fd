"""What a problem's outputs should be, in parts: never a whole T x T matrix, nor a whole array in float64.

Rows, or sequences of attention, are independent of each other, and gradients of weights are sums over them. So the
answer is computed for some of them at a time and compared at once.
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llmc_jax.trials import problems
from llmc_jax.trials.problems import Problem

PART = 2**26  # elements of the largest array of a part


def errors(found: Sequence[jax.Array], given: Problem, kind: Any) -> list[tuple[float, float]]:
    """Return the two errors of every output (numerics.py), beside the answer in float64 or float32 (kind)."""
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        compared: list[list[Compared]] = [[] for _ in found]
        wholes, vectors = dict[int, jax.Array](), dict[int, list[jax.Array]]()
        for here, wanted in parts(given, kind):
            for k, part in enumerate(wanted):
                if here is None or part.shape == found[k].shape:  # the whole, or a sum over rows
                    wholes[k] = wholes[k] + part if k in wholes else part
                elif part.ndim == 1:
                    vectors.setdefault(k, []).append(part)
                else:
                    compared[k].append(_compare(found[k][here], part, given))
        wholes |= {k: jnp.concatenate(cut) for k, cut in vectors.items()}
        for k, whole in wholes.items():
            compared[k].append(_compare(found[k], whole, given))
        answers = [_errors(parts) for parts in compared]
        for k, terms in given.sums:  # streamed rows leave no room to add up what is not rounded yet
            whole = jnp.sum(found[terms], axis=0, dtype=jnp.float64)
            answers[k] = min(answers[k], _errors([_compare(found[k], whole, given)]))
        return answers


def parts(given: Problem, kind: Any) -> Iterator[tuple[slice | None, tuple[jax.Array, ...]]]:
    """Yield the answer for some rows at a time, and which rows these are; None: all of them, or nothing to cut."""
    run = jax.jit(lambda *arrays: problems.expected(given._replace(arrays=arrays), kind))
    length = given.arrays[0].shape[0]  # rows or sequences
    largest = max(array.size for array in given.arrays)
    count = min(length, math.ceil(largest / PART)) if given.cut else 1
    if count == 1:
        yield None, run(*given.arrays)
        return
    count = next((more for more in range(count, 2 * count) if length % more == 0), count)  # alike ones compile once
    step = math.ceil(length / count)
    for start in range(0, length, step):
        here = slice(start, min(start + step, length))
        yield here, run(*[array[here] if k in given.cut else array for k, array in enumerate(given.arrays)])


Compared = tuple[float, float, float]  # squares of what is off, squares of what is wanted, the worst element


@partial(jax.jit, static_argnames="columns")
def _sums(found: jax.Array, wanted: jax.Array, columns: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the sums of squares, and the largest of |found - wanted| / (|wanted| + its row's rms), over rows."""
    wanted = wanted.astype(jnp.float64).reshape(-1, columns)
    off = jnp.abs(found.astype(jnp.float64).reshape(-1, columns) - wanted)
    row = jnp.sqrt(jnp.mean(wanted**2, axis=1, keepdims=True))
    size = jnp.abs(wanted) + row
    relative = jnp.where(size > 0, off / jnp.where(size > 0, size, 1.0), jnp.where(off > 0, jnp.inf, off))
    return jnp.sum(off**2), jnp.sum(wanted**2), jnp.max(relative)


def _compare(found: jax.Array, wanted: jax.Array, given: Problem) -> Compared:
    """Return how far an output is off; of a vector, and where rows mean nothing, the whole is one row.

    Of attention's packed gradient dk and dv count as rows of their own too: few queries see the last keys, so their
    gradients are small beside dq's, which would hide them. Raises ValueError for another shape.
    """
    if found.shape != wanted.shape:
        raise ValueError(f"an output has the shape {found.shape}, not {wanted.shape}")
    columns = found.shape[-1] if given.rows and found.ndim > 1 else found.size
    off, size, worst = _sums(found, wanted, columns)
    if "attention" in given.function and columns == 3 * (C := given.arrays[0].shape[-1]) and found.ndim > 1:
        worst = jnp.maximum(worst, _sums(found[..., C:], wanted[..., C:], C)[2])
    return float(off), float(size), float(worst)


def _errors(parts: Sequence[Compared]) -> tuple[float, float]:
    off, size, worst = zip(*parts, strict=True)
    return math.sqrt(sum(off)) / (math.sqrt(sum(size)) or 1.0), float(np.max(worst))  # NaN if one of them is
