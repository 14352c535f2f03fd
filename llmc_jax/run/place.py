"""How a run begins, by its place among processes: as the only one, as the parent of a worker, or as a worker.

Leaves out what a parent does (cluster/parent.py) and what a run does (run/loop.py).
"""

import os
import traceback
from collections.abc import Callable
from typing import NoReturn

from llmc_jax import cluster
from llmc_jax.base.commands import program_name
from llmc_jax.base.errors import ExitCode
from llmc_jax.base.kit import exit_status
from llmc_jax.cluster.agreement import Agreed
from llmc_jax.cluster.launchers import Member
from llmc_jax.cluster.worker import joined
from llmc_jax.config.train import TrainConfig


def begin(config: TrainConfig, notes: list[str], member: Member | None) -> int:
    """Train, or have a worker train; return the exit status. member: which of several processes this is."""
    group = joined(os.environ)
    if group is not None:
        cluster.enter(group)
        in_group(lambda: _trained(config, notes))
    if member is not None:
        from llmc_jax.cluster.parent import supervise  # here, because a run of one process does without asyncio

        return supervise(member, config.peer_timeout)
    return _trained(config, notes)


def _trained(config: TrainConfig, notes: list[str]) -> int:
    from llmc_jax.run.loop import run  # here, because it imports JAX, which takes a second

    return run(config, notes)


def in_group(work: Callable[[], int]) -> NoReturn:
    """Do the work of one of several processes, and end this one with words for the others on how it went.

    What all have found alike, the first one alone shows. An exchange that broke is nothing to show here: another
    process is lost, and the one that started this one says which.
    """
    group, failed = cluster.here(), list[BaseException]()

    def tried() -> int:
        try:
            return work()
        except BaseException as error:
            failed.append(error)
            if _is_broken(error) or (isinstance(error, Agreed) and group.rank):
                return ExitCode.BAD_INPUT
            raise

    try:
        status = exit_status(program_name("train"), tried)
    except BaseException:  # a mistake of ours
        traceback.print_exc()
        status = 1
    if not failed or isinstance(failed[0], Agreed):
        group.leave(status)
    words = str(failed[0]) or type(failed[0]).__name__
    if isinstance(failed[0], KeyboardInterrupt):
        words = "stopped by Ctrl-C before anything could be saved"
    group.leave(status, words, "broken" if _is_broken(failed[0]) else "failed")


def _is_broken(error: BaseException) -> bool:
    """Return whether an error is of JAX's runtime: of an exchange between processes, most likely."""
    return type(error).__name__ == "JaxRuntimeError"
