"""What a model thinks of each token of many rows: rows in batches of few shapes, batches on one device or several.

A row is padded to the next power of two, so short ones cost little and there are few programs. The shape of a batch
depends on the length of its rows alone, never on the number of devices: each device computes whole batches with the
program of one, so the figures of several devices are those of one. Logits exist for a few positions at a time, and for
none before the first or behind the last position that is asked for. Leaves out where rows come from.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from llmc_jax.config.model import ModelShape, refuse_foresight
from llmc_jax.generate.model import Model
from llmc_jax.machine import compiling
from llmc_jax.machine.device import devices_of
from llmc_jax.models.execution import PLAIN, Execution
from llmc_jax.models.layout import tensors_of
from llmc_jax.models.program import head_of, hidden
from llmc_jax.ops.head import rows_per_chunk
from llmc_jax.ops.linear import linear_forward
from llmc_jax.training.parallel.collectives import gather
from llmc_jax.training.parallel.placement import Placement, placement
from llmc_jax.training.parallel.stage import EVERYWHERE, SPLIT, Parallel

TOKENS_ON_CPU, TOKENS_ON_GPU = 4096, 16384  # computed at a time: what keeps a device busy, and takes little memory
SHORTEST = 32  # positions of a batch's rows, at least


class Scorer(NamedTuple):
    """A model that gives losses. tokens_per_batch: computed at a time on each device, padding included."""

    weights: Any  # its tensors, or one flat buffer (flat_size,); on every device of `place`
    config: ModelShape
    execution: Execution
    place: Placement
    tokens_per_batch: int = TOKENS_ON_CPU


def scorer_of(model: Model, devices: int = 1, tokens_per_batch: int | None = None) -> Scorer:
    """Return a scorer of a model on the first so many devices, which must be there.

    tokens_per_batch: computed at a time on each device; None: what suits it.
    """
    refuse_foresight(model.config, f"{model.path}: no token has a loss of its own")
    place = placement(model.config, Parallel(devices), devices_of(devices))
    platform = devices_of(1)[0].platform
    at_once = tokens_per_batch or (TOKENS_ON_CPU if platform == "cpu" else TOKENS_ON_GPU)
    return Scorer(place.everywhere(model.weights), model.config, PLAIN, place, at_once)


class Row(NamedTuple):
    """Tokens to score: ids (n + 1,) of any integer dtype, 1 <= n <= maxT, from number `first` on (1 <= first <= n)."""

    ids: np.ndarray
    first: int = 1


class ScoreOptions(NamedTuple):
    """What is asked of each token beside its loss, and of how many bytes of float32 logits at a time."""

    rank: bool = False
    candidates: int | None = None  # how many of the likeliest tokens, and the entropy; None: neither
    logit_bytes: int = 128 << 20


LOSSES = ScoreOptions()


class Scored(NamedTuple):
    """What the model thinks of a row, all at temperature 1. k = n + 1 - first. None: was not asked for."""

    row: int  # its number, from 0
    losses: np.ndarray  # (k,) float32, nats; rounding may make that of a certainty a little less than 0
    rank: np.ndarray | None = None  # (k,) int32; 0: the likeliest; of equal ones the smaller id comes first
    entropy: np.ndarray | None = None  # (k,) float32, nats, of the model's distribution at this place
    ids: np.ndarray | None = None  # (k, candidates) int32 of the likeliest tokens, best first
    logprobs: np.ndarray | None = None  # (k, candidates) float32


Found = tuple[jax.Array | None, ...]  # the fields of `Scored` but the first, of positions


class Batch(NamedTuple):
    """Rows of one padded length: inputs and targets (R, length) int32, and the number of each row; fewer than R at the
    end. places (2,) int32: the first of the R * length positions that is scored, and where they end.
    """

    inputs: np.ndarray
    targets: np.ndarray
    places: np.ndarray
    rows: list[tuple[int, Row]]


def cut(tokens: int, positions: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yield (start, first, end) of rows of at most `positions` inputs, in which each id but a text's first is scored.

    A row holds the ids from `start` to `end`; those from number `first` of the row on are scored. Every `stride` ids a
    row begins; an id is scored in the first row that has it as a target.
    """
    assert 1 <= stride <= positions
    start, done = 0, 1
    while done < tokens:
        end = min(start + positions + 1, tokens)
        yield start, done - start, end
        start, done = start + stride, end


