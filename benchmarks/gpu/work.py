"""What a problem of llmc_jax/trials/problems.py moves at least, and which of its inputs may be overwritten."""

import jax
import jax.numpy as jnp

from benchmarks.gpu import solvers
from llmc_jax.trials.problems import Problem

# Of a function, the arrays that an implementation may overwrite, and the output that takes the place of each.
IN_PLACE = {"classifier": {0: 1}, "embedding_backward": {2: 0}, "adamw_update": {0: 0, 1: 1, 2: 2, 4: 3}}


def in_place(given: Problem) -> dict[int, int]:
    """Return the arrays that an implementation may overwrite, and the output that takes the place of each."""
    return {k: output for k, output in IN_PLACE.get(given.function, {}).items() if k < len(given.arrays)}


def bytes_of(given: Problem) -> int:
    """Return the compulsory bytes: each input read once, each output written once. Not of attention.

    Of an embedding's gradient only the rows that tokens touch count, of a softmax's scores the part that the mask
    leaves; AdamW's 16-bit copy is not read.
    """
    bound = given.bind(solvers.implementation(given.function, "xla"))
    inputs = [array.nbytes for array in given.arrays]
    outputs = [array.size * array.dtype.itemsize for array in jax.eval_shape(bound, *given.arrays)]
    if given.function == "adamw_update":
        inputs = inputs[:4]
    if given.function == "embedding_backward":
        dout, tokens, dwte = given.arrays
        touched = 2 * dwte.shape[1] * dwte.dtype.itemsize * len(jnp.unique(tokens))
        return dout.nbytes + tokens.nbytes + touched + dout[0].size * dout.dtype.itemsize
    if given.function.startswith("softmax"):
        T = given.arrays[0].shape[-1]
        return sum(inputs) * (T + 1) // (2 * T) + sum(outputs)
    return sum(inputs) + sum(outputs)
