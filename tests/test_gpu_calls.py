"""Times of benchmarks/gpu/calls.py on a CPU: what is timed is what was asked for; no time is asserted."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks.gpu import calls, clock, times
from llmc_jax.trials import problems

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
        for at, output in calls.in_place(given).items():
            wanted[at] = found[output]
    run = calls.InPlace(bound, [given])
    for _ in range(2):
        run.prepare()
        run.run_calls(3)
        assert list(run.changed[0]) == list(calls.in_place(given))
        assert all(jnp.array_equal(run.changed[0][at], wanted[at]) for at in calls.in_place(given))


def test_time_of_one_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "timing", lambda run_calls: clock.Timing(6.0, 0.5, 2))
    sets = [problems.problem("gelu_forward", "bf16", [4, 32], seed) for seed in range(3)]
    assert calls.time_of(problems.plain_twin("gelu_forward"), sets).seconds == 2.0


@pytest.mark.parametrize("moved, held, sets", [(200e6, 100e6, 8), (500e6, 100e6, 4), (3e9, 100e6, 1), (200e6, 5e9, 2)])
def test_number_of_sets(moved: float, held: float, sets: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program moves 2 GB, of no more inputs than the memory of a small card holds."""
    monkeypatch.setattr(times, "bytes_of", lambda _: moved)
    array: Any = SimpleNamespace(nbytes=held)
    assert times.number_of_sets(problems.Problem("f", (array,), lambda f: f)) == sets


def test_compulsory_bytes() -> None:
    """Of 6 x 64 logits in bf16 read and written, and three arrays of 4 bytes a row; AdamW's copy is only written."""
    classifier = problems.problem("classifier", "bf16", [6, 60, 64], seed=1)
    adamw = problems.problem("adamw_update", "bf16", [4096], seed=1)
    assert times.bytes_of(classifier) == 2 * 2 * 6 * 64 + 12 * 6
    assert times.bytes_of(adamw) == 4096 * (6 * 4 + 2 + 2)


# ----- the clock, with a device and a time that are made up -----------------------------------------------------------


class Device:
    """Runs what is queued, one after another; the host takes time to queue a call, and to wait for the last."""

    start, wait, first = 30e-6, 300e-6, 5.0  # seconds

    def __init__(self, call: float) -> None:
        self.call, self.now, self.prepared, self.rounds = call, 0.0, 0, []

    def clock(self) -> float:
        return self.now

    def prepare(self) -> None:
        self.now += 1.0
        self.prepared += 1

    def run_calls(self, calls: int) -> None:
        begin, done = self.now, self.now
        for _ in range(calls):
            self.now += self.start
            done = max(done, self.now) + self.call
        self.now = max(self.now, done) + self.wait + (0.0 if self.rounds else self.first)
        self.rounds.append(self.now - begin)


@pytest.mark.parametrize("call", [40e-6, 250e-6, 3.5e-3, 0.12])
def test_neither_start_nor_wait_is_measured(call: float) -> None:
    device = Device(call)
    found = clock.timing(device.run_calls, device.prepare, clock=device.clock)
    assert found.seconds == pytest.approx(call, rel=0.02)
    assert min(device.rounds[-9:]) >= clock.ROUND
    assert found.calls == 1 or found.calls * call < 2 * clock.ROUND  # no longer than need be
    assert device.prepared == len(device.rounds)


def test_the_spread_is_that_of_the_rounds() -> None:
    times = iter([5.0, 0.03, 0.02, 0.025, 0.02, 0.02, 0.02, 0.02, 0.02, 0.04])
    now = [0.0]

    def run_calls(calls: int) -> None:
        now[0] += calls * next(times)

    found = clock.timing(run_calls, clock=lambda: now[0])
    assert found.seconds == pytest.approx(0.02) and found.spread == pytest.approx(1.0) and found.calls == 1
