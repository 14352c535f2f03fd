"""The kernels of a run, tried before it begins: known from an earlier start, or found out now, by other processes.

They run before this one has a GPU context, so that a card that only one process may use serves them and then the run.
Nothing here touches a machine without an NVIDIA GPU. Leaves out what follows from a try (search.py).
"""

import os
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from llmc_jax.base.streams import print_error
from llmc_jax.kernels import Findings
from llmc_jax.machine import driver
from llmc_jax.machine.driver import Card
from llmc_jax.trials import candidates, known
from llmc_jax.trials.candidates import Case
from llmc_jax.trials.children import Children, Stuck
from llmc_jax.trials.search import Search, search, task

SECONDS = 110.0  # for all of it, so that two minutes are not exceeded
LOOKS, PAUSE = 6, 0.5  # at a card that is in use, seconds between them: a process that was killed takes a while to go


class NotChecked(Exception):
    """The kernels are not checked, and run as shipped; the message says why."""


def say(line: str) -> None:
    """Show the progress of a check."""
    print_error(f"kernel check: {line}")


def find_out(
    case: Case,
    here: Card,
    *,
    again: bool = False,
    seconds: float = SECONDS,
    say: Callable[[str], None] = say,
) -> Findings:
    """Return what is known of a case's kernels on a card, with notes for the user; tries them if nothing is known yet.

    Where nothing is found, the table that is shipped decides. again: what is known does not count.
    """
    if not candidates.listed(case):
        return Findings()
    facts = known.facts_of(case, here)
    if not again and (found := known.read(facts, say)) is not None:
        return found
    try:
        with known.locked(here) as free:
            if driver.jax_has_begun():
                raise NotChecked("this process uses the GPU already")
            if not free:
                raise NotChecked("another process is checking some on this card")
            if problem := _in_use(here):
                raise NotChecked(problem)
            say(
                f"new combination of {here.name}, versions and shapes; at most {seconds:.0f} s (--no-kernel-check "
                "skips this)"
            )
            found = _searched(case, seconds, say)
            known.write(facts, found, say)
            return found
    except NotChecked as why:
        return Findings(notes=(f"the kernels are not checked: {why}; they are used as shipped",))


def _in_use(here: Card) -> str:
    """Return why nothing should be tried on a card now; empty where it is free, or soon becomes so."""
    for look in range(LOOKS):
        time.sleep(PAUSE if look else 0)
        if not (problem := driver.busy(here)):
            break
    return problem


def _searched(case: Case, seconds: float, say: Callable[[str], None]) -> Findings:
    """Return what a search finds, in processes of its own."""
    until = time.monotonic() + seconds
    try:
        with tempfile.TemporaryDirectory() as folder, closing(Children(child_environment(), Path(folder))) as running:
            if not case.interpret:  # what fails on another device than the run's is no kernel's fault
                outcome = running.measure(task("device", case), until)
                if outcome.kind not in ("DONE", "TIME"):
                    raise NotChecked(f"the processes that check them cannot get the card ({outcome.content})")
            found = search(Search(case, lambda task: running.measure(task, until), say))
        if running.stuck is not None:
            raise Stuck(f"process {running.stuck} cannot be ended")
        return found
    except Stuck as stuck:
        raise NotChecked(f"{stuck}, and occupies the card") from None


def child_environment() -> dict[str, str]:
    """Return the environment of processes that have the card to themselves, and take only the memory that they need."""
    found = dict(os.environ)
    found["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    found.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    found.setdefault("JAX_CUDA_VISIBLE_DEVICES", "0")  # of those that CUDA shows this process
    if not found.get("JAX_COMPILATION_CACHE_DIR"):
        # Not the one of the runs: a process that is ended while it writes leaves a torn file, over which JAX trips at
        # every start.
        found["JAX_COMPILATION_CACHE_DIR"] = str(known.folder() / "xla")
    found.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    return found
