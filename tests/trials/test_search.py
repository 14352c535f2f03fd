"""What follows from tries whose outcomes and clock are made up: a whole step decides, and time is kept."""

from typing import Any

import pytest

from llmc_jax.kernels import Finding, Findings, Preferences
from llmc_jax.kernels.functions import PRODUCTS
from llmc_jax.trials import candidates, start
from llmc_jax.trials.candidates import Case
from llmc_jax.trials.children import Outcome, Task, Tried
from llmc_jax.trials.start import NO_FUSION
from tests.kernels.test_choice import choose
from tests.trials.test_check import D12

CRASH = Outcome("FAILED", "the process ended with status -6", 0.0)


class Card:
    """A card that answers from a table, and whose clock goes on by a second with each task.

    beside: the seconds of a step on our products, timed in turns with one without.
    """

    def __init__(
        self, step: Any = lambda chosen, options: 0.1 if chosen else 0.2, beside: float = 0.0, **bad: Outcome
    ) -> None:
        self.beside = beside
        self.now, self.step = 0.0, step
        self.tried: list[str] = []
        self.bad = bad  # by operation; of attention by implementation

    def attempt(self, task: Task) -> Outcome:
        self.now += 1.0
        if self.now > self.until:
            return Outcome("TIME", None, 1.0)
        if task.arguments["what"] == "step":
            self.tried.append("step")
            found = self.step(dict(task.arguments["chosen"]), task.arguments["options"])
            if isinstance(found, Outcome):
                return found
            beside = self.beside if "beside" in task.arguments else 0.0
            return Outcome("DONE", Tried("", found, beside=beside) if found else Tried("x", 1.0), 1.0)
        finding = task.arguments["finding"]
        self.tried.append(finding.label)
        name = finding.implementation if finding.operation == "attention" else finding.operation
        return self.bad.get(name, Outcome("DONE", Tried(), 1.0))

    def search(self, case: Case = D12, seconds: float = 1e6) -> Findings:
        self.until = seconds
        return start.search(case, self.attempt)


@pytest.fixture(autouse=True)
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines = list[str]()
    monkeypatch.setattr(start, "print_error", lines.append)
    return lines


BY_XLA = {"xla", "naive, xla"}


def test_right_kernels_that_are_faster_run() -> None:
    card = Card(beside=0.12)
    found = card.search()
    assert not found.notes and not any(each.problem or each.unjudged for each in found.found)
    assert card.tried == [*(each.label for each in candidates.listed(D12)), *["step"] * 4]
    assert dict(found.steps) == {
        "xla": 0.2, "the kernels": 0.12, "the kernels, products of ours": 0.1,
        "the kernels, products of ours, attention by cudnn": 0.1,
    }  # fmt: skip
    chosen = choose(Preferences(), D12.machine, "bf16", 64, found).choices
    assert {choice.by for choice in chosen if choice.operation != "global norm"} == {"pallas"}
    assert {choice.why for choice in chosen if choice.operation != "global norm"} == {"measured here"}


@pytest.mark.parametrize(
    ("seconds", "attention"), [((0.1, 0.2, 0.2), "naive, xla"), ((0.3, 0.2, 0.1), "cudnn"), ((0.0, 0.3, 0.4), None)]
)
def test_the_fastest_step_decides(seconds: tuple[float, float, float], attention: str | None) -> None:
    """XLA's, the kernels', or the kernels' with cuDNN's attention; XLA's time may not be known."""

    def step(chosen: dict[str, str], _: Any) -> Any:
        by_xla, ours, cudnn = seconds
        if not chosen:
            return Outcome("DONE", Tried("", by_xla), 1.0)
        return cudnn if chosen["attention"] == "cudnn" else ours

    found = Card(step).search()
    assert dict(found.fastest)["attention"] == (attention or "flash, pallas") and not found.notes
    if attention == "naive, xla":
        assert set(dict(found.fastest).values()) <= BY_XLA and not any(each.problem for each in found.found)


@pytest.mark.parametrize(("beside", "by"), [(0.09, "xla"), (0.11, "pallas")])
def test_products_of_ours_are_compared_in_turns(beside: float, by: str) -> None:
    """With NVIDIA's and the passes that they save: what the step without them took alone, 0.1 s, does not count."""
    found = Card(beside=beside).search()
    chosen = {choice.operation: choice.by for choice in choose(Preferences(), D12.machine, "bf16", 64, found).choices}
    assert {chosen[name] for name in PRODUCTS} == {by} and chosen["layernorm"] == "pallas" and not found.notes


@pytest.mark.parametrize("outcome", [
    Outcome("UNJUDGED", "RESOURCE_EXHAUSTED: 9 GB", 1.0), Outcome("TIME", None, 1.0), CRASH, None,
])  # fmt: skip
def test_products_that_were_not_compared_do_not_run(outcome: Outcome | None) -> None:
    """Out of memory, time, a crash, a wrong step: the kernels without them were right, and remain."""
    card = Card(lambda chosen, _: outcome if chosen and chosen["head"] == "pallas" else 0.1 if chosen else 0.2)
    found = card.search()
    assert {each.operation for each in found.found if each.problem} == (
        {*PRODUCTS} if outcome in (CRASH, None) else set()
    )
    chosen = {choice.operation: choice.by for choice in choose(Preferences(), D12.machine, "bf16", 64, found).choices}
    assert {chosen[name] for name in PRODUCTS} == {"xla"} and chosen["layernorm"] == "pallas"


