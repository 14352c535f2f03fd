"""Each kernel against float64, on random inputs, over memory that holds NaN, three times for the bits that it promises.

Two errors of every output: `error`, of the whole array, norm-wise; and `worst`, of the worst element, relative to its
own size plus the root mean square of its row. The first finds what is wrong everywhere, the second what is wrong
somewhere. Neither tolerance leaves more room than rounding takes.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from llmc_jax.config.model import ModelConfig
from llmc_jax.models.gpt2.tensors import tensor_specs
from llmc_jax.training.adamw import ADAMW
from llmc_jax.trials import reference
from llmc_jax.trials.figures import FREE, OTHER, SAME, Figures, running
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
    errors = reference.errors(found, given, wide)
    tolerances = ATTENTION if "attention" in given.function else ROUNDED
    wrong = []
    for number, ((error, worst), output) in enumerate(zip(errors, found, strict=True)):
        allowed = tolerances.get(str(output.dtype), ROUNDED["float32"])
        if rounding == "stochastic":  # by up to a whole unit in the last place, not half of one
            allowed = allowed._replace(worst=2 * allowed.worst)
        if not (error <= allowed.error and worst <= allowed.worst):
            wrong.append(f"output {number}: error {error:.2g}, worst {worst:.2g}, allowed {tuple(allowed)}")
    error, worst = np.max(errors, axis=0)  # NaN if one of them is
    figures: Figures = {"error": float(error), "worst": float(worst), "digest": first}
    if given.function == "adamw_update" and len(found) == 4:
        copy = jax.jit(given.bind(ADAMW.update))(*given.arrays)[3]
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


# ----- the whole model ----------------------------------------------------------------------------------------------

MODEL = {
    "bf16": (5e-3, 2e-2),
    "fp16": (1e-3, 5e-3),
    "fp32": (1e-4, 2e-3),
}  # of the loss, absolutely; of each tensor's gradient


def judged_model(
    config: ModelConfig, dtype: str, found: tuple[float, np.ndarray], wanted: tuple[float, np.ndarray]
) -> tuple[Figures, list[str]]:
    """Return how far a loss and a flat gradient are off others, and what is off by more than a precision explains."""
    errors = {}
    for spec in tensor_specs(config):
        here = slice(spec.offset, spec.offset + spec.size)
        one, other = found[1][here].astype(np.float64), wanted[1][here].astype(np.float64)
        errors[spec.name] = float(np.linalg.norm(one - other) / np.linalg.norm(other))
    name, error = max(errors.items(), key=lambda each: math.inf if math.isnan(each[1]) else each[1])
    off, (loss_allowed, allowed) = abs(found[0] - wanted[0]), MODEL[dtype]
    wrong = []
    if not off <= loss_allowed:
        wrong.append(f"loss off by {off:.2g}, allowed {loss_allowed}")
    if not error <= allowed:
        wrong.append(f"gradient of {name} off by {error:.2g}, allowed {allowed}")
    return {"error": error, "loss off": off, "of": name}, wrong
