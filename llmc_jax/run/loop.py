"""The training loop: model, data, folder and screen put together, and llm.c's order of things in each step.

    validate (before the step's update) ─► sample ─► checkpoint ─► one training step ─► log

Leaves out what each of these is (training/step.py, data/, checkpoint/, folder.py, console.py) and how options are
spelled.
"""

import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple

import jax

from llmc_jax import cluster
from llmc_jax.base.commands import program_name
from llmc_jax.base.errors import ExitCode, InputError
from llmc_jax.base.streams import Output, print_error
from llmc_jax.checkpoint.contents import stops_early
from llmc_jax.config.checks import devices_of_each
from llmc_jax.config.train import TrainConfig
from llmc_jax.machine import compiling, jax_setup
from llmc_jax.machine.device import full_memory, memory_in_use
from llmc_jax.machine.nvml import gpu_line, gpu_numbers
from llmc_jax.plan.fits import DoesNotFit, check_program, refusal
from llmc_jax.plan.memory import computed
from llmc_jax.plan.plan import step_numbers
from llmc_jax.plan.search import limit_of
from llmc_jax.run.begin import lock_of, opened
from llmc_jax.run.due import Batches, pauses_after, poll_saves, run_due, training_batches
from llmc_jax.run.end import exit_code, finish, last_save
from llmc_jax.run.figures import StepFigures
from llmc_jax.run.fitting import step_bytes
from llmc_jax.run.prepare import prepare
from llmc_jax.run.processes import Votes, disconnect, in_turn
from llmc_jax.run.programs import lower_step
from llmc_jax.run.record import profile_slice, slice_trace
from llmc_jax.run.state import Outcome, Progress, Run, Setup, diverged, first_progress
from llmc_jax.training.outliers import skip_message
from llmc_jax.training.state import TrainState


def run(config: TrainConfig, notes: list[str]) -> ExitCode:
    """Train as configured and return the exit code. notes: lines to show once the table has been printed.

    Raises InputError: before anything is written for what cannot be used, and after what was learned has been saved for
    what breaks during the run.
    """
    group = cluster.here()
    fixed, devices = config.reduction == "fixed", devices_of_each(config.devices, group.size)
    devices = max(devices, min(group.size - 1, 1))  # of several processes each has one on a CPU, if none are asked for
    notes = [*notes, *jax_setup.settle(steps=True)]
    notes += jax_setup.configure(tf32=config.tf32, devices=devices, fixed_threads=fixed)
    request = threading.Event()
    with ExitStack() as closing:
        # of several processes the first one alone has the screen
        screen = sys.stdout if group.rank == 0 else closing.enter_context(open(os.devnull, "w", encoding="utf-8"))
        # they share a terminal, and mpirun gives them one where its own output is a file: no bar
        output = Output(screen, request, plain=group.size > 1)
        outcome = _trained(config, notes, request, output)
    if outcome.problem is not None:
        raise outcome.problem
    if outcome.code == ExitCode.STOPPED and output.reader_left:
        print_error(f"{program_name('train')}: stopped, because nothing reads the output any more")
    elif outcome.code == ExitCode.STOPPED and output.error is not None:
        raise InputError(f"standard output: cannot be written ({output.error.strerror}); the run was stopped")
    return outcome.code


def _trained(config: TrainConfig, notes: list[str], request: threading.Event, output: Output) -> Outcome:
    """Prepare a run, train and say how it ended. request: set by what asks the run to stop."""
    setup = None
    try:
        with lock_of(config) as held:
            setup, state = prepare(config, notes)
            with opened(setup, output, request, held) as session:
                outcome = finish(session, loop(session, state))
            disconnect(outcome.progress.step)
            return outcome
    except jax.errors.JaxRuntimeError as error:
        if (words := full_memory(error)) is None:
            raise
        if setup is None:
            raise InputError(f"{words}; lower -b or -t, or take a smaller model") from error
        memory = setup.plan.available or computed(setup.plan).program
        raise refusal(setup.plan, words, limit_of(setup.plan.machine.platform, memory)) from error
    finally:
        output.discard_rest()


