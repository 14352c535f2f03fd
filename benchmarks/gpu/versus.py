"""The step of another checkout, or of this one with a patch, beside this one's, in turns: what a change is worth.

Each side has a process that keeps its compiled step, on half of the memory; where two steps do not fit, every turn
compiles its own. Both sides are measured by this checkout's benchmarks. Imports no JAX.
"""

import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.gpu.plan import Item, timed
from benchmarks.gpu.results import NO_MEMORY, source_digest
from benchmarks.gpu.stepping import QUEUED
from llmc_jax.base.errors import InputError
from llmc_jax.trials.children import Children, Figures, Outcome, Task

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("llmc_jax", "pallas_kernels")  # what makes a side
STEPS = ("d12 bf16 B=64", "d48 bf16 B=16")  # that are compared unless others are named
TURNS, APART = 6, 2  # of each side: with both steps in memory, and where every turn compiles


def other_side(given: Path, folder: Path) -> Path:
    """Make the other side in an empty folder and return it. given: a checkout, or a patch to this one.

    Raises InputError for something else.
    """
    if not given.exists():
        raise InputError(f"--vs {given}: there is no such folder or file; it is another checkout, or a patch")
    source = given if given.is_dir() else ROOT
    if missing := [name for name in PACKAGES if not (source / name).is_dir()]:
        raise InputError(f"--vs {given}: no checkout of this project: it has no {', '.join(missing)}")
    for name in PACKAGES:
        shutil.copytree(source / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "benchmarks").symlink_to(ROOT / "benchmarks")
    if not given.is_dir():
        _apply(given, folder)
    return folder


def _apply(patch: Path, folder: Path) -> None:
    """Apply what a patch changes of the packages. Raises InputError where it does not apply, or changes nothing."""
    only = [f"--include={name}/*" for name in PACKAGES]
    outside = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent.resolve())}  # the folder is no repository
    try:
        done = subprocess.run(
            ["git", "apply", *only, str(patch.resolve())], capture_output=True, text=True, cwd=folder, env=outside,
            check=False,
        )  # fmt: skip
    except OSError as error:
        raise InputError(f"--vs {patch}: a patch needs git: {error}") from error
    if done.returncode:
        raise InputError(f"--vs {patch}: does not apply to this checkout: {' '.join(done.stderr.split())[:300]}")
    if source_digest(folder) == source_digest(ROOT):
        raise InputError(f"--vs {patch}: changes nothing in {' or '.join(PACKAGES)}")


# ----- the parent's side --------------------------------------------------------------------------------------------


def items_of(steps: Sequence[Item], given: Path) -> list[Item]:
    """Return an item for each step that is compared. In small XLA runs it: interpreted kernels would take minutes."""
    place, found = given.resolve().name, []
    for step in steps:
        arguments = {name: value for name, value in step.arguments.items() if name != "interpret"}
        changed = {"part": "versus", "name": f"{step.name} beside {place}", "module": "versus"}
        found.append(timed(step._replace(**changed, arguments={"steps": QUEUED} | arguments)))
    return found


def compare(
    item: Item, other: Path, environment: Callable[[int], Mapping[str, str]], end: float, together: bool = True
) -> Outcome:
    """Return the times of both sides. environment: of one of so many processes that share the card; end: see Children.

    together: whether the driver lets two processes onto the card.
    """
    outcome = _in_turns(item, other, environment(2), end, TURNS, keep=True) if together else None
    if outcome is None or NO_MEMORY in str(outcome.content):
        outcome = _in_turns(item, other, environment(1), end, APART, keep=False)
    return outcome


def _in_turns(item: Item, other: Path, environment: Mapping[str, str], end: float, turns: int, keep: bool) -> Outcome:
    """Return the times of both sides; or the first that failed, and of which side. keep: the steps in memory."""
    sides = [Children(environment, folder) for folder in (ROOT, other)]
    task = Task(item.name, "benchmarks.gpu.versus", item.arguments, item.seconds)
    began, found = time.monotonic(), ([], [])
    try:
        for side in order(turns):
            children = sides[side]
            outcome = children.measure(task, end)
            if outcome.kind != "DONE":
                return outcome._replace(content=f"{('this', 'other')[side]} side: {outcome.content}")
            found[side].append(outcome.content)
            if not keep:
                children.close()
    finally:
        for children in sides:
            children.close()
    how = {"compiled": "once" if keep else "in each turn", "other source": source_digest(other)}
    return Outcome("DONE", figures_of(*found) | how, time.monotonic() - began)


def order(turns: int) -> list[int]:
    """Return whose turn it is, of so many of each side: 0, 1, 1, 0, …, so that a clock that falls slows both alike."""
    return [side for pair in range(turns) for side in ((0, 1) if pair % 2 == 0 else (1, 0))]


def figures_of(ours: Sequence[Figures], others: Sequence[Figures]) -> Figures:
    """Return medians of both sides, and of the ratios of neighbouring turns; spread: the ratios', as a share."""
    pairs = list(zip(ours, others, strict=True))
    ratios = [float(other["ms"]) / float(own["ms"]) for own, other in pairs]
    ratio = statistics.median(ratios)
    return {
        "ms": statistics.median(float(own["ms"]) for own, _ in pairs),
        "other ms": statistics.median(float(other["ms"]) for _, other in pairs),
        "other / this": ratio, "spread": (max(ratios) - min(ratios)) / ratio, "turns": len(pairs),
        "loss": pairs[-1][0]["loss"], "other loss": pairs[-1][1]["loss"],
    }  # fmt: skip


# ----- the child's side ---------------------------------------------------------------------------------------------


def measure(steps: int, **arguments: Any) -> Figures:
    """Milliseconds of a step, of so many more; the first call of a process compiles it, and warms up."""
    step = compiled_step(steps, **arguments)
    start = time.perf_counter()
    loss = step.run(steps)
    return {"ms": 1e3 * (time.perf_counter() - start) / steps, "loss": loss}


@cache
def compiled_step(steps: int, **arguments: Any) -> Any:
    """Return a `CompiledStep` that has run so many times, once for each process and arguments."""
    from benchmarks.gpu.steps import CompiledStep

    step = CompiledStep(**arguments)
    step.run(steps)
    return step
