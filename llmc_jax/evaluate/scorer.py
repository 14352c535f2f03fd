"""The loss of each token of many rows of tokens: rows in batches of few shapes, batches on one device or several.

A row is padded to the next power of two, so short ones cost little and there are few programs. The shape of a batch
depends on the length of its rows alone, never on the number of devices: each device computes whole batches with the
program of one, so the figures of several devices are those of one. Leaves out where rows come from.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from llmc_jax.config.model import ModelConfig
from llmc_jax.generate.model import Model
from llmc_jax.machine import compiling
from llmc_jax.machine.device import devices_of
from llmc_jax.models.gpt2.model import Execution, forward_stream, tensors_of
from llmc_jax.models.gpt2.tensors import Params
from llmc_jax.ops.head import map_logits
from llmc_jax.training.parallel.collectives import gather
from llmc_jax.training.parallel.placement import Placement, placement
from llmc_jax.training.parallel.stage import EVERYWHERE, SPLIT, Parallel

TOKENS_ON_CPU, TOKENS_ON_GPU = 4096, 16384  # computed at a time: what keeps a device busy, and takes little memory
SHORTEST = 32  # positions of a batch's rows, at least
LOGIT_BYTES = 128 << 20  # of float32 logits that exist at a time


class Scorer(NamedTuple):
    """A model that gives losses. tokens_per_batch: computed at a time on each device, padding included."""

    weights: Params | jax.Array  # its tensors, or one flat buffer (flat_size,); on every device of `place`
    config: ModelConfig
    execution: Execution
    place: Placement
    tokens_per_batch: int = TOKENS_ON_CPU


def scorer_of(model: Model, devices: int = 1, tokens_per_batch: int | None = None) -> Scorer:
    """Return a scorer of a model on the first so many devices, which must be there.

    tokens_per_batch: computed at a time on each device; None: what suits it.
    """
    place = placement(model.config, Parallel(devices), devices_of(devices))
    platform = devices_of(1)[0].platform
    at_once = tokens_per_batch or (TOKENS_ON_CPU if platform == "cpu" else TOKENS_ON_GPU)
    return Scorer(place.everywhere(model.weights), model.config, model.execution, place, at_once)


class Row(NamedTuple):
    """Tokens to score: ids (n + 1,) of any integer dtype, 1 <= n <= maxT, from number `first` on (1 <= first <= n)."""

    ids: np.ndarray
    first: int = 1


class Scored(NamedTuple):
    """What the model thinks of a row. k = n + 1 - first."""

    row: int  # its number, from 0
    losses: np.ndarray  # (k,) float32, nats
    best: np.ndarray | None  # (k,) bool: the model holds no other token for likelier; None: was not asked for


class Batch(NamedTuple):
    """Rows of one padded length: inputs and targets (R, length) int32, and the number of each row; fewer than R at the
    end.
    """

    inputs: np.ndarray
    targets: np.ndarray
    rows: list[tuple[int, Row]]


def score(
    scorer: Scorer, rows: Iterable[Row], *, greedy: bool = False, stop: Callable[[], bool] = lambda: False
) -> Iterator[Scored]:
    """Yield what the model thinks of each row, in the order in which batches become full.

    greedy: also tell whether each token is the likeliest. stop: is asked after each computation whether to end. Of
    several processes each must be given the same rows, and gets all answers.
    """
    devices = scorer.place.parallel.devices
    waiting: dict[int, list[Batch]] = {}
    for batch in batches(rows, scorer.tokens_per_batch, scorer.config.max_seq_len):
        of_length = waiting.setdefault(batch.inputs.shape[1], [])
        of_length.append(batch)
        if len(of_length) == devices:
            yield from _computed(scorer, of_length, greedy)
            of_length.clear()
            if stop():
                return
    for of_length in waiting.values():
        if of_length:
            yield from _computed(scorer, of_length, greedy)
            if stop():
                return


def batches(rows: Iterable[Row], tokens_per_batch: int, longest: int) -> Iterator[Batch]:
    """Yield rows in batches of one length each: the next power of two, at least SHORTEST and at most `longest`."""
    waiting: dict[int, list[tuple[int, Row]]] = {}
    for number, row in enumerate(rows):
        length = padded_length(len(row.ids) - 1, longest)
        of_length = waiting.setdefault(length, [])
        of_length.append((number, row))
        if len(of_length) == rows_of(length, tokens_per_batch):
            yield _batch(of_length, length, tokens_per_batch)
            waiting[length] = []
    for length, of_length in waiting.items():
        if of_length:
            yield _batch(of_length, length, tokens_per_batch)


def padded_length(length: int, longest: int) -> int:
    """Return the positions that a row of so many inputs takes."""
    assert 1 <= length <= longest, (length, longest)
    return min(max(SHORTEST, 1 << (length - 1).bit_length()), longest)


def rows_of(length: int, tokens_per_batch: int) -> int:
    """Return how many rows of a padded length one batch has."""
    return max(1, tokens_per_batch // length)


def _batch(rows: list[tuple[int, Row]], length: int, tokens_per_batch: int) -> Batch:
    inputs = np.zeros((rows_of(length, tokens_per_batch), length), np.int32)
    targets = np.zeros_like(inputs)
    for at, (_, row) in enumerate(rows):
        inputs[at, : len(row.ids) - 1] = row.ids[:-1]
        targets[at, : len(row.ids) - 1] = row.ids[1:]
    return Batch(inputs, targets, rows)


def _computed(scorer: Scorer, group: list[Batch], greedy: bool) -> Iterator[Scored]:
    """Compute batches of one shape, at most one for each device, and yield what their rows got."""
    place = scorer.place
    static = (scorer.config, scorer.execution, greedy)
    options = scorer.execution.compiler_options
    if place.parallel.devices == 1:
        arrays = (scorer.weights, group[0].inputs, group[0].targets)
        found = compiling.call(scores_of_batch, arrays, static, options)
        losses, best = jax.tree.map(lambda x: np.asarray(x)[None], found)
    else:
        # the last time some devices repeat the last batch, which is not counted twice
        own = [group[min(number, len(group) - 1)] for number in place.own_devices]
        tokens = [place.rows(np.stack([getattr(batch, name) for batch in own])) for name in ("inputs", "targets")]
        with place.context():
            found = compiling.call(scores_of_batches, (scorer.weights, *tokens), static, options)
        losses, best = jax.tree.map(np.asarray, found)
    for number, batch in enumerate(group):
        for at, (row_number, row) in enumerate(batch.rows):
            new = slice(row.first - 1, len(row.ids) - 1)
            yield Scored(row_number, losses[number, at, new], None if best is None else best[number, at, new])


@partial(jax.jit, static_argnames=("config", "execution", "greedy"))
def scores_of_batch(
    weights: Params | jax.Array,
    inputs: jax.Array,
    targets: jax.Array,
    config: ModelConfig,
    execution: Execution,
    greedy: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """Return the losses (R, T) float32 of targets (R, T) given inputs (R, T), and whether each is the likeliest token.

    The second is None unless greedy. Of equally likely tokens the one with the smallest id counts, as for argmax.
    """
    params = weights if isinstance(weights, Params) else tensors_of(weights, config)
    lnf, _ = forward_stream(params, inputs, config, execution)

    def of_rows(logits: jax.Array, aims: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        losses, _ = execution.op.classifier_forward(logits, aims, config.vocab_size)
        best = jnp.argmax(logits[:, : config.vocab_size], axis=1) == aims if greedy else None
        return losses.astype(jnp.float32), best

    limit = max(1, LOGIT_BYTES // (4 * config.padded_vocab_size))
    found = map_logits(lnf.reshape(-1, config.channels), params.wte, targets.reshape(-1), of_rows, limit)
    shaped: tuple[jax.Array, jax.Array | None] = jax.tree.map(lambda x: x.reshape(inputs.shape), found)
    return shaped


@partial(jax.jit, static_argnames=("config", "execution", "greedy"))
def scores_of_batches(
    weights: Params | jax.Array,
    inputs: jax.Array,
    targets: jax.Array,
    config: ModelConfig,
    execution: Execution,
    greedy: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """Return what `scores_of_batch` returns of each of n batches (n, R, T), one on each device: (n, R, T) each.

    Every device has all of them.
    """

    def one_device(weights: Any, inputs: jax.Array, targets: jax.Array) -> Any:
        found = scores_of_batch(weights, inputs[0], targets[0], config, execution, greedy)
        return jax.tree.map(lambda x: gather(x[None]), found)

    each = jax.shard_map(one_device, in_specs=(EVERYWHERE, SPLIT, SPLIT), out_specs=EVERYWHERE, check_vma=False)
    shaped: tuple[jax.Array, jax.Array | None] = each(weights, inputs, targets)
    return shaped
