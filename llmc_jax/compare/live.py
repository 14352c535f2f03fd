"""A trainer of llm.c and ours on the same checkpoint, data and flags, one after the other: losses and time per step.

The trainers are llm.c's train_gpt2 (CPU), train_gpt2fp32cu and train_gpt2cu, as built by the user. Leaves out
reading what they print (logs/reading.py) and the sizes of differences (logs.py).
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import batched, chain
from pathlib import Path
from typing import Any, NamedTuple

from llmc_jax.base.child import end_of
from llmc_jax.base.errors import ExitCode, InputError
from llmc_jax.base.files import refusing
from llmc_jax.base.options import own
from llmc_jax.base.streams import escaped
from llmc_jax.base.text import wrapped
from llmc_jax.checkpoint.llmc import read_header
from llmc_jax.compare import logs
from llmc_jax.compare.tensors import Show
from llmc_jax.config.checks import validate
from llmc_jax.config.flags import parse_args
from llmc_jax.config.train import AUTO_BATCH
from llmc_jax.data.tokenizers import write_tokenizer_bin
from llmc_jax.logs.curves import median
from llmc_jax.logs.reading import Log, read_log
from llmc_jax.machine.jax_setup import child_environment

CPU, FP32, CUDA = "train_gpt2", "train_gpt2fp32cu", "train_gpt2cu"  # the names that llm.c's Makefile gives them
FILES = {  # what stands for a flag in their working folder
    "-e": "gpt2_124M.bin",
    "-i": "dev/data/tinyshakespeare/tiny_shakespeare_train.bin",
    "-j": "dev/data/tinyshakespeare/tiny_shakespeare_val.bin",
}
FIXED = {CPU: tuple(FILES), FP32: ("-e",), CUDA: ()}  # flags that a trainer does not have: it opens those files
TOKENIZER_FILE = "gpt2_tokenizer.bin"
CPU_SEQUENCE = 64  # T of train_gpt2.c
NAMES = ("llm.c", "ours")
ROWS = 50
LAST_LINES = 8  # shown of a program that failed
LLMC_OUTPUT, OUR_FOLDER = "llmc.txt", "ours"

# What each takes, in llm.c's spelling. -e names the checkpoint that the first two find under a fixed name.
FLAGS = {
    CPU: FIXED[CPU],
    FP32: (*FILES, "-b", "-t", "-l", "-v", "-m", "-s", "-g"),
    CUDA: (
        *FILES, "-b", "-t", "-d", "-x", "-k", "-l", "-u", "-q", "-c", "-sl", "-sg", "-v", "-m", "-s", "-g", "-h", "-a",
        "-f", "-w", "-ge", "-r", "-lg", "-z", "-pn", "-pr", "-pg", "-pi", "-ps", "-pf",
    ),
}  # fmt: skip
# Ours beside each: llm.c's presets, without the samples of the CPU trainer, whose text is not compared.
BESIDE = {
    CPU: ["--preset", "llmc-cpu", "--dtype", "fp32", "-s", "0"],
    FP32: ["--preset", "llmc-fp32", "--dtype", "fp32"],
    CUDA: ["--devices", "1"],  # as llm.c's program without mpirun
}
PRECISION = re.compile(r"^\| precision +\| (FP32|TF32|FP16|BF16) ", re.MULTILINE)


class Comparison(NamedTuple):
    """What will be run."""

    kind: str  # CPU, FP32 or CUDA
    executable: Path
    flags: dict[str, str]  # as the user gave them, for both
    extra: list[str]  # words for us alone


# ----- what is asked for --------------------------------------------------------------------------------------------


def make_comparison(executable: str, kind: str | None, flags: Sequence[str], extra: Sequence[str]) -> Comparison:
    """Return what will be run for an executable and the words after `--`. Raises InputError if it cannot be run so."""
    path = Path(executable).resolve()
    if not (path.is_file() and os.access(path, os.X_OK)):
        raise InputError(f"{executable}: no program; give the path of a built trainer of llm.c, such as llm.c/{CPU}")
    kind = kind or path.name
    if kind not in FLAGS:
        known = "|".join(FLAGS)
        raise InputError(f"{path}: {kind} is not a trainer of llm.c by its name; if it is one, give --kind {known}")
    comparison = Comparison(kind, path, _pairs(kind, flags), list(extra))
    config = parse_args(our_words(comparison, Path("ours"), None))
    if config.batch_size == AUTO_BATCH:
        raise InputError(f"-b auto: {kind} takes a number; give both the same")
    validate(config)
    return comparison if kind == CUDA else comparison._replace(flags=_with_files(kind, comparison.flags))


def _pairs(kind: str, words: Sequence[str]) -> dict[str, str]:
    """Return the flags with their values. Only what both programs know is let through, in llm.c's spelling."""
    pairs: dict[str, str] = {}
    for flag, *value in batched(words, 2):
        if flag not in FLAGS[kind]:
            known = " ".join(FLAGS[kind])
            raise InputError(f"{flag}: {kind} and ours share the flags {known}; for ours alone there is --ours")
        if not value:
            raise InputError(f"{flag}: its value must follow")
        pairs[flag] = value[0]
    return pairs


