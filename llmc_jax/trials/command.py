"""What is known of this machine's kernels, shown and measured again: llmc-jax kernels --help."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from llmc_jax.base import text
from llmc_jax.base.commands import typed
from llmc_jax.base.errors import InputError
from llmc_jax.base.files import refusing
from llmc_jax.base.kit import command_line, help_page
from llmc_jax.base.options import own
from llmc_jax.base.streams import print_error
from llmc_jax.config.flags import step_config, take_own

if TYPE_CHECKING:  # --help does without JAX
    from llmc_jax.kernels import Findings
    from llmc_jax.trials.known import Known

ACTIONS = "measure clear"
OWN = (
    own("--measure", "", False, "measure again, for the run that flags of train.py describe (-e -b -t --dtype -r "
        "--kernels …)", excludes=ACTIONS),
    own("--seconds", "N", 600, "with --measure: how long that may take"),  # it is in no hurry
    own("--clear", "", False, "forget all of it, and the programs that were compiled: new runs compile theirs again",
        excludes=ACTIONS),
)  # fmt: skip
ABOUT = (
    "Shows which kernels are correct on this machine's GPUs, how fast steps on them are, and which run. train.py finds "
    "it out for new GPUs, versions and shapes; docs/kernels/check.md explains how. Flags of train.py go with --measure "
    "alone."
)
EXAMPLES = (("--measure -e d12 -b 64 -t 1024", "measure again, for GPT-2 124M"),)
HEADINGS = ("operation", "implementation", "verdict", "")


@command_line("kernels")
def main(words: list[str]) -> None:
    """Run `llmc-jax kernels`."""
    if "--help" in words or "-h" in words:
        print(help_page(typed("kernels"), ABOUT, OWN, EXAMPLES))
        return
    given, rest = take_own(words, OWN)
    if rest and not given.measure:
        raise InputError(f"{rest[0]}: goes with --measure alone")
    from llmc_jax.trials import known

    if given.measure:
        print(measure(rest, float(given.seconds)))
    elif given.clear:
        with refusing(f"{known.folder()}: cannot be cleared", "check its permissions"):
            print(f"{known.folder()}: {known.clear()} combinations forgotten, and the programs of earlier runs")
    elif everything := known.all_known():
        print("\n\n".join(map(shown, everything)))
    else:
        nothing = f"Nothing is known about this machine's kernels: {known.folder()} is empty"
        print(f"{nothing}; train.py measures them on a GPU, and so does --measure")


def rows(found: "Findings") -> list[list[str]]:
    """Return a row for each implementation that was tried, and whether it runs; and for XLA's that run instead."""
    judged = {
        each.key: each.problem or (f"not judged: {each.unjudged}" if each.unjudged else "right") for each in found.found
    }
    keys = sorted({*judged, *found.fastest})
    return [[*key, judged.get(key, ""), "runs" if key in found.fastest else ""] for key in keys]


def shown(each: "Known") -> str:
    """Return a combination as text: what it consists of, what was tried, and what else was found."""
    from llmc_jax.trials.known import sources_digest

    facts, case, found, width = each.facts, each.facts["case"], each.found, text.screen_width()
    model = ", ".join(f"{name} {value}" for name, value in case["model"].items() if isinstance(value, int))
    batch = f"B={case['batch_size']} T={case['sequence_length']} -r {case['recompute']}"
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    card = f"{facts['card']}, driver {facts['driver'] or 'unknown'}"
    other = "" if facts["sources"] == sources_digest() else " (other kernels than these)"
    heading = f"{model}; {batch}, {case['dtype']}: {card}; {versions}; {each.date}{other}"
    body = text.table(HEADINGS, rows(found), left=HEADINGS, width=width)
    steps = [f"a whole step on {name}: {1e3 * seconds:.2f} ms" for name, seconds in found.steps if seconds]
    options = [f"compiled with {name}={str(value).lower()}" for name, value in found.options]
    return "\n".join([text.wrapped(heading, width), "", body, *steps, *options, *found.notes])


def measure(words: Sequence[str], seconds: float) -> str:
    """Find out again what the run of train.py's words needs to know; return it as text.

    Raises InputError where there is no GPU for it.
    """
    from llmc_jax.machine.compiling import user_flags
    from llmc_jax.machine.driver import seen_cards
    from llmc_jax.machine.jax_setup import settle
    from llmc_jax.plan.asked import model_of
    from llmc_jax.plan.plan import make_plan
    from llmc_jax.trials import candidates, known, start
    from llmc_jax.trials.here import case_of

    config = step_config(words)
    for note in settle(steps=True):
        print_error(f"note: {note}")
    if not (cards := seen_cards()):
        raise InputError("--measure: there is no NVIDIA GPU here that JAX would use; there is nothing to measure")
    here = cards[0]
    config = replace(config, strict_kernels=False)  # what cannot run is not tried
    case = case_of(make_plan(config, model_of(config.init_from or config.model), here.machine, xla_flags=user_flags()))
    if not candidates.listed(case):
        return f"{here.name}: each operation has only one possible implementation, so there is nothing to measure"
    found = start.find_out(case, here, again=True, seconds=seconds)
    if not found.found:
        raise InputError(f"--measure: {'; '.join(found.notes)}")
    return shown(known.Known(known.facts_of(case, here), found, "now"))
