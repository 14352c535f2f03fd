"""What all processes of a run find out together, so that all go the same way: the result of the first one, or of all.

Where one of them fails, all do, with the same words. Leaves out how they talk (worker.py).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llmc_jax import cluster
from llmc_jax.base.errors import InputError

FAILURES = (InputError, OSError, MemoryError)  # of one process, that the others are told


class Agreed(InputError):
    """All processes of the run raise this, with the same words: one of them need show it."""


def of_first(name: str, action: Callable[[], Any]) -> Any:
    """Return what process 0 finds, a JSON value, on all processes.

    name: no other exchange of the run has it. Raises Agreed on all where the action fails; in a process alone, what it
    raises.
    """
    group = cluster.here()
    if group.size == 1:
        return action()
    (found, *_) = _checked(group.meet(name, _tried(action) if group.rank == 0 else None)[:1])
    if "problem" in found:
        raise Agreed(found["problem"])
    return found["value"]


def of_all(name: str, action: Callable[[], Any]) -> list[Any]:
    """Return what each process finds, JSON values by rank.

    Raises Agreed on all where the action fails on some, with the rank and host of each; in a process alone, what it
    raises.
    """
    group = cluster.here()
    if group.size == 1:
        return [action()]
    found = _checked(group.meet(name, _tried(action)))
    _raise_agreed([each.get("problem") for each in found])
    return [each["value"] for each in found]


@contextmanager
def alike(name: str) -> Iterator[None]:
    """Wait at the block's end for the other processes. Raises Agreed on all where it fails on some.

    Within the block the processes do not talk to each other: one that has failed would not answer.
    """
    group = cluster.here()
    if group.size == 1:
        yield
        return
    problem = None
    try:
        yield
    except FAILURES as error:
        problem = _words(error)
    _raise_agreed(group.meet(name, problem))


def _checked(answers: list[Any]) -> list[dict[str, Any]]:
    """Return answers, all as `_tried` gives them. Raises Agreed for another: a stranger may stand in a rank's place."""
    for rank, each in enumerate(answers):
        if not isinstance(each, dict) or each.keys() not in ({"value"}, {"problem"}):
            raise Agreed(f"{who(rank)}: answers as no process of a run does; what else uses the port of -ps?")
    return answers


def _raise_agreed(problems: Sequence[str | None]) -> None:
    """Raise Agreed with what is wrong, by rank: once, where it is the same for all."""
    problems = [words if words is None else str(words) for words in problems]
    if problems[0] is not None and len(set(problems)) == 1:
        raise Agreed(problems[0])
    found = [f"{who(rank)}: {words}" for rank, words in enumerate(problems) if words is not None]
    if found:
        raise Agreed("\n  ".join(found))


def who(rank: int) -> str:
    """Return a process in words: `rank 3 (node1)`."""
    return f"rank {rank} ({cluster.here().hosts[rank]})"


def _tried(action: Callable[[], Any]) -> dict[str, Any]:
    """Return what an action finds, or why it fails."""
    try:
        return {"value": action()}
    except FAILURES as error:
        return {"problem": _words(error)}


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__