def loop(run: Run, state: TrainState) -> Outcome:
    """Make all steps, or as many as can be made before the user stops the run, it diverges, or something breaks.

    Source: llm.c train_gpt2.cu, `main`.
    """
    setup, config, group = run.setup, run.setup.config, cluster.here()
    progress, pipeline, problem = first_progress(setup, state), Pipeline(run.votes), None
    # XLA compiles the step while the main thread validates, which needs a compilation of its own.
    with ThreadPoolExecutor(max_workers=1) as pool, training_batches(setup) as batches, traced(run) as tick:
        compilation = pool.submit(compile_step, run, state) if goes_on(run, progress) else None
        try:
            progress = run_due(run, progress, batches, None)
            group.phase("compile", progress.step)
            if compilation is None and goes_on(run, progress):  # a validation was an improvement, against all patience
                compilation = pool.submit(compile_step, run, state)
            step = compilation.result() if compilation else None
            if step:
                jax_setup.keep_freed(setup.device, step.bytes)
            while goes_on(run, progress):
                assert step is not None
                group.phase("step", progress.step)
                recorded = tick(progress.step)
                state = pipeline.submit(step.traced if recorded else step.call, progress.state, batches)
                progress = progress._replace(state=state, step=progress.step + 1)
                pauses = not setup.plan.runs_ahead or pauses_after(run, progress.step)
                for result in pipeline.results(pending=0 if pauses else 1):
                    progress = counted(config, progress, result)
                    report(run, progress, result)
                if pauses:
                    progress = run_due(run, progress, batches, step.bytes)
                progress = poll_saves(run, progress, run.saver.finished())
                run.trackers.tell(run.console.warning)
        except DoesNotFit:  # nothing has been learned
            raise
        except InputError as error:  # a full disk, a damaged data file: what has been learned so far is still good
            if group.size > 1:  # the others cannot continue, and so cannot save either
                raise
            problem = error
        for result in pipeline.results(pending=0):
            progress = counted(config, progress, result)
            try:
                report(run, progress, result)
            except InputError as error:
                problem = problem or error
        code = ExitCode.BAD_INPUT if problem else exit_code(run, progress)
        return last_save(run, Outcome(code, progress, problem), batches)


def goes_on(run: Run, progress: Progress) -> bool:
    """Return whether another step follows."""
    setup, config = run.setup, run.setup.config
    ended = diverged(config, progress) or stops_early(config, progress.counters) or progress.test.exploded
    return progress.step < setup.steps and not run.stop.is_set() and not ended


# ----- the step -----------------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """The compiled step."""

    call: Callable[..., Any]  # (state, inputs, targets) -> (state, metrics)
    traced: Callable[..., Any]  # the same for steps that are recorded, without CUDA graphs
    bytes: int  # of memory that it needs, the state included


def compile_step(run: Run, state: TrainState) -> Step:
    """Compile the step as a function of (state, inputs, targets), for the run's shapes."""
    setup, config, options = run.setup, run.setup.config, run.setup.plan.step_options
    numbers = setup.place.everywhere(step_numbers(config, setup.plan.optimizer, setup.steps))
    shape = (config.micro_batches, config.batch_size, config.sequence_length)  # (A, B, T)
    tokens = setup.place.tokens(shape)
    with setup.place.context():
        found = lower_step((state, tokens, tokens, numbers), setup.model, options, run.programs.step)
    with in_turn():
        compiled = traced = compiling.compiled(found.lowered, setup.plan.execution.compiler_options)
        if config.profile and (without := compiling.without_graphs(setup.device.platform, setup.plan.xla_flags)):
            traced = compiling.compiled(found.lowered, (*setup.plan.execution.compiler_options, *without))
    needed, put = step_bytes(compiled), setup.place.batch
    check_program(setup.plan, needed)

    def given_batches(program: Any) -> Callable[..., Any]:
        step = found.call(program)
        return lambda state, inputs, targets: step(state, put(inputs), put(targets), numbers)

    return Step(given_batches(compiled), given_batches(traced), needed)


class Result(NamedTuple):
    """What one step gave."""

    metrics: Any  # step.Metrics, as Python's numbers
    seconds: float  # with those of waiting for the data, as llm.c's


