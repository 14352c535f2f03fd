"""What follows from tries whose outcomes and clock are made up: a whole step decides, and time is kept."""

from collections.abc import Mapping
from typing import Any

import pytest

from llmc_jax.kernels import GROUPS, Finding, Findings, Preferences
from llmc_jax.trials import candidates, search
from llmc_jax.trials.candidates import Case
from llmc_jax.trials.children import Outcome, Task
from llmc_jax.trials.figures import Tried
from llmc_jax.trials.search import Search
from tests.kernels.test_choice import choose
from tests.trials.test_check import D12

CRASH = Outcome("SPOILT", "the process ended with status -6", 0.0)


class Card:
    """A card that answers from a table, and whose clock goes on by a second with each task."""

    def __init__(self, us: Mapping[str, float] = {}, step: Any = lambda chosen, options: 0.1, seconds: float = 1.0):
        self.now, self.seconds, self.us, self.step = 0.0, seconds, us, step
        self.tried: list[str] = []
        self.said: list[str] = []
        self.bad: dict[str, Outcome] = {}

    def attempt(self, task: Task, until: float) -> Outcome:
        self.now += self.seconds
        if self.now > until:
            return Outcome("TIME", None, self.seconds)
        if task.arguments["what"] == "step":
            chosen = {each.operation: each for each in task.arguments["chosen"]}
            self.tried.append(f"step on {len(chosen)}")
            found = self.step(chosen, task.arguments["options"])
            if isinstance(found, Outcome):
                return found
            return Outcome("DONE", Tried("", found) if found else Tried("x", 1.0), 1.0)
        self.tried.append(task.name)
        if task.name in self.bad:
            return self.bad[task.name]
        return Outcome("DONE", task.arguments["finding"]._replace(us=self.us.get(task.name, 100.0)), 1.0)

    def search(self, case: Case = D12, seconds: float = 1e6) -> Findings:
        return search.search(Search(case, self.attempt, lambda: self.now, self.said.append), seconds)


def fastest(found: Findings) -> dict[str, str]:
    return {each.operation: each.label.partition(": ")[2] for each in found.fastest}


US = {"attention: flash, pallas mma": 50.0, "attention: cudnn": 80.0, "gelu: xla": 50.0, "global norm: xla": 9.0}


def test_times_propose_and_the_step_decides() -> None:
    """The step on the proposed set is the fastest; the second row of a kernel is only a form of it."""
    card = Card(US, lambda chosen, _: 0.2 if not chosen else 0.1 if chosen["gelu"].implementation == "xla" else 0.15)
    found = card.search()
    assert not found.notes
    assert dict(found.steps) == {"xla": 0.2, "the fastest": 0.1, "as shipped": 0.15}
    assert fastest(found)["attention"] == "flash, pallas mma" and fastest(found)["gelu"] == "xla"
    assert card.tried[-3:] == ["step on 0", "step on 7", "step on 7"]
    chosen = {each.operation: each for each in choose(Preferences(), D12.machine, "bf16", 64, found).choices}
    assert (chosen["attention"].version, chosen["attention"].why) == ("mma", "1.60 x cudnn, measured here")
    assert (chosen["gelu"].implementation, chosen["gelu"].why) == ("xla", "2.00 x pallas, measured here")


@pytest.mark.parametrize("winner", ["xla", "as shipped"])
def test_fusions_count(winner: str) -> None:
    """What is faster by itself loses where the whole step is slower."""
    seconds = {"xla": 0.3, "proposed": 0.2, "as shipped": 0.25} | {winner: 0.1}

    def step(chosen: dict[str, Finding], _: Any) -> float:
        return seconds["xla" if not chosen else "proposed" if chosen["gelu"].implementation == "xla" else "as shipped"]

    found = Card(US, step).search()
    assert fastest(found)["gelu"] == {"xla": "xla", "as shipped": "pallas"}[winner]
    assert fastest(found)["attention"] == {"xla": "naive, xla", "as shipped": "flash, pallas"}[winner]


def test_what_is_wrong_costs_itself() -> None:
    card = Card()
    card.bad = {
        "classifier: pallas": Outcome("DONE", Finding("classifier", "pallas", problem="output 1: error 0.3"), 1.0),
        "attention: flash, pallas": CRASH,
        "adamw: pallas": Outcome("SPOILT", "not done after 40 s", 40.0),
        "gelu: pallas": Outcome("FAILED", "ValueError: Mosaic", 1.0),
        "embedding backward: pallas": Outcome("UNJUDGED", "JaxRuntimeError: RESOURCE_EXHAUSTED: 5 GB", 1.0),
        "attention: naive, xla": Outcome("SKIPPED", "too large", 1.0),
    }  # fmt: skip
    found = card.search()
    assert found.fastest and not found.notes
    assert found.problem("classifier", "pallas") == "output 1: error 0.3"
    assert found.problem("gelu", "pallas") and found.problem("adamw", "pallas")
    assert not found.problem("attention", "flash, pallas")  # another version of it is right
    assert not found.problem("embedding backward", "pallas")  # what could not be compared is not wrong
    unjudged = {each.operation: each.unjudged for each in found.found if each.unjudged}
    assert unjudged == {"embedding backward": "JaxRuntimeError: RESOURCE_EXHAUSTED: 5 GB", "attention": "too large"}
    assert not found.problem("attention", "naive, xla")
    assert sum("is not used" in line for line in card.said) == 4
    assert fastest(found)["classifier"] == "xla"


NO_FUSION = (("xla_gpu_enable_dynamic_slice_fusion", False),)


