"""Processes that train together: who they are, and what must be the same for all. Without JAX."""

from llmc_jax.cluster.worker import ALONE, Group

_here = ALONE  # the one state of a module here: which process this is does not change while it lives


def here() -> Group:
    """Return the processes of this run as this one sees them: itself alone, where `enter` has not said otherwise.

    As with `jax.process_index()`, all threads get the same answer.
    """
    return _here


def enter(group: Group) -> None:
    """Set what `here` returns, for good; before anybody asks."""
    global _here
    _here = group
