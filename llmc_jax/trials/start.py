"""The kernels of a run, tried before it begins: known from an earlier start, or found out now, by other processes.

They run before this one has a GPU context, so that a card that only one process may use serves them and then the run.
Each kernel must be right by itself, then whole steps decide, since XLA fuses operations: a step on kernels must give
XLA's loss and gradients; of those that do, and XLA's, the fastest is the run's. Nothing here touches a machine without
an NVIDIA GPU. Leaves out a try itself (check.py).
"""

import math
import os
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from llmc_jax.base.commands import typed
from llmc_jax.base.streams import print_error
from llmc_jax.kernels import Findings
from llmc_jax.kernels.functions import PRODUCTS
from llmc_jax.machine import driver
from llmc_jax.machine.compiling import Options
from llmc_jax.machine.driver import Card
from llmc_jax.plan.separate import kept
from llmc_jax.trials import candidates, known
from llmc_jax.trials.candidates import Case
from llmc_jax.trials.children import Children, Outcome, Stuck, Task, Tried
from llmc_jax.trials.known import Known

SECONDS = 110.0  # for all of it, so that two minutes are not exceeded
LOOKS, PAUSE = 6, 0.5  # at a card that is in use, seconds between them: a process that was killed takes a while to go
MODULE = "llmc_jax.trials.check"
LIMITS = {"device": 40.0, "kernel": 40.0, "step": 100.0}  # that a try may take to compile, and then to run
NO_FUSION = (("xla_gpu_enable_dynamic_slice_fusion", False),)  # the second try, where a step on kernels is wrong
HANGS = 20.0  # seconds of running after which what time was up for hangs: it takes milliseconds

Attempt = Callable[[Task], Outcome]


class NotChecked(Exception):
    """The kernels are not checked, and run as shipped; the message says why."""


def say(line: str) -> None:
    """Show the progress of a check."""
    print_error(f"kernel check: {line}")


def find_out(case: Case, here: Card, *, again: bool = False, seconds: float = SECONDS) -> Findings:
    """Return what is known of a case's kernels on a card, with notes for the user; tries them if nothing is known yet.

    Where nothing is found, the table that is shipped decides. again: what is known does not count.
    """
    if not candidates.listed(case):
        return Findings()
    facts = known.facts_of(case, here)

    def checked() -> Known:
        with known.locked(here) as free:
            if driver.jax_has_begun():
                raise NotChecked("this process uses the GPU already")
            if not free:
                raise NotChecked("another process is checking some on this card")
            if problem := _in_use(here):
                raise NotChecked(problem)
            say(
                f"new combination of {here.name}, versions and shapes; at most {seconds:.0f} s (--no-kernel-check "
                "skips this)"
            )
            return Known(facts, _searched(case, seconds), time.strftime("%Y-%m-%d %H:%M"))

    try:
        found: Known = kept(known.file_of(facts), Known, checked, again)
        return found.found
    except NotChecked as why:
        return Findings(notes=(f"the kernels are not checked: {why}; they are used as shipped",))


def _in_use(here: Card) -> str:
    """Return why nothing should be tried on a card now; empty where it is free, or soon becomes so."""
    for look in range(LOOKS):
        time.sleep(PAUSE if look else 0)
        if not (problem := driver.busy(here)):
            break
    return problem


def _searched(case: Case, seconds: float) -> Findings:
    """Return what a search finds, in processes of its own."""
    until = time.monotonic() + seconds
    try:
        with tempfile.TemporaryDirectory() as folder, closing(Children(child_environment(), Path(folder))) as running:
            if not case.interpret:  # what fails on another device than the run's is no kernel's fault
                outcome = running.measure(task("device", case), until)
                if outcome.kind not in ("DONE", "TIME"):
                    raise NotChecked(f"the processes that check them cannot get the card ({outcome.content})")
            found = search(case, lambda task: running.measure(task, until))
        if running.stuck is not None:
            raise Stuck(f"process {running.stuck} cannot be ended")
        return found
    except Stuck as stuck:
        raise NotChecked(f"{stuck}, and occupies the card") from None


