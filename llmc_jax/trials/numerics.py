"""Each kernel against float64, on random inputs, over memory that holds NaN, three times for the bits that it promises.

Two errors of every output: `error`, of the whole array, norm-wise; and `worst`, of the worst element, relative to its
own size plus the root mean square of its row. The first finds what is wrong everywhere, the second what is wrong
somewhere. Neither tolerance leaves more room than rounding takes.
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from llmc_jax.config.model import ModelShape
from llmc_jax.models.layout import tensor_specs
from llmc_jax.training.rules.adamw import adamw_update
from llmc_jax.trials import problems
from llmc_jax.trials.children import FREE, OTHER, SAME, Figures, running
from llmc_jax.trials.problems import Function, Problem


class Tolerance(NamedTuple):
    """What rounding to a dtype may cost. bfloat16 rounds to within 2^-8 of a value, float16 to within 2^-11."""

    error: float
    worst: float


ROUNDED = {
    "bfloat16": Tolerance(3e-3, 5e-3),
    "float16": Tolerance(4e-4, 7e-4),
    "float32": Tolerance(1e-5, 2e-4),  # sums of up to 65,536 rows
}
# Weights and their gradients are rounded before they are multiplied and summed: errors are those of sums, several
# times larger in single elements.
ATTENTION = {"bfloat16": Tolerance(5e-3, 5e-2), "float16": Tolerance(6e-4, 7e-3)}
# An exponential has the error of its exponent, a logit of up to 100 that was summed in float32.
EXPONENTIALS = ROUNDED | {"float32": Tolerance(1e-4, 1e-3)}
PART = 2**26  # elements of the largest array of a part of the answer
POISON = 2**28  # elements of NaN, 1 GB, that the allocator gives to the kernel's outputs next
DIFFERING = 1e-3  # share of a rounded copy's elements that may differ from XLA's, by a float32 rounding before


def judged(
    given: Problem, run: Function, *, promised: bool, interpret: bool, wide: Any, rounding: str
) -> tuple[Figures, list[str]]:
    """Return the errors of what solves a problem, with a digest of its outputs, and what is wrong.

    run: compiled. promised: that the same inputs give the same bits. wide: float64 or float32, in which the answer is
    computed.
    """
    again = 0 if interpret or not promised else 2
    with running():
        found = _poisoned(run, given.arrays, interpret)
        first = digest(found)
        moved = any(digest(_poisoned(run, given.arrays, interpret)) != first for _ in range(again))
    off = errors(found, given, wide)
    tolerances = ATTENTION if "attention" in given.function else EXPONENTIALS if "head" in given.function else ROUNDED
    wrong = []
    for number, ((error, worst), output) in enumerate(zip(off, found, strict=True)):
        allowed = tolerances.get(str(output.dtype), ROUNDED["float32"])
        if rounding == "stochastic":  # by up to a whole unit in the last place, not half of one
            allowed = allowed._replace(worst=2 * allowed.worst)
        if not (error <= allowed.error and worst <= allowed.worst):
            wrong.append(f"output {number}: error {error:.2g}, worst {worst:.2g}, allowed {tuple(allowed)}")
    error, worst = np.max(off, axis=0)  # NaN if one of them is
    figures: Figures = {"error": float(error), "worst": float(worst), "digest": first}
    if given.function == "adamw_update" and len(found) == 4:
        copy = jax.jit(given.bind(adamw_update))(*given.arrays)[3]
        figures["copy differs"] = share = float(jnp.mean(found[3] != copy))
        wrong += [f"{share:.2g} of the copy differs from XLA's"] if not share <= DIFFERING else []
    if moved:
        wrong.append("the same inputs gave different bits")
    if again or not promised:
        figures["bits"] = FREE if not promised else OTHER if moved else SAME
    return figures, wrong


def _poisoned(run: Any, arrays: tuple[jax.Array, ...], interpret: bool) -> tuple[jax.Array, ...]:
    """Return the outputs, made where NaN was: what the kernel does not write shows."""
    if not interpret:
        poison = [jax.block_until_ready(jnp.full(POISON, jnp.nan, jnp.float32)) for _ in range(2)]
        for array in poison:
            array.delete()
    return jax.block_until_ready(run(*arrays))


def digest(outputs: tuple[jax.Array, ...]) -> str:
    """Return a number that changes with any one element: a sum of the elements' bits, weighted by their places."""
    return f"{int(_weighted_bits(outputs)):08x}"


