"""GPT-2's tables: llm.c's 16 tensors, in one flat buffer viewed as them, and the activations.

The order and the shapes are llm.c's (`fill_in_parameter_sizes` in train_gpt2.c), so files agree byte for byte. Whatever
else knows the tensors (initialisation, weight decay, file formats, comparisons, memory) derives it from the tables.

    B batch, T sequence length, C channels, L layers, NH heads, V vocabulary, Vp padded vocabulary, N parameters
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from llmc_jax.config.model import ModelConfig
from llmc_jax.models.tensors import ALWAYS, FLAT_MULTIPLE, Activation, Tensor, TensorSpec, layout


class Params(NamedTuple):
    """The 16 tensors in the order of the file. Linear weights are (output channels, input channels), as in PyTorch."""

    wte: Any  # (Vp, C)     token embedding, and the output head (tied)
    wpe: Any  # (maxT, C)   position embedding
    ln1w: Any  # (L, C)
    ln1b: Any  # (L, C)
    qkvw: Any  # (L, 3C, C)  rows Q | K | V, each split into NH heads
    qkvb: Any  # (L, 3C)
    attprojw: Any  # (L, C, C)
    attprojb: Any  # (L, C)
    ln2w: Any  # (L, C)
    ln2b: Any  # (L, C)
    fcw: Any  # (L, 4C, C)
    fcb: Any  # (L, 4C)
    fcprojw: Any  # (L, C, 4C)
    fcprojb: Any  # (L, C)
    lnfw: Any  # (C,)
    lnfb: Any  # (C,)


TENSORS = (  # in the order of the file, which is that of Params
    Tensor("wte", "Vp C", "embedding", "normal", "wte.weight"),
    Tensor("wpe", "maxT C", "embedding", "normal", "wpe.weight"),
    Tensor("ln1w", "L C", "layernorm", "one", "ln_1.weight"),
    Tensor("ln1b", "L C", "layernorm", "zero", "ln_1.bias"),
    Tensor("qkvw", "L 3C C", "linear", "normal", "attn.c_attn.weight"),
    Tensor("qkvb", "L 3C", "linear", "zero", "attn.c_attn.bias"),
    Tensor("attprojw", "L C C", "linear", "residual", "attn.c_proj.weight"),
    Tensor("attprojb", "L C", "linear", "zero", "attn.c_proj.bias"),
    Tensor("ln2w", "L C", "layernorm", "one", "ln_2.weight"),
    Tensor("ln2b", "L C", "layernorm", "zero", "ln_2.bias"),
    Tensor("fcw", "L 4C C", "linear", "normal", "mlp.c_fc.weight"),
    Tensor("fcb", "L 4C", "linear", "zero", "mlp.c_fc.bias"),
    Tensor("fcprojw", "L C 4C", "linear", "residual", "mlp.c_proj.weight"),
    Tensor("fcprojb", "L C", "linear", "zero", "mlp.c_proj.bias"),
    Tensor("lnfw", "C", "layernorm", "one", "ln_f.weight"),
    Tensor("lnfb", "C", "layernorm", "zero", "ln_f.bias"),
)
BY_NAME = {tensor.name: tensor for tensor in TENSORS}

ACTIVATIONS = (  # in the order of the forward pass
    Activation("x", "B T"),  # the tokens
    Activation("y", "B T"),  # the targets
    Activation("encoded", "B T C"),
    Activation("residual1", "L B T C", ALWAYS),  # the stream before a block
    Activation("ln1", "L B T C", 2),
    Activation("ln1_mean", "L B T", ALWAYS, wide=True),
    Activation("ln1_rstd", "L B T", ALWAYS, wide=True),
    Activation("qkv", "L B T 3C", ALWAYS),
    Activation("att", "L B NH T T", ALWAYS),  # the weights; attention without that matrix keeps a sum for each row
    Activation("atty", "L B T C", ALWAYS),
    Activation("attproj", "L B T C"),
    Activation("residual2", "L B T C", ALWAYS),  # the stream between a block's halves
    Activation("ln2", "L B T C", 2),
    Activation("ln2_mean", "L B T", ALWAYS, wide=True),
    Activation("ln2_rstd", "L B T", ALWAYS, wide=True),
    Activation("fch", "L B T 4C", ALWAYS),
    Activation("fch_gelu", "L B T 4C", 1),
    Activation("fcproj", "L B T C"),
    Activation("residual3", "L B T C"),  # the stream behind a block: residual1 of the next one, or
    Activation("residual", "B T C", ALWAYS),  # what the last layernorm reads
    Activation("lnf", "B T C"),
    Activation("lnf_mean", "B T", ALWAYS, wide=True),
    Activation("lnf_rstd", "B T", ALWAYS, wide=True),
    Activation("logits", "B T Vp"),
    Activation("losses", "B T", wide=True),
    Activation("loss", "", wide=True),
    Activation("dwte_head", "Vp C", wide=True),  # the head's share of wte's gradient
)


def letters(config: ModelConfig, B: int = 1, T: int = 1) -> dict[str, int]:
    """Return what the letters of shapes stand for, with a batch of B x T."""
    return {
        "B": B, "T": T, "C": config.channels, "L": config.num_layers, "NH": config.num_heads, "V": config.vocab_size,
        "Vp": config.padded_vocab_size, "maxT": config.max_seq_len,
    }  # fmt: skip


@cache
def tensor_specs(config: ModelConfig) -> tuple[TensorSpec, ...]:
    """Return where the 16 tensors of a model lie in the flat buffer, in order."""
    return layout(TENSORS, letters(config))


def num_parameters(config: ModelConfig) -> int:
    """Return N, the parameters of a model as llm.c counts them, padded vocabulary rows included."""
    last = tensor_specs(config)[-1]
    return last.offset + last.size


def flat_size(config: ModelConfig) -> int:
    """Return the elements of the flat buffer: N padded to a multiple of FLAT_MULTIPLE."""
    return -(-num_parameters(config) // FLAT_MULTIPLE) * FLAT_MULTIPLE


def views(flat: Any, config: ModelConfig) -> Params:
    """Return the 16 tensors of a flat buffer (JAX or NumPy array of at least N elements), without its padding."""
    return Params(*(flat[s.offset : s.offset + s.size].reshape(s.shape) for s in tensor_specs(config)))


def separate(flat: Any, config: ModelConfig) -> Params:
    """Return the 16 tensors of a flat buffer, of those with a layer axis a tuple of L.

    Outside of a compiled program they are arrays of their own. A program that is called for every token takes these,
    because it would copy each part of a larger array first.
    """
    tensors = views(flat, config)
    layered = {name: tuple(values) for name, values in tensors._asdict().items() if BY_NAME[name].layered}
    return tensors._replace(**layered)


def padded(values: Any, config: ModelConfig) -> Any:
    """Return a flat buffer (flat_size,) on the host, from the N values of a file (NumPy, float32)."""
    buffer = np.zeros(flat_size(config), np.float32)
    buffer[: num_parameters(config)] = values
    return buffer
