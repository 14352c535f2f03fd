"""The algorithms of a step's products as XLA chooses them, several times: the steps in turns, the fastest's in a file.

XLA times the candidates one after the other while the clock moves, and chooses otherwise the next time. A process keeps
what it has found, and reads one file: so each choice is made in a process of its own, with an empty compile cache, and
keeps its step while the steps take turns. The file is XLA's own, for `--algorithms`; a last process shows that the step
which is compiled with it has the same algorithms. The processes that wait compute nothing. The parent imports no JAX.
"""

import os
import re
import shutil
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.gpu import versus
from benchmarks.turns import blocks_in_turns
from llmc_jax.machine.algorithms import name_of
from llmc_jax.machine.jax_setup import MEMORY_SHARE
from llmc_jax.trials.children import Children, Figures, Task

ROUNDS = 8  # turns of each step
MARGIN = 0.03  # of a card's memory, for the contexts of several processes
SECONDS = 120  # that one process may take to compile its step
NONE = "-"  # the algorithm of a product that XLA does not time, as it reads its weights in place of a larger array
DUMP, LOAD = "xla_gpu_dump_autotune_results_to", "xla_gpu_load_autotune_results_from"
ALGORITHM = re.compile(r'"selected_algorithm":"(-?\d+)"')


def measure(what: str, **arguments: Any) -> Figures:
    """what: 'compare', the item; 'step', a process of it."""
    return compare(**arguments) if what == "compare" else step(**arguments)


# ----- the parent's side --------------------------------------------------------------------------------------------


class Tuned:
    """A process with a step that it has compiled: with algorithms of its own choice, or with those of a file."""

    def __init__(self, folder: Path, option: str, file: Path, share: float, arguments: Figures) -> None:
        """folder: for its compile cache, empty; share: of the memory."""
        self.file = file
        own = {"JAX_COMPILATION_CACHE_DIR": str(folder), "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{share:.3f}"}
        self._children = Children({**os.environ, **own})
        told = {"what": "step", "option": option, "file": str(file), **arguments}
        self._task = Task(file.stem, "benchmarks.gpu.algorithms", told, SECONDS)
        self.figures = self.run()  # compiles, and warms up

    def run(self) -> Figures:
        """Return the figures of some steps. Raises RuntimeError."""
        outcome = self._children.measure(self._task)
        if outcome.kind != "DONE":
            self.close()
            raise RuntimeError(f"{self._task.name}: {outcome.content}")
        return outcome.content

    def block(self) -> float:
        """Return the milliseconds of a step, of some."""
        return float(self.run()["ms"])

    def close(self) -> None:
        """End the process."""
        self._children.close()


def compare(tunings: int, **arguments: Any) -> Figures:
    """Return the times of a step with each choice of XLA's; the file of the fastest goes into the results' folder.

    arguments: of `step`, but for its option and file.
    """
    with tempfile.TemporaryDirectory(dir=os.environ.get("GPU_CHECK_SCRATCH")) as name, ExitStack() as closing:
        folder, share = Path(name), (MEMORY_SHARE - MARGIN) / tunings

        def tuned(option: str, file: str) -> Tuned:
            cache = Path(tempfile.mkdtemp(dir=folder))
            made = Tuned(cache, option, folder / file, share, arguments)
            closing.callback(made.close)
            return made

        found = {f"choice {k}": tuned(DUMP, f"choice {k}.txt") for k in range(1, tunings + 1)}
        times = blocks_in_turns({name: each.block for name, each in found.items()}, ROUNDS)
        medians = {name: statistics.median(each) for name, each in times.items()}
        best = min(medians, key=lambda name: medians[name])
        chosen = [str(each.figures["algorithms"]).split() for each in found.values()]
        for each in found.values():
            each.close()
        file = found[best].file
        said = loaded(tuned(LOAD, file.name), found[best]) if file.is_file() else {}
        kept = keep(file) if file.is_file() else "none: XLA chose nothing, as on a CPU"
    return {
        "ms": medians[best], "spread": (max(times[best]) - min(times[best])) / medians[best],
        "ms of each": ", ".join(f"{ms:.2f}" for ms in medians.values()), "turns": ROUNDS,
        "products": len(chosen[0]), "not timed": chosen[0].count(NONE),
        "chosen otherwise": sum(len(set(each)) > 1 for each in zip(*chosen, strict=False)),
        **said, "file": kept,
    }  # fmt: skip


def loaded(again: Tuned, best: Tuned) -> Figures:
    """Return whether a step that was compiled with a file has its algorithms, and so the same bits."""
    same = all(again.figures[name] == best.figures[name] for name in ("algorithms", "loss"))
    return {"loaded": "the same algorithms and loss" if same else "OTHER algorithms or another loss"}


def keep(file: Path) -> str:
    """Copy a file into the results' folder under the digest of its content, and return its name there."""
    name = name_of(file.read_bytes(), file.suffix)
    shutil.copyfile(file, Path(os.environ["GPU_CHECK_OUTPUT"]) / name)
    return name


# ----- the child's side ---------------------------------------------------------------------------------------------


def step(option: str, file: str, steps: int, **arguments: Any) -> Figures:
    """Return the milliseconds of so many steps, the algorithms of the program's products, and a loss.

    option: of XLA, which takes a file: `DUMP`, `LOAD`. arguments: of `CompiledStep`.
    """
    arguments |= {"options": ((option, file),)}
    text = versus.compiled_step(steps, **arguments).compiled.as_text()
    return versus.measure(steps, **arguments) | {"algorithms": algorithms_of(text)}


def algorithms_of(text: str) -> str:
    """Return the algorithm of each product of NVIDIA's library in a compiled program's text."""
    products = [line for line in text.splitlines() if '"gemm_backend_config"' in line]
    return " ".join(match[1] if (match := ALGORITHM.search(line)) else NONE for line in products)
