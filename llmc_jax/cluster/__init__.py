"""Processes that train together: who they are, and what must be the same for all. Without JAX."""

from llmc_jax.cluster.worker import ALONE, Group

_here: Group | None = None  # the one state of a module here: which process this is does not change while it lives


def here() -> Group:
    """Return the processes of this run as this one sees them: itself alone, where `enter` has not said otherwise.

    As with `jax.process_index()`, all threads get the same answer.
    """
    if _here is None:
        enter(ALONE)
    assert _here is not None
    return _here


def enter(group: Group) -> None:
    """Set what `here` returns, for good. Raises RuntimeError where that is set, or was read, already."""
    global _here
    if _here is not None:
        raise RuntimeError("which process of a run this is has been set already")
    _here = group
