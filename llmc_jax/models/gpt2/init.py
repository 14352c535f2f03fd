"""Random initial parameters from llm.c's random stream: what its model descriptors (`-e d12`) start from.

Leaves out llm.c's rounding to bfloat16: the numbers here are the float32 ones before it.
"""

import numpy as np

from llmc_jax.base.rng import Mt19937
from llmc_jax.config.model import ModelConfig
from llmc_jax.models.layout import flat_size, tensor_specs

WEIGHT_STD = 0.02


def random_parameters(config: ModelConfig, seed: int = 42) -> np.ndarray:
    """Return the initial parameters of a model, a flat buffer (flat_size,) float32 as the model takes it.

    Matrices are normal with standard deviation 0.02, the two that write to the residual stream with 0.02 / sqrt(2L),
    so that its variance does not grow with the 2L additions; layernorm weights are 1; biases, the padded rows of wte
    and the buffer's padding are 0. The stream gives wte (V rows), wpe, then for each layer qkvw, attprojw, fcw and
    fcprojw.

    Memory beyond the result is a few chunks of the stream. The values are PyTorch's for the same seed and draws, up to
    the last bits of the machine's logarithm and sine.
    Source: llm.c train_gpt2.cu, `gpt2_build_from_descriptor`.
    """
    flat = np.zeros(flat_size(config), np.float32)
    residual_scale = np.float32(1) / np.sqrt(np.float32(2 * config.num_layers))  # llm.c computes it in float32
    std = {"normal": WEIGHT_STD, "residual": float(np.float32(WEIGHT_STD) * residual_scale)}
    rng = Mt19937(seed)
    drawn = []  # those of the layers, whose turn comes after the others'
    for spec in tensor_specs(config):
        tensor, values = spec.tensor, flat[spec.offset :][: spec.size]
        if tensor.start == "one":
            values[:] = 1
        elif tensor.start in std and tensor.layered:
            drawn.append((values.reshape(config.num_layers, -1), std[tensor.start]))
        elif tensor.start in std:
            rows = config.vocab_size * config.channels if tensor.name == "wte" else spec.size
            rng.normal_(values[:rows], 0.0, std[tensor.start])
    for layer in range(config.num_layers):
        for layers, deviation in drawn:
            rng.normal_(layers[layer], 0.0, deviation)
    return flat
