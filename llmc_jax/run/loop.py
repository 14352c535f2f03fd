"""The training loop: model, data, folder and screen put together, and llm.c's order of things in each step.

    validate (before the step's update) ─► sample ─► checkpoint ─► one training step ─► log

Leaves out what each of these is (training/step.py, data/, checkpoint/, folder.py, console.py) and how options are
spelled.
"""

import itertools
import math
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from llmc_jax.checkpoint.contents import Counters, Metadata
from llmc_jax.config.options import parse_slice
from llmc_jax.config.train import TrainConfig
from llmc_jax.data.loader import Batch, Prefetcher
from llmc_jax.data.tokenizers import sample_text
from llmc_jax.errors import ExitCode, InputError
from llmc_jax.kernels.record import to_json
from llmc_jax.machine import compiling
from llmc_jax.machine import jax_setup as platform
from llmc_jax.machine.gpus import peak_flops
from llmc_jax.machine.nvml import gpu_line, gpu_numbers
from llmc_jax.models.gpt2.tensors import num_parameters
from llmc_jax.models.gpt2.work import flops_per_token
from llmc_jax.plan import step_numbers
from llmc_jax.profile.trace import slice_trace
from llmc_jax.rng import skip_u32
from llmc_jax.run.console import Console, Speed, StepFigures, smooth_speed, utilization_text
from llmc_jax.run.curves import CurveDrawer
from llmc_jax.run.folder import (
    Held,
    Kept,
    RunLog,
    absent_folders,
    check_path,
    config_file,
    config_record,
    create_run_folder,
    cut_logs,
    leaving_nothing,
    locked,
    write_config,
)
from llmc_jax.run.prepare import Setup, prepare
from llmc_jax.run.sampler import SEED, generate
from llmc_jax.run.saver import Memory, Retention, Saved, Saver
from llmc_jax.run.stopping import stop_on_signals
from llmc_jax.run.table import table
from llmc_jax.streams import Output, print_error
from llmc_jax.training.outliers import skip_message
from llmc_jax.training.step import TrainState, evaluate_loss, train_step

# ----- the run's folder and screen ----------------------------------------------------------------------------------


class Run(NamedTuple):
    """What stays the same while the loop runs."""

    setup: Setup
    folder: Path
    held: Held
    log: RunLog
    console: Console
    drawer: CurveDrawer
    saver: Saver
    stop: threading.Event  # set: the user wants the run to end


@contextmanager
def opened(setup: Setup, output: Output, stop: threading.Event, held: Held | None = None) -> Iterator[Run]:
    """Makes the run folder, opens what is written there and the screen, and says how the run begins.

    held: the folder, if it was there before and this process has locked it.
    """
    config, corpus = setup.config, setup.data.corpus
    if held is not None:
        held.check()
    elif config.reuse and config.output_dir and os.path.isdir(config.output_dir):
        raise InputError(f"-o {config.output_dir}: another process made this folder just now; start again")
    made = absent_folders(config.output_dir)
    folder = create_run_folder(config.output_dir, setup.name, reuse=config.reuse and held is not None)
    made = made if config.output_dir else [folder, *made]
    validates_on_it = corpus is not None and config.val_data == "stdlib"
    baselines = {"bigram baseline": corpus.bigram_nats} if corpus is not None and validates_on_it else {}
    with ExitStack() as closing:
        held = held or closing.enter_context(locked(folder))
        log = closing.enter_context(begun_log(setup, held, made))
        console = closing.enter_context(Console(setup.steps, config.print_every, cast(Any, output)))
        drawer = closing.enter_context(CurveDrawer(folder, setup.name, baselines, console.warning, held.is_there))
        closing.enter_context(stop_on_signals(stop, console.note))
        announce(setup, folder, console)
        if setup.monitor is not None:
            closing.callback(setup.monitor.close)
        programs = folder / "xla_cache" if setup.device.platform != "cpu" else None
        if programs and not platform.keep_programs(programs) and setup.earlier is not None:
            console.warning("not bit-exact from here: compiled programs of this run are missing or damaged")

        def sync() -> None:
            log.sync()
            if programs is not None and programs.is_dir():
                platform.seal_programs(programs)

        retention = Retention(config.keep_checkpoints, config.major_every)
        saver = Saver(folder, setup.model, retention, export=config.export_llmc, sync=sync, check=held.check)
        closing.callback(saver.wait)
        yield Run(setup, folder, held, log, console, drawer, saver, stop)