def score(
    scorer: Scorer, rows: Iterable[Row], asked: ScoreOptions = LOSSES, *, stop: Callable[[], bool] = lambda: False
) -> Iterator[Scored]:
    """Yield what the model thinks of each row, in the order in which batches become full.

    stop: is asked after each computation whether to end. Of several processes each must be given the same rows, and
    gets all answers.
    """
    group_size = scorer.place.parallel.devices
    whole = batches(rows, scorer.tokens_per_batch, scorer.config.max_seq_len)
    for _, group in grouped(whole, lambda batch: batch.inputs.shape[1], lambda _: group_size):
        yield from _computed(scorer, group, asked)
        if stop():
            return


def batches(rows: Iterable[Row], tokens_per_batch: int, longest: int) -> Iterator[Batch]:
    """Yield rows in batches of one length each: the next power of two, at least SHORTEST and at most `longest`."""

    def length_of(numbered: tuple[int, Row]) -> int:
        return padded_length(len(numbered[1].ids) - 1, longest)

    for length, group in grouped(enumerate(rows), length_of, lambda length: rows_of(length, tokens_per_batch)):
        yield _batch(group, length, tokens_per_batch)


def grouped[T](
    items: Iterable[T], key: Callable[[T], int], size: Callable[[int], int]
) -> Iterator[tuple[int, list[T]]]:
    """Yield a key and as many items as its size, all of this key, as soon as they are there; at the end the rest."""
    waiting: dict[int, list[T]] = {}
    for item in items:
        group = waiting.setdefault(key(item), [])
        group.append(item)
        if len(group) == size(key(item)):
            yield key(item), waiting.pop(key(item))
    yield from waiting.items()


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
    places = rows[0][1].first - 1, (len(rows) - 1) * length + len(rows[-1][1].ids) - 1
    return Batch(inputs, targets, np.array(places, np.int32), rows)


def _computed(scorer: Scorer, group: list[Batch], asked: ScoreOptions) -> Iterator[Scored]:
    """Compute batches of one shape, at most one for each device, and yield what their rows got."""
    place = scorer.place
    static = (scorer.config, scorer.execution, asked)
    options = scorer.execution.compiler_options
    if place.parallel.devices == 1:
        found = compiling.call(scores_of_batch, (scorer.weights, *group[0][:3]), static, options)
        columns = [x if x is None else np.asarray(x)[None] for x in found]
    else:
        # the last time some devices repeat the last batch, which is not counted twice
        own = [group[min(number, len(group) - 1)] for number in place.own_devices]
        arrays = [place.rows(np.stack(each)) for each in zip(*(batch[:3] for batch in own), strict=True)]
        with place.context():
            found = compiling.call(scores_of_batches, (scorer.weights, *arrays), static, options)
        columns = [x if x is None else np.asarray(x) for x in found]
    for number, batch in enumerate(group):
        for at, (row_number, row) in enumerate(batch.rows):
            new = slice(row.first - 1, len(row.ids) - 1)
            yield Scored(row_number, *(x if x is None else x[number, at, new] for x in columns))  # type: ignore[arg-type]