def our_words(comparison: Comparison, folder: Path, dtype: str | None) -> list[str]:
    """Return our command line; folder: the run folder to make; dtype: what llm.c computes in, where that is known."""
    given = chain.from_iterable(comparison.flags.items())
    precision = ["--dtype", dtype] if dtype else []
    return [*BESIDE[comparison.kind], *given, *precision, "--no-save", "-o", str(folder), *comparison.extra]


def _with_files(kind: str, given: Mapping[str, str]) -> dict[str, str]:
    """Return the flags with the files that the programs take by themselves, and with full paths.

    Raises InputError where one is missing: both would stop there, one with an assertion.
    """
    flags = {**FILES, **given}
    for flag in FILES:
        flags[flag] = os.path.abspath(flags[flag])
        if (flag == "-e" or kind == CPU) and not Path(flags[flag]).is_file():
            raise InputError(f"{flags[flag]}: there is no such file; name it with {flag}, behind --")
    header = read_header(flags["-e"])
    if header.version != 3:
        raise InputError(f"{flags['-e']}: version {header.version}; {kind} reads version 3 alone")
    if kind == CPU and header.config.max_seq_len < CPU_SEQUENCE:
        raise InputError(f"{flags['-e']}: max_seq_len is below {CPU_SEQUENCE}, the T that {CPU} trains with")
    return flags


# ----- running ------------------------------------------------------------------------------------------------------


@contextmanager
def work_folder(keep: str | None) -> Iterator[Path]:
    """Yield the folder for what both write: kept, or gone afterwards. Raises InputError if it holds something."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="llmc-jax-compare-") as folder:
            yield Path(folder)
        return
    with refusing(f"--keep {keep}: cannot be made", "choose another"):
        Path(keep).mkdir(parents=True, exist_ok=True)
        if any(Path(keep).iterdir()):
            raise InputError(f"--keep {keep}: the folder is not empty; choose another")
    yield Path(keep).resolve()


def lay_out(comparison: Comparison, folder: Path) -> None:
    """Make the working folder of a program that opens its files under fixed names: links to the ones it needs.

    Without a tokenizer llm.c begins its samples with an undefined token; where there is none, or one of another
    vocabulary, it gets a table whose end-of-text is V - 1.
    """
    for flag in FIXED[comparison.kind]:
        link = folder / FILES[flag]
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(comparison.flags[flag])
    vocabulary = read_header(comparison.flags["-e"]).config.vocab_size
    given = Path(TOKENIZER_FILE).absolute()
    if given.is_file() and vocabulary == 50257:
        (folder / TOKENIZER_FILE).symlink_to(given)
    else:
        write_tokenizer_bin(folder / TOKENIZER_FILE, (b"?",) * vocabulary, vocabulary - 1)


def llmc_command(comparison: Comparison) -> list[str]:
    """Return llm.c's command line: what it does not find by a fixed name, as flags."""
    given = (pair for pair in comparison.flags.items() if pair[0] not in FIXED[comparison.kind])
    return [str(comparison.executable), *chain.from_iterable(given)]


def run_llmc(comparison: Comparison, folder: Path) -> Log:
    """Run llm.c's program; its output goes to a file in `folder`. Raises InputError if it fails or prints no loss."""
    place = None
    if comparison.kind != CUDA:
        place = folder / "llmc"
        place.mkdir()
        lay_out(comparison, place)
    command = llmc_command(comparison)
    _run(command[0], command, folder / LLMC_OUTPUT, (ExitCode.DONE,), cwd=place)
    return read_log(folder / LLMC_OUTPUT)


def run_ours(comparison: Comparison, folder: Path, words: Sequence[str]) -> Log:
    """Run our trainer with these words in a process of its own; return its log. Raises InputError if it fails."""
    environment = child_environment()
    if comparison.kind == CPU:  # beside a CPU a CPU
        environment.setdefault("JAX_PLATFORMS", "cpu")
    command = [sys.executable, "-c", "from llmc_jax.base.main import program; program('train')", *words]
    name = f"train.py {shlex.join(words)}"
    _run(name, command, folder / "ours.txt", (ExitCode.DONE, ExitCode.DIVERGED), env=environment)
    return read_log(folder / OUR_FOLDER)


def _run(name: str, command: Sequence[str], output: Path, good: Collection[int], **more: Any) -> None:
    """Run a command whose output goes to a file, and which Ctrl-C ends too. Raises InputError if it fails."""
    with refusing(f"{name}: cannot be run", "build it for this machine"), output.open("wb") as file:
        status = subprocess.call(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, **more)
    if status in good:
        return
    with output.open("rb") as file:
        text = escaped(end_of(file).decode("utf-8", "replace"), keep="\n", instead=" ")
    lines = [line.strip()[:400] for line in text.split("\n") if line.strip()] or ["it printed nothing"]
    for line in lines[-LAST_LINES:]:
        print(f"    {line}", file=sys.stderr)
    raise InputError(f"{name}: ended with status {status}; last line: {lines[-1]}")