def begun_log(setup: Setup, held: Held, made: list[Path]) -> RunLog:
    """Write the configuration, cut the logs back to where the run begins, open them and write the first event.

    The configuration is config.json and kernels.json. Where something fails, nothing of it stays: neither files, nor
    the folders in `made`, and an earlier configuration is as it was. So is that of a run which is only evaluated
    (-x 0): what goes on later takes its options from there.
    """
    config, shape = setup.config, setup.model
    kind, step = ("start", 0) if setup.earlier is None else ("resume", setup.earlier.step)
    with leaving_nothing(held, made):
        record = config_record(config.to_json(), asdict(shape), setup.device._asdict())
        kernels = to_json(setup.plan.resolved)
        is_first = config_file(held.folder) is None
        if is_first:  # before any log: what has a log but no config.json is another program's folder
            write_config(held.folder, record, kernels)
        if config.reuse:
            cut_logs(held.folder, where_logs_stay(setup))
        with ExitStack() as closing:
            log = closing.enter_context(RunLog(held.folder, reuse=config.reuse, check=held.check))
            log.event(kind, step=step, steps=setup.steps, parameters=num_parameters(shape), config=record)
            if not is_first and config.max_steps != 0:
                write_config(held.folder, record, kernels)
            closing.pop_all()
            return log


def where_logs_stay(setup: Setup) -> Kept | None:
    """Up to where the logs of the earlier run belong to this one."""
    if setup.earlier is None:
        return None
    step, counters = setup.earlier.step, setup.earlier.metadata.counters or Counters()
    return Kept(step, counters.validated == step, counters.sampled == step)


@contextmanager
def lock_of(config: TrainConfig) -> Iterator[Held | None]:
    """Within the block a run folder that is there already is this process's. Gives it, or None."""
    check_path(config.output_dir)
    folder = Path(config.output_dir) if config.output_dir else None
    if folder is None or not folder.is_dir():
        yield None
        return
    with locked(folder) as held:
        yield held


def announce(setup: Setup, folder: Path, console: Console) -> None:
    """The start-up table, and what the user should know about this run."""
    console.table(table(setup, folder))
    for note in setup.notes:
        console.note(note)
    for warning in setup.warnings:
        console.warning(warning)
    if setup.data.corpus is not None:
        corpus = setup.data.corpus
        console.note(f"{corpus.description}; fingerprint {corpus.fingerprint}")
        if setup.config.val_data == "stdlib":
            console.note(f"bigram baseline: {corpus.bigram_nats:.3f} nats (each byte guessed from the one before)")


# ----- the loop -----------------------------------------------------------------------------------------------------


class Progress(NamedTuple):
    """How far the run has come. A new one after each step."""

    state: TrainState
    step: int = 0  # steps given to the device, those without an update included
    begun_at: int = 0  # steps that were made before this process began
    read: int = 0  # of the steps, those whose figures have been read: all but one, where the loop runs ahead
    read_at: float = 0.0  # when the last of them was
    saving: int = -1  # the step of the last checkpoint that was begun, -1: none
    saved: Path | None = None  # the last checkpoint that is complete
    counters: Counters = Counters()
    speed: Speed = Speed()
    seconds: float = 0.0  # in all steps of this process but the first, which llm.c leaves out of its mean too


def first_progress(setup: Setup, state: TrainState) -> Progress:
    """Where the run begins: at its start, or where a checkpoint left it."""
    if setup.earlier is None:
        return Progress(state)
    step, counters = setup.earlier.step, setup.earlier.metadata.counters or Counters()
    if 0 < setup.config.max_nonfinite <= counters.skipped_in_a_row:  # it had diverged; now it gets another chance
        counters = counters._replace(skipped_in_a_row=0)
    return Progress(
        state, step=step, begun_at=step, read=step, saving=step, saved=setup.earlier.folder, counters=counters
    )


