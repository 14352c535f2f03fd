"""The plan's command line: llmc-jax plan --help. Its flags are those of train.py, and its own."""

import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from llmc_jax.base.commands import program_name, typed
from llmc_jax.base.errors import ExitCode
from llmc_jax.base.kit import command_line, help_page
from llmc_jax.base.options import ABOVE_ZERO, SCREEN, own
from llmc_jax.base.parsers import write_json
from llmc_jax.config.flags import take_own
from llmc_jax.machine.jax_setup import settle
from llmc_jax.plan.asked import asked_config

if TYPE_CHECKING:
    from llmc_jax.plan.answer import Wishes

OWN = (
    own("--gpu", "NAME", None, "the GPU to plan for: h100, a100, rtx4090 and more (an unknown name lists all), or its "
        "driver's name; without it the device at hand"),
    own("--quick", "", False, "compute the memory, compile nothing"),
    own("--operations", "", False, "also a line for each operation: FLOPs, bytes, floor, time", excludes="sweep"),
    own("--sweep", "NAME=LIST", None, "only a table, over values of gpu or one of train.py's options: devices=1,2,4,8"),
    own("--tokens", "X", None, "train on this many tokens, such as 10e9, instead of -x", 1),
    own("--price", "X", None, "USD for an hour of one GPU; default: from llmc_jax/plan/prices.toml", 0),
    own("--network", "GBIT", None, "Gbit/s of each GPU between machines (default: 400)", check=ABOVE_ZERO),
    own("--json", "FILE", None, "write everything to it as JSON; - prints it instead of the report", writes="- *"),
)  # fmt: skip


def help_text() -> str:
    """Return what --help prints."""
    return help_page(
        typed("plan"),
        "Does it fit, how fast is it, how long does it take, what does it cost: for any GPU and any number of them, "
        "none of which need be here. Takes every flag of train.py (--preset -e -b -t -d -r -z --devices -x and so on; "
        "without --preset and -e: d12); token files need not be here either, nor the checkpoints of presets. Nothing "
        "is trained. The exit status is 0 also where it does not fit. docs/plan.md explains every figure and where it "
        "comes from.",
        OWN,
        (
            ("-e d12 -b 64 -d 524288 --gpu h100 --devices 8", "GPT-2 124M on eight H100s"),
            ("--preset gpt2-1558M --gpu h100 --devices 8 --quick", "llm.c's launch, in two seconds"),
            ("-e d12 --gpu a100 --sweep devices=1,2,4,8", "how it scales"),
            ("-e d48 -b 4 --sweep gpu=rtx4090,a100,h200", "where it would fit"),
            ("-e d12 -b 4 -t 64", "the device at hand; a CPU is measured first, for some four seconds"),
        ),
    )


@command_line("plan")
def main(words: list[str]) -> int:
    """Run `llmc-jax plan`. The exit status is 0 also where it does not fit."""
    if "--help" in words:
        print(help_text())
        return ExitCode.DONE
    own, rest = take_own(words, OWN)
    for note in settle():
        _say(note)
    content, text = (_sweep if own.sweep else _answer)(rest, own)
    if own.json:
        write_json(content, own.json)
    if own.json != SCREEN:
        print(text)
    return ExitCode.DONE


def _say(words: str) -> None:
    """Say what takes seconds, where it does not mix with the answer."""
    print(f"{program_name('plan')}: {words}", file=sys.stderr, flush=True)


# ----- what is shown: as --json has it, and as text -------------------------------------------------------------------


def _wishes(own: SimpleNamespace) -> "Wishes":
    from llmc_jax.plan.answer import Wishes  # here, because --help and errors do without JAX

    return Wishes(own.quick, own.tokens, own.price, own.network)


def _answer(words: list[str], own: SimpleNamespace) -> tuple[dict[str, Any], str]:
    """Return the answer to one configuration."""
    from llmc_jax.plan.answer import answer, as_json
    from llmc_jax.plan.report import as_text

    found = answer(asked_config(words), own.gpu, _wishes(own), _say)
    return as_json(found), as_text(found, operations=own.operations)


def _sweep(words: list[str], own: SimpleNamespace) -> tuple[dict[str, Any], str]:
    """Return the table of --sweep."""
    from llmc_jax.plan.answer import as_json
    from llmc_jax.plan.sweep import parse_sweep, rows_table, swept

    sweep = parse_sweep(own.sweep)
    rows = swept(asked_config(words), own.gpu, sweep, _wishes(own))
    content = [row._asdict() | {"answer": row.answer and as_json(row.answer)} for row in rows]
    return {"sweep": content}, rows_table(sweep[0], rows)