def precision_of(output: Path) -> str | None:
    """Return what train_gpt2cu was compiled for, from its start-up table; TF32 is fp32 with our -f 1, the default."""
    with output.open("rb") as file:
        found = PRECISION.search(file.read(1 << 16).decode("utf-8", "replace"))
    return {"FP32": "fp32", "TF32": "fp32", "FP16": "fp16", "BF16": "bf16"}[found[1]] if found else None


# ----- side by side -------------------------------------------------------------------------------------------------


def agree(found: Sequence[logs.Difference]) -> bool:
    """Return whether no loss of the common steps differs by more than the tolerance."""
    compared = [each for each in found if len(each.steps)]
    return bool(compared) and all(each.first_beyond is None for each in compared)


def time_ratio(both: Sequence[Log]) -> float | None:
    """Return our median time per step as a part of llm.c's."""
    theirs, mine = (median(log.of("ms")) for log in both)
    return mine / theirs if mine and theirs else None


def verdict(both: Sequence[Log], found: Sequence[logs.Difference]) -> list[str]:
    """Return the result: a sentence on each kind of loss, one on the time. both: llm.c's log and ours."""
    lines = [logs.verdict(each, f"{each.curve} losses") for each in found]
    theirs, mine = (median(log.of("ms")) for log in both)
    if ratio := time_ratio(both):
        words = f"ours is {1 / ratio:.2f} times as fast" if ratio < 1 else f"ours takes {ratio:.2f} times as long"
        lines.append(f"time per step, median without the first: llm.c {theirs:.2f} ms, ours {mine:.2f} ms; {words}")
    words = "the losses agree" if agree(found) else "the losses do NOT agree"
    return [*lines, f"verdict: {words} within {found[0].tolerance:g} nats per token"]


# ----- the command --------------------------------------------------------------------------------------------------

DESCRIPTION = f"""\
Run a trainer of llm.c, then ours, on the same checkpoint, data and flags, and show losses and time side by side.

  run llm.c/{CPU} -- -e model.bin -i train.bin -j val.bin
  run llm.c/{CUDA} -- -e gpt2_124M_bf16.bin -b 4 -t 1024 -x 50

The words behind -- are flags for both, in llm.c's spelling. {CPU} has none of its own: -e, -i and -j name the
files that it finds under fixed names in a folder made for it; {FP32} gets -e in the same way. Flags for
ours alone (--kernels, say) go into --ours. --keep names a folder that keeps what both print and our run folder.

Exit status: 0 the losses agree, 2 bad input or a program that failed, 4 they do not agree."""


OPTIONS = (
    own("executable", "EXECUTABLE", None, "the built trainer of llm.c", is_path=True),
    own("--kind", "|".join(FLAGS), None, "which trainer it is [by its name]"),
    own("--ours", "WORDS", "", "further flags of train.py, in one pair of quotes"),
    own("--keep", "DIR", None, "a new folder for what both print and our run"),
    *logs.difference_options("1 = do not, the default"),
    own("--rows", "N", ROWS, f"steps in the table, at most [{ROWS}]"),
)


def run(args: argparse.Namespace, show: Show) -> tuple[bool, dict[str, Any]]:
    """Run both, compare and print; return whether they agree, and the result for JSON. Raises InputError.

    args.flags: the words behind `--`.
    """
    try:
        extra = shlex.split(args.ours)
    except ValueError as error:
        raise InputError(f"--ours {args.ours}: {error}") from error
    comparison = make_comparison(args.executable, args.kind, args.flags, extra)
    with work_folder(args.keep) as folder:
        show(f"1 of 2, llm.c: {shlex.join(llmc_command(comparison))}")
        theirs = run_llmc(comparison, folder)
        dtype = precision_of(folder / LLMC_OUTPUT) if comparison.kind == CUDA else None
        ours = our_words(comparison, folder / OUR_FOLDER, dtype)
        show(f"2 of 2, ours:  train.py {shlex.join(ours)}\n")
        both = theirs, run_ours(comparison, folder, ours)
        found = logs.differences(both, args.tolerance, args.window or 1)
        lines = verdict(both, found)
        steps = logs.some_of(
            {step for log in both for curve in (log.train, log.val) for step in curve.steps}, args.rows
        )
        show("\n".join([logs.steps_table(both, steps, NAMES, with_times=True), "", *map(wrapped, lines)]))
        if args.picture is not None:
            logs.draw_logs(both, found, args.picture, NAMES)
            show(f"\npicture: {args.picture}")
    return agree(found), {
        "comparison": "run", "kind": comparison.kind, "executable": comparison.executable,
        "commands": {"llm.c": llmc_command(comparison), "ours": ["train.py", *ours]},
        "agree": agree(found), "time_ratio": time_ratio(both),
        "verdict": lines, **logs.as_json(both, found, args.rows),
    }  # fmt: skip