@jax.jit
def _weighted_bits(outputs: tuple[jax.Array, ...]) -> jax.Array:
    total = jnp.uint32(0)
    for array in outputs:
        bits = jax.lax.bitcast_convert_type(array, {2: jnp.uint16, 4: jnp.uint32}[array.dtype.itemsize]).reshape(-1)
        place = jax.lax.iota(jnp.uint32, bits.size) * jnp.uint32(0x9E3779B1)
        weight = (place ^ (place >> 15)) * jnp.uint32(0x85EBCA77) | jnp.uint32(1)  # mixed; an odd one loses no bit
        total = 31 * total + jnp.sum(weight * bits.astype(jnp.uint32), dtype=jnp.uint32)
    return total


# ----- the answer, in parts -----------------------------------------------------------------------------------------
# Never a whole T x T matrix, nor a whole array in float64: rows, or sequences of attention, are independent of each
# other, and gradients of weights are sums over them. So the answer is computed for some of them at a time.


def errors(found: Sequence[jax.Array], given: Problem, kind: Any) -> list[tuple[float, float]]:
    """Return the two errors of every output, beside the answer in float64 or float32 (kind)."""
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
    largest = max(given.wide * length, *(array.size for array in given.arrays))
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
    """Return how far an output is off; of a vector the whole is one row.

    Of attention's packed gradient dk and dv count as rows of their own too: few queries see the last keys, so their
    gradients are small beside dq's, which would hide them. Raises ValueError for another shape.
    """
    if found.shape != wanted.shape:
        raise ValueError(f"an output has the shape {found.shape}, not {wanted.shape}")
    columns = found.shape[-1] if found.ndim > 1 else found.size
    off, size, worst = _sums(found, wanted, columns)
    if "attention" in given.function and columns == 3 * (C := given.arrays[0].shape[-1]) and found.ndim > 1:
        worst = jnp.maximum(worst, _sums(found[..., C:], wanted[..., C:], C)[2])
    return float(off), float(size), float(worst)


def _errors(parts: Sequence[Compared]) -> tuple[float, float]:
    off, size, worst = zip(*parts, strict=True)
    return math.sqrt(sum(off)) / (math.sqrt(sum(size)) or 1.0), float(np.max(worst))  # NaN if one of them is


# ----- the whole model ----------------------------------------------------------------------------------------------

MODEL = {
    "bf16": (5e-3, 2e-2),
    "fp16": (1e-3, 5e-3),
    "fp32": (1e-4, 2e-3),
}  # of the loss, absolutely; of each tensor's gradient


def judged_model(
    config: ModelShape, dtype: str, found: tuple[float, np.ndarray], wanted: tuple[float, np.ndarray]
) -> tuple[Figures, list[str]]:
    """Return how far a loss and a flat gradient are off others, and what is off by more than a precision explains."""
    errors_of = {}
    for spec in tensor_specs(config):
        here = slice(spec.offset, spec.offset + spec.size)
        one, other = found[1][here].astype(np.float64), wanted[1][here].astype(np.float64)
        errors_of[spec.name] = float(np.linalg.norm(one - other) / np.linalg.norm(other))
    name, error = max(errors_of.items(), key=lambda each: math.inf if math.isnan(each[1]) else each[1])
    off, (loss_allowed, allowed) = abs(found[0] - wanted[0]), MODEL[dtype]
    wrong = []
    if not off <= loss_allowed:
        wrong.append(f"loss off by {off:.2g}, allowed {loss_allowed}")
    if not error <= allowed:
        wrong.append(f"gradient of {name} off by {error:.2g}, allowed {allowed}")
    return {"error": error, "loss off": off, "of": name}, wrong
