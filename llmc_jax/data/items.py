"""A question with several answers in tokens, as evaluation sees it, whichever file it comes from.

Leaves out the files (evalfile.py, tasks.py) and the evaluation (evaluate/).
"""

from typing import NamedTuple


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
