"""What was found out about the implementations on the card at hand, as plain data: for the choice, and for a file.

Leaves out how it is found out (llmc_jax/trials/) and where it is kept.
"""

from typing import NamedTuple

from llmc_jax.machine.compiling import Options


class Finding(NamedTuple):
    """One implementation of one operation, tried at a run's shapes."""

    operation: str  # a key of GROUPS
    implementation: str  # the name of a row
    version: str = ""  # of our attention: mma, wgmma; empty: the one that pallas_kernels/tuning.py names
    problem: str = ""  # what is wrong with it; empty: nothing
    us: float = 0.0  # of the operation in a whole step; 0: it was not timed
    unjudged: str = ""  # why nobody knows whether it is right; what is not wrong may be used

    @property
    def key(self) -> tuple[str, str, str]:
        """Return what tells it from others."""
        return self.operation, self.implementation, self.version

    @property
    def form(self) -> str:
        """Return which implementation it is, in words."""
        return f"{self.implementation} {self.version}".rstrip()

    @property
    def label(self) -> str:
        """Return the name of what was tried."""
        return f"{self.operation}: {self.form}"


class Findings(NamedTuple):
    """What was found out for one combination of card, versions, shapes and precision."""

    found: tuple[Finding, ...] = ()
    fastest: tuple[Finding, ...] = ()  # of each operation at most one: what a whole step ran with, and right
    options: Options = ()  # of XLA, which that step had to be compiled with
    steps: tuple[tuple[str, float], ...] = ()  # seconds of the whole steps that were timed, by what ran them
    notes: tuple[str, ...] = ()  # what a user should know, a line each

    def right(self, operation: str) -> list[Finding]:
        """Return what is not wrong of an operation: the fastest first, what was not timed last."""
        found = [each for each in self.found if each.operation == operation and not each.problem]
        return sorted(found, key=lambda each: (not each.us, each.us))

    def problem(self, operation: str, implementation: str) -> str:
        """Return why a row cannot be used on this card; empty where some form of it can, or nothing is known."""
        known = [each for each in self.found if each.key[:2] == (operation, implementation)]
        return known[0].problem if known and all(each.problem for each in known) else ""

    def version(self, operation: str, implementation: str) -> str:
        """Return the version of a row that was the fastest of those that are right; empty if nothing is known."""
        forms = (*self.fastest, *self.right(operation))
        return next((each.version for each in forms if each.key[:2] == (operation, implementation)), "")

    def ratio(self, finding: Finding) -> tuple[float, str]:
        """Return how many times faster a finding is than the best other implementation, and that one's name.

        (0, "") where no other one was timed.
        """
        others = [each for each in self.right(finding.operation) if each.implementation != finding.implementation]
        if not others or not others[0].us or not finding.us:
            return 0.0, ""
        return others[0].us / finding.us, others[0].implementation
