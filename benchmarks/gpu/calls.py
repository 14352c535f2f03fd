"""How long one call of a function takes on the device: on several sets of inputs, and where it overwrites them."""

from typing import Any

import jax

from benchmarks.gpu.clock import Timing, queued, timing
from llmc_jax.trials.problems import Function, Problem

# Of a function, the arrays that an implementation may overwrite, and the output that takes the place of each.
IN_PLACE = {"classifier": {0: 1}, "embedding_backward": {2: 0}, "adamw_update": {0: 0, 1: 1, 2: 2, 4: 3}}


def in_place(given: Problem) -> dict[int, int]:
    """Return the arrays that an implementation may overwrite, and the output that takes the place of each."""
    return {k: output for k, output in IN_PLACE.get(given.function, {}).items() if k < len(given.arrays)}


def time_of(solver: Function, sets: list[Problem], *, quick: bool = False) -> Timing:
    """Return the time of one call on one set. quick: of a single run, for what is interpreted.

    The calls on all sets stand in one compiled program, and as many runs of it are queued as clock.py says: neither the
    cache nor the time to start a kernel is measured. What overwrites its inputs goes on from its own outputs.
    """
    bound = sets[0].bind(solver)
    if in_place(sets[0]):
        run = InPlace(bound, sets)
        found = timing(run.run_calls, run.prepare, **pace(quick))
    else:
        program = jax.jit(lambda *sets: [bound(*arrays) for arrays in sets])
        found = timing(queued(lambda: program(*[each.arrays for each in sets])), **pace(quick))
    return found._replace(seconds=found.seconds / len(sets))


def pace(quick: bool) -> dict[str, Any]:
    """Return how `timing` measures; quick: of a single run."""
    return {"least": 0.0, "rounds": 1} if quick else {}


class InPlace:
    """Calls that overwrite their inputs: each goes on from the outputs of the one before.

    A classifier's next logits are the gradient of the last ones, which takes it the same time.
    """

    def __init__(self, bound: Function, sets: list[Problem]) -> None:
        self.sets, self.donated = sets, in_place(sets[0])
        self.kept = [{k: array for k, array in enumerate(each.arrays) if k not in self.donated} for each in sets]
        self.changed: list[dict[int, jax.Array]] = []

        def call(changed: list[dict[int, jax.Array]], kept: list[dict[int, jax.Array]]) -> tuple[Any, Any]:
            """Return the arrays that take the place of the changed ones, and the other outputs."""
            following, others = [], []
            for mine, rest in zip(changed, kept, strict=True):
                arrays = mine | rest
                found = bound(*[arrays[k] for k in sorted(arrays)])
                following.append({k: found[output] for k, output in self.donated.items()})
                others.append([array for output, array in enumerate(found) if output not in self.donated.values()])
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