class Pipeline:
    """The steps that the device has been given and whose metrics have not been read yet.

    A step is submitted before the results of the one before it are read, so that the device need not wait for the host.
    """

    def __init__(self, votes: Votes | None = None) -> None:
        self._votes = votes or Votes()
        # metrics and votes on the device, and when the host began the step
        self._pending: deque[tuple[Any, Any, float]] = deque()
        self._read_at = 0.0  # when the last metrics came

    def submit(self, step: Callable[..., Any], state: TrainState, batches: Batches) -> TrainState:
        """Hand the device one training step and return its state at once."""
        start = time.perf_counter()
        inputs, targets = next(batches.each)
        state, metrics = step(state, inputs, targets)
        self._pending.append((metrics, self._votes.cast(), start))
        return state

    def results(self, pending: int) -> Iterator[Result]:
        """Yield the results of the oldest steps, waiting for each, until only so many are pending.

        The time of a step begins where the step before it ended.
        """
        while len(self._pending) > pending:
            metrics, voted, start = self._pending.popleft()
            read = jax.tree.map(lambda value: value.item(), jax.device_get(metrics))  # waits for the device
            self._votes.count(voted)
            start, self._read_at = max(start, self._read_at), time.perf_counter()
            yield Result(read, self._read_at - start)


# ----- its figures --------------------------------------------------------------------------------------------------


def counted(config: TrainConfig, progress: Progress, result: Result) -> Progress:
    """Return the progress with the step whose result has been read."""
    metrics, counters = result.metrics, progress.counters
    # An overflow under a loss scale that moves is no divergence: the scale gives way first.
    harmless = metrics.finite or (metrics.loss_scale > 1 and config.loss_scale_factor > 1)
    return progress._replace(
        read=progress.read + 1,
        test=progress.test.then(metrics.learning_rate, metrics.loss) if config.find_lr else progress.test,
        counters=counters._replace(
            skipped=counters.skipped + (not metrics.applied),
            skipped_in_a_row=0 if harmless else counters.skipped_in_a_row + 1,
        ),
        seconds=progress.seconds + (result.seconds if progress.read > progress.begun_at else 0.0),
    )


def figures_of(setup: Setup, progress: Progress, result: Result) -> StepFigures:
    """Return the figures of the step that `progress` has just counted."""
    metrics, tokens = result.metrics, setup.config.tokens_per_step
    return StepFigures(
        step=progress.read - 1,
        loss=metrics.loss,
        norm=metrics.norm,
        lr=metrics.learning_rate,
        ms=1e3 * result.seconds,
        tokens_per_second=tokens / result.seconds,
        skipped=not metrics.applied,
        tokens=progress.read * tokens,
        loss_scale=metrics.loss_scale if setup.plan.dtype == "fp16" else None,
        z_loss=None if math.isnan(metrics.z_loss) else metrics.z_loss,
        z_norm=None if math.isnan(metrics.z_norm) else metrics.z_norm,
        memory=memory_in_use(setup.device),
    )


def report(run: Run, progress: Progress, result: Result) -> None:
    """Log, show and draw the step that was just read; of several processes the first one does."""
    config, metrics = run.setup.config, result.metrics
    if cluster.here().rank:
        return
    figures = figures_of(run.setup, progress, result)
    run.log.train(figures)
    run.console.step(figures)
    why = skip_message(metrics.z_loss, metrics.z_norm, config.skip_loss_z, config.skip_norm_z)
    if why and figures.skipped:
        run.console.note(why)
    report_gpu(run, progress.read)
    run.beside.refresh()


def report_gpu(run: Run, steps: int) -> None:
    """Log and show what the GPU says of itself, where -lg asks for it after so many steps, as llm.c does."""
    monitor, every = run.setup.monitor, run.setup.config.gpu_info_every
    if monitor is None or steps % every:
        return
    reading = monitor.read(run.console.warning)
    if reading is not None:
        run.log.event("gpu", step=steps - 1, **gpu_numbers(reading))
        run.console.note(gpu_line(reading))


def traced(run: Run) -> AbstractContextManager[Callable[[int], bool]]:
    """Return what gives the function to call before each step: it records those that --profile names, and says so.

    Of several processes the first one does: two of one host would write to the same file.
    """
    folder, group = run.held.folder / "profile", cluster.here()
    words = f"profile:      {folder} (docs/profiling.md says how to open it)"
    named = (-1, -1) if group.rank else profile_slice(run.setup.config)
    return slice_trace(folder, *named, lambda: run.console.note(words))