class StepResult(NamedTuple):
    """What one step gave."""

    loss: float  # nats per token
    norm: float  # of the gradient, before clipping
    rate: float
    applied: bool  # False: the step updated nothing
    z_loss: float  # the loss among the last 128, in standard deviations; NaN until there are so many
    z_norm: float  # the norm likewise
    seconds: float
    loss_scale: float  # 1 where the loss is not scaled


class Outcome(NamedTuple):
    """How the loop ended; problem: what broke, where something did."""

    code: ExitCode
    progress: Progress
    problem: InputError | None = None


class Step(NamedTuple):
    """The compiled step."""

    call: Callable[..., Any]  # (state, inputs, targets) -> (state, metrics)
    bytes: int  # of memory that it needs, the state included


def compile_step(setup: Setup, state: TrainState) -> Step:
    """The step as a function of (state, inputs, targets), compiled for the run's shapes."""
    config, options = setup.config, setup.plan.step_options
    numbers = jax.device_put(step_numbers(config, setup.steps))
    shape = (config.grad_accumulation, config.batch_size, config.sequence_length)  # (A, B, T)
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32)
    lowered = train_step.lower(state, tokens, tokens, numbers, setup.model, options)
    compiled = compiling.compiled(lowered, setup.plan.execution.compiler_options)
    memory = compiled.memory_analysis()
    needed = 0 if memory is None else memory.argument_size_in_bytes + memory.temp_size_in_bytes
    return Step(lambda state, inputs, targets: compiled(state, inputs, targets, numbers), needed)


class Batches(NamedTuple):
    """Training batches (A, B, T) without end."""

    each: Iterator[Batch]
    position: Callable[[], dict[str, Any] | None]  # the loader's, after the batches given out


@contextmanager
def training_batches(setup: Setup) -> Iterator[Batches]:
    """The batches: read ahead in the background, or with -a the same one each time."""
    loader, micro_batches = setup.data.train, setup.config.grad_accumulation
    if loader is None:
        yield Batches(iter(()), lambda: None)
    elif setup.config.overfit:
        loader.reset()
        batch = loader.next_batch(micro_batches)
        yield Batches(itertools.repeat(batch), lambda: None)
    else:
        with Prefetcher(loader, micro_batches) as prefetcher:
            yield Batches(prefetcher, prefetcher.state)


def validate(run: Run, progress: Progress) -> Progress:
    """Mean loss over the first batches of the validation data; nothing if the user stops the run meanwhile."""
    setup, loader = run.setup, run.setup.data.val
    assert loader is not None
    loader.reset()
    total = 0.0
    for _ in range(setup.val_batches):
        inputs, targets = loader.next_batch()
        batch = progress.state.weights, inputs[0], targets[0]
        static = setup.model, setup.plan.execution
        loss = compiling.call(evaluate_loss, batch, static, setup.plan.execution.compiler_options)
        total += float(loss)
        if run.stop.is_set():
            return progress
    mean = total / setup.val_batches
    run.log.val(progress.step, loss=mean, batches=setup.val_batches)
    run.console.val(progress.step, mean)
    counters = progress.counters._replace(val_loss=mean, validated=progress.step)
    # A run stopped in its validation left a checkpoint of this step without this loss.
    return progress._replace(counters=counters, saving=-1 if progress.saving == progress.step else progress.saving)


def draw_sample(run: Run, progress: Progress) -> Progress:
    """Samples from the model, keeps and shows the text; nothing if the user stops the run meanwhile."""
    setup, model, tokenizer = run.setup, run.setup.model, run.setup.tokenizer.tokenizer
    weights, length = progress.state.weights, setup.config.sequence_length
    end_of_text = model.vocab_size - 1 if tokenizer is None else tokenizer.eot
    counters, ids = progress.counters, list[int]()
    state = skip_u32(SEED, 0 if setup.config.samples_begin_anew else counters.drawn)
    for token in generate(weights, model, setup.config.sample_tokens, length, end_of_text, setup.plan.execution, state):
        if run.stop.is_set():
            return progress
        ids.append(token)
    text = sample_text(tokenizer, ids)
    run.log.sample(progress.step, text, len(ids))
    run.console.sample(text)
    return progress._replace(counters=counters._replace(sampled=progress.step, drawn=counters.drawn + len(ids)))


