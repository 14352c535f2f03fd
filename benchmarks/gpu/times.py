"""Times of a kernel and of XLA's version of the same operation, on random inputs of a real size.

GB/s are compulsory bytes over time: whatever else is moved counts as loss.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu import solvers
from benchmarks.gpu.calls import pace, time_of
from benchmarks.gpu.clock import queued, timing
from llmc_jax.trials import problems
from llmc_jax.trials.children import Figures
from llmc_jax.trials.problems import Problem

SETS_BYTES = 12e9  # of inputs at most
PROGRAM_BYTES = 2e9  # that one program moves at least: more than a cache holds, and longer than it takes to start
SETS = 8  # of inputs at most


def measure(
    function: str,
    dtype: str,
    sizes: list[int],
    implementation: str = "pallas",
    *,
    against: str = "",
    interpret: bool = False,
    form: str = "",
    **options: Any,
) -> Figures:
    """us and GB/s of one implementation; of another too, and how many times slower it is, where `against` names one."""
    if "attention" in function:
        return measure_attention(function, dtype, sizes, implementation, interpret=interpret)
    seed = problems.seed_of(f"{function} {sizes}")
    least = problems.problem(function, dtype, sizes, seed, **options)
    number = 1 if interpret else number_of_sets(least)
    sets = [least] + [problems.problem(function, dtype, sizes, seed + k, **options) for k in range(1, number)]
    solver = solvers.implementation(function, implementation, interpret=interpret, form=form)
    ours = time_of(solver, sets, quick=interpret)
    figures: Figures = {"us": 1e6 * ours.seconds, "GB/s": bytes_of(least) / ours.seconds / 1e9, "spread": ours.spread}
    if against:
        other = time_of(solvers.implementation(function, against), sets, quick=interpret).seconds
        figures |= {f"{against} us": 1e6 * other, f"{against} / ours": other / ours.seconds}
    return figures


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


def number_of_sets(given: Problem) -> int:
    """Return how many calls, each on inputs of its own, stand in one program."""
    nbytes = sum(array.nbytes for array in given.arrays)
    return max(1, min(SETS, math.ceil(PROGRAM_BYTES / bytes_of(given)), int(SETS_BYTES / nbytes)))


def measure_attention(function: str, dtype: str, sizes: list[int], implementation: str, *, interpret: bool) -> Figures:
    """Forward, and forward with backward; FLOPs of what lies inside the mask, five products backward for two forward.

    implementation: mma, wgmma, cudnn, naive.
    """
    given = problems.problem(function, dtype, sizes, problems.seed_of(f"attention {sizes}"))
    pair = solvers.implementation(function, implementation, interpret=interpret)
    num_heads = sizes[2]
    dout, qkv = given.arrays
    forward = jax.jit(lambda qkv: pair[0](qkv, num_heads)[0])
    both = jax.jit(given.bind(pair))
    once = timing(queued(lambda: forward(qkv)), **pace(interpret)).seconds
    seconds, spread, _ = timing(queued(lambda: both(dout, qkv)), **pace(interpret))
    B, T, _, HS = sizes
    flops = 7 * B * num_heads * T * T * HS
    return {
        "us": 1e6 * seconds, "TFLOP/s": flops / seconds / 1e12, "spread": spread,
        "forward us": 1e6 * once, "forward TFLOP/s": flops * 2 / 7 / once / 1e12,
        "backward us": 1e6 * (seconds - once), "backward TFLOP/s": flops * 5 / 7 / max(seconds - once, 1e-9) / 1e12,
    }  # fmt: skip
