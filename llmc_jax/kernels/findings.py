"""What was found out about the implementations on the card at hand, as plain data: for the choice, and for a file.

Leaves out how it is found out (llmc_jax/trials/) and where it is kept.
"""

from typing import NamedTuple

from llmc_jax.machine.compiling import Options


class Finding(NamedTuple):
    """One implementation of one operation, tried at a run's shapes."""

    operation: str  # a key of GROUPS
    implementation: str  # the name of a row
    problem: str = ""  # what is wrong with it; empty: nothing
    unjudged: str = ""  # why nobody knows whether it is right; what is not wrong may be used

    @property
    def key(self) -> tuple[str, str]:
        """Return what tells it from others."""
        return self.operation, self.implementation

    @property
    def label(self) -> str:
        """Return the name of what was tried."""
        return f"{self.operation}: {self.implementation}"


class Findings(NamedTuple):
    """What was found out for one combination of card, versions, shapes and precision."""

    found: tuple[Finding, ...] = ()
    fastest: tuple[tuple[str, str], ...] = ()  # operations and their rows: a whole step on them was right, and fastest
    options: Options = ()  # of XLA, which that step had to be compiled with
    steps: tuple[tuple[str, float], ...] = ()  # seconds of the whole steps that were timed, by what ran them
    notes: tuple[str, ...] = ()  # what a user should know, a line each

    def problem(self, operation: str, implementation: str) -> str:
        """Return why a row cannot be used on this card; empty where it can, or nothing is known."""
        return next((each.problem for each in self.found if each.key == (operation, implementation)), "")