def save(
    run: Run, progress: Progress, batches: Batches, step: Step | None, *, last: bool = False, prune: bool = True
) -> Progress:
    """Begins to save the training state, unless this step's is saved already. last: no step follows."""
    setup = run.setup
    if progress.step == progress.saving:
        return progress
    metadata = Metadata(
        progress.step,
        setup.identity,
        setup.steps,
        counters=progress.counters,
        options=setup.config.to_json(),
        val_data=setup.val_data,
        loader=batches.position(),
        environment=setup.environment,
        kernels=to_json(setup.plan.resolved),
        origin=setup.origin,
    )
    copies = not last and step is not None  # before the step is compiled nobody knows what memory it needs
    run.saver.save(progress.state, metadata, available_memory(setup, step), last=not copies, prune=prune)
    return progress._replace(saving=progress.step)


def available_memory(setup: Setup, step: Step | None) -> Memory:
    """What decides whether a copy of the state may lie beside the training."""
    needed = 0 if step is None else step.bytes
    if setup.device.platform == "cpu":
        return Memory(needed, None)
    stats = jax.devices()[0].memory_stats() or {}
    return Memory(needed, stats.get("bytes_limit", 0) - stats.get("peak_bytes_in_use", 0))


def hear_of_saves(run: Run, progress: Progress, ended: list[Saved], last: bool = False) -> Progress:
    """Logs and shows how saves ended. last: no other will be tried.

    Raises InputError for one that failed, where --save-failure says stop, or where it was the last one.
    """
    for each in ended:
        if each.problem is None:
            times = {"waited_ms": 1e3 * each.waited, "ms": 1e3 * each.seconds}
            run.log.event("checkpoint", step=each.step, path=each.path.name, **times)
            tell_removed(run, each.removed, each.unremoved)
            progress = progress._replace(saved=each.path)
            continue
        run.log.event("save_failed", step=each.step, problem=each.problem)
        if run.setup.config.save_failure == "stop" or (last and each.step == progress.saving):
            raise InputError(each.problem)
        run.console.warning(f"{each.problem}; earlier ones are as they were")
        if each.step == progress.saving:
            progress = progress._replace(saving=-1)
    return progress


def tell_removed(run: Run, steps: tuple[int, ...], problem: str | None) -> None:
    """Logs which checkpoints were deleted; one that could not be deleted is no reason to stop."""
    for step in steps:
        run.log.event("removed", step=step)
    if problem is not None:
        run.console.warning(problem)


def tell_notices(run: Run, progress: Progress) -> None:
    """Log and show what happened to the token files."""
    data = run.setup.data
    for idle in (data.val, data.train if run.setup.config.overfit else None):
        if idle is not None:  # the others are looked at as they are read
            idle.look()
    for loader in (data.train, data.val):
        for notice in loader.notices() if loader else ():
            run.log.event("data", step=progress.step, file=str(notice.path), what=notice.what)
            run.console.warning(notice.words)


def look(run: Run, progress: Progress, batches: Batches, compiled: Step | None) -> Progress:
    """What comes before a step and after the last one, where it is due: validation, sample, checkpoint.

    What a checkpoint says was done before its step already is not done again.
    """
    config, step = run.setup.config, progress.step
    last = step == run.setup.steps

    def due(every: int, done: int = -1, at_end: bool = True) -> bool:
        return every > 0 and (step % every == 0 or (last and at_end)) and step != done and not run.stop.is_set()

    if due(config.val_every, progress.counters.validated):
        progress = validate(run, progress)
    at_end = config.samples_at_end
    if due(config.sample_every, progress.counters.sampled, at_end) and (step > 0 or (last and at_end)):
        progress = draw_sample(run, progress)
    if due(config.checkpoint_every) and step > 0 and step % config.checkpoint_every == 0:
        progress = save(run, progress, batches, compiled, last=last)
    return progress


class InFlight(NamedTuple):
    """A step that the device has been given and whose figures have not been read yet."""

    metrics: Any  # step.Metrics, on the device
    start: float  # when the host began it


