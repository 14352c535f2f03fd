"""The kernels that decode beside XLA's operations, on the machine at hand, before any text is made with them."""

from collections.abc import Iterable
from typing import Any

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

    dtype: fp32, bf16 or fp16, of the weights. The cache is random too, and the position the last one. The spread has
    room for the rounding of the largest logit. Of a model whose logits are not finite, 0: that is no fault of kernels.
    """
    decoder, kind, last = decoder_of(config), DTYPES[dtype], np.int32(config.max_seq_len - 1)
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, texts).astype(np.int32)

    def cache() -> Any:
        empty = decoder.empty(config, texts, config.max_seq_len, kind)
        return jax.tree.map(lambda array: jax.random.normal(jax.random.key(1), array.shape, array.dtype), empty)

    def logits(made_by: Any, cache: Any) -> np.ndarray:
        run = jax.jit(made_by.decode, static_argnums=4, donate_argnums=3)
        return np.asarray(run(weights, tokens, last, cache, config)[0], np.float64)

    expected = logits(decoder, jax.jit(cache)())
    if not np.isfinite(expected).all():
        return 0.0
    found = logits(kernels(), jax.jit(lambda: kernels().stacked(cache()))())
    rounding = float(jnp.finfo(kind).eps) / 2 * np.abs(expected).max(axis=1, keepdims=True)
    spread = np.std(expected, axis=1, keepdims=True) + rounding / TOLERANCES[dtype]
    return float(np.sqrt(np.mean(((found - expected) / spread) ** 2)))


def checked(model: Model, texts: Iterable[int]) -> Model:
    """Return a model with `Packed` weights as it is; where its kernels are wrong, with others, and a warning more.

    texts: numbers of them, of at most 16, with which the kernels will be called.
    """
    most = TOLERANCES[model.dtype]
    errors = (error_of(model.config, model.weights, model.dtype, each) for each in texts)
    error = next((each for each in errors if not each <= most), None)  # NaN is above all
    if error is None:
        return model
    words = f"the kernels' logits differ from XLA's by {error:.2g} of their spread, more than {most}: XLA's are used"
    weights = separated(model.weights.rows.reshape(-1), model.config)
    return model._replace(weights=weights, warnings=(*model.warnings, words))
