"""Sampling as llm.c does it while it trains: its random stream, from the end-of-text token, temperature 1.

Where a sample begins in that stream is for the loop to say (due.py).

Leaves out prompts, top-k and a key-value cache: this is the look at the model that a training run takes.
"""

from collections.abc import Iterator

import jax
import numpy as np

from llmc_jax.config.model import ModelConfig
from llmc_jax.machine import compiling
from llmc_jax.models.gpt2.model import PLAIN, Execution
from llmc_jax.rng import random_f32
from llmc_jax.training.step import next_token_logits

SEED = 1337  # the state that llm.c's stream begins with
CHUNK = 256  # llm.c runs the model on a multiple of this many positions, or of T where T is smaller
LARGE = 70.0  # exp(70) times any vocabulary is still a float32, and exp(-70) still one with all its digits


def sample_softmax(logits: np.ndarray, coin: float) -> int:
    """Return the id that a coin in [0, 1) picks from softmax(logits), (V,) float32: the first whose cdf exceeds it.

    Source: llm.c llmc/sampler.h, `sample_softmax`, in its own arithmetic: the sum in float64, the running sum that the
    coin is compared with in float32. llm.c takes exp of the logits as they are, which leaves the range of float32
    where they are large; there, and nowhere else, the largest is subtracted first, so that the picks agree.
    """
    largest = np.max(logits)
    weights = np.exp(logits - largest if abs(largest) > LARGE else logits, dtype=np.float32)  # (V,)
    threshold = np.float32(coin * float(np.cumsum(weights, dtype=np.float64)[-1]))
    cdf = np.cumsum(weights, dtype=np.float32)  # (V,) not yet divided by the sum, which the threshold contains
    return min(int(np.searchsorted(cdf, threshold, side="right")), logits.size - 1)


def generate(
    weights: jax.Array,
    config: ModelConfig,
    num_tokens: int,
    sequence_length: int,
    end_of_text: int,
    execution: Execution = PLAIN,
    state: int = SEED,
) -> Iterator[int]:
    """Yield num_tokens - 1 ids, each drawn after the ones before it, the first after end_of_text.

    weights (flat_size,) in the compute dtype; num_tokens at most maxT; sequence_length: the run's T; state: of the
    random stream, one draw of which each id takes. The model runs on whole chunks, filled up with end_of_text, so that
    few lengths are compiled: what stands after a position does not change its logits.
    Source: llm.c train_gpt2.cu, `main`, "generating".
    """
    assert num_tokens <= config.max_seq_len
    chunk = min(sequence_length, CHUNK)
    tokens = np.full((1, config.max_seq_len), end_of_text, np.int32)
    for position in range(1, num_tokens):
        length = min(-(-position // chunk) * chunk, config.max_seq_len)
        arrays = weights, tokens[:, :length], np.int32(position - 1)
        logits = compiling.call(next_token_logits, arrays, (config, execution), execution.compiler_options)  # (V,)
        coin, state = random_f32(state)
        tokens[0, position] = sample_softmax(np.asarray(logits), coin)
        yield int(tokens[0, position])
