"""Times of benchmarks/gpu/calls.py on a CPU: what is timed is what was asked for; no time is asserted."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks.gpu import calls
from benchmarks.gpu.times import number_of_sets
from llmc_jax.trials import clock, problems

pytestmark = pytest.mark.usefixtures("quick_compilation")

CASES: dict[str, list[int]] = {"adamw_update": [4096], "classifier": [6, 60, 64], "embedding_backward": [2, 8, 32, 64]}


@pytest.mark.slow
@pytest.mark.parametrize("function", CASES)
def test_what_is_overwritten_goes_on_from_its_outputs(function: str) -> None:
    """Each call of a round gets the arrays of the one before, each round begins with the inputs."""
    given = problems.problem(function, "bf16", CASES[function], seed=1)
    bound = given.bind(problems.plain_twin(function))
    wanted = list(given.arrays)
    for _ in range(3):
        found = jax.jit(bound)(*wanted)
        for at, output in zip(given.donated, given.becomes, strict=True):
            wanted[at] = found[output]
    run = calls.InPlace(bound, [given])
    for _ in range(2):
        run.prepare()
        run.run_calls(3)
        assert list(run.changed[0]) == list(given.donated)
        assert all(jnp.array_equal(run.changed[0][at], wanted[at]) for at in given.donated)


def test_time_of_one_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "timing", lambda run_calls: clock.Timing(6.0, 0.5, 2))
    sets = [problems.problem("gelu_forward", "bf16", [4, 32], seed) for seed in range(3)]
    assert calls.time_of(problems.plain_twin("gelu_forward"), sets).seconds == 2.0


@pytest.mark.parametrize("moved, held, sets", [(200e6, 100e6, 8), (500e6, 100e6, 4), (3e9, 100e6, 1), (200e6, 5e9, 2)])
def test_number_of_sets(moved: float, held: float, sets: int) -> None:
    """A program moves 2 GB, of no more inputs than the memory of a small card holds."""

    class Array:
        nbytes = held

    assert number_of_sets(problems.Problem("f", (Array(),), lambda f: f, int(moved))) == sets  # type: ignore
