"""A question with several answers in tokens, as evaluation sees it, whichever file it comes from; whether it fits.

Leaves out the files (evalfile.py, tasks.py) and the evaluation (evaluate/).
"""

from collections.abc import Sequence
from typing import NamedTuple

from llmc_jax.base.errors import InputError


class Item(NamedTuple):
    """One question: a context, and completions of which one is right.

    name: what its file calls it, or its number as text. context: at least one id. completions: one or more, each of at
    least one id; a single one (LAMBADA's last word) is right if the model would have written it. label: the right one.
    """

    name: str
    context: tuple[int, ...]
    completions: tuple[tuple[int, ...], ...]
    label: int

    @property
    def longest(self) -> int:
        """Return the ids of context and longest completion together. The last one is a target alone."""
        return len(self.context) + max(map(len, self.completions))


def check_fit(items: Sequence[Item], positions: int, what: str) -> None:
    """Check that each item fits T positions: its ids without the last, which is a target alone.

    what: the items' file, for the message. Raises InputError. llm.c's trainers stop at an assert two ids earlier.
    """
    long = [item for item in items if item.longest - 1 > positions]
    if long:
        raise InputError(
            f"{what}: item {long[0].name} has {long[0].longest} tokens and {len(long)} of {len(items)} items have too "
            f"many: T={positions} takes {positions + 1}; take a model of a larger T"
        )