def begin_step(step: Step, batches: Batches, progress: Progress) -> tuple[Progress, InFlight]:
    """Hands the device one training step and returns at once."""
    start = time.perf_counter()
    inputs, targets = next(batches.each)
    state, metrics = step.call(progress.state, inputs, targets)
    return progress._replace(state=state, step=progress.step + 1), InFlight(metrics, start)


def end_step(progress: Progress, flight: InFlight, scale_moves: bool = True) -> tuple[Progress, StepResult]:
    """Waits for the oldest step in flight and reads its figures. scale_moves: an overflow lowers the loss scale.

    Its time includes that of waiting for the data, as llm.c's does, and begins where the step before it ended.
    """
    read = jax.tree.map(lambda value: value.item(), jax.device_get(flight.metrics))  # waits for the device
    now = time.perf_counter()
    seconds = now - max(flight.start, progress.read_at)
    counters = progress.counters
    # An overflow under a loss scale is no divergence: the scale gives way first.
    harmless = read.finite or (read.loss_scale > 1 and scale_moves)
    progress = progress._replace(
        read=progress.read + 1,
        read_at=now,
        counters=counters._replace(
            skipped=counters.skipped + (not read.applied),
            skipped_in_a_row=0 if harmless else counters.skipped_in_a_row + 1,
        ),
        seconds=progress.seconds + (seconds if progress.read > progress.begun_at else 0.0),
    )
    return progress, StepResult(
        read.loss, read.norm, read.learning_rate, read.applied, read.z_loss, read.z_norm, seconds, read.loss_scale
    )


def report_step(run: Run, progress: Progress, result: StepResult) -> Progress:
    """Logs and shows the step that was just made."""
    setup, index = run.setup, progress.read - 1  # llm.c counts steps from 0
    tokens = setup.config.tokens_per_step
    per_second = tokens / result.seconds
    precision = setup.plan.product_precision
    peak = None if setup.device.platform == "cpu" else peak_flops(setup.device.kind, precision)
    flops = flops_per_token(setup.model, setup.config.sequence_length) * per_second
    common: dict[str, Any] = {
        "loss": result.loss,
        "norm": result.norm,
        "lr": result.rate,
        "ms": 1e3 * result.seconds,
        "skipped": not result.applied,
    }
    more: dict[str, Any] = {"loss_scale": result.loss_scale} if setup.plan.dtype == "fp16" else {}
    scores = {"z_loss": result.z_loss, "z_norm": result.z_norm}
    more |= {name: z for name, z in scores.items() if not math.isnan(z)}
    run.log.train(index, tokens_per_second=per_second, tokens=progress.read * tokens, **common, **more)
    speed, shown = smooth_speed(progress.speed, per_second)
    utilization = utilization_text(flops, peak, precision)
    shown_scores: dict[str, Any] = scores if setup.config.skip_loss_z or setup.config.skip_norm_z else {}
    figures = {"tokens_per_second": shown, "utilization": utilization, **common, **shown_scores}
    run.console.step(StepFigures(index, setup.steps, **figures))
    why = skip_message(result.z_loss, result.z_norm, setup.config.skip_loss_z, setup.config.skip_norm_z)
    if why and not result.applied:
        run.console.note(why)
    return progress._replace(speed=speed)


def loop(run: Run, state: TrainState) -> Outcome:
    """Makes all steps, or as many as can be made before the user stops the run, it diverges, or something breaks.

    Source: llm.c train_gpt2.cu, `main`.
    """
    setup, stop = run.setup, run.stop
    scale_moves = setup.config.loss_scale_factor > 1
    progress, flight, problem = first_progress(setup, state), None, None
    # XLA compiles the step while the main thread validates, which needs a compilation of its own.
    with ThreadPoolExecutor(max_workers=1) as pool, training_batches(setup) as batches, traced(run) as tick:
        compilation = pool.submit(compile_step, setup, state) if progress.step < setup.steps else None
        try:
            progress = look(run, progress, batches, None)
            step = compilation.result() if compilation else None
            while progress.step < setup.steps and not stop.is_set() and not diverged(setup, progress):
                assert step is not None
                tick(progress.step)
                before, progress, flight = flight, *begin_step(step, batches, progress)
                if before is not None:  # while the device works on the step just begun
                    progress, result = end_step(progress, before, scale_moves)
                    progress = report(run, progress, result)
                if not setup.plan.runs_ahead or pauses_after(run, progress.step):
                    ending, flight = flight, None
                    progress, result = end_step(progress, ending, scale_moves)
                    progress = report(run, progress, result)
                    progress = look(run, progress, batches, step)
                progress = hear_of_saves(run, progress, run.saver.finished())
                tell_notices(run, progress)
        except InputError as error:  # a full disk, a damaged data file: what has been learned so far is still good
            problem = error
        if flight is not None:
            progress, result = end_step(progress, flight, scale_moves)
            try:
                progress = report(run, progress, result)
            except InputError as error:
                problem = problem or error
        code = ExitCode.BAD_INPUT if problem else exit_code(run, progress)
        return last_save(run, Outcome(code, progress, problem), batches)


