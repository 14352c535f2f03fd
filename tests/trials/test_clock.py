"""llmc_jax/trials/clock.py with a device and a clock that are made up."""

import pytest

from llmc_jax.trials.clock import ROUND, timing


class Device:
    """Runs what is queued, one after another; the host takes time to queue a call, and to wait for the last."""

    def __init__(self, call: float, *, start: float = 30e-6, wait: float = 300e-6, first: float = 5.0) -> None:
        self.call, self.start, self.wait, self.first = call, start, wait, first
        self.now, self.prepared, self.rounds = 0.0, 0, []

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
    found = timing(device.run_calls, device.prepare, clock=device.clock)
    assert found.seconds == pytest.approx(call, rel=0.02)
    assert min(device.rounds[-9:]) >= ROUND
    assert found.calls == 1 or found.calls * call < 2 * ROUND  # no longer than need be
    assert device.prepared == len(device.rounds)


def test_the_spread_is_that_of_the_rounds() -> None:
    times = iter([5.0, 0.03, 0.02, 0.025, 0.02, 0.02, 0.02, 0.02, 0.02, 0.04])
    now = [0.0]

    def run_calls(calls: int) -> None:
        now[0] += calls * next(times)

    found = timing(run_calls, clock=lambda: now[0])
    assert found.seconds == pytest.approx(0.02) and found.spread == pytest.approx(1.0) and found.calls == 1
