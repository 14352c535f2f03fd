"""A run that is killed and continued in a new process, beside one that nobody disturbed; and what a save costs."""

import hashlib
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu.programs import require_packages, train, words_with_data
from llmc_jax.trials.children import Figures

PROGRAMS = "xla_cache"  # in a run's folder: what train.py compiled for it on a GPU


def measure(what: str, **arguments: Any) -> Figures:
    """what: 'killed' for a run that is killed and continued, 'saves' for what a save costs."""
    require_packages()
    return killed(**arguments) if what == "killed" else saves(**arguments)


# ----- the same bits ------------------------------------------------------------------------------------------------


def killed(words: str, steps: int, every: int, programs: str) -> Figures:
    """Return whether a run killed after a checkpoint, and continued, has the bits of the run without a break.

    words: train.py's flags for model and precision; every: steps between checkpoints. programs: 'kept', where the one
    that is continued finds what was compiled for it; or 'deleted', where the compiler has to choose again.
    """
    with tempfile.TemporaryDirectory(dir=os.environ.get("GPU_CHECK_SCRATCH")) as name:
        folder = Path(name)
        common = [*words_with_data(words, folder, 11), "-x", str(steps), "-n", str(every), "-nk", "1"]
        common += ["-v", str(every), "-m", "2", "-s", "0", "-y", "1"]
        caches = {run: folder / f"cache of {run}" for run in ("whole", "killed")}
        train(common, folder, "whole", caches["whole"])
        whole = bits(folder / "whole", steps)
        shutil.rmtree(folder / f"whole/state_{steps:08d}")
        if (folder / "whole" / PROGRAMS).exists():  # else the two runs were two choices of the compiler
            shutil.copytree(folder / "whole" / PROGRAMS, folder / "killed" / PROGRAMS)
        train(common, folder, "killed", caches["killed"], kill_after=every)
        if programs == "deleted":
            for place in (folder / "killed" / PROGRAMS, caches["killed"]):
                shutil.rmtree(place, ignore_errors=True)
        seconds = train(common, folder, "killed", caches["killed"])
        resumed_at, parted = resumption(folder / "killed", folder / "whole")
        continued = bits(folder / "killed", steps)
    same = continued == whole and parted is None
    told = "the same bits" if same else f"{'from step ' + str(parted) if parted is not None else 'state'} other bits"
    found: Figures = {"resumed at": resumed_at, "command to step s": seconds, **continued}
    if programs == "deleted":
        return found | {"bits": told}
    return found | {"verdict": "right: " + told if same else "WRONG: " + told}


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

    from benchmarks.gpu.steps import CompiledStep
    from llmc_jax.checkpoint.contents import Identity, Metadata
    from llmc_jax.machine import device as hardware
    from llmc_jax.run.saver import Saver

    step = CompiledStep(model, B, dtype, T=T)
    identity = Identity(step.config, dtype, step.plan.master_weights, step.plan.rounding)
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(step.state))
    analysis = step.compiled.memory_analysis()
    needed = analysis.argument_size_in_bytes + analysis.temp_size_in_bytes

    def free() -> int | None:
        found = hardware.memory_stats()
        return found.get("bytes_limit", 0) - found.get("peak_bytes_in_use", 0) if found else None

    def peak() -> int:
        return hardware.memory_stats().get("peak_bytes_in_use", 0)

    def make(count: int) -> None:
        for _ in range(count):
            step.run(1)  # and its loss is read, as the trainer does of each

    make(3)

    def pace() -> float:
        begin = time.perf_counter()
        make(steps)
        return (time.perf_counter() - begin) / steps

    quiet, before = pace(), peak()
    costs = []
    with tempfile.TemporaryDirectory(dir=os.environ.get("GPU_CHECK_SCRATCH")) as folder:
        saver = Saver(Path(folder), step.config, keep=1, major_every=0)
        for turn in range(1 + rounds):  # the first warms up
            begin, made, ended = time.perf_counter(), 0, []
            saver.save(step.state, Metadata(turn + 1, identity), needed, free())
            while not ended:
                make(1)
                made, ended = made + 1, saver.finished()
            if ended[0].problem is not None:
                raise RuntimeError(ended[0].problem)
            elapsed, after = time.perf_counter() - begin, pace()
            costs.append(Cost(elapsed - made * (quiet + after) / 2, ended[0].seconds, ended[0].waited))
            quiet = after
    median = sorted(costs[1:])[rounds // 2]
    per_half_million = quiet * 524_288 / (B * T)
    return {
        "added s": median.added, "of a 524,288-token step": median.added / per_half_million, "waited s": median.waited,
        "save s": median.total, "MB/s": nbytes / 1e6 / median.total, "state GB": nbytes / 1e9, "step ms": 1e3 * quiet,
        "GiB": before / 2**30, "added GiB": (peak() - before) / 2**30,
    }  # fmt: skip
