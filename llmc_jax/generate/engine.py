"""Text that a model continues: prefill, decode and draw, over and over, one step ahead of who reads it.

The next step is begun on the device before the last one's tokens are read, so a GPU never waits. Past the model's last
position the oldest half of the text is dropped and the rest prefilled anew (models/gpt2/decode.py says why).
Leaves out how a token is drawn (sampling.py), and printing.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from llmc_jax.base.errors import InputError
from llmc_jax.config.model import ModelShape, refuse_foresight
from llmc_jax.generate.model import Model
from llmc_jax.generate.sampling import Draws, Numbers, Sampling, Steps, check, draw, numbers_of, steps_of
from llmc_jax.generate.text import TextStream
from llmc_jax.machine.device import first_device
from llmc_jax.models.execution import PLAIN
from llmc_jax.models.packed import Packed
from llmc_jax.models.program import decoder_of

SMALLEST_PROMPT, SMALLEST_CACHE = 16, 64  # positions: shorter ones share a program
MOST_TOKENS, MOST_SAMPLES = 1 << 30, 1 << 16  # positions are counted in int32; all texts are held in memory


class Request(NamedTuple):
    """What is wanted of a model."""

    prompt: tuple[int, ...]  # ids; empty: the end-of-text token alone, after which a text begins
    tokens: int  # new ones of each sample, at most
    samples: int = 1
    sampling: Sampling = Sampling()
    stops: tuple[str, ...] = ()  # a sample ends before the first of these
    ignore_end: bool = False  # continue past the end-of-text token
    candidates: int = 0  # how many of the likeliest tokens come with each drawn one


class Drawn(NamedTuple):
    """One new token of one sample."""

    sample: int
    position: int  # 0: the first new token of the sample
    token: int
    logprob: float  # natural, of the model's own distribution: temperature 1, nothing filtered
    candidates: tuple[tuple[int, float], ...]  # ids and their logprobs, the likeliest first
    text: str  # what this token lets out: whole characters, nothing that may begin a stop string
    end: str  # why the sample ends here: end of text, stop, length; empty where it continues


class Dropped(NamedTuple):
    """The model's last position was used: the oldest tokens are dropped, and the others prefilled at the front."""

    position: int  # of the next new token
    kept: int  # tokens of the text that the model still sees


class Coins(NamedTuple):
    """What `draw` takes beside the logits."""

    samples: Any  # (B,) int32, their numbers
    position: Any  # of the text, a scalar
    numbers: Numbers


class State(NamedTuple):
    """A batch of samples on the device between two steps."""

    draws: Draws
    cache: Any
    place: Any  # of the window, where the draws belong; on a GPU it stays there, as the next one does
    position: Any  # of the text, of what is drawn next


def generate(model: Model, request: Request) -> Iterator[Drawn | Dropped]:
    """Yield the new tokens: position by position, and at each position sample by sample.

    Closing the iterator stops it. Raises InputError for what cannot be asked.
    """
    check_request(model, request)
    return _generate(model, request)


def check_request(model: Model, request: Request) -> None:
    """Raise InputError for what cannot be asked of this model."""
    check(request.sampling)
    refuse_foresight(model.config, f"{model.path}: no text can be generated")
    for name, value, most in (("--tokens", request.tokens, MOST_TOKENS), ("--samples", request.samples, MOST_SAMPLES)):
        if not 1 <= value <= most:
            raise InputError(f"{name} {value}: it must be from 1 to {most}")
    if not 0 <= request.candidates <= model.drawable:
        raise InputError(f"{request.candidates} candidates: it must be from 0 to {model.drawable}, the ids there are")
    check_ids(model.config, request.prompt)
    if "" in request.stops:
        raise InputError("--stop: a stop string must not be empty")


def check_ids(config: ModelShape, ids: Sequence[int]) -> np.ndarray:
    """Return ids (n,) as int32. Raises InputError for one that the model does not have, for JAX would take another."""
    if (bad := next((token for token in ids if not 0 <= token < config.vocab_size), None)) is not None:
        raise InputError(f"prompt: has the id {bad}; this model has ids 0 to {config.vocab_size - 1}")
    return np.asarray(ids, np.int32)


def kernels() -> Any:
    """Return the module of what our kernels decode; it is imported where they do."""
    from llmc_jax.kernels import decode

    return decode


def _power(length: int, smallest: int, largest: int) -> int:
    return min(max(smallest, 1 << (length - 1).bit_length()), largest)


def prompt_size(config: ModelShape, length: int) -> int:
    """Return the positions that a prefill of a length is compiled for: a power of two, or all that the model has."""
    return _power(length, SMALLEST_PROMPT, config.max_seq_len)


def cache_size(config: ModelShape, request: Request) -> int:
    """Return the positions that a request's cache has room for: a power of two, or all that the model has."""
    return _power((len(request.prompt) or 1) + request.tokens, SMALLEST_CACHE, config.max_seq_len)


def kept_after_drop(config: ModelShape) -> int:
    """Return how many tokens the model still sees when the oldest half was just dropped."""
    return config.max_seq_len - config.max_seq_len // 2