def test_a_wrong_step_is_tried_again() -> None:
    """First compiled otherwise, then with XLA's classifier, then by XLA alone."""
    found = Card({}, lambda chosen, options: 0.2 if not chosen or options else None).search()
    assert found.options == NO_FUSION and found.fastest and len(found.notes) == 1
    assert not any(each.problem for each in found.found)

    def without_classifier(chosen: dict[str, Finding], _: Any) -> float | None:
        return 0.3 if not chosen else 0.2 if chosen["classifier"].implementation == "xla" else None

    found = Card({}, without_classifier).search()
    assert found.options == () and found.problem("classifier", "pallas") and not found.problem("gelu", "pallas")
    assert fastest(found)["classifier"] == "xla" and fastest(found)["gelu"] == "pallas"
    found = Card({}, lambda chosen, _: CRASH if chosen else 0.2).search()
    assert set(fastest(found).values()) == {"xla", "naive, xla"} and len(found.notes) == 4
    assert all(choice.by == "xla" for choice in choose(Preferences(), D12.machine, "bf16", 64, found).choices)
    asked = choose(Preferences(kernels="pallas"), D12.machine, "bf16", 64, found).choices
    assert all(choice.by == "xla" for choice in asked if choice.operation != "attention")


NO_TRITON = (("xla_gpu_enable_triton_gemm", False),)


@pytest.mark.parametrize(("by_default", "expected"), [(0.05, ()), (0.2, NO_TRITON), (None, NO_TRITON)])
def test_options_that_nobody_has_decided_are_tried_on_the_best_step(by_default: float | None, expected: Any) -> None:
    """What was compared remains, unless XLA's defaults are right and faster."""

    def step(chosen: dict[str, Finding], options: Any) -> float | None:
        return 0.3 if not chosen else 0.1 if options else by_default

    card = Card(US, step)
    found = card.search(D12._replace(other_options=NO_TRITON))
    assert not found.notes[1:] and found.options == expected
    assert fastest(found)["attention"] == "flash, pallas mma"
    assert len(found.steps) == 3 + (not expected) and min(dict(found.steps).values()) == min(0.1, by_default or 1.0)
    assert card.tried[-1] == "step on 7"


def test_a_kernel_that_hangs_is_wrong_and_too_little_memory_is_not() -> None:
    """What runs for long counts, though the search's own time ends it."""
    card = Card(US)
    card.bad = {"attention: flash, pallas": Outcome("TIME", None, 60.0, ran=search.HANGS)}
    found = card.search()
    assert next(each for each in found.found if each.label == "attention: flash, pallas").problem
    card.bad = {"attention: flash, pallas": Outcome("TIME", None, 60.0)}  # it was compiled all that time
    found = card.search()
    assert not any(each.problem for each in found.found) and not found.fastest and "--measure" in found.notes[0]
    card = Card(US, lambda chosen, _: Outcome("UNJUDGED", "RESOURCE_EXHAUSTED: 9 GB", 1.0) if chosen else 0.2)
    found = card.search()
    assert not any(each.problem for each in found.found) and not found.fastest and len(found.notes) == 1


def test_what_was_asked_for_is_checked_too() -> None:
    case = D12._replace(asked=Preferences(kernels="pallas"))
    card = Card({"gelu: xla": 1.0}, lambda chosen, _: 0.1 if not chosen else 0.2)
    found = card.search(case)
    assert {each.operation: each.implementation for each in search.proposed(case, found)}["gelu"] == "pallas"
    assert all(choice.by == "pallas" for choice in choose(case.asked, D12.machine, "bf16", 64, found).choices)


@pytest.mark.parametrize(
    ("seconds", "tried", "decided"),
    [(5.0, 5, False), (8.0, 7, False), (14.0, 7, True), (22.0, 11, True)],
)
def test_time_is_kept(seconds: float, tried: int, decided: bool) -> None:
    """First what would run, which a whole step waits for; then what that is compared with, in half of the time."""
    listed = candidates.listed(D12)
    card = Card(US)
    found = card.search(seconds=seconds)
    assert card.now <= seconds + 1 and [each.key for each in found.found] == [each.key for each in listed[:tried]]
    assert bool(found.fastest) == decided
    (note,) = found.notes
    assert f"{len(listed) - tried} of {len(listed)}" in note and "--measure" in note
    assert ("no whole step" in note) == (not decided)
    assert card.said[-1] == note


def test_each_is_tried_once() -> None:
    card = Card(US)
    card.search()
    singles = [name for name in card.tried if not name.startswith("step")]
    assert singles == [each.label for each in candidates.listed(D12)]


def test_xla_is_the_fastest_by_itself() -> None:
    """The kernels as shipped are still compared; nothing is wrong with them where they lose."""
    card = Card({f"{name}: xla": 1.0 for name in GROUPS} | {"attention: naive, xla": 1.0}, lambda chosen, _: 0.1)
    found = card.search()
    assert not found.notes and not any(each.problem for each in found.found)
    assert dict(found.steps) == {"xla": 0.1, "the kernels as shipped": 0.1}
    assert set(fastest(found).values()) == {"xla", "naive, xla"}


def test_without_a_step_of_xla_nothing_is_decided() -> None:
    found = Card(US, lambda chosen, _: CRASH).search()
    assert not found.fastest and "XLA's step" in found.notes[0] and "--measure" in found.notes[1]


def test_nothing_to_try() -> None:
    card = Card()
    assert card.search(D12._replace(asked=Preferences(kernels="xla"))) == Findings() and not card.tried
