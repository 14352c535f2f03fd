"""How long a call takes on the device, without the time to start it. Imports JAX only when used.

A call is queued as often as it takes for a round to last 20 ms: the device then never waits for the host, and waiting
once at the end is less than a hundredth of it. One call alone would be measured with its start, which takes as long as
the smaller kernels do.
"""

import math
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

ROUND = 0.02  # seconds that a round lasts at least
ROUNDS = 9
MOST_CALLS = 20_000  # of a round


class Timing(NamedTuple):
    """The times of several rounds."""

    seconds: float  # of one call: the median of the rounds
    spread: float  # the longest round less the shortest, as a share of the median
    calls: int  # in a round


def timing(
    run_calls: Callable[[int], None],
    prepare: Callable[[], None] = lambda: None,
    *,
    least: float = ROUND,
    rounds: int = ROUNDS,
    clock: Callable[[], float] = time.perf_counter,
) -> Timing:
    """Return the time of one call, of which run_calls(n) makes n and waits for the last.

    prepare: called before each round, outside its time. least: seconds that a round lasts at least; 0 makes it one
    call. The first call, which compiles, does not count.
    """

    def seconds_of(calls: int) -> float:
        prepare()
        start = clock()
        run_calls(calls)
        return clock() - start

    calls = 1
    seconds_of(calls)
    first = seconds_of(calls)
    while first < least and calls < MOST_CALLS:
        enough = math.ceil(1.2 * calls * least / first) if first > 0 else MOST_CALLS
        calls = min(MOST_CALLS, max(calls + 1, enough))
        first = seconds_of(calls)
    times = [first, *(seconds_of(calls) for _ in range(rounds - 1))]
    median = statistics.median(times)
    return Timing(median / calls, (max(times) - min(times)) / median, calls)


def queued(run: Callable[[], Any]) -> Callable[[int], None]:
    """Return what makes n calls of `run`, which returns JAX arrays before they are there, and waits for the last."""

    def run_calls(calls: int) -> None:
        import jax

        for _ in range(calls):
            result = run()
        jax.block_until_ready(result)

    return run_calls
