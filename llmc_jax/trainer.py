"""The training loop: model, data, folder and screen put together, and llm.c's order of things in each step.

    validate (before the step's update) ─► sample ─► checkpoint ─► one training step ─► log

Leaves out what each of these is (step.py, data/, checkpoint/, runlog.py, console.py) and how options are spelled.
"""

import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from llmc_jax import hardware, platform
from llmc_jax.checkpoint.llmc import read_header, read_model, write_model
from llmc_jax.config import ExitCode, ModelConfig, TrainConfig, check_model_fit, parse_descriptor
from llmc_jax.console import Console, Speed, smooth_speed, utilization_text
from llmc_jax.curves import draw_curves
from llmc_jax.data.corpora import Corpus, stdlib_corpus
from llmc_jax.data.loader import Prefetcher, TokenLoader
from llmc_jax.data.tokenizers import Choice, load_tokenizer, sample_text
from llmc_jax.errors import InputError
from llmc_jax.init import random_parameters
from llmc_jax.optimizer import AdamWNumbers
from llmc_jax.params import num_parameters, padded
from llmc_jax.runlog import METRICS, RunLog, create_run_folder, read_metrics
from llmc_jax.sampler import generate
from llmc_jax.schedule import ScheduleNumbers
from llmc_jax.step import StepNumbers, StepOptions, TrainState, evaluate_loss, initial_state, train_step

CURVES = "curves.png"
REDRAW_SECONDS = 20.0  # between two pictures; drawing one takes a fraction of a second of one core


# ----- setting up ---------------------------------------------------------------------------------------------------


class Model(NamedTuple):
    """What `-e` names."""

    config: ModelConfig
    path: Path | None  # of the checkpoint; None: random weights


class Data(NamedTuple):
    """What `-i` and `-j` name."""

    train: TokenLoader
    val: TokenLoader
    corpus: Corpus | None  # the built-in one, if it is that


def resolve_model(config: TrainConfig) -> Model:
    """The model's shape, from the header of a checkpoint or from a descriptor; reads no weights."""
    name = config.model
    path = Path(name)
    if path.is_file():
        return Model(read_header(path).config, path)
    if name.endswith(".bin") or "/" in name:
        raise InputError(
            f"-e {name}: no such file; give the path of an llm.c checkpoint, or a shape such as d12 for random weights "
            "(without any flag, a small demo model is trained)"
        )
    return Model(parse_descriptor(name), None)


def open_data(config: TrainConfig, model: ModelConfig) -> Data:
    """The two loaders. With -a both read the validation data, unshuffled, as llm.c has it."""
    corpus = stdlib_corpus() if "stdlib" in (config.train_data, config.val_data) else None
    train_name = config.val_data if config.overfit else config.train_data

    def loader(name: str, flag: str, shuffle: bool, split: str) -> TokenLoader:
        paths = [getattr(corpus, split)] if corpus is not None and name == "stdlib" else name
        return TokenLoader(
            paths,
            config.batch_size,
            config.sequence_length,
            vocab_size=model.vocab_size,
            shuffle=shuffle,
            flag=flag,
            seed=config.seed,
        )

    shuffle = config.shuffle == "llmc" and not config.overfit
    train = loader(train_name, "-j" if config.overfit else "-i", shuffle, "val" if config.overfit else "train")
    return Data(train, loader(config.val_data, "-j", False, "val"), corpus)


def initial_parameters(config: TrainConfig, model: Model) -> tuple[np.ndarray, tuple[str, ...]]:
    """The flat buffer to start from (flat_size,), and warnings about the checkpoint's content."""
    if model.path is None:
        return padded(random_parameters(model.config, config.seed), model.config), ()
    file = read_model(model.path, v2_order=config.v2_order)
    return padded(file.flat, file.config), file.warnings


def total_steps(config: TrainConfig, loader: TokenLoader) -> int:
    """Steps of the run: as asked, or one epoch, as llm.c counts it."""
    if config.max_steps >= 0:
        return config.max_steps
    steps = loader.num_tokens // config.tokens_per_step
    if steps == 0:
        raise InputError(
            f"-d {config.tokens_per_step}: one update takes more tokens than the training data holds "
            f"({loader.num_tokens}); lower -d, give more data, or say how many steps to make with -x"
        )
    return steps


def step_numbers(config: TrainConfig, steps: int) -> StepNumbers:
    """The traced numbers of the step."""
    schedule = ScheduleNumbers(
        learning_rate=float(config.learning_rate),
        warmup_steps=config.warmup_steps,
        total_steps=steps,
        final_fraction=float(config.final_lr_fraction),
        step_every=config.step_every,
        step_factor=float(config.step_factor),
    )
    adamw = AdamWNumbers(float(config.beta1), float(config.beta2), float(config.eps), float(config.weight_decay))
    return StepNumbers(schedule, adamw, float(config.grad_clip))