def exit_code(run: Run, progress: Progress) -> ExitCode:
    """How a run that broke nowhere has ended."""
    if diverged(run.setup, progress):
        return ExitCode.DIVERGED
    return ExitCode.STOPPED if run.stop.is_set() else ExitCode.DONE


def last_save(run: Run, outcome: Outcome, batches: Batches) -> Outcome:
    """The checkpoint of the end, and the ends of all saves; where one fails here, the run has failed."""
    code, progress, problem = outcome
    try:
        if run.setup.config.saves_at_end and (progress.step > 0 or run.setup.steps == 0):
            # The checkpoints from before a divergence may be what the user goes back to.
            progress = save(run, progress, batches, None, last=True, prune=code != ExitCode.DIVERGED)
        progress = hear_of_saves(run, progress, run.saver.wait(), last=True)
        if code == ExitCode.DONE:
            tell_removed(run, *run.saver.prune_rest())
    except InputError as error:
        return Outcome(ExitCode.BAD_INPUT, progress, problem or error)
    return Outcome(code, progress, problem)


def report(run: Run, progress: Progress, result: StepResult) -> Progress:
    """Logs, shows and draws the step that was just read."""
    progress = report_step(run, progress, result)
    report_gpu(run, progress.read)
    run.drawer.refresh()
    return progress


def report_gpu(run: Run, steps: int) -> None:
    """Logs and shows what the GPU says of itself, where -lg asks for it after so many steps, as llm.c does."""
    monitor, every = run.setup.monitor, run.setup.config.gpu_info_every
    if monitor is None or steps % every:
        return
    reading = monitor.read(run.console.warning)
    if reading is not None:
        run.log.event("gpu", step=steps - 1, **gpu_numbers(reading))
        run.console.note(gpu_line(reading))


def diverged(setup: Setup, progress: Progress) -> bool:
    """Whether so many steps in a row were not finite that the run ends."""
    return 0 < setup.config.max_nonfinite <= progress.counters.skipped_in_a_row


def pauses_after(run: Run, step: int) -> bool:
    """Whether something is due after `step` steps that needs the state or an idle device."""
    config = run.setup.config
    every = (config.val_every, config.sample_every, config.checkpoint_every)
    start, stop = profile_slice(config)
    return step == run.setup.steps or start <= step <= stop or any(n > 0 and step % n == 0 for n in every)


def profile_slice(config: TrainConfig) -> tuple[int, int]:
    """The steps that --profile names; an empty slice without it."""
    return parse_slice(config.profile) if config.profile else (-1, -1)


@contextmanager
def traced(run: Run) -> Iterator[Callable[[int], None]]:
    """Gives the function to call before each step: it records those that --profile names into the run's folder."""
    if not run.setup.config.profile:
        yield lambda step: None
        return
    folder = run.folder / "profile"

    def done() -> None:
        run.console.note(f"profile:      {folder} (docs/profiling.md says how to open it)")

    with slice_trace(folder, *profile_slice(run.setup.config), done) as tick:
        yield tick


# ----- the end ------------------------------------------------------------------------------------------------------


def finish(run: Run, outcome: Outcome) -> Outcome:
    """Writes the last event and the last picture, and says where everything is."""
    outcome = write_rest(run, outcome)
    run.drawer.finish()
    run.console.close()
    for line in summary(run, outcome):
        run.console.note(line)
    return outcome


