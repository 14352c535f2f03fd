"""The state of a run, from what it wrote: running, ended, died; it and each event in words, a line each.

A run's lock is never asked for: the question alone could keep a run from starting.
"""

import os
import platform
import time
from collections import defaultdict
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

from llmc_jax.base.streams import escaped
from llmc_jax.logs.files import LARGEST_STEP, METRICS, OF_ALL, finite_number, time_of
from llmc_jax.logs.follow import STARTS, recent

RUNNING, DIED, UNKNOWN = "running", "died", "unknown"  # beside the outcomes that an `end` has: done, stopped, …
SILENCE = 60.0  # seconds without an event that say nothing of any run
COMPILING = 600.0  # and before its first step
PAUSES = 5  # times the longest time between two events so far; a longer silence leaves the state unknown
COUNTING = (*STARTS, "train", "end")  # events that say how many steps are done
CLOCK_ERROR = 2.0  # seconds by which the system's start of a process may be off: it counts from a whole second


class Seen(NamedTuple):
    """What tells the state of a run, gathered from its events in order."""

    start: Mapping[str, Any] | None = None  # the last start or resume
    last: Mapping[str, Any] | None = None  # the last event
    step: int | None = None  # steps done
    steps: int | None = None  # steps there are to be
    time: float | None = None  # of the last event
    longest: float = 0.0  # seconds between two events since the start
    trained: bool = False  # a step has been done since the start
    outcome: str | None = None  # of the last `end`, if nothing began since


class RunState(NamedTuple):
    """The state of a run. Times in seconds since 1970."""

    state: str  # running, died, unknown, or the outcome of the last start: done, stopped, diverged, bad_input
    step: int | None  # steps done
    steps: int | None
    started: float | None  # when the last start or resume was
    last: float | None  # when the last event was
    silent: float | None  # seconds since then
    host: str | None
    event: Mapping[str, Any] | None  # the last one

    @property
    def ended(self) -> bool:
        return self.state not in (RUNNING, UNKNOWN)


def own_process() -> dict[str, Any]:
    """Return what a start says of its process, by which another one can tell whether it is still there."""
    return {"host": platform.node(), "pid": os.getpid(), "machine": machine()}


def machine() -> str | None:
    """Return what tells this boot of this machine, and this container's processes, from others; None if unknown.

    Hosts may have the same name, and the same process has different numbers within a container and outside.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return None


def after(seen: Seen, event: Mapping[str, Any]) -> Seen:
    """Return what is known after another event."""
    kind, step, now = event.get("event"), finite_number(event.get("step"), 0, LARGEST_STEP), time_of(event.get("time"))
    if kind in STARTS:
        steps = finite_number(event.get("steps"), 0, LARGEST_STEP)
        seen = Seen(start=event, step=seen.step, steps=seen.steps if steps is None else int(steps))
    return Seen(
        start=seen.start,
        last=event,
        step=seen.step if step is None or kind not in COUNTING else int(step) + (kind == "train"),
        steps=seen.steps,
        time=seen.time if now is None else now,
        longest=seen.longest if now is None or seen.time is None else max(seen.longest, now - seen.time),
        trained=seen.trained or kind == "train",
        outcome=str(event.get("outcome") or UNKNOWN) if kind == "end" else seen.outcome,
    )


def usual_silence(seen: Seen) -> float:
    """Return how many seconds of silence are usual: more, the longer its steps, validations and saves took so far."""
    return max(SILENCE if seen.trained else COMPILING, PAUSES * seen.longest)


def run_state(seen: Seen, now: float | None = None) -> RunState:
    """Return the state of a run. now: seconds since 1970."""
    now = time.time() if now is None else now
    start = seen.start or {}
    silent = None if seen.time is None else max(0.0, now - seen.time)
    runs = None if seen.outcome else is_there(start, now if seen.time is None else seen.time)
    return RunState(
        state=seen.outcome or _state(runs, silent, seen),
        step=seen.step,
        steps=seen.steps,
        started=time_of(start.get("time")),
        last=seen.time,
        silent=silent,
        host=None if start.get("host") is None else str(start["host"]),
        event=seen.last,
    )


def _state(runs: bool | None, silent: float | None, seen: Seen) -> str:
    if runs is not None:
        return RUNNING if runs else DIED
    if silent is None or seen.time is None:
        return UNKNOWN
    return RUNNING if silent <= usual_silence(seen) else UNKNOWN


def read_state(path: str | Path, now: float | None = None) -> RunState:
    """Return the state of a run by its folder or its events' file; without events it is unknown. Raises InputError."""
    path = Path(path)
    return run_state(reduce(after, recent(path / METRICS if path.is_dir() else path), Seen()), now)


