"""What is known of this machine's kernels: llmc-jax kernels --help."""

import textwrap

from llmc_jax.base.commands import typed
from llmc_jax.base.errors import InputError
from llmc_jax.base.kit import command_line, help_page
from llmc_jax.base.options import own
from llmc_jax.config.flags import take_own

ACTIONS = "report measure clear"
OWN = (
    own("--report", "", False, "the same as Markdown, with the versions: what a bug report needs",
        excludes=ACTIONS),
    own("--measure", "", False, "measure again, for the run that flags of train.py describe (-e -b -t --dtype -r "
        "--kernels …)", excludes=ACTIONS),
    own("--seconds", "N", 600, "with --measure: how long that may take"),  # it is in no hurry
    own("--clear", "", False, "forget all of it, and the programs that were compiled: new runs compile theirs again",
        excludes=ACTIONS),
)  # fmt: skip
ABOUT = (
    "Shows which kernels are correct on this machine's GPUs, how fast they are, and which run. train.py measures it "
    "for new GPUs, versions and shapes; docs/kernels/check.md explains how. Flags of train.py go with --measure alone."
)
EXAMPLES = (("--measure -e d12 -b 64 -t 1024", "measure again, for GPT-2 124M"), ("--report", "for a bug report"))


@command_line("kernels")
def main(words: list[str]) -> None:
    """Run `llmc-jax kernels`."""
    if "--help" in words or "-h" in words:
        print(help_page(typed("kernels"), ABOUT, OWN, EXAMPLES))
        return
    given, rest = take_own(words, OWN)
    if rest and not given.measure:
        raise InputError(f"{rest[0]}: goes with --measure alone")
    from llmc_jax.trials import known, shown  # here, because --help does without JAX

    if given.measure:
        print(shown.measure(rest, float(given.seconds)))
    elif given.clear:
        print(f"{known.folder()}: {known.clear()} combinations forgotten")
        cleared = f"{known.run_programs()}: {known.clear_programs()} forgotten"
        print(f"{cleared}; new runs choose their products' algorithms again")
    elif given.report:
        print(shown.report(known.all_known()) or "Nothing is known about this machine's kernels.")
    else:
        nothing = f"Nothing is known about this machine's kernels: {known.folder()} is empty. train.py measures them "
        empty = textwrap.fill(nothing + "on a GPU, and so does --measure.", 100)
        print("\n\n".join(map(shown.shown, known.all_known())) or empty)