def write_rest(run: Run, outcome: Outcome) -> Outcome:
    """The last event; where it cannot be written either, the first problem counts."""
    progress, code = outcome.progress, outcome.code
    try:
        run.log.event("end", step=progress.step, outcome=code.name.lower(), skipped=progress.counters.skipped)
    except InputError as problem:
        return Outcome(ExitCode.BAD_INPUT, progress, outcome.problem or problem)
    return outcome


def summary(run: Run, outcome: Outcome) -> Iterator[str]:
    """The last lines on the screen: how it went, where everything is, what to try next."""
    config, (code, progress, _) = run.setup.config, outcome
    timed = progress.step - progress.begun_at - 1
    if timed > 0:
        yield f"total average iteration time: {1e3 * progress.seconds / timed:.6f} ms"
    if progress.counters.skipped:
        yield f"skipped:      {progress.counters.skipped} steps updated nothing (not finite, or an outlier)"
    if progress.step < run.setup.steps:
        yield f"stopped:      after {progress.step} of {run.setup.steps} steps"
    if code == ExitCode.DIVERGED:
        yield from divergence_advice(config, progress)
    if run.held.is_there():
        yield from places(run, outcome)
    if config.preset == "demo" and code == ExitCode.DONE:
        train, python = platform.train_command(), platform.python_command()
        for words, command, meaning in (
            ("try next:", f"{train} --preset demo -x 5000", "the same, longer"),
            ("", f"{train} --help", "every option"),
            ("", f"{python} -m llmc_jax.data tinyshakespeare", "then --preset tinyshakespeare"),
        ):
            yield f"{words:<13} {command:<54} ({meaning})"


def places(run: Run, outcome: Outcome) -> Iterator[str]:
    """Where everything is, and the command that goes on."""
    config, (code, progress, _) = run.setup.config, outcome
    yield f"run folder:   {run.folder}"
    if run.drawer.path.exists():
        yield f"picture:      {run.drawer.path}"
    if progress.saved is not None:
        yield f"checkpoint:   {progress.saved}"
    goes_on = progress.saved is not None or (config.save and progress.step == 0)
    if progress.step < run.setup.steps and code != ExitCode.DIVERGED and goes_on:
        yield f"to go on:     {platform.train_command()} -y 1 -o {shlex.quote(str(run.folder))}"


def divergence_advice(config: TrainConfig, progress: Progress) -> Iterator[str]:
    """What to try after a run that diverged."""
    yield f"diverged:     the loss or the gradient was not finite {progress.counters.skipped_in_a_row} times in a row"
    if progress.counters.skipped == progress.step:
        yield f"              no step was finite: are the weights that it started from sound (-e {config.model})?"
    else:
        yield "              the model is as the last finite step left it, so probably no good either"
        yield f"try:          a lower -l (it was {config.learning_rate:g}), a longer warm-up -u, a smaller --grad-clip,"
        yield "              or an earlier checkpoint (-n); main.log shows where the norm began to grow"


def run(config: TrainConfig, notes: list[str]) -> ExitCode:
    """Trains as configured and returns the exit code. notes: lines to show once the table has been printed.

    Raises InputError: before anything is written for what cannot be used, and after what was learned has been saved
    for what breaks during the run.
    """
    notes = [*notes, *platform.configure(tf32=config.tf32)]
    stop = threading.Event()
    output = Output(sys.stdout, stop)
    try:
        with lock_of(config) as held:
            setup, state = prepare(config, notes)
            with opened(setup, output, stop, held) as session:
                outcome = finish(session, loop(session, state))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        words = str(error).splitlines()[0].rstrip(".")
        raise InputError(
            f"the device's memory is full: {words}; lower -b (and keep -d for the same updates), or -t, or keep less "
            "with --recompute-blocks 1, or take a smaller model"
        ) from error
    finally:
        output.discard_rest()
    if outcome.problem is not None:
        raise outcome.problem
    if outcome.code == ExitCode.STOPPED and output.reader_left:
        print_error(f"{Path(sys.argv[0]).name}: stopped, since nobody reads the output any more")
    elif outcome.code == ExitCode.STOPPED and output.error is not None:
        raise InputError(f"standard output: cannot be written ({output.error.strerror}); the run was stopped")
    return outcome.code
