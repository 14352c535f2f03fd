"""Several versions of a step in turns: another implementation or precision.

Each runs in a process of its own, which compiles its step and then waits to be asked for steps, so that all see the
same machine; a figure is the median of the ratios of neighbouring blocks. Leaves out what a step is made of.
"""

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from llmc_jax.base.commands import ROOT
from llmc_jax.base.errors import InputError
from llmc_jax.base.text import table
from llmc_jax.config.flags import step_config
from llmc_jax.config.train import OPTIONS
from llmc_jax.machine.jax_setup import child_environment


class Variant(NamedTuple):
    """One version to run."""

    label: str
    words: tuple[str, ...]  # flags of train.py


def parse_variant(text: str, words: Sequence[str]) -> Variant:
    """Return a variant from `NAME=VALUE`, a flag of train.py. Raises InputError for another."""
    name, equals, value = text.partition("=")
    flag = name.replace("_", "-")
    if not equals or not value:
        raise InputError(f"--vs {text}: must be NAME=VALUE, such as kernels=xla, dtype=bf16")
    about = next((each for each in OPTIONS if flag in (each.long_flag[2:], *(f[1:] for f in each.flags))), None)
    if about is None:
        raise InputError(f"--vs {text}: there is no flag --{flag}; train.py --help lists them")
    changed = (*words, f"{about.long_flag}={value}")
    step_config(changed)
    return Variant(text, changed)


# ----- one process per variant --------------------------------------------------------------------------------------


@contextmanager
def running(variant: Variant) -> Iterator[Callable[[str], dict[str, Any]]]:
    """Start a process that makes steps of a variant; yield what hands it a line and returns its answer.

    It answers without a line once its step is compiled. Where it cannot continue, InputError has what it says.
    """
    environment = child_environment() | {"PYTHONPATH": str(ROOT), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    with tempfile.TemporaryFile("w+") as errors, subprocess.Popen(
        [sys.executable, "-P", "-m", "llmc_jax", "profile", "--worker", *variant.words],  # here: paths may be relative
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment,
    ) as process:  # fmt: skip
        given, said = process.stdin, process.stdout
        assert given is not None and said is not None

        def answer(line: str) -> dict[str, Any]:
            with contextlib.suppress(OSError):  # it has ended: then there is no answer either
                given.write(line)
                given.flush()
            text = said.readline()
            if text.startswith("{"):
                found: dict[str, Any] = json.loads(text)
                return found
            process.wait()
            errors.seek(0)
            last = errors.read().strip().splitlines() or [f"its process ended with status {process.returncode}"]
            raise InputError(f"{variant.label}: {last[-1]}")

        try:
            yield answer
        finally:
            process.terminate()
            with contextlib.suppress(OSError):  # a line that it did not live to read
                given.close()


def serve(words: Sequence[str]) -> int:
    """Be the other side: prepare the step that the words describe, then make as many as each line of input says."""
    config, _ = step_config(words)
    from llmc_jax.machine import jax_setup

    jax_setup.configure(tf32=config.tf32)
    from llmc_jax.profile.measure import prepared

    bench = prepared(config)
    print(json.dumps({"tokens": bench.tokens}), flush=True)
    for line in sys.stdin:
        print(json.dumps({"seconds": bench.steps(int(line), 1)}), flush=True)
    return 0


# ----- in turns -----------------------------------------------------------------------------------------------------


class Result(NamedTuple):
    """How one variant did."""

    label: str
    seconds: float  # median over the blocks
    low: float  # least block
    high: float  # slowest block
    ratio: float  # of its speed to the first variant's, median over the rounds: above 1 is faster
    ratio_low: float
    ratio_high: float
    tokens: int  # of a step


def ratios(first: Sequence[float], other: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, least and greatest of how many times as fast the other is, round by round."""
    found = sorted(a / b for a, b in zip(first, other, strict=True))
    return statistics.median(found), found[0], found[-1]


def compare(variants: Sequence[Variant], rounds: int, steps: int) -> list[Result]:
    """Run the variants in turns: in each round a block of steps of each; the first is what the others are held to."""
    with contextlib.ExitStack() as stack:
        workers, tokens = [], []
        for variant in variants:
            workers.append(stack.enter_context(running(variant)))  # after the last: compilations disturb each other
            tokens.append(workers[-1]("")["tokens"])
        blocks: list[list[float]] = [[] for _ in workers]
        for _ in range(rounds):
            for worker, found in zip(workers, blocks, strict=True):
                found.append(statistics.median(worker(f"{steps}\n")["seconds"]))
    return [
        Result(variant.label, statistics.median(found), min(found), max(found), *ratios(blocks[0], found), count)
        for variant, found, count in zip(variants, blocks, tokens, strict=True)
    ]


def as_text(results: Sequence[Result]) -> str:
    """Return the comparison as a table for the screen."""
    rows = [
        [
            each.label, f"{1e3 * each.seconds:.2f}", f"({1e3 * each.low:.2f} - {1e3 * each.high:.2f})",
            f"{each.tokens / each.seconds:,.0f}",
            f"{each.ratio:.3f}", f"({each.ratio_low:.3f} - {each.ratio_high:.3f})",
        ]
        for each in results
    ]  # fmt: skip
    headings = ["", "ms", "(least - most)", "tok/s", "times as fast", "(lowest - highest)"]
    return table(headings, rows, left=[""], optional=("tok/s", "(least - most)"))
