"""Recording some steps with jax.profiler: what --profile asks for, and what the profile command measures.

A trace folder opens in Perfetto and in TensorBoard's profiler (docs/profiling.md). Leaves out reading it back
(profile/trace.py).
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import jax

from llmc_jax.base.errors import InputError
from llmc_jax.base.files import write_problem
from llmc_jax.base.options import parse_slice
from llmc_jax.config.train import TrainConfig

STEP = "train"  # the name of a step's annotation, which TensorBoard's profiler counts steps by


def check_writable(folder: Path) -> None:
    """Make the folder and raise InputError if no file can be written there."""
    if problem := write_problem(folder):
        raise InputError(f"{folder}: a trace cannot be written there ({problem}); name another folder")


@contextmanager
def slice_trace(
    folder: Path, start: int, stop: int, done: Callable[[], None] = lambda: None
) -> Iterator[Callable[[int], bool]]:
    """Record steps start to stop - 1 of a loop into a folder: call what it yields with each step's number before it.

        with slice_trace(folder, 10, 15) as tick:
            for step in range(steps):
                recorded = tick(step)
                ...  # the step, complete before the next tick

    done: called once, when the recording has been written. A loop that ends early writes what it has; one that never
    reaches `start` writes nothing. Where any step is named, raises InputError at once if the folder cannot be written.
    """
    if start < stop:
        check_writable(folder)
    begun = False
    with ExitStack() as recording, ExitStack() as annotation:  # open while the profiler runs, and during a step

        def tick(step: int) -> bool:
            nonlocal begun
            annotation.close()
            if not start <= step < stop:
                recording.close()
                return False
            if not begun:
                begun = True
                options = jax.profiler.ProfileOptions()
                options.python_tracer_level = 0  # Python's own calls are many, and recording them costs time
                jax.profiler.start_trace(str(folder), profiler_options=options)
                recording.callback(done)
                recording.callback(jax.profiler.stop_trace)
            annotation.enter_context(jax.profiler.StepTraceAnnotation(STEP, step_num=step))
            return True

        yield tick


def profile_slice(config: TrainConfig) -> tuple[int, int]:
    """Return the steps that --profile names; an empty slice without it."""
    return parse_slice(config.profile) or (-1, -1)
