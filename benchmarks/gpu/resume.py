"""A run that is killed and continued in a new process, beside one that nobody disturbed; and what a save costs."""

import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from llmc_jax.trials.figures import Figures, NotMeasured

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = "xla_cache"  # in a run's folder: what train.py compiled for it on a GPU
STEP_LINE = re.compile(r"\s*step\s+(\d+)/")
TOO_LONG = 300  # seconds for one process


def measure(what: str, **arguments: Any) -> Figures:
    """what: 'killed' for a run that is killed and continued, 'saves' for what a save costs."""
    missing = [name for name in ("rich", "matplotlib", "tiktoken") if find_spec(name) is None]
    if missing:
        raise NotMeasured(f"train.py's packages {', '.join(missing)} are not installed")
    return killed(**arguments) if what == "killed" else saves(**arguments)


# ----- the same bits ------------------------------------------------------------------------------------------------


def killed(words: str, steps: int, every: int, programs: str) -> Figures:
    """Return whether a run killed after a checkpoint, and continued, has the bits of the run without a break.

    words: train.py's flags for model and precision; every: steps between checkpoints. programs: 'kept', where the one
    that is continued finds what was compiled for it; or 'deleted', where the compiler has to choose again.
    """
    from benchmarks.gpu.programs import write_tokens
    from llmc_jax.config.model import parse_descriptor

    given = shlex.split(words)
    flags = dict(zip(given[::2], given[1::2], strict=True))
    vocab_size = parse_descriptor(flags["-e"]).vocab_size
    with tempfile.TemporaryDirectory(dir=os.environ.get("GPU_CHECK_SCRATCH")) as name:
        folder = Path(name)
        tokens = write_tokens(folder / "tokens.bin", 11 * int(flags["-b"]) * int(flags["-t"]) + 1, vocab_size)
        common = [*given, "-i", str(tokens), "-j", str(tokens), "-x", str(steps), "-n", str(every), "-nk", "1"]
        common.append("--no-kernel-check")  # which takes time, and may choose otherwise in each of the runs
        common += ["-v", str(every), "-m", "2", "-s", "0", "-y", "1"]
        train(common, folder, "whole")
        whole = bits(folder / "whole", steps)
        shutil.rmtree(folder / f"whole/state_{steps:08d}")
        if (folder / "whole" / PROGRAMS).exists():  # else the two runs were two choices of the compiler
            shutil.copytree(folder / "whole" / PROGRAMS, folder / "killed" / PROGRAMS)
        train(common, folder, "killed", kill_after=every)
        if programs == "deleted":
            for place in (folder / "killed" / PROGRAMS, cache_of(folder, "killed")):
                shutil.rmtree(place, ignore_errors=True)
        seconds = train(common, folder, "killed")
        resumed_at, parted = resumption(folder / "killed", folder / "whole")
        continued = bits(folder / "killed", steps)
    same = continued == whole and parted is None
    told = "the same bits" if same else f"{'from step ' + str(parted) if parted is not None else 'state'} other bits"
    found: Figures = {"resumed at": resumed_at, "command to step s": seconds, **continued}
    if programs == "deleted":
        return found | {"bits": told}
    return found | {"verdict": "right: " + told if same else "WRONG: " + told}


def cache_of(folder: Path, name: str) -> Path:
    """Return where a run looks for the programs of runs alike, and for what it knows of its kernels."""
    return folder / f"cache of {name}"


def train(flags: list[str], folder: Path, name: str, kill_after: int = 0) -> float:
    """Runs train.py; or kills it at the first step after the checkpoint of step kill_after.

    Returns the seconds from the command to the line of its first step.
    """
    command = [sys.executable, "-u", str(ROOT / "train.py"), *flags, "-o", str(folder / name)]
    environment = {key: value for key, value in os.environ.items() if key != "JAX_COMPILATION_CACHE_DIR"}
    environment["LLMC_JAX_CACHE"] = str(cache_of(folder, name))
    begin, first = time.perf_counter(), 0.0
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=folder
    )
    assert process.stdout is not None
    output = []
    for line in process.stdout:
        output.append(line)
        if STEP_LINE.match(line):
            first = first or time.perf_counter() - begin
            if kill_after and (folder / name / f"DONE_{kill_after:08d}").exists():
                process.kill()
        if time.perf_counter() - begin > TOO_LONG:
            process.kill()
    status = process.wait()
    if status != (-signal.SIGKILL if kill_after else 0) or not first:
        raise RuntimeError(f"train.py {shlex.join(flags)} ended with status {status}: {''.join(output)[-300:]}")
    return first


def bits(run: Path, step: int) -> Figures:
    """SHA-256 of all arrays of a checkpoint."""
    from llmc_jax.checkpoint.store import open_checkpoint

    checkpoint, hashed = open_checkpoint(run / f"state_{step:08d}"), hashlib.sha256()
    for name in sorted(checkpoint.manifest.tensors):
        hashed.update(name.encode() + checkpoint.read(name).tobytes())
    return {"state": hashed.hexdigest()[:16]}