# ----- the process --------------------------------------------------------------------------------------------------


def is_there(start: Mapping[str, Any], last: float) -> bool | None:
    """Return whether the process of a start still runs; None where that cannot be told.

    last: the time of the run's last event. A process that began later has its number, but is another one.
    """
    import psutil  # here, because what only reads logs does without it

    pid = start.get("pid")
    is_here = start.get("host") == platform.node() and start.get("machine", machine()) == machine()
    if not is_here or not isinstance(pid, int) or pid <= 0:  # older files name no machine
        return None
    try:
        process = psutil.Process(pid)
        is_later = process.create_time() > last + CLOCK_ERROR
        return not is_later and process.status() != psutil.STATUS_ZOMBIE
    except psutil.AccessDenied:
        return True  # it is somebody else's
    except (psutil.NoSuchProcess, OverflowError):
        pass
    try:
        os.kill(pid, 0)  # sends nothing
    except PermissionError:
        return None  # it is there, but this user must not see it: /proc is mounted with hidepid
    except (OSError, OverflowError):
        pass
    return False


# ----- in words -----------------------------------------------------------------------------------------------------

LONGEST = 500  # characters of such a line
# A run's state, and the outcome that its `end` has; another outcome stands as it is.
STATES = {UNKNOWN: "silent", "done": "finished", "bad_input": "failed"}
# An event's words, by its kind, with its own fields in braces; of another kind its fields by name.
WORDS = {
    "start": "started on {host}, pid {pid}",
    "resume": "resumed on {host}, pid {pid}",
    "train": "loss {loss:.4f}, norm {norm:.2f}",
    "val": "validation loss {loss:.4f}",
    "sample": "sample of {tokens} tokens",
    "checkpoint": "saved {path} in {ms:,.0f} ms",
    "save_failed": "saving a checkpoint failed: {problem}",
    "removed": "checkpoint deleted",
    "data": "{file}: {what}",
    "lost": "lost rank {rank} on {host}, pid {pid}, in phase {phase}: {cause} {words}",
    "end": "{outcome}",
}


def event_words(event: Mapping[str, Any]) -> str:
    """Return an event in words, without its step and time: one line, with nothing that a terminal would obey.

    Values may be of any type, as in a damaged file.
    """
    kind = event.get("event")
    words = WORDS.get(kind) if isinstance(kind, str) else None
    if kind == "end":
        event = {**event, "outcome": state_words(str(event.get("outcome", "ended")))}
    fields = defaultdict(lambda: _Value(None), {name: _Value(value) for name, value in event.items()})
    text = escaped(_all_of(event) if words is None else words.format_map(fields)) or escaped(str(kind))
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def state_words(state: str) -> str:
    """Return a run's state, or the outcome of its last start, as it is shown."""
    return STATES.get(state, state.replace("_", " "))


class _Value(NamedTuple):
    """A field as words show it: numbers in a form, `?` for none."""

    value: Any

    def __format__(self, form: str) -> str:
        if self.value is None:
            return "?"
        number = finite_number(self.value) if form else None
        return str(self.value) if number is None else format(float(number), form)


def _all_of(event: Mapping[str, Any]) -> str:
    kind = str(event.get("event")).replace("_", " ")
    facts = ", ".join(f"{name} {_Value(event[name]):.6g}" for name in event if name not in OF_ALL)
    return f"{kind}: {facts}" if facts else kind
