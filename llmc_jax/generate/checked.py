"""The kernels that decode beside XLA's operations, on the machine at hand, before any text is made with them."""

import jax
import jax.numpy as jnp
import numpy as np

from llmc_jax.config.model import ModelShape
from llmc_jax.generate.engine import kernels
from llmc_jax.generate.model import Model
from llmc_jax.models.packed import Packed
from llmc_jax.models.program import decoder_of, separated
from llmc_jax.training.state import DTYPES

# What roundings may make of `error_of`; of a wrong kernel it is about 1.
TOLERANCES = {"fp32": 1e-3, "fp16": 0.02, "bf16": 0.1}


def error_of(config: ModelShape, weights: Packed, dtype: str, texts: int) -> float:
    """Return how far the kernels' logits of a random token are from XLA's: root mean square, as a share of the spread.

    dtype: fp32, bf16 or fp16, of the weights. The cache is random too, and the position the last one.
    """
    rng, last = np.random.default_rng(1), np.int32(config.max_seq_len - 1)
    empty = decoder_of(config).empty(config, texts, config.max_seq_len, DTYPES[dtype])
    cache = jax.tree.map(lambda array: jnp.array(rng.standard_normal(array.shape), array.dtype), empty)
    tokens = rng.integers(0, config.vocab_size, texts).astype(np.int32)
    ours, xlas = (jax.jit(each.decode, static_argnums=4) for each in (kernels(), decoder_of(config)))
    found, _ = ours(weights, tokens, last, kernels().stacked(cache), config)
    expected, _ = xlas(weights, tokens, last, cache, config)
    found, expected = (np.asarray(each, np.float64) for each in (found, expected))
    spread = np.std(expected, axis=1, keepdims=True)
    return float(np.sqrt(np.mean(((found - expected) / spread) ** 2)))


def checked(model: Model, texts: int) -> Model:
    """Return a model with `Packed` weights as it is; where its kernels are wrong, with others, and a warning more."""
    most, error = TOLERANCES[model.dtype], error_of(model.config, model.weights, model.dtype, min(texts, 16))
    if error <= most:
        return model
    words = f"the kernels' logits differ from XLA's by {error:.2g} of their spread, more than {most}: XLA's are used"
    weights = separated(model.weights.rows.reshape(-1), model.config)
    return model._replace(weights=weights, warnings=(*model.warnings, words))
