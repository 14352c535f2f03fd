"""Times of a kernel and of XLA's version of the same operation, on random inputs of a real size.

Several calls on inputs of their own stand in one compiled program, and as many runs of it are queued as clock.py says:
neither the cache nor the time to start a kernel is measured. What overwrites its inputs goes on from its own outputs.
GB/s are compulsory bytes over time: whatever else is moved counts as loss.
"""

import math
from typing import Any

import jax

from llmc_jax.trials import problems
from llmc_jax.trials.clock import Timing, queued, timing
from llmc_jax.trials.figures import Figures
from llmc_jax.trials.problems import Function, Problem

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
    tuning: dict[str, Any] | None = None,
    **options: Any,
) -> Figures:
    """us and GB/s of one implementation; of another too, and how many times slower it is, where `against` names one.

    tuning: fields of pallas_kernels/tuning.py's Sizes that are given another value.
    """
    if function in ("attention", "relu_attention"):
        return measure_attention(function, dtype, sizes, implementation, interpret=interpret)
    seed = problems.seed_of(f"{function} {sizes}")
    least = problems.problem(function, dtype, sizes, seed, **options)
    number = 1 if interpret else number_of_sets(least)
    sets = [least] + [problems.problem(function, dtype, sizes, seed + k, **options) for k in range(1, number)]
    solver = problems.implementation(function, implementation, interpret=interpret, form=form, tuning=tuning)
    ours = time_of(solver, sets, quick=interpret)
    figures: Figures = {"us": 1e6 * ours.seconds, "GB/s": least.bytes / ours.seconds / 1e9, "spread": ours.spread}
    if against:
        other = time_of(problems.implementation(function, against), sets, quick=interpret).seconds
        figures |= {f"{against} us": 1e6 * other, f"{against} / ours": other / ours.seconds}
    return figures


def number_of_sets(given: Problem) -> int:
    """Return how many calls, each on inputs of its own, stand in one program."""
    nbytes = sum(array.nbytes for array in given.arrays)
    return max(1, min(SETS, math.ceil(PROGRAM_BYTES / given.bytes), int(SETS_BYTES / nbytes)))


def time_of(solver: Function, sets: list[Problem], *, quick: bool = False) -> Timing:
    """Return the time of one call on one set. quick: of a single run, for what is interpreted."""
    bound = sets[0].bind(solver)
    if sets[0].donated:
        run = InPlace(bound, sets)
        found = timing(run.run_calls, run.prepare, **_pace(quick))
    else:
        program = jax.jit(lambda *sets: [bound(*arrays) for arrays in sets])
        found = timing(queued(lambda: program(*[each.arrays for each in sets])), **_pace(quick))
    return found._replace(seconds=found.seconds / len(sets))


def _pace(quick: bool) -> dict[str, Any]:
    return {"least": 0.0, "rounds": 1} if quick else {}


class InPlace:
    """Calls that overwrite their inputs: each goes on from the outputs of the one before.

    A classifier's next logits are the gradient of the last ones, which takes it the same time.
    """

    def __init__(self, bound: Function, sets: list[Problem]) -> None:
        self.sets, self.donated = sets, sets[0].donated
        self.kept = [{k: array for k, array in enumerate(each.arrays) if k not in self.donated} for each in sets]
        self.changed: list[dict[int, jax.Array]] = []
        becomes = sets[0].becomes

        def call(changed: list[dict[int, jax.Array]], kept: list[dict[int, jax.Array]]) -> tuple[Any, Any]:
            """The arrays that take the place of the changed ones, and the other outputs."""
            following, others = [], []
            for mine, rest in zip(changed, kept, strict=True):
                arrays = mine | rest
                found = bound(*[arrays[k] for k in sorted(arrays)])
                following.append({k: found[output] for k, output in zip(self.donated, becomes, strict=True)})
                others.append([array for output, array in enumerate(found) if output not in becomes])
            return following, others

        self.program = jax.jit(call, donate_argnums=0)

    def prepare(self) -> None:
        """Begin with copies of the inputs."""
        self.changed = []  # frees the last ones
        self.changed = jax.block_until_ready([{k: each.arrays[k].copy() for k in self.donated} for each in self.sets])

    def run_calls(self, calls: int) -> None:
        """Make so many calls and wait for the last."""
        for _ in range(calls):
            self.changed, others = self.program(self.changed, self.kept)
        jax.block_until_ready((self.changed, others))


def measure_attention(function: str, dtype: str, sizes: list[int], implementation: str, *, interpret: bool) -> Figures:
    """Forward, and forward with backward; FLOPs of what lies inside the mask, five products backward for two forward.

    implementation: mma, wgmma, cudnn, naive.
    """
    given = problems.problem(function, dtype, sizes, problems.seed_of(f"attention {sizes}"))
    pair = problems.implementation(function, implementation, interpret=interpret)
    num_heads = sizes[2]
    dout, qkv = given.arrays
    forward = jax.jit(lambda qkv: pair[0](qkv, num_heads)[0])
    both = jax.jit(given.bind(pair))
    once = timing(queued(lambda: forward(qkv)), **_pace(interpret)).seconds
    seconds, spread, _ = timing(queued(lambda: both(dout, qkv)), **_pace(interpret))
    flops = given.flops
    return {
        "us": 1e6 * seconds, "TFLOP/s": flops / seconds / 1e12, "spread": spread,
        "forward us": 1e6 * once, "forward TFLOP/s": flops * 2 / 7 / once / 1e12,
        "backward us": 1e6 * (seconds - once), "backward TFLOP/s": flops * 5 / 7 / max(seconds - once, 1e-9) / 1e12,
    }  # fmt: skip