def step_options(config: TrainConfig) -> StepOptions:
    """The static choices of the step."""
    return StepOptions(config.schedule, config.decay if config.weight_decay else "none", config.recompute)


# ----- stopping -----------------------------------------------------------------------------------------------------


@contextmanager
def stop_requests() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C or SIGTERM sets; the second one ends the program at once.

    Outside the main thread, where Python allows no handlers, the event is never set.
    """
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    signals = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in signals}

    def ask(number: int, frame: Any) -> None:
        asked.set()
        for each in signals:
            signal.signal(each, before[each])

    for number in signals:
        signal.signal(number, ask)
    try:
        yield asked
    finally:
        for number in signals:
            signal.signal(number, before[number])


# ----- the picture --------------------------------------------------------------------------------------------------


class CurveDrawer:
    """Redraws the picture of the curves in a thread of its own, so that the training step does not wait for it."""

    def __init__(self, folder: Path, title: str, yardsticks: dict[str, float]) -> None:
        self._folder, self._title, self._yardsticks = folder, title, yardsticks
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="curves")
        self._drawing: Future[None] | None = None
        self._last = time.monotonic()

    def _draw(self) -> None:
        draw_curves(read_metrics(self._folder / METRICS), self._folder / CURVES, self._title, self._yardsticks)

    def refresh(self) -> None:
        """Begins a new picture if the last one is old enough and finished."""
        idle = self._drawing is None or self._drawing.done()
        if idle and time.monotonic() - self._last > REDRAW_SECONDS:
            self._last = time.monotonic()
            self._drawing = self._pool.submit(self._draw)

    def finish(self) -> None:
        """Draws the last picture and waits for it."""
        try:
            self._pool.submit(self._draw).result()
        finally:
            self._pool.shutdown()


# ----- the loop -----------------------------------------------------------------------------------------------------


class Run(NamedTuple):
    """What stays the same while the loop runs."""

    config: TrainConfig
    model: ModelConfig
    data: Data
    steps: int
    numbers: StepNumbers
    options: StepOptions
    tokenizer: Choice
    folder: Path
    log: RunLog
    console: Console
    drawer: CurveDrawer
    device: hardware.Device
    stop: threading.Event


class Outcome(NamedTuple):
    """How the loop ended."""

    code: ExitCode
    state: TrainState
    val_loss: float | None
    skipped: int
    step_seconds: list[float]


def validate_model(run: Run, params: jax.Array) -> tuple[float, int]:
    """Mean validation loss in nats per token and the number of batches it was taken over, from the first batch on."""
    available = run.data.val.batches_per_epoch
    wanted = run.config.val_batches
    batches = available if wanted == -1 else min(wanted, available)
    run.data.val.reset()
    total = 0.0
    for _ in range(batches):
        inputs, targets = run.data.val.next_batch()
        total += float(evaluate_loss(params, inputs[0], targets[0], run.model))
    return total / batches, batches


def draw_sample(run: Run, params: jax.Array, step: int) -> None:
    """Samples from the model, shows and keeps the text."""
    tokenizer = run.tokenizer.tokenizer
    end_of_text = run.model.vocab_size - 1 if tokenizer is None else tokenizer.eot
    ids = list(generate(params, run.model, run.config.sample_tokens, run.config.sequence_length, end_of_text))
    text = sample_text(tokenizer, ids)
    run.console.sample(text)
    run.log.sample(step, text, len(ids))


def save_model(run: Run, params: jax.Array, step: int) -> Path:
    """Writes model_<step>.bin, complete under its name or not there."""
    path = run.folder / f"model_{step:08d}.bin"
    write_model(path, run.model, np.asarray(params)[: num_parameters(run.model)])
    run.log.event("checkpoint", step=step, path=path.name)
    return path


def is_due(step: int, every: int, last: bool) -> bool:
    """Whether something that happens every so many steps, and at the end, happens now. 0: never."""
    return every > 0 and (step % every == 0 or last)


def training_batches(run: Run) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Batches (A, B, T) without end: read ahead in the background, or with -a the same one each time."""
    loader, micro_batches = run.data.train, run.config.grad_accumulation
    if run.config.overfit:
        while True:
            loader.reset()
            yield loader.next_batch(micro_batches)
    with Prefetcher(loader, micro_batches) as prefetcher:
        while True:
            yield prefetcher.next()


def compile_step(run: Run, state: TrainState) -> Any:
    """The compiled step, for arguments of the run's shapes."""
    config = run.config
    tokens = jax.ShapeDtypeStruct((config.grad_accumulation, config.batch_size, config.sequence_length), jnp.int32)
    return train_step.lower(state, tokens, tokens, run.numbers, run.model, run.options).compile()


