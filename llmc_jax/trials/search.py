"""What follows from trying: implementations by themselves first, then whole steps, since what XLA fuses counts too.

Times of single operations propose a set, and a whole step on it decides: it must give XLA's loss and gradients, and be
faster than XLA's and than the set that is shipped. Measures nothing itself: what tries a task is handed in, and so is
the clock.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from llmc_jax.base.commands import typed
from llmc_jax.kernels import GROUPS, Finding, Findings, Variant, choice
from llmc_jax.machine.compiling import Options
from llmc_jax.trials import candidates
from llmc_jax.trials.candidates import Case, row_of
from llmc_jax.trials.children import Outcome, Task

MODULE = "llmc_jax.trials.check"
CANDIDATE_SECONDS = 40.0  # that one implementation may take to compile, and then to run
STEP_SECONDS = 100.0
SHARE = 0.5  # of the time, that implementations by themselves may take
NO_FUSION = (("xla_gpu_enable_dynamic_slice_fusion", False),)  # the second try, where a step on kernels is wrong
UNCOMPARED = "there was not enough time or memory to compare a whole step"
HANGS = CANDIDATE_SECONDS / 2  # seconds of running after which what time was up for hangs: it takes milliseconds
STARTS = 3  # over which a search that runs out of time continues; what is not known then stays unknown

DEFAULT = Variant()
Set = tuple[Finding, ...]
Try = Callable[[Task, float], Outcome]  # a task, and the time of the clock by which it must be done


class Search(NamedTuple):
    """What a search needs, and says."""

    case: Case
    attempt: Try
    clock: Callable[[], float]
    say: Callable[[str], None]  # a line for the user


def search(how: Search, seconds: float, known: Findings) -> Findings:
    """Return what is found out within so many seconds, beginning with what is known.

    What time does not suffice for is left to the next start. Raises what `attempt` raises.
    """
    start = how.clock()
    known = known._replace(starts=known.starts + 1, notes=())
    listed = candidates.listed(how.case)
    if not listed:
        return known._replace(complete=True)
    # what would run unmeasured: without having tried these, no whole step is compared
    needed = [each[0] for each in _by_operation(how.case).values()]
    found = try_each(how, [each for each in listed if each in needed], known.found, start + seconds)
    if known.starts == 1 or known.steps:  # else a whole step comes first, for which there was no time before
        found = try_each(how, [each for each in listed if each not in needed], found, start + SHARE * seconds)
    known = known._replace(found=found)
    tried = {each.key for each in known.found}
    left = [each for each in listed if each.key not in tried and not _hopeless(each, known.found)]
    if any(each in needed for each in left) and known.starts < STARTS:
        return _told(how, known, f"time ran out with {len(left)} of {len(listed)} not tried; the next start continues")
    whole = compare_steps(how, known, start + seconds)
    if not left or not whole.complete:
        return whole
    go_on = any(each.variant == DEFAULT for each in left) and known.starts < STARTS
    then = "the next start continues" if go_on else f"{typed('kernels')} --measure tries them"
    return _told(how, whole._replace(complete=not go_on), f"{len(left)} of {len(listed)} not tried yet; {then}")


def _told(how: Search, known: Findings, note: str) -> Findings:
    how.say(note)
    return known._replace(notes=(*known.notes, note))


# ----- each by itself -----------------------------------------------------------------------------------------------


def try_each(how: Search, listed: Sequence[Finding], known: Sequence[Finding], until: float) -> Set:
    """Return what is known and what was found out about each that was not; of some nothing if the time was up."""
    found = list(known)
    for number, finding in enumerate(listed):
        if finding.key in {each.key for each in found} or _hopeless(finding, found):
            continue
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


def _hopeless(finding: Finding, found: Sequence[Finding]) -> bool:
    """Return whether these are other tile sizes of a wrong kernel; another version of attention is another kernel."""
    default = finding._replace(variant=DEFAULT).key
    return bool(finding.variant.sizes) and any(each.key == default and each.problem for each in found)


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
    guilty: tuple[str, ...] = ()  # operations whose kernels are wrong where this one is right
    seconds: float = 0.0  # 0: not known
    problem: str = ""  # what is wrong with it


def compare_steps(how: Search, known: Findings, until: float) -> Findings:
    """Return the findings with the set whose whole step is right and the fastest; if time suffices, complete."""
    by_xla = _tried(how, Step("xla", ()), until, "a whole step by XLA")
    if by_xla is None or by_xla.problem:
        return _undecided(how, known, UNCOMPARED if by_xla is None else f"XLA's step: {by_xla.problem}")
    by_xla = by_xla._replace(sets=_by_xla(how.case), options=how.case.other_options)
    attempts = _attempts(how.case, known)
    for step in attempts:
        tried = _tried(how, step, until, f"a whole step on {step.name}")
        if tried is None:
            return _undecided(how, known, UNCOMPARED)
        if not tried.problem:
            known = known._replace(found=_spoilt(known.found, step.guilty))
            return _decided(how, known, [by_xla._replace(options=step.options), tried], until)
        known = _told(how, known, f"a whole step on {step.name}: {tried.problem}")
    if attempts:
        known = _told(how, known, "no whole step with kernels is correct, so XLA runs everything")
        known = known._replace(found=_spoilt(known.found, GROUPS))
    return _decided(how, known, [by_xla], until)


def _undecided(how: Search, known: Findings, why: str) -> Findings:
    return _told(how, known._replace(complete=known.starts >= STARTS), f"{why}; the kernels are used as shipped")


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
    named = {each.key: each for each in known.found}
    fastest = tuple(named.get(each.key, each) for each in best.sets)
    steps = tuple((step.name, step.seconds) for step in right)
    return known._replace(fastest=fastest, options=best.options, steps=steps, complete=True)


def _attempts(case: Case, known: Findings) -> list[Step]:
    """Return what may be right, the best first: all kernels, compiled otherwise too, or without the classifier's.

    Where XLA is the fastest at each operation by itself, the kernels as shipped still may be in a whole step.
    """
    name, sets = "the fastest", proposed(case, known)
    if _is_xla(sets):
        name, sets = "the kernels as shipped", shipped(case, known)
    if _is_xla(sets):
        return []
    fewer = tuple(
        each._replace(implementation="xla", variant=DEFAULT) if each.operation == "classifier" else each
        for each in sets
    )  # fmt: skip
    options = case.other_options
    found = [
        Step(name, sets, options),
        Step(f"{name} without XLA's dynamic-slice fusion", sets, (*options, *NO_FUSION)),
        Step(f"{name} with XLA's classifier", fewer, options, ("classifier",)),
    ]
    return found if fewer != sets else found[:2]


def _is_xla(sets: Set) -> bool:
    return all(row_of(each).by == "xla" for each in sets)


def proposed(case: Case, known: Findings) -> Set:
    """Return what was the fastest of each operation by itself; what was asked for, where that is right."""
    chosen = []
    for default in shipped(case, known):
        asked = choice.candidates(default.operation, case.asked, case.setting)
        name = asked.rows[0].name if asked.asked else ""
        right = [each for each in known.right(default.operation) if (each.implementation == name if name else each.us)]
        chosen.append([*right, default][0])
    return tuple(chosen)


def shipped(case: Case, known: Findings) -> Set:
    """Return what runs where nothing has been measured, without what is wrong."""
    return tuple(
        next((each for each in listed if not known.problem(operation, each.implementation)), listed[-1])
        for operation, listed in _by_operation(case).items()
    )


def _by_operation(case: Case) -> dict[str, list[Finding]]:
    """Return the default forms that are tried, in order of preference."""
    listed = [each for each in candidates.listed(case) if each.variant == DEFAULT]
    found = {name: [each for each in listed if each.operation == name] for name in GROUPS}
    return {name: each for name, each in found.items() if each}


def _by_xla(case: Case) -> Set:
    return tuple(next(each for each in listed if row_of(each).by == "xla") for listed in _by_operation(case).values())


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
