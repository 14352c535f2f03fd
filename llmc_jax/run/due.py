"""A run's batches, and the work between two steps: validation, HellaSwag, a sample, a checkpoint, news of saves."""

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np

from llmc_jax import cluster
from llmc_jax.base.rng import skip_u32
from llmc_jax.checkpoint.contents import judged, stops_early
from llmc_jax.cluster.agreement import Agreed
from llmc_jax.data.loader import Batch, Prefetcher
from llmc_jax.data.tokenizers import drawable, sample_text, usual_eot
from llmc_jax.evaluate.choices import answers, rows_of_items
from llmc_jax.generate.llmc import SEED, generate, sample_mult, sample_softmax
from llmc_jax.generate.scorer import TOKENS_ON_CPU, TOKENS_ON_GPU, Scored, Scorer, score
from llmc_jax.machine import compiling
from llmc_jax.machine.device import memory_stats
from llmc_jax.models.execution import PLAIN
from llmc_jax.run.record import profile_slice
from llmc_jax.run.saver import Saved
from llmc_jax.run.state import Progress, Run, Setup
from llmc_jax.training.step import evaluate_loss, evaluate_losses


class Batches(NamedTuple):
    """Training batches (A, B, T) without end: of several processes those that are this one's own."""

    each: Iterator[Batch]
    position: Callable[[], dict[str, Any] | None]  # the loader's, after the batches given out


@contextmanager
def training_batches(setup: Setup) -> Iterator[Batches]:
    """Open the batches: read ahead in the background, or with -a the same one each time."""
    loader, micro_batches = setup.data.train, setup.config.micro_batches
    own = setup.place.own(micro_batches)
    if loader is None:
        yield Batches(iter(()), lambda: None)
    elif setup.config.overfit:
        loader.reset()
        batch = loader.next_batch(micro_batches, own)
        yield Batches(itertools.repeat(batch), lambda: None)
    else:
        with closing(Prefetcher(loader, micro_batches, wanted=own)) as prefetcher:
            yield Batches(prefetcher, prefetcher.state)


def run_due(run: Run, progress: Progress, batches: Batches, step_bytes: int | None) -> Progress:
    """Validate, evaluate, sample and save where that is due before a step or after the last one.

    step_bytes: memory that the step needs; None before it is compiled. What a checkpoint says was done before its step
    already is not done again.
    """
    setup, step = run.setup, progress.step
    config, group = setup.config, cluster.here()
    last = step == setup.steps

    def due(every: int, done: int = -1, at_end: bool = True) -> bool:
        return every > 0 and (step % every == 0 or (last and at_end)) and step != done and not run.stop.is_set()

    if due(config.val_every, progress.counters.validated):
        progress = validate(run, progress)
    last = last or stops_early(config, progress.counters)
    if setup.questions and (step > 0 or last) and due(config.val_every, progress.counters.evaluated):
        progress = evaluate(run, progress)
    at_end = config.sampling != "train_gpt2.c"
    first = group.rank == 0  # which draws, alone: the others wait for it at the next exchange
    if due(config.sample_every, progress.counters.sampled, at_end) and (step > 0 or (last and at_end)):
        weights = setup.place.weights(progress.state)  # of all processes
        if first:
            group.phase("sample", step)
            progress = draw_sample(run, progress, setup.place.first(weights))
        del weights  # before a save takes memory
    if due(config.checkpoint_every) and step > 0 and step % config.checkpoint_every == 0:
        group.phase("save", step)
        progress = save(run, progress, batches, step_bytes, last=last)
    return progress


def pauses_after(run: Run, step: int) -> bool:
    """Return whether something is due after `step` steps that needs the state or an idle device."""
    config = run.setup.config
    every = (config.val_every, config.sample_every, config.checkpoint_every)
    start, stop = profile_slice(config)
    return step == run.setup.steps or start <= step <= stop or any(n > 0 and step % n == 0 for n in every)


def losses(setup: Setup, weights: jax.Array, inputs: np.ndarray, targets: np.ndarray) -> list[float]:
    """Return the mean loss of each of n batches (n, B, T), one on each device. Of several processes each gives its own
    ones, and gets all losses.
    """
    static, options = (setup.model, setup.plan.execution), setup.plan.execution.compiler_options
    if setup.plan.parallel.devices == 1:
        return [float(compiling.call(evaluate_loss, (weights, inputs[0], targets[0]), static, options))]
    batch = weights, setup.place.rows(inputs), setup.place.rows(targets)
    with setup.place.context():
        found = compiling.call(evaluate_losses, batch, static, options)
    return [float(loss) for loss in np.asarray(found)]


def validate(run: Run, progress: Progress) -> Progress:
    """Log the mean loss over the first batches of the validation data; nothing if the user stops the run meanwhile."""
    setup, loader = run.setup, run.setup.data.val
    assert loader is not None
    loader.reset()
    weights = setup.place.weights(progress.state)
    total, left, at_once, own = 0.0, setup.val_batches, setup.plan.parallel.devices, setup.place.own_devices
    read = math.lcm(at_once, loader.num_processes)  # as many as there are devices, unless more of llm.c's take turns
    wanted = [first + device for first in range(0, read, at_once) for device in own]
    while left:
        inputs, targets = loader.next_batch(read, wanted)
        for first in range(0, len(wanted), len(own)):
            cluster.here().phase("validate", progress.step)  # whose limit is for one batch, however many there are
            batch = (each[first : first + len(own)] for each in (inputs, targets))
            # the last time some may be read once more and not counted
            for loss in losses(setup, weights, *batch)[:left]:
                total += loss  # one after the other, whatever the number of devices
            left -= min(left, at_once)
            if run.votes.ask():
                return progress
    mean = total / setup.val_batches
    run.log.val(progress.step, loss=mean, batches=setup.val_batches)
    run.console.val(mean)
    counters = judged(progress.counters, progress.step, mean, setup.config.patience_delta)
    # A run stopped in its validation left a checkpoint of this step without this loss.
    return progress._replace(counters=counters, saving=-1 if progress.saving == progress.step else progress.saving)


