"""Arrays of training states that tests make up."""

import numpy as np

from llmc_jax.config.model import ModelConfig
from llmc_jax.models.layout import flat_size, tensor_specs


def joined(arrays: dict[str, np.ndarray], model: ModelConfig) -> dict[str, np.ndarray]:
    """The arrays of a state with its tensors (`params/wte`, …) put into flat buffers, zeros behind them."""
    specs = {spec.name: spec for spec in tensor_specs(model)}
    found: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        buffer, _, part = name.partition("/")
        if part not in specs:
            found[name] = array
            continue
        flat = found.setdefault(buffer, np.zeros(flat_size(model), array.dtype))
        flat[specs[part].offset :][: array.size] = array.reshape(-1)
    return found