def child_environment() -> dict[str, str]:
    """Return the environment of processes that have the card to themselves, and take only the memory that they need."""
    found = dict(os.environ)
    found["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    found.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    found.setdefault("JAX_CUDA_VISIBLE_DEVICES", "0")  # of those that CUDA shows this process
    if not found.get("JAX_COMPILATION_CACHE_DIR"):
        # Not the one of the runs: a process that is ended while it writes leaves a torn file, over which JAX trips at
        # every start.
        found["JAX_COMPILATION_CACHE_DIR"] = str(known.folder() / "xla")
    found.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    return found


# ----- the search: it measures nothing itself, and knows no clock ---------------------------------------------------


class Step(NamedTuple):
    """A whole step."""

    name: str
    rows: dict[str, str]  # of each operation what runs it; none: XLA's step, with which the others are compared
    options: Options  # of XLA
    seconds: float = 0.0  # 0: not known


def task(what: str, case: Case, **arguments: Any) -> Task:
    """Return a call of check.measure."""
    return Task(what, MODULE, {"what": what, "case": case, **arguments}, LIMITS[what])


def search(case: Case, attempt: Attempt) -> Findings:
    """Return what is found out in time; what is not runs as shipped. Raises what `attempt` raises."""
    listed, findings = candidates.listed(case), Findings()
    for number, finding in enumerate(listed, 1):
        say(f"{number}/{len(listed)} {finding.label}")
        if (tried := _tried(case, attempt, finding.label, "kernel", finding=finding)) is None:
            break
        found = finding._replace(problem=tried.problem, unjudged=tried.unjudged)
        findings = findings._replace(found=(*findings.found, found))
    findings = compare_steps(case, attempt, findings)
    if not findings.fastest:
        advice = f"what is not known runs as shipped; {typed('kernels')} --measure tries it"
        say(note := f"no whole step could be compared; {advice}")
        findings = findings._replace(notes=(*findings.notes, note))
    return findings


def compare_steps(case: Case, attempt: Attempt, findings: Findings) -> Findings:
    """Return the findings with the step that is right and the fastest, if time and memory suffice to compare them."""
    options, rows, notes = case.other_options, dict[str, list[str]](), list[str]()
    for operation, each in candidates.by_operation(case).items():  # what is not wrong, in order of preference
        rows[operation] = [row.name for row in each if not findings.problem(operation, row.name)]
    ours, xla = ({operation: each[at] for operation, each in rows.items()} for at in (0, -1))
    products = {name: row for name, row in ours.items() if name in PRODUCTS and row != xla[name]}
    ours |= {name: xla[name] for name in products}  # these come last, beside the step without them
    tried = _step(case, attempt, by_xla := Step("xla", {}, options))
    if tried is None or tried.problem:
        return findings._replace(notes=(f"XLA's step: {tried.problem}",) if tried else ())
    right = [by_xla._replace(rows=xla, seconds=tried.seconds)]
    attentions = rows.get("attention", [])[1:-1]  # that are right too
    for step in _attempts(ours, xla, attentions, options):
        if (tried := _step(case, attempt, step)) is None:
            break
        if not tried.problem:
            # where XLA is faster, the kernels that a flag names still run, and so need these options
            right = [right[0]._replace(options=step.options), step._replace(seconds=tried.seconds)]
            break
        notes.append(f"a whole step on {step.name}: {tried.problem}")
    tried_in_vain = ours if len(right) > 1 else ours | products
    findings = _with_wrong(findings, tried_in_vain.items() - right[-1].rows.items() if notes else (), notes)
    if tried is None:  # time or memory did not suffice; what was found wrong before counts
        return findings
    if products and len(right) > 1:
        findings = _products_beside(case, attempt, right, products, findings)
    best = _fastest(case, attempt, right, attentions)
    steps = tuple((step.name, step.seconds) for step in right)
    return findings._replace(fastest=tuple(best.rows.items()), options=best.options, steps=steps)


def _with_wrong(findings: Findings, spoilt: Collection[tuple[str, str]], notes: Sequence[str]) -> Findings:
    """Return findings with rows that spoil a whole step, and notes."""
    wrong = "a whole step with it is wrong"
    found = [each._replace(problem=wrong) if each.key in spoilt else each for each in findings.found]
    return findings._replace(found=tuple(found), notes=(*findings.notes, *notes))


def _products_beside(
    case: Case, attempt: Attempt, right: list[Step], products: dict[str, str], findings: Findings
) -> Findings:
    """Add the last step with products of ours to the right ones, if it is; return the findings, with what is wrong.

    They save passes over their result, so whole steps are compared; in turns, because the clock of a GPU moves more
    than these differ. What is not compared does not run.
    """
    plain = right[-1]
    ours = plain._replace(name=f"{plain.name}, products of ours", rows=plain.rows | products)
    tried = _step(case, attempt, ours, beside=plain)
    if tried is None:
        return findings
    if tried.problem:
        return _with_wrong(findings, products.items(), [f"a whole step on {ours.name}: {tried.problem}"])
    right[-1:] = [plain._replace(seconds=tried.beside or plain.seconds), ours._replace(seconds=tried.seconds)]
    return findings


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


def _fastest(case: Case, attempt: Attempt, right: list[Step], attentions: Sequence[str]) -> Step:
    """Return the fastest of steps that are right, with what else is worth a try added.

    attentions: that are right too. XLA's default options are tried on the fastest, and last, because XLA may time each
    product for them first.
    """

    def add(step: Step) -> None:
        tried = _step(case, attempt, step)
        if tried is not None and not tried.problem:
            right.append(step._replace(seconds=tried.seconds))

    def best(of: Sequence[Step] = right) -> Step:
        return min(of, key=lambda step: step.seconds or math.inf)

    if len(right) > 1 and attentions and (ours := best(right[1:])).rows["attention"] not in attentions:
        add(_with_attention(ours, attentions[0]))
    if case.other_options and best().seconds:
        options = tuple(option for option in best().options if option not in case.other_options)
        add(best()._replace(name=f"{best().name}, XLA's default products", options=options))
    return best()


def _step(case: Case, attempt: Attempt, step: Step, beside: Step | None = None) -> Tried | None:
    """Return what came of a step; None: time was up, the memory too small for two steps, or it could not be judged.

    beside: the one that is timed in turns with it.
    """
    say(name := f"a whole step on {step.name}")
    more = {} if beside is None else {"beside": tuple(beside.rows.items())}
    tried = _tried(case, attempt, name, "step", chosen=tuple(step.rows.items()), options=step.options, **more)
    return None if tried is None or tried.unjudged else tried


def _tried(case: Case, attempt: Attempt, name: str, what: str, **arguments: Any) -> Tried | None:
    """Return what came of a try, and say what is wrong; None: time was up."""
    outcome = attempt(task(what, case, **arguments))
    if outcome.kind == "TIME" and outcome.ran < HANGS:
        return None
    said, unjudged = str(outcome.content), outcome.kind in ("SKIPPED", "UNJUDGED")
    tried = outcome.content if outcome.kind == "DONE" else Tried(unjudged=said) if unjudged else Tried(said)
    if tried.problem or tried.unjudged:
        say(f"{name} is not {'used' if tried.problem else 'judged'}: {tried.problem or tried.unjudged}")
    return tried