def first_seen(length: int, config: ModelShape) -> int:
    """Return where what the model sees of a text begins, once it has so many tokens: 0, until T are not enough.

    Nothing but the length decides, so a long prompt is seen as the same text is that was generated.
    """
    T = config.max_seq_len
    dropped = T + 1 - kept_after_drop(config)  # whenever one token more than T stands there
    return -(-max(0, length - T) // dropped) * dropped


def window(text: Sequence[int], config: ModelShape) -> Sequence[int]:
    """Return the end of a text that the model sees: all of it, or where that is too long from T/2 to T tokens."""
    return text[first_seen(len(text), config) :]


@partial(jax.jit, static_argnames=("size", "config", "texts"))
def _prefill(
    weights: Any,
    tokens: jax.Array,
    length: jax.Array,
    size: int,
    config: ModelShape,
    texts: int,
) -> tuple[jax.Array, Any]:
    """Prefill, and repeat a single text for all samples that begin with it."""
    logits, cache = decoder_of(config).prefill(weights, tokens, length, size, config, PLAIN)
    if tokens.shape[0] != texts:
        logits, cache = repeated((logits, cache), texts)
    return logits, kernels().stacked(cache) if isinstance(weights, Packed) else cache


def repeated(arrays: Any, texts: int) -> Any:
    """Return what a prefill gives of one text as that of several that begin alike."""
    return jax.tree.map(lambda array: jnp.tile(array, (texts, *(1,) * (array.ndim - 1))), arrays)


@partial(jax.jit, static_argnames="config", donate_argnames=("cache",))
def _decode(
    weights: Any, tokens: jax.Array, position: jax.Array, cache: Any, config: ModelShape
) -> tuple[jax.Array, Any]:
    decoder = kernels() if isinstance(weights, Packed) else decoder_of(config)
    return decoder.decode(weights, tokens, position, cache, config)


def following(
    weights: Any, tokens: Any, place: Any, cache: Any, coins: Coins, config: ModelShape, steps: Steps
) -> State:
    """Decode tokens (B,) int32 at a place of the window, whose cache it uses up, and draw those that follow them."""
    logits, cache = _decode(weights, tokens, place, cache, config)
    return State(draw(logits, *coins, steps), cache, place + 1, coins.position + 1)


# One CUDA graph on a GPU. A CPU would gain nothing, and compile the decoder anew for other steps of sampling.
in_one_program = jax.jit(following, static_argnames=("config", "steps"), donate_argnames="cache")


class _Batch(NamedTuple):
    """What does not change while samples are generated together."""

    model: Model
    samples: jax.Array  # (B,) int32, their numbers
    size: int  # of the cache
    numbers: Numbers
    steps: Steps
    run: Callable[..., State]  # `following`, or that in one program

    def prefilled(self, texts: Sequence[Sequence[int]], position: int) -> State:
        """Begin with texts of one length, one for all samples or one for each, and draw the token at a position."""
        model = self.model
        length = len(texts[0])
        tokens = np.zeros((len(texts), prompt_size(model.config, length)), np.int32)
        tokens[:, :length] = texts
        logits, cache = _prefill(model.weights, tokens, np.int32(length), self.size, model.config, len(self.samples))
        draws = draw(logits, self.samples, np.int32(position), self.numbers, self.steps)
        return State(draws, cache, np.int32(length), np.int32(position + 1))

    def decoded(self, before: State) -> State:
        """Put the last draws at their place of the window, and draw the token at the next position of the text."""
        model, coins = self.model, Coins(self.samples, before.position, self.numbers)
        return self.run(model.weights, before.draws.tokens, before.place, before.cache, coins, model.config, self.steps)


def _generate(model: Model, request: Request) -> Iterator[Drawn | Dropped]:
    sampling, config, rows = request.sampling, model.config, range(request.samples)
    steps = steps_of(sampling, request.candidates, model.drawable)
    run = following if first_device().platform == "cpu" else in_one_program
    samples, numbers = jax.device_put((np.array(rows, np.int32), numbers_of(sampling)))  # once, not for each token
    batch = _Batch(model, samples, cache_size(config, request), numbers, steps, run)
    prompt = list(request.prompt) or [model.end_of_text]
    texts = [list(prompt) for _ in rows]
    running = {row: TextStream(model.tokenizer, request.stops) for row in rows}
    begin = list(window(prompt, config))
    if len(begin) < len(prompt):
        yield Dropped(0, len(begin))
    state, length = batch.prefilled([begin], len(prompt)), len(begin)
    for position in range(request.tokens):
        draws, last = state.draws, position + 1 == request.tokens
        room = length < config.max_seq_len
        if room and not last:  # begun before its input is read
            state, length = batch.decoded(state), length + 1
        for row in set(rows) - set(running):  # ended: any token will do
            texts[row].append(model.end_of_text)
        for drawn in _read(draws, running, position, model, request):
            texts[drawn.sample].append(drawn.token)
            yield drawn
        if not running:
            return
        if not room:
            begun = [window(text, config) for text in texts]
            length = len(begun[0])
            del state  # or there would be two caches at a time
            yield Dropped(position + 1, length)
            state = batch.prefilled(begun, len(prompt) + position + 1)


def _read(
    draws: Draws, running: dict[int, TextStream], position: int, model: Model, request: Request
) -> Iterator[Drawn]:
    """Yield what was drawn for the samples that still run; those that end here no longer run then."""
    found = jax.device_get(draws)
    if np.isnan(found.logprobs[list(running)]).any():
        raise InputError(
            f"{model.path}: what the model computes in {model.dtype} is not finite at new token {position + 1}; "
            "its training has diverged, or fp16 is too narrow for it: take an earlier checkpoint, or --dtype fp32"
        )
    for row in list(running):
        token, stream = int(found.tokens[row]), running[row]
        end = "end of text" if token == model.end_of_text and not request.ignore_end else ""
        text = "" if end else stream.add(token)
        end = end or ("stop" if stream.stopped else "length" if position + 1 == request.tokens else "")
        if end:
            text += stream.finish()
            end = "stop" if stream.stopped else end
            del running[row]
        best: Any = zip(found.candidates[row].tolist(), found.candidate_logprobs[row].tolist(), strict=True)
        yield Drawn(row, position, token, float(found.logprobs[row]), tuple(best), text, end)
