"""The plan's command line: llmc-jax plan --help. Its flags are those of train.py, and its own."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from llmc_jax.base.commands import program_name, typed
from llmc_jax.base.errors import ExitCode, InputError
from llmc_jax.base.files import plain, write_atomic
from llmc_jax.base.kit import command_line, help_page, print_json
from llmc_jax.base.options import ABOVE_ZERO, SCREEN, own
from llmc_jax.config.flags import take_own
from llmc_jax.machine.jax_setup import settle
from llmc_jax.plan.asked import asked_config

if TYPE_CHECKING:
    from llmc_jax.plan.answer import Wishes

OWN = (
    own("--gpu", "NAME", None, "the GPU to plan for: h100, a100, rtx4090 and more (an unknown name lists all), its "
        "driver's name, or a .toml file of your own (docs/plan.md); without it the device at hand"),
    own("--quick", "", False, "compute the memory, compile nothing"),
    own("--operations", "", False, "also a line for each operation: FLOPs, bytes, floor, time", excludes="sweep"),
    own("--neighbours", "", False, "also what is near: other GPUs, numbers of them, -b, -r and -z",
        excludes="sweep"),
    own("--sweep", "NAME=LIST", None, "only a table, over values of gpu or one of train.py's options: devices=1,2,4,8"),
    own("--picture", "FILE", None, "with --sweep: draw it there: .png, .svg, .pdf", needs="sweep",
        why="as in --sweep devices=1,2,4,8", writes=".png .svg .pdf"),
    own("--reproductions", "", False, "only llm.c's four reproductions of GPT-2, beside what llm.c says of them",
        excludes="gpu operations neighbours sweep tokens price network", why="it takes llm.c's launches as they are"),
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
            ("-e d48 -b 4 --gpu rtx4090 --neighbours", "what would fit instead"),
            ("-e d12 --gpu a100 --sweep devices=1,2,4,8 --picture sweep.png", "how it scales"),
            ("--reproductions", "what llm.c's four runs would need"),
            ("-e d12 -b 4 -t 64", "the device at hand; a CPU is measured first, for some twelve seconds"),
        ),
    )


@command_line("plan")
def main(words: list[str]) -> int:
    """Run `llmc-jax plan`. The exit status is 0 also where it does not fit."""
    if "--help" in words:
        print(help_text())
        return ExitCode.DONE
    own, rest = take_own(words, OWN)
    if own.reproductions and rest:
        raise InputError(f"--reproductions: takes llm.c's launches as they are; leave out {' '.join(rest)}")
    for note in settle():
        _say(note)
    show = _reproductions if own.reproductions else _sweep if own.sweep else _answer
    from llmc_jax.plan.answer import Wishes  # here, because --help and errors do without JAX

    content, text = show(rest, own, Wishes(own.quick, own.tokens, own.price, own.network))
    if own.json:
        _write(own.json, content)
    if own.json != SCREEN:
        print(text)
    return ExitCode.DONE


def _say(words: str) -> None:
    """Say what takes seconds, where it does not mix with the answer."""
    print(f"{program_name('plan')}: {words}", file=sys.stderr, flush=True)


# ----- what is shown: as --json has it, and as text -------------------------------------------------------------------


def _answer(words: list[str], own: SimpleNamespace, wanted: "Wishes") -> tuple[dict[str, Any], str]:
    """Return the answer to one configuration, and its neighbours where they are asked for."""
    from llmc_jax.plan.answer import answer, as_json
    from llmc_jax.plan.neighbours import neighbours, rows_table
    from llmc_jax.plan.report import as_text

    config = asked_config(words)
    found = answer(config, own.gpu, wanted, _say)
    content, table = as_json(found), ""
    if own.neighbours:
        rows = neighbours(replace(config, batch_size=found.setting.batch_size), own.gpu, wanted)
        content, table = content | {"neighbours": rows}, rows_table(rows)
    return content, as_text(found, operations=own.operations, more=table)


def _sweep(words: list[str], own: SimpleNamespace, wanted: "Wishes") -> tuple[dict[str, Any], str]:
    """Return the table of --sweep, and draw it where --picture says so."""
    from llmc_jax.plan.neighbours import draw_sweep, parse_sweep, rows_table, swept, title_of

    sweep, config = parse_sweep(own.sweep), asked_config(words)
    rows = swept(config, own.gpu, sweep, wanted)
    if own.picture:
        draw_sweep(rows, Path(own.picture), title_of(sweep[0], config.model, own.gpu))
    return {"sweep": rows}, rows_table(rows)


def _reproductions(words: list[str], own: SimpleNamespace, wanted: "Wishes") -> tuple[dict[str, Any], str]:
    """Return llm.c's reproductions."""
    from llmc_jax.plan.neighbours import reproductions, reproductions_table

    found = list(reproductions())
    content = [{"published": published, "row": row} for published, row in found]
    return {"reproductions": content}, reproductions_table(found)


def _write(path: str, content: dict[str, Any]) -> None:
    """Write --json's file, or print it."""
    from llmc_jax.base.plain import to_json

    if path == SCREEN:
        print_json(plain(to_json(content)))
    else:
        write_atomic(Path(path), (json.dumps(plain(to_json(content)), indent=1) + "\n").encode())
