"""The process that writes a run's page and picture beside it: `python -m llmc_jax.report.beside REQUEST`.

Each comes anew every so often, and once more when the run says that it has ended; where the run just ends, so does
this. On its output it says of each why it could not be written, or nothing. Leaves out how it is started
(run/beside.py).
"""

import json
import os
import select
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from llmc_jax.base.errors import InputError
from llmc_jax.base.files import leads_to
from llmc_jax.logs.files import CURVES, METRICS, REPORT

FIRST = 20.0  # seconds until the first of each, so that there soon is one to open
DRAW_EVERY = 20.0  # seconds between two pictures
SHARE = 0.03  # of one core's time at most, which a very long run, whose metrics are large, would exceed


class Request(NamedTuple):
    """What the process is started with."""

    folder: str  # of the run
    title: str  # of the picture
    baselines: Mapping[str, float]  # in the picture
    minutes: float  # between two pages; 0: there is none


def write(name: str, request: Request) -> None:
    """Write one of the two files. May raise anything."""
    folder = Path(request.folder)
    if name == CURVES:
        from llmc_jax.logs.events import read_events
        from llmc_jax.logs.picture import draw_curves
        from llmc_jax.logs.reading import log_of

        log = log_of(read_events(folder / METRICS), request.title)
        draw_curves(log, folder / CURVES, request.baselines)
    else:
        from llmc_jax.report import command

        command.run(["--quiet", request.folder])


def problem_of(name: str, request: Request) -> str:
    """Write a file; return why it could not be written, or nothing."""
    try:
        write(name, request)
    except InputError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    request = Request(*json.loads(sys.argv[1]))
    with suppress(Exception):  # the page comes without it
        import matplotlib.backends.backend_agg  # noqa: F401  a second, for which a short run would wait at its end

    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # sent to all of a job, whose run writes its last picture then
    folder = os.open(request.folder, os.O_RDONLY)  # by its path another one may come
    every = {CURVES: DRAW_EVERY} | ({REPORT: 60 * request.minutes} if request.minutes > 0 else {})
    due = {name: time.monotonic() + min(FIRST, seconds) for name, seconds in every.items()}
    said: dict[str, str] = {}
    run, ended = select.poll(), False
    run.register(0, select.POLLIN)
    while not ended:
        ended = bool(run.poll(1000 * max(0.0, min(due.values()) - time.monotonic())))
        if ended and not sys.stdin.readline():
            return
        for name in [name for name in every if ended or time.monotonic() >= due[name]]:
            if not leads_to(request.folder, folder):
                return
            began = time.monotonic()
            problem = problem_of(name, request)
            now = time.monotonic()
            due[name] = now + max(every[name], (now - began) / SHARE)
            if said.get(name) != problem:
                said[name] = problem
                with suppress(OSError):  # a full disk
                    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