def loop(run: Run, state: TrainState) -> Outcome:
    """Runs all steps, or as many as are made before the user stops it or it diverges. Source: llm.c `main`."""
    config = run.config
    val_loss: float | None = None
    speed, skipped, in_a_row = Speed(), 0, 0
    seconds: list[float] = []
    flops = hardware.flops_per_token(run.model, config.sequence_length)
    peak = None
    if run.device.platform != "cpu":
        peak = hardware.peak_flops(run.device.kind, "tf32" if config.tf32 else "fp32")
    batches = training_batches(run)
    # XLA compiles the step while the main thread validates (and compiles what that needs).
    with ThreadPoolExecutor(max_workers=1) as pool:
        compiling = pool.submit(compile_step, run, state) if run.steps else None
        for step in range(run.steps + 1):
            last = step == run.steps
            if is_due(step, config.val_every, last):
                val_loss, val_batches = validate_model(run, state.params)
                run.console.val(step, val_loss)
                run.log.val(step, loss=val_loss, batches=val_batches)
            if step > 0 and is_due(step, config.sample_every, last):
                draw_sample(run, state.params, step)
            if step > 0 and not last and is_due(step, config.checkpoint_every, last):
                save_model(run, state.params, step)
            if last:
                return Outcome(ExitCode.DONE, state, val_loss, skipped, seconds)
            if run.stop.is_set():
                return Outcome(ExitCode.STOPPED, state, val_loss, skipped, seconds)

            assert compiling is not None
            compiled = compiling.result()
            start = time.perf_counter()
            inputs, targets = next(batches)
            state, metrics = compiled(state, inputs, targets, run.numbers)
            loss, norm, rate, finite = (x.item() for x in jax.device_get(metrics))
            elapsed = time.perf_counter() - start
            seconds.append(elapsed)

            per_second = config.tokens_per_step / elapsed
            speed, shown = smooth_speed(speed, per_second)
            run.log.train(
                step,
                loss=loss,
                norm=norm,
                lr=rate,
                ms=1e3 * elapsed,
                tokens_per_second=per_second,
                tokens=(step + 1) * config.tokens_per_step,
                skipped=not finite,
            )
            run.console.step(
                step,
                loss=loss,
                norm=norm,
                lr=rate,
                ms=1e3 * elapsed,
                tokens_per_second=shown,
                utilization=utilization_text(flops * per_second, peak, "tf32" if config.tf32 else "fp32"),
                skipped=not finite,
            )
            run.drawer.refresh()
            skipped += not finite
            in_a_row = 0 if finite else in_a_row + 1
            if config.max_nonfinite and in_a_row >= config.max_nonfinite:
                return Outcome(ExitCode.DIVERGED, state, val_loss, skipped, seconds)
    raise AssertionError("the loop returns at its last step")


# ----- beginning and end --------------------------------------------------------------------------------------------


def table(config: TrainConfig, model: Model, data: Data, steps: int, device: hardware.Device, folder: Path) -> Any:
    """The sections of the start-up table."""
    shape = model.config
    val = config.val_batches if config.val_batches >= 0 else data.val.batches_per_epoch
    settings = [
        ("train data pattern", config.val_data if config.overfit else config.train_data),
        ("val data pattern", config.val_data),
        ("output log dir", folder),
        ("checkpoint_every", config.checkpoint_every),
        ("micro batch size B", config.batch_size),
        ("sequence length T", config.sequence_length),
        ("total batch size", config.tokens_per_step),
        ("grad_accum_steps", config.grad_accumulation),
        ("LR scheduler", config.schedule),
        ("learning rate (LR)", f"{config.learning_rate:e}"),
        ("warmup iterations", config.warmup_steps),
        ("final LR fraction", f"{config.final_lr_fraction:e}"),
        ("weight decay", f"{config.weight_decay:e}"),
        ("grad_clip", config.grad_clip),
        ("max_steps", config.max_steps),
        ("val_loss_every", config.val_every),
        ("val_max_steps", config.val_batches),
        ("sample_every", config.sample_every),
        ("genT", config.sample_tokens),
        ("overfit_single_batch", int(config.overfit)),
        ("recompute", config.recompute),
    ]
    shapes = [
        ("weights", model.path or f"random, seed {config.seed}"),
        ("max_sequence_length T", shape.max_seq_len),
        ("vocab_size V", shape.vocab_size),
        ("padded_vocab_size Vp", shape.padded_vocab_size),
        ("num_layers L", shape.num_layers),
        ("num_heads NH", shape.num_heads),
        ("channels C", shape.channels),
        ("num_parameters", num_parameters(shape)),
    ]
    counts = [
        ("train tokens", data.train.num_tokens),
        ("train_num_batches", steps),
        ("val_num_batches", min(val, data.val.batches_per_epoch)),
    ]
    device_rows = [("device", hardware.device_label(device)), ("precision", "fp32")]
    return [settings, device_rows, shapes, counts]