@partial(jax.jit, static_argnames=("config", "execution", "asked"))
def scores_of_batch(
    weights: Any,
    inputs: jax.Array,
    targets: jax.Array,
    places: jax.Array,
    config: ModelShape,
    execution: Execution,
    asked: ScoreOptions = LOSSES,
) -> Found:
    """Return the losses (R, T) float32 of targets (R, T) given inputs (R, T), and what else is asked for, (R, T, …).

    places (2,) int32: the first of the R * T positions that is asked for, and where they end; others mean nothing.
    """
    params = tensors_of(weights, config) if isinstance(weights, jax.Array) else weights
    rows, head = hidden(params, inputs, config, execution), head_of(params, config)
    flat, aims = rows.reshape(-1, rows.shape[-1]), targets.reshape(-1)
    size = rows_per_chunk(len(aims), max(1, asked.logit_bytes // (4 * len(head))))

    def of_chunk(start: jax.Array) -> Found:
        part, own = (jax.lax.dynamic_slice_in_dim(x, start, size) for x in (flat, aims))
        logits = linear_forward(part, head, None)  # (size, Vp) rounded to the model's dtype, as in training
        return scores_of_logits(logits, own, config.vocab_size, execution, asked)

    def step(chunk: jax.Array, found: Found) -> Found:
        new, start = of_chunk(chunk * size), chunk * size
        return jax.tree.map(lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, start, 0), found, new)

    empty = jax.tree.map(lambda x: jnp.zeros((len(aims), *x.shape[1:]), x.dtype), jax.eval_shape(of_chunk, places[0]))
    found = jax.lax.fori_loop(places[0] // size, -(-places[1] // size), step, empty)
    shaped: Found = jax.tree.map(lambda x: x.reshape(*inputs.shape, *x.shape[1:]), found)
    return shaped


def scores_of_logits(
    logits: jax.Array, targets: jax.Array, vocab_size: int, execution: Execution, asked: ScoreOptions
) -> Found:
    """Return what is asked for of logits (n, Vp), (n, …) each; columns from vocab_size on take no part."""
    losses, logsumexp = execution.op.classifier_forward(logits, targets, vocab_size)
    wide = logits.astype(losses.dtype)  # (n, Vp)
    column = jax.lax.broadcasted_iota(jnp.int32, wide.shape, 1)
    real, aim = column < vocab_size, targets[:, None]
    rank = entropy = ids = logprobs = None
    if asked.rank:
        own = jnp.take_along_axis(wide, aim, axis=1)  # (n, 1)
        behind = (wide < own) | ((wide == own) & (column >= aim))  # NaN is behind nothing: it never ranks first
        rank = jnp.sum(real & ~behind, axis=1, dtype=jnp.int32)
    if asked.candidates is not None:
        surprise = jnp.where(real, logsumexp[:, None] - wide, 0)  # (n, Vp)
        entropy = jnp.sum(jnp.where(real, jnp.exp(-surprise) * surprise, 0), axis=1)
        best, ids = jax.lax.top_k(jnp.where(real, wide, -jnp.inf), asked.candidates)  # of equal ones the first
        logprobs = jnp.minimum(best - logsumexp[:, None], 0)
    return losses.astype(jnp.float32), rank, entropy, ids, logprobs


@partial(jax.jit, static_argnames=("config", "execution", "asked"))
def scores_of_batches(
    weights: Any,
    inputs: jax.Array,
    targets: jax.Array,
    places: jax.Array,
    config: ModelShape,
    execution: Execution,
    asked: ScoreOptions = LOSSES,
) -> Found:
    """Return what `scores_of_batch` returns of each of n batches (n, R, T), one on each device: (n, R, T, …) each.

    Every device has all of them.
    """

    def one_device(weights: Any, *batch: jax.Array) -> Any:
        found = scores_of_batch(weights, *(x[0] for x in batch), config, execution, asked)
        return jax.tree.map(lambda x: gather(x[None]), found)

    specs = (EVERYWHERE, SPLIT, SPLIT, SPLIT)
    each = jax.shard_map(one_device, in_specs=specs, out_specs=EVERYWHERE, check_vma=False)
    shaped: Found = each(weights, inputs, targets, places)
    return shaped
