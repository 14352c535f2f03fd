"""What is known of this machine's kernels as text and as Markdown, and what is measured again for it.

Leaves out the command line (command.py).
"""

from collections.abc import Sequence
from dataclasses import replace

from llmc_jax.base import text
from llmc_jax.base.errors import InputError
from llmc_jax.base.streams import print_error
from llmc_jax.config.flags import step_config
from llmc_jax.kernels import Findings
from llmc_jax.machine.compiling import user_flags
from llmc_jax.machine.jax_setup import settle
from llmc_jax.plan.asked import model_of
from llmc_jax.plan.plan import make_plan
from llmc_jax.trials import candidates, known, start
from llmc_jax.trials.card import find_card
from llmc_jax.trials.here import case_of
from llmc_jax.trials.known import Known


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
    """Return a row for each implementation that was tried, and whether it runs; and for XLA's that run instead."""
    judged = {
        each.key: each.problem or (f"not judged: {each.unjudged}" if each.unjudged else "right") for each in found.found
    }
    keys = sorted({*judged, *found.fastest})
    return [[*key, judged.get(key, ""), "runs" if key in found.fastest else ""] for key in keys]


HEADINGS = ("operation", "implementation", "verdict", "")


def rest_of(found: Findings) -> list[str]:
    """Return what is not in the table: whole steps, options of XLA, what a user should know."""
    steps = [f"{name} {1e3 * seconds:.2f} ms" for name, seconds in found.steps if seconds]
    lines = [f"whole steps: {', '.join(steps)}"] if steps else []
    return [*lines, *(f"compiled with {name}={str(value).lower()}" for name, value in found.options), *found.notes]


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


def measure(words: Sequence[str], seconds: float) -> str:
    """Find out again what the run of train.py's words needs to know; return it as text.

    Raises InputError where there is no GPU for it.
    """
    config, _ = step_config(words)
    for note in settle(steps=True):
        print_error(f"note: {note}")
    here = find_card()
    if here is None:
        raise InputError("--measure: there is no NVIDIA GPU here that JAX would use; there is nothing to measure")
    config = replace(config, strict_kernels=False)  # what cannot run is not tried
    case = case_of(make_plan(config, model_of(config.init_from or config.model), here.machine, xla_flags=user_flags()))
    if not candidates.listed(case):
        return f"{here.name}: each operation has only one possible implementation, so there is nothing to measure"
    found = start.find_out(case, here, again=True, seconds=seconds)
    if not found.found:
        raise InputError(f"--measure: {'; '.join(found.notes)}")
    return shown(Known(known.facts_of(case, here), found, "now"))
