"""What follows from trying: each kernel must be right by itself, then whole steps decide, since XLA fuses operations.

A step on kernels must give XLA's loss and gradients; of those that do, and XLA's, the fastest is the run's. Measures
nothing itself: what tries a task is handed in, and so is the clock.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from llmc_jax.base.commands import typed
from llmc_jax.kernels import Finding, Findings
from llmc_jax.machine.compiling import Options
from llmc_jax.trials import candidates
from llmc_jax.trials.candidates import Case
from llmc_jax.trials.children import Outcome, Task, Tried

MODULE = "llmc_jax.trials.check"
KERNEL_SECONDS = 40.0  # that one implementation may take to compile, and then to run
STEP_SECONDS = 100.0
NO_FUSION = (("xla_gpu_enable_dynamic_slice_fusion", False),)  # the second try, where a step on kernels is wrong
HANGS = KERNEL_SECONDS / 2  # seconds of running after which what time was up for hangs: it takes milliseconds


class Search(NamedTuple):
    """What a search needs, and says."""

    case: Case
    attempt: Callable[[Task, float], Outcome]  # a task, and the time of the clock by which it must be done
    clock: Callable[[], float]
    say: Callable[[str], None]  # a line for the user


def task(name: str, seconds: float, what: str, case: Case, **arguments: Any) -> Task:
    """Return a call of check.measure."""
    return Task(name, MODULE, {"what": what, "case": case, **arguments}, seconds)


def search(how: Search, seconds: float) -> Findings:
    """Return what is found out within so many seconds; what is not runs as shipped. Raises what `attempt` raises.

    No whole step is compared before each kernel has been tried.
    """
    until, listed = how.clock() + seconds, candidates.listed(how.case)
    known = Findings(found=try_each(how, listed, until))
    if (tried := len(known.found)) == len(listed):
        known = compare_steps(how, known, until)
    if not known.fastest:
        found = f"{tried} of {len(listed)} kernels were tried in time, and no whole step could be compared"
        known = _told(how, known, f"{found}; what is not known runs as shipped; {typed('kernels')} --measure tries it")
    return known


def _told(how: Search, known: Findings, note: str) -> Findings:
    how.say(note)
    return known._replace(notes=(*known.notes, note))


def try_each(how: Search, listed: Sequence[Finding], until: float) -> tuple[Finding, ...]:
    """Return what was found out about each, in their order, as far as time sufficed."""
    found = list[Finding]()
    for number, finding in enumerate(listed, 1):
        how.say(f"{number}/{len(listed)} {finding.label}")
        outcome = how.attempt(task(finding.label, KERNEL_SECONDS, "kernel", how.case, finding=finding), until)
        if outcome.kind == "TIME":
            if outcome.ran < HANGS:
                break
            outcome = outcome._replace(kind="SPOILT", content=f"not done after {outcome.seconds:.0f} s")
        if outcome.kind == "DONE":
            found.append(outcome.content)
        else:
            field = "unjudged" if outcome.kind in ("SKIPPED", "UNJUDGED") else "problem"
            found.append(finding._replace(**{field: str(outcome.content)}))
        if why := found[-1].problem or found[-1].unjudged:
            how.say(f"{finding.label} is not {'used' if found[-1].problem else 'judged'}: {why}")
    return tuple(found)


# ----- whole steps --------------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """A whole step."""

    name: str
    rows: dict[str, str]  # of each operation what runs it; none: XLA's step, with which the others are compared
    options: Options  # of XLA
    seconds: float = 0.0  # 0: not known


def compare_steps(how: Search, known: Findings, until: float) -> Findings:
    """Return the findings with the step that is right and the fastest, if time and memory suffice to compare them."""
    options, rows = how.case.other_options, {}  # of each operation what is not wrong, in order of preference
    for operation, each in candidates.by_operation(how.case).items():
        rows[operation] = [row.name for row in each if not known.problem(operation, row.name)]
    ours, xla = ({operation: each[at] for operation, each in rows.items()} for at in (0, -1))
    tried = _tried(how, by_xla := Step("xla", {}, options), until)
    if tried is None:
        return known
    if tried.problem:
        return _told(how, known, f"XLA's step: {tried.problem}")
    right = [by_xla._replace(rows=xla, seconds=tried.seconds)]
    spoilt: dict[str, str] = {}  # kernels with which no whole step is right
    attentions = rows.get("attention", [])[1:-1]  # that are right too
    for step in _attempts(ours, xla, attentions, options):
        if (tried := _tried(how, step, until)) is None:
            break
        if not tried.problem:
            # where XLA is faster, the kernels that a flag names still run, and so need these options
            right = [right[0]._replace(options=step.options), step._replace(seconds=tried.seconds)]
            break
        known = _told(how, known, f"a whole step on {step.name}: {tried.problem}")
        spoilt = ours
    if spoilt and len(right) == 1 and tried:
        known = _told(how, known, "no whole step with kernels is correct, so XLA runs everything")
    kept = right[-1].rows
    found = [
        each._replace(problem="a whole step with it is wrong") if each.key in spoilt.items() - kept.items() else each
        for each in known.found
    ]
    if tried is None:  # time or memory did not suffice; what was found wrong before counts
        return known._replace(found=tuple(found))
    best = _fastest(how, right, attentions, until)
    steps = tuple((step.name, step.seconds) for step in right)
    return known._replace(found=tuple(found), fastest=tuple(best.rows.items()), options=best.options, steps=steps)


def _attempts(ours: dict[str, str], xla: dict[str, str], attentions: Sequence[str], options: Options) -> list[Step]:
    """Return what may be right, the best first: all kernels, compiled otherwise too, or without one of them."""
    fewer = {name: xla[name] if name == "classifier" else row for name, row in ours.items()}
    found = [
        Step("the kernels", ours, options),
        Step("the kernels without XLA's dynamic-slice fusion", ours, (*options, *NO_FUSION)),
        *([Step("the kernels with XLA's classifier", fewer, options)] if fewer != ours else []),
        *(_with_attention(Step("the kernels", ours, options), row) for row in attentions),
    ]
    return [step for step in found if step.rows != xla]


def _with_attention(step: Step, row: str) -> Step:
    return step._replace(name=f"{step.name}, attention by {row}", rows=step.rows | {"attention": row})


def _fastest(how: Search, right: list[Step], attentions: Sequence[str], until: float) -> Step:
    """Return the fastest of steps that are right, that by kernels last, with what else is worth a try added.

    attentions: that are right too. XLA's default options are tried on the fastest, and last, because XLA may time each
    product for them first.
    """
    others = how.case.other_options

    def add(step: Step) -> None:
        tried = _tried(how, step, until)
        if tried is not None and not tried.problem:
            right.append(step._replace(seconds=tried.seconds))

    def best() -> Step:
        return min((step for step in right if step.seconds), key=lambda step: step.seconds, default=right[-1])

    if len(right) > 1 and attentions and right[-1].rows["attention"] not in attentions:
        add(_with_attention(right[-1], attentions[0]))
    if others and best().seconds:
        options = tuple(option for option in best().options if option not in others)
        add(best()._replace(name=f"{best().name}, XLA's default products", options=options))
    return best()


def _tried(how: Search, step: Step, until: float) -> Tried | None:
    """Return what came of a step; None: time was up, the memory too small for two steps, or it could not be judged."""
    how.say(f"a whole step on {step.name}")
    arguments = {"chosen": tuple(step.rows.items()), "options": step.options}
    outcome = how.attempt(task("step", STEP_SECONDS, "step", how.case, **arguments), until)
    if outcome.kind in ("TIME", "UNJUDGED"):
        if outcome.content:
            how.say(f"{step.name} is not judged: {outcome.content}")
        return None
    return outcome.content if outcome.kind == "DONE" else Tried(str(outcome.content))