def test_what_is_wrong_costs_itself(said: list[str]) -> None:
    """Wrong, crashed, hung, refused by the compiler; out of memory is not wrong."""
    bad = {
        "classifier": Outcome("DONE", Tried("output 1: error 0.3"), 1.0),
        "flash, pallas": CRASH,
        "adamw": Outcome("TIME", None, 60.0, ran=start.HANGS),
        "gelu": Outcome("FAILED", "ValueError: Mosaic", 1.0),
        "embedding backward": Outcome("UNJUDGED", "JaxRuntimeError: RESOURCE_EXHAUSTED: 5 GB", 1.0),
    }  # fmt: skip
    card = Card(**bad)
    found = card.search()
    assert {each.operation for each in found.found if each.problem} == {"classifier", "attention", "adamw", "gelu"}
    assert {each.operation for each in found.found if each.unjudged} == {"embedding backward"}
    assert not found.notes and sum("is not used" in line for line in said) == 4
    assert dict(found.fastest) == {
        "layernorm": "pallas", "gelu": "xla", "attention": "cudnn", "classifier": "xla",
        "embedding backward": "pallas", "adamw": "xla", **dict.fromkeys(PRODUCTS, "xla"),
    }  # fmt: skip


def test_a_wrong_step_is_tried_again() -> None:
    """First compiled otherwise, then with XLA's classifier, with cuDNN's attention, and by XLA alone."""
    found = Card(lambda chosen, options: 0.2 if not chosen or options else None).search()
    assert found.options == NO_FUSION and found.fastest and len(found.notes) == 1
    assert not any(each.problem for each in found.found)

    def without_classifier(chosen: dict[str, str], _: Any) -> float | None:
        return 0.3 if not chosen else 0.2 if chosen["classifier"] == "xla" else None

    found = Card(without_classifier).search()
    assert found.options == () and found.problem("classifier", "pallas") and not found.problem("gelu", "pallas")
    assert dict(found.fastest)["classifier"] == "xla" and dict(found.fastest)["gelu"] == "pallas"
    found = Card(lambda chosen, _: None if chosen.get("attention") == "flash, pallas" else 0.2).search()
    assert [each.key for each in found.found if each.problem] == [("attention", "flash, pallas")]
    by_cudnn = "the kernels, attention by cudnn"
    assert [name for name, _ in found.steps] == ["xla", by_cudnn, f"{by_cudnn}, products of ours"]
    assert len(found.notes) == 3
    found = Card(lambda chosen, _: CRASH if chosen else 0.2).search()
    assert set(dict(found.fastest).values()) == BY_XLA and len(found.notes) == 4
    assert all(choice.by == "xla" for choice in choose(Preferences(), D12.machine, "bf16", 64, found).choices)
    asked = choose(Preferences(kernels="pallas"), D12.machine, "bf16", 64, found).choices
    assert all(choice.by == "xla" for choice in asked if choice.operation not in ("attention", "global norm"))


NO_TRITON = (("xla_gpu_enable_triton_gemm", False),)


@pytest.mark.parametrize(("by_default", "expected"), [(0.05, ()), (0.2, NO_TRITON), (None, NO_TRITON)])
def test_options_that_nobody_has_decided_are_tried_on_the_best_step(by_default: float | None, expected: Any) -> None:
    """What was compared remains, unless XLA's defaults are right and faster."""
    card = Card(lambda chosen, options: 0.3 if not chosen else 0.1 if options else by_default)
    found = card.search(D12._replace(other_options=NO_TRITON))
    assert not found.notes and found.options == expected
    assert len(found.steps) == 4 + (by_default is not None)


def test_what_cannot_be_compared_runs_as_shipped() -> None:
    """Out of memory, or a crash of XLA's own step."""
    found = Card(lambda chosen, _: Outcome("UNJUDGED", "RESOURCE_EXHAUSTED: 9 GB", 1.0) if chosen else 0.2).search()
    assert not any(each.problem for each in found.found) and not found.fastest and len(found.notes) == 1
    found = Card(lambda chosen, _: CRASH).search()
    assert not found.fastest and "XLA's step" in found.notes[0] and "--measure" in found.notes[1]


def test_a_wrong_step_counts_where_time_ends_before_another() -> None:
    card = Card(lambda chosen, _: None if chosen else 0.2)
    found = card.search(seconds=len(candidates.listed(D12)) + 2.5)  # XLA's step and one with the kernels
    assert card.tried[-2:] == ["step", "step"] and len(found.notes) == 2 and not found.fastest
    wrong = {each.operation for each in found.found if each.problem}
    assert {"classifier", "attention"} <= wrong
    chosen = choose(Preferences(), D12.machine, "bf16", 64, found).choices
    assert not {choice.by for choice in chosen if choice.operation in wrong} & {"pallas"}


def test_what_was_asked_for_is_checked_too() -> None:
    """Where XLA is faster it still runs."""
    case = D12._replace(asked=Preferences(kernels="pallas"))
    found = Card(lambda chosen, _: 0.2 if chosen else 0.1).search(case)
    assert Finding("global norm", "pallas") in found.found
    assert all(choice.by == "pallas" for choice in choose(case.asked, D12.machine, "bf16", 64, found).choices)


@pytest.mark.parametrize("seconds", [3.0, 7.0, 8.0])
def test_time_is_kept(seconds: float, said: list[str]) -> None:
    """What was found wrong by then is known."""
    listed = candidates.listed(D12)
    card = Card(gelu=CRASH)
    found = card.search(seconds=seconds)
    assert (
        card.now <= seconds + 2 and [each.key for each in found.found] == [each.key for each in listed][: int(seconds)]
    )
    assert found.problem("gelu", "pallas") and not found.fastest
    (note,) = found.notes
    assert "--measure" in note and said[-1].endswith(note)
