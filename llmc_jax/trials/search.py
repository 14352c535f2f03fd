"""What follows from trying: implementations by themselves first, then whole steps, since what XLA fuses counts too.

Times of single operations propose a set, and a whole step on it decides: it must give XLA's loss and gradients, and be
faster than XLA's and than the set that is shipped. Measures nothing itself: what tries a task is handed in, and so is
the clock.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from llmc_jax.base.commands import typed
from llmc_jax.kernels import GROUPS, Finding, Findings, choice
from llmc_jax.machine.compiling import Options
from llmc_jax.trials import candidates
from llmc_jax.trials.candidates import Case, row_of
from llmc_jax.trials.children import Outcome, Task

MODULE = "llmc_jax.trials.check"
CANDIDATE_SECONDS = 40.0  # that one implementation may take to compile, and then to run
STEP_SECONDS = 100.0
SHARE = 0.5  # of the time, that implementations by themselves may take which would not run unmeasured
NO_FUSION = (("xla_gpu_enable_dynamic_slice_fusion", False),)  # the second try, where a step on kernels is wrong
HANGS = CANDIDATE_SECONDS / 2  # seconds of running after which what time was up for hangs: it takes milliseconds

Set = tuple[Finding, ...]  # one of each operation, as it is listed
Try = Callable[[Task, float], Outcome]  # a task, and the time of the clock by which it must be done


class Search(NamedTuple):
    """What a search needs, and says."""

    case: Case
    attempt: Try
    clock: Callable[[], float]
    say: Callable[[str], None]  # a line for the user


def search(how: Search, seconds: float) -> Findings:
    """Return what is found out within so many seconds; what is not runs as shipped. Raises what `attempt` raises.

    No whole step is compared before all that would run unmeasured has been tried.
    """
    until = how.clock() + seconds
    groups, listed = candidates.by_operation(how.case), candidates.listed(how.case)
    if not listed:
        return Findings()
    known = Findings(found=try_each(how, listed, needed=len(groups), seconds=seconds))
    if len(known.found) >= len(groups):
        known = compare_steps(how, known, until)
    left = len(listed) - len(known.found)
    lacking = [f"{left} of {len(listed)} were not tried in time"] if left else []
    lacking += [] if known.fastest else ["no whole step could be compared"]
    if lacking:
        rest = f"what is not known runs as shipped; {typed('kernels')} --measure tries it"
        known = _told(how, known, f"{' and '.join(lacking)}; {rest}")
    return known


def _told(how: Search, known: Findings, note: str) -> Findings:
    how.say(note)
    return known._replace(notes=(*known.notes, note))


# ----- each by itself -----------------------------------------------------------------------------------------------


def try_each(how: Search, listed: Sequence[Finding], needed: int, seconds: float) -> Set:
    """Return what was found out about each, in their order, as far as time sufficed.

    needed: so many come first that would run unmeasured. The others get a share of the time, so that whole steps have
    the rest.
    """
    start, found = how.clock(), list[Finding]()
    for number, finding in enumerate(listed):
        until = start + (seconds if number < needed else SHARE * seconds)
        if how.clock() >= until:
            break
        how.say(f"{number + 1}/{len(listed)} {finding.label}")
        outcome = how.attempt(task(finding.label, CANDIDATE_SECONDS, "candidate", how.case, finding=finding), until)
        if outcome.kind == "TIME":
            if outcome.ran < HANGS:
                break
            outcome = outcome._replace(kind="SPOILT", content=f"not done after {outcome.seconds:.0f} s")
        found.append(tried := _finding(finding, outcome))
        if why := tried.problem or tried.unjudged:
            how.say(f"{finding.label} is not {'used' if tried.problem else 'judged'}: {why}")
    return tuple(found)


def task(name: str, seconds: float, what: str, case: Case, **arguments: Any) -> Task:
    """Return a call of check.measure."""
    return Task(name, MODULE, {"what": what, "case": case, **arguments}, seconds)


def _finding(finding: Finding, outcome: Outcome) -> Finding:
    """Return what came of trying it. XLA's have no problem, as they always remain, nor has what cannot be tried."""
    if outcome.kind == "DONE":
        return outcome.content
    if row_of(finding).by == "xla" or outcome.kind in ("SKIPPED", "UNJUDGED"):
        return finding._replace(unjudged=str(outcome.content))
    return finding._replace(problem=str(outcome.content))


# ----- whole steps --------------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """A whole step, and what came of it."""

    name: str
    sets: Set  # nothing: XLA's, with which the others are compared
    options: Options = ()  # of XLA
    seconds: float = 0.0  # 0: not known
    problem: str = ""  # what is wrong with it