def resumption(run: Path, whole: Path) -> tuple[int, int | None]:
    """The step that a run went on from, and the first step whose figures are not those of the whole run."""
    from tests.metrics import read_metrics

    def figures(folder: Path) -> list[dict[str, Any]]:
        events = [event for event in read_metrics(folder / "metrics.jsonl") if event["event"] in ("train", "val")]
        return [{key: event.get(key) for key in ("event", "step", "loss", "norm")} for event in events]

    resumed = [event["step"] for event in read_metrics(run / "metrics.jsonl") if event["event"] == "resume"]
    if not resumed:
        raise RuntimeError("the second process did not go on from a checkpoint")
    ours, theirs = figures(run), figures(whole)
    parted = [one["step"] for one, other in zip(ours, theirs, strict=False) if json.dumps(one) != json.dumps(other)]
    if len(ours) != len(theirs):
        parted.append(min(len(ours), len(theirs)))
    return resumed[-1], min(parted, default=None)


# ----- what a save costs --------------------------------------------------------------------------------------------


class Cost(NamedTuple):
    """Of one save."""

    added: float  # seconds that the training lost
    total: float  # seconds until the checkpoint was complete
    waited: float  # seconds that the training stood still


def saves(model: str, B: int, T: int, dtype: str, steps: int, rounds: int) -> Figures:
    """Seconds that a save adds to training, by the steps made while it is under way, and the memory that it adds.

    steps: how many of them are timed without a save; more than the device does in a save tell nothing.
    """
    import jax
    import jax.numpy as jnp

    from benchmarks.gpu import steps as whole_steps
    from llmc_jax.checkpoint.contents import Identity, Metadata
    from llmc_jax.config.model import parse_descriptor
    from llmc_jax.machine import compiling
    from llmc_jax.machine import device as hardware
    from llmc_jax.run.saver import Saver
    from llmc_jax.training.state import DTYPES, initial_state
    from llmc_jax.training.step import train_step
    from llmc_jax.trials.problems import skewed_tokens

    config = parse_descriptor(model)
    plan, _ = whole_steps.choose(config, dtype, B, T)
    identity = Identity(config, dtype, plan.master_weights, plan.rounding)
    tokens = skewed_tokens((1, B, T + 1), config.vocab_size, seed=1)
    batch = jnp.asarray(tokens[..., :-1]), jnp.asarray(tokens[..., 1:])
    state = initial_state(whole_steps.random_values(config), DTYPES[dtype])
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    numbers = whole_steps.step_numbers()
    lowered = train_step.lower(state, *batch, numbers, config, plan.step_options)
    compiled = compiling.compiled(lowered, plan.execution.compiler_options)

    def step(state: Any) -> Any:
        state, metrics = compiled(state, *batch, numbers)
        metrics.loss.item()  # as the trainer does, which reads each
        return state

    analysis = compiled.memory_analysis()
    needed = analysis.argument_size_in_bytes + analysis.temp_size_in_bytes

    def free() -> int | None:
        found = hardware.memory_stats()
        return found.get("bytes_limit", 0) - found.get("peak_bytes_in_use", 0) if found else None

    def peak() -> int:
        return hardware.memory_stats().get("peak_bytes_in_use", 0)

    for _ in range(3):
        state = step(state)
    begin = time.perf_counter()
    for _ in range(steps):
        state = step(state)
    quiet, before = (time.perf_counter() - begin) / steps, peak()
    costs = []
    with tempfile.TemporaryDirectory(dir=os.environ.get("GPU_CHECK_SCRATCH")) as folder:
        saver = Saver(Path(folder), config, keep=1, major_every=0)
        for turn in range(1 + rounds):  # the first warms up
            begin, made, ended = time.perf_counter(), 0, []
            saver.save(state, Metadata(turn + 1, identity), needed, free())
            while not ended:
                state = step(state)
                made, ended = made + 1, saver.finished()
            if ended[0].problem is not None:
                raise RuntimeError(ended[0].problem)
            added = time.perf_counter() - begin - made * quiet
            costs.append(Cost(added, ended[0].seconds, ended[0].waited))
    median = sorted(costs[1:])[rounds // 2]
    per_half_million = quiet * 524_288 / (B * T)
    return {
        "added s": median.added, "of a 524,288-token step": median.added / per_half_million, "waited s": median.waited,
        "save s": median.total, "MB/s": nbytes / 1e6 / median.total, "state GB": nbytes / 1e9, "step ms": 1e3 * quiet,
        "GiB": before / 2**30, "added GiB": (peak() - before) / 2**30,
    }  # fmt: skip
