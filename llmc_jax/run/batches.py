"""The batches that a run trains on, and the loss over those that it validates on."""

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any, NamedTuple

import jax
import numpy as np

from llmc_jax import cluster
from llmc_jax.checkpoint.contents import judged
from llmc_jax.data.loader import Batch, Prefetcher
from llmc_jax.machine import compiling
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
    total, left, at_once, own = 0.0, setup.val_batches, setup.plan.parallel.devices, setup.place.own_devices
    read = math.lcm(at_once, loader.num_processes)  # as many as there are devices, unless more of llm.c's take turns
    wanted = [first + device for first in range(0, read, at_once) for device in own]
    while left:
        inputs, targets = loader.next_batch(read, wanted)
        for first in range(0, len(wanted), len(own)):
            cluster.here().phase("validate", progress.step)  # whose limit is for one batch, however many there are
            batch = (each[first : first + len(own)] for each in (inputs, targets))
            # the last time some may be read once more and not counted
            for loss in losses(setup, progress.state.weights, *batch)[:left]:
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