def draw_sample(run: Run, progress: Progress, weights: jax.Array) -> Progress:
    """Sample from the model, keep and show the text; nothing if the user stops the run meanwhile."""
    setup, model, tokenizer = run.setup, run.setup.model, run.setup.tokenizer.tokenizer
    end_of_text = usual_eot(model.vocab_size) if tokenizer is None else tokenizer.eot
    counters, drawn, request = progress.counters, list[int](), run.votes.request
    ids = drawable(tokenizer, model.vocab_size)
    state = skip_u32(SEED, 0 if setup.config.sampling == "train_gpt2.cu" else counters.drawn)
    count, options = setup.config.sample_tokens, setup.plan.execution.compiler_options
    pick = sample_mult if setup.config.sampling == "train_gpt2.c" else sample_softmax
    for token in generate(weights, model, count, end_of_text, options, state, pick, ids):
        cluster.here().phase("sample", progress.step)  # whose limit is for one token
        if request.is_set():
            return progress
        drawn.append(token)
    text = sample_text(tokenizer, drawn)
    run.log.sample(progress.step, text, len(drawn))
    run.console.sample(text)
    return progress._replace(counters=counters._replace(sampled=progress.step, drawn=counters.drawn + len(drawn)))


def save(
    run: Run, progress: Progress, batches: Batches, step_bytes: int | None, *, last: bool = False, prune: bool = True
) -> Progress:
    """Begin to save the training state, unless this step's is saved already. last: no step follows."""
    setup = run.setup
    if progress.step == progress.saving:
        return progress
    test = progress.test.to_json() if setup.config.find_lr else None
    metadata = replace(
        setup.metadata, step=progress.step, counters=progress.counters, loader=batches.position(), range_test=test
    )
    copies = not last and step_bytes is not None  # before the step is compiled nobody knows what memory it needs
    run.saver.save(progress.state, metadata, step_bytes or 0, free_memory(setup), last=not copies, prune=prune)
    return progress._replace(saving=progress.step)


def free_memory(setup: Setup) -> int | None:
    """Return the bytes of the device that nothing has used so far; None on a CPU."""
    if setup.device.platform == "cpu":
        return None
    stats = memory_stats()
    return stats.get("bytes_limit", 0) - stats.get("peak_bytes_in_use", 0)


def poll_saves(run: Run, progress: Progress, ended: list[Saved], last: bool = False) -> Progress:
    """Log and show how saves ended. last: no other will be tried.

    Raises InputError for one that failed, where it was the last one.
    """
    for each in ended:
        if each.problem is None:
            times = {"waited_ms": 1e3 * each.waited, "ms": 1e3 * each.seconds}
            run.log.event("checkpoint", step=each.step, path=each.path.name, **times)
            tell_removed(run, each.removed, each.unremoved)
            progress = progress._replace(saved=each.path)
            continue
        run.log.event("save_failed", step=each.step, problem=each.problem)
        if last and each.step == progress.saving:
            raise Agreed(each.problem)
        run.console.warning(f"{each.problem}; earlier checkpoints are unchanged")
        if each.step == progress.saving:
            progress = progress._replace(saving=-1)
    return progress


def tell_removed(run: Run, steps: tuple[int, ...], problem: str | None) -> None:
    """Log which checkpoints were deleted; one that could not be deleted is no reason to stop."""
    for step in steps:
        run.log.event("removed", step=step)
    if problem is not None:
        run.console.warning(problem)


def evaluate(run: Run, progress: Progress) -> Progress:
    """Log how many of HellaSwag's questions are answered right; nothing if the user stops the run meanwhile."""
    setup, found = run.setup, list[Scored]()
    rows = sum(len(item.completions) for item in setup.questions)

    def stop() -> bool:
        cluster.here().phase("evaluate", progress.step)  # whose limit is for one computation
        return run.votes.ask()

    cluster.here().phase("evaluate", progress.step)
    for each in score(scorer_of(setup, progress), rows_of_items(setup.questions), stop=stop):
        found.append(each)
        run.console.doing(f"HellaSwag {len(found) / rows:.0%}")
    run.console.doing("")
    if run.stop.is_set():
        return progress
    answered = answers(setup.questions, found)
    items, correct_norm = len(answered), sum(each.right_norm for each in answered)  # the latter is llm.c's figure
    correct = sum(each.right for each in answered)
    run.log.accuracy(progress.step, items=items, correct=correct, correct_norm=correct_norm)
    run.console.accuracy(correct_norm, items)
    # as after a validation: a checkpoint that a stopped run left of this step is without it
    saving = -1 if progress.saving == progress.step else progress.saving
    return progress._replace(counters=progress.counters._replace(evaluated=progress.step), saving=saving)


def scorer_of(setup: Setup, progress: Progress) -> Scorer:
    """Return the model as it is, computed by XLA's operations: rows are short, and no kernel was tried at their sizes.

    On a GPU a batch has no more tokens than a step that is not tiny, so that there is memory for it.
    """
    execution = PLAIN._replace(compiler_options=setup.plan.execution.compiler_options)
    tokens = setup.config.batch_size * setup.config.sequence_length
    on_gpu = min(max(TOKENS_ON_CPU, tokens), TOKENS_ON_GPU)
    at_once = TOKENS_ON_CPU if setup.device.platform == "cpu" else on_gpu
    return Scorer(setup.place.weights(progress.state), setup.model, execution, setup.place, at_once)
