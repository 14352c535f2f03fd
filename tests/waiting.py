"""Waiting for what another thread or process does."""

import time
from collections.abc import Callable
from typing import Any

SECONDS = 300.0  # after which a wait has failed: nothing here needs as many


def wait_until(condition: Callable[[], Any], goes_on: Callable[[], bool] = lambda: True) -> None:
    """Return once a condition holds. goes_on: whether it may still come to that."""
    end = time.monotonic() + SECONDS
    while not condition():
        assert goes_on() and time.monotonic() < end, "waited in vain"
        time.sleep(0.01)
