"""What is known of this machine's kernels: llmc-jax kernels --help."""

import textwrap
from collections.abc import Sequence
from dataclasses import replace

from llmc_jax.base import text
from llmc_jax.base.commands import typed
from llmc_jax.base.errors import InputError
from llmc_jax.base.kit import help_page, run_words
from llmc_jax.base.streams import print_error
from llmc_jax.config.flags import own, step_config, take_own
from llmc_jax.kernels import Findings
from llmc_jax.machine.jax_setup import settle
from llmc_jax.trials import known
from llmc_jax.trials.known import Known

ACTIONS = ("--report", "--measure", "--clear")
OWN = (
    own("--report", "", False, "the same as Markdown, with the versions: what a bug report needs"),
    own("--measure", "", False, "measure again, for the run that flags of train.py describe (-e -b -t --dtype -r "
        "--kernels …)"),
    own("--seconds", "N", 600, "with --measure: how long that may take"),  # it is in no hurry
    own("--clear", "", False, "forget all of it, and the programs that were compiled: new runs compile theirs anew"),
)  # fmt: skip
ABOUT = (
    "Shows which kernels are correct on this machine's GPUs, how fast they are, and which run. train.py measures it "
    "for new GPUs, versions and shapes; docs/kernels/check.md explains how. Flags of train.py go with --measure alone."
)
EXAMPLES = (("--measure -e d12 -b 64 -t 1024", "measure again, for GPT-2 124M"), ("--report", "for a bug report"))


# ----- what is shown ------------------------------------------------------------------------------------------------


def heading(each: Known) -> str:
    """Return a combination in one line."""
    facts, case = each.facts, each.facts["case"]
    model = case["model"]
    shape = f"L{model['num_layers']}-NH{model['num_heads']}-C{model['channels']}-V{model['vocab_size']}"
    batch = f"B={case['batch_size']} T={case['sequence_length']} -r {case['recompute']}"
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    other = "" if facts["sources"] == known.sources_digest() else " (other kernels than these)"
    card = f"{facts['card']}, driver {facts['driver'] or 'unknown'}"
    return f"{shape}, {batch}, {case['dtype']}: {card}; {versions}; {each.date}{other}"


def rows(found: Findings) -> list[list[str]]:
    """Return a row for each implementation that was tried, and whether it runs."""
    runs = {each.key for each in found.fastest}
    return [
        [
            each.operation, " ".join(filter(None, [each.implementation, each.variant.text])),
            f"{each.us:,.0f}" if each.us else "",
            each.problem or (f"not judged: {each.unjudged}" if each.unjudged else "right"),
            "runs" if each.key in runs else "",
        ]
        for each in sorted(found.found, key=lambda each: each.operation)
    ]  # fmt: skip


HEADINGS = ("operation", "implementation", "us in a step", "verdict", "")


def rest_of(found: Findings) -> list[str]:
    """Return what is not in the table: whole steps, options of XLA, what a user should know."""
    steps = [f"{name} {1e3 * seconds:.2f} ms" for name, seconds in found.steps if seconds]
    lines = [f"whole steps: {', '.join(steps)}"] if steps else []
    lines += [f"compiled with {name}={str(value).lower()}" for name, value in found.options]
    return [*lines, *found.notes, *([] if found.complete else ["not complete: the next start continues"])]


def shown(each: Known) -> str:
    """Return a combination as text."""
    width = text.screen_width()
    body = text.table(HEADINGS, rows(each.found), left=HEADINGS, width=width)
    return "\n".join([text.wrapped(heading(each), width), "", body, *rest_of(each.found)])


def report(everything: Sequence[Known]) -> str:
    """Return all that is known as Markdown."""
    lines = []
    for each in everything:
        lines += [f"### {heading(each)}", "", f"| {' | '.join(HEADINGS)} |", f"|{'---|' * len(HEADINGS)}"]
        lines += ["| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in rows(each.found)]
        lines += ["", *(f"- {line}" for line in rest_of(each.found)), ""]
    return "\n".join(lines)


# ----- what is done -------------------------------------------------------------------------------------------------


def measure(words: Sequence[str], seconds: float) -> str:
    """Find out again what the run of train.py's words needs to know; return it as text.

    Raises InputError where there is no GPU for it.
    """
    from llmc_jax.machine.compiling import user_flags
    from llmc_jax.plan.asked import model_of
    from llmc_jax.plan.plan import make_plan
    from llmc_jax.trials import candidates, start
    from llmc_jax.trials.card import find_card
    from llmc_jax.trials.here import case_of

    config, _ = step_config(words)
    for note in settle(steps=True):
        print_error(f"note: {note}")
    here = find_card()
    if here is None:
        raise InputError("--measure: there is no NVIDIA GPU here that JAX would use; there is nothing to measure")
    config = replace(config, strict_kernels=False)  # what cannot run is not tried
    case = case_of(make_plan(config, model_of(config.model), here.machine, xla_flags=user_flags()))
    if not candidates.listed(case):
        return f"{here.name}: each operation has only one possible implementation, so there is nothing to measure"
    found = start.find_out(case, here, again=True, seconds=seconds)
    if not found.found:
        raise InputError(f"--measure: {'; '.join(found.notes)}")
    return shown(Known(known.facts_of(case, here), found, "now"))


def _run(words: list[str]) -> None:
    if "--help" in words or "-h" in words:
        print(help_page(typed("kernels"), ABOUT, OWN, EXAMPLES))
        return
    given, rest = take_own(words, OWN)
    actions = [flag for flag in ACTIONS if getattr(given, flag[2:])]
    if len(actions) > 1:
        raise InputError(f"{actions[0]} and {actions[1]}: only one of them at a time")
    if rest and not given.measure:
        raise InputError(f"{rest[0]}: goes with --measure alone")
    if given.measure:
        print(measure(rest, float(given.seconds)))
    elif given.clear:
        print(f"{known.folder()}: {known.clear()} combinations forgotten")
        cleared = f"{known.run_programs()}: {known.clear_programs()} forgotten"
        print(f"{cleared}; new runs choose their products' algorithms anew")
    elif given.report:
        print(report(known.all_known()) or "Nothing is known about this machine's kernels.")
    else:
        nothing = f"Nothing is known about this machine's kernels: {known.folder()} is empty. train.py measures them "
        empty = textwrap.fill(nothing + "on a GPU, and so does --measure.", 100)
        print("\n\n".join(map(shown, known.all_known())) or empty)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    return run_words("kernels", _run, argv)