def advice(config: TrainConfig, outcome: Outcome, folder: Path, saved: Path | None) -> list[str]:
    """What to look at and to try next, for the end of the run."""
    lines = [f"run folder:   {folder}", f"picture:      {folder / CURVES}"]
    if saved is not None:
        lines.append(f"model:        {saved}")
    if outcome.code == ExitCode.DIVERGED:
        lines.append(
            f"The loss or gradient was not finite {config.max_nonfinite} times in a row; the parameters are those of "
            f"the last good step. Try a lower -l (it was {config.learning_rate:g}), a longer warm-up -u, or a smaller "
            "--grad-clip; look for the step where the norm began to grow in main.log."
        )
    elif config.preset == "demo" and outcome.code == ExitCode.DONE:
        lines += [
            "try next:     python train.py --preset demo -x 5000                  (the same, longer)",
            "              python train.py --help                                 (every option)",
            "              python -m llmc_jax.data tinyshakespeare                (then --preset shakespeare)",
        ]
    return lines


def start(config: TrainConfig, notes: list[str], stop: threading.Event) -> tuple[Run, TrainState]:
    """Checks everything that can go wrong, makes the run folder, and puts the run together."""
    model = resolve_model(config)
    notes = [*notes, *check_model_fit(config, model.config)]
    hardware.check_fits(model.config, config.batch_size, config.sequence_length)
    data = open_data(config, model.config)
    steps = total_steps(config, data.train)
    tokenizer = load_tokenizer(config.tokenizer, model.config.vocab_size)
    device = hardware.describe_device()
    parameters, warnings = initial_parameters(config, model)
    state = initial_state(jnp.array(parameters))
    del parameters

    name = config.preset or (model.path.stem if model.path else config.model)
    folder = create_run_folder(config.output_dir, name, config.reuse)
    earlier = sorted(folder.glob("model_*.bin"))
    if earlier:
        raise InputError(
            f"-y 1: {folder} holds the checkpoints of an earlier run, and continuing its training state is not built "
            f"yet; to start from its weights give -e {earlier[-1]} and another -o"
        )
    log = RunLog(folder, config.to_json(), asdict(model.config), reuse=config.reuse, device=device._asdict())
    console = Console(steps, config.print_every or steps + 1)
    console.table(table(config, model, data, steps, device, folder))
    for note in notes:
        console.note(note)
    for warning in warnings:
        console.warning(warning)
    if tokenizer.tokenizer is None and config.sample_every:
        console.warning(f"samples are printed as token ids: {tokenizer.note}")
    yardsticks = {}
    if data.corpus is not None:
        console.note(f"{data.corpus.description}; fingerprint {data.corpus.fingerprint}")
        console.note(f"yardstick: guessing from the byte before gives a loss of {data.corpus.bigram_nats:.3f} nats")
        yardsticks["bigram entropy"] = data.corpus.bigram_nats
    drawer = CurveDrawer(folder, name, yardsticks)
    numbers, options = step_numbers(config, steps), step_options(config)
    run = Run(
        config, model.config, data, steps, numbers, options, tokenizer, folder, log, console, drawer, device, stop
    )
    return run, state


def finish(run: Run, outcome: Outcome) -> None:
    """Writes the model and the last picture, and says where everything is."""
    step = int(outcome.state.step)
    saved = save_model(run, outcome.state.params, step) if run.config.save and step > 0 else None
    run.log.event("end", step=step, outcome=outcome.code.name.lower(), skipped=outcome.skipped)
    run.drawer.finish()
    run.console.close()
    if len(outcome.step_seconds) > 1:  # llm.c leaves out the first step
        mean = 1e3 * sum(outcome.step_seconds[1:]) / (len(outcome.step_seconds) - 1)
        run.console.note(f"total average iteration time: {mean:.6f} ms")
    if outcome.skipped:
        run.console.warning(f"{outcome.skipped} steps had a loss or gradient that was not finite and updated nothing")
    if outcome.code == ExitCode.STOPPED:
        run.console.note(f"stopped after {step} of {run.steps} steps, everything written")
    for line in advice(run.config, outcome, run.folder, saved):
        run.console.note(line)


def run(config: TrainConfig, notes: list[str]) -> ExitCode:
    """Trains as configured and returns the exit code. notes: lines to show once the table has been printed.

    Raises InputError, before anything is written, for whatever cannot be used.
    """
    platform.configure(tf32=config.tf32)
    with stop_requests() as stop:
        session, state = start(config, notes, stop)
        with session.log, session.console:
            outcome = loop(session, state)
            del state
            finish(session, outcome)
    sys.stdout.flush()
    return outcome.code