def compare_steps(how: Search, known: Findings, until: float) -> Findings:
    """Return the findings with the set whose whole step is right and the fastest, if time and memory suffice for it."""
    by_xla = _tried(how, Step("xla", ()), until, "a whole step by XLA")
    if by_xla is None:
        return known
    if by_xla.problem:
        return _told(how, known, f"XLA's step: {by_xla.problem}")
    by_xla = by_xla._replace(sets=_by_xla(how.case), options=how.case.other_options)
    attempts = _attempts(how.case, known)
    for step in attempts:
        tried = _tried(how, step, until, f"a whole step on {step.name}")
        if tried is None:
            return known
        if not tried.problem:
            spoilt = {each.operation for each in set(attempts[0].sets) - set(step.sets)}
            # where XLA is faster, the kernels that a flag names still run, and so need these options
            right = [by_xla._replace(options=step.options), tried]
            break
        known = _told(how, known, f"a whole step on {step.name}: {tried.problem}")
    else:
        right, spoilt = [by_xla], set(GROUPS) if attempts else set()
        if attempts:
            known = _told(how, known, "no whole step with kernels is correct, so XLA runs everything")
    return _decided(how, known._replace(found=_spoilt(known.found, spoilt)), right, until)


def _attempts(case: Case, known: Findings) -> list[Step]:
    """Return what may be right, the best first: all kernels, compiled otherwise too, or without the classifier's.

    Where XLA is the fastest at each operation by itself, the kernels as shipped still may be in a whole step.
    """
    name, sets = "the fastest", proposed(case, known)
    if _is_xla(sets):
        name, sets = "the kernels as shipped", shipped(case, known)
    if _is_xla(sets):
        return []
    fewer = tuple(Finding("classifier", "xla") if each.operation == "classifier" else each for each in sets)
    options = case.other_options
    found = [
        Step(name, sets, options),
        Step(f"{name} without XLA's dynamic-slice fusion", sets, (*options, *NO_FUSION)),
        Step(f"{name} with XLA's classifier", fewer, options),
    ]
    return found if fewer != sets else found[:2]


def _decided(how: Search, known: Findings, right: list[Step], until: float) -> Findings:
    """Return the findings with the fastest of the steps that are right, among them the shipped set's.

    XLA's default options are tried on the fastest, and last, because XLA may time each product for them first.
    """
    shipped_set, others = shipped(how.case, known), how.case.other_options
    if shipped_set != right[-1].sets and not _is_xla(right[-1].sets) and not _is_xla(shipped_set):
        step = right[-1]._replace(name="as shipped", sets=shipped_set)
        tried = _tried(how, step, until, "a whole step on the kernels as shipped")
        if tried is not None and not tried.problem:
            right.append(tried)
    best = min((step for step in right if step.seconds), key=lambda step: step.seconds, default=right[-1])
    if others and best.seconds:
        options = tuple(option for option in best.options if option not in others)
        step = best._replace(name=f"{best.name}, XLA's default products", options=options)
        tried = _tried(how, step, until, "the fastest whole step once more, with XLA's default products")
        if tried is not None and not tried.problem and 0 < tried.seconds < best.seconds:
            best = tried
            right.append(best)
    timed = {each.key: each for each in known.found}
    fastest = tuple(timed.get(each.key, each) for each in best.sets)
    return known._replace(
        fastest=fastest, options=best.options, steps=tuple((step.name, step.seconds) for step in right)
    )


def _is_xla(sets: Set) -> bool:
    return all(row_of(each).by == "xla" for each in sets)


def proposed(case: Case, known: Findings) -> Set:
    """Return what was the fastest of each operation by itself; what was asked for, where that is right."""
    chosen = []
    for default in shipped(case, known):
        asked = choice.candidates(default.operation, case.asked, case.setting)
        name = asked.rows[0].name if asked.asked else ""
        right = [each for each in known.right(default.operation) if (each.implementation == name if name else each.us)]
        chosen.append(Finding(*right[0].key) if right else default)
    return tuple(chosen)


def shipped(case: Case, known: Findings) -> Set:
    """Return what runs where nothing has been measured, without what is wrong."""
    wrong = {each.key for each in known.found if each.problem}
    groups = candidates.by_operation(case).values()
    return tuple(next(each for each in listed if each.key not in wrong) for listed in groups)


def _by_xla(case: Case) -> Set:
    groups = candidates.by_operation(case).values()
    return tuple(next(each for each in listed if row_of(each).by == "xla") for listed in groups)


def _spoilt(found: Sequence[Finding], operations: Collection[str]) -> Set:
    """Return the findings, with a problem for all kernels of some operations."""
    return tuple(
        each if each.operation not in operations or row_of(each).by == "xla"
        else each._replace(problem="a whole step with it is wrong", us=0.0)
        for each in found
    )  # fmt: skip


def _tried(how: Search, step: Step, until: float, words: str) -> Step | None:
    """Return a step with what came of it. words: what to say of it.

    None: time was up, the memory too small for two steps, or it could not be judged.
    """
    how.say(words)
    arguments = {"chosen": step.sets, "options": step.options}
    outcome = how.attempt(task("step", STEP_SECONDS, "step", how.case, **arguments), until)
    if outcome.kind in ("TIME", "UNJUDGED"):
        if outcome.content:
            how.say(f"{step.name} is not judged: {outcome.content}")
        return None
    problem, seconds = outcome.content if outcome.kind == "DONE" else (str(outcome.content), 0.0)
    return step._replace(problem=problem, seconds=seconds)
