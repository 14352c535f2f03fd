"""GPT-2's tables: llm.c's 16 tensors, in one flat buffer viewed as them, and the activations.

The order and the shapes are llm.c's (`fill_in_parameter_sizes` in train_gpt2.c), so files agree byte for byte. Whatever
else knows the tensors (initialisation, weight decay, file formats, comparisons, memory) derives it from the tables.

    B batch, T sequence length, C channels, L layers, NH heads, Q channels of queries, keys and values
    (3C), K channels of keys (C), F hidden channels of the MLP (4C), V vocabulary, Vp padded vocabulary
"""

from typing import Any, NamedTuple

from llmc_jax.config.model import ModelConfig
from llmc_jax.models.tensors import ALWAYS, Activation, Tensor


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
    fcw: Any  # (L, F, C)
    fcb: Any  # (L, F)
    fcprojw: Any  # (L, C, F)
    fcprojb: Any  # (L, C)
    lnfw: Any  # (C,)
    lnfb: Any  # (C,)


TENSORS = (  # in the order of the file, which is that of Params
    Tensor("wte", "Vp C", "embedding", "normal", "wte.weight", own=True),
    Tensor("wpe", "maxT C", "embedding", "normal", "wpe.weight"),
    Tensor("ln1w", "L C", "layernorm", "one", "ln_1.weight"),
    Tensor("ln1b", "L C", "layernorm", "zero", "ln_1.bias", bias=True),
    Tensor("qkvw", "L Q C", "linear", "normal", "attn.c_attn.weight", parts="C K K"),
    Tensor("qkvb", "L Q", "linear", "zero", "attn.c_attn.bias", bias=True),
    Tensor("attprojw", "L C C", "linear", "residual", "attn.c_proj.weight"),
    Tensor("attprojb", "L C", "linear", "zero", "attn.c_proj.bias", bias=True),
    Tensor("ln2w", "L C", "layernorm", "one", "ln_2.weight"),
    Tensor("ln2b", "L C", "layernorm", "zero", "ln_2.bias", bias=True),
    Tensor("fcw", "L F C", "linear", "normal", "mlp.c_fc.weight"),
    Tensor("fcb", "L F", "linear", "zero", "mlp.c_fc.bias", bias=True),
    Tensor("fcprojw", "L C F", "linear", "residual", "mlp.c_proj.weight"),
    Tensor("fcprojb", "L C", "linear", "zero", "mlp.c_proj.bias", bias=True),
    Tensor("lnfw", "C", "layernorm", "one", "ln_f.weight"),
    Tensor("lnfb", "C", "layernorm", "zero", "ln_f.bias", bias=True),
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
    Activation("qkv", "L B T Q", ALWAYS),
    Activation("att", "L B NH T T", ALWAYS),  # the weights; attention without that matrix keeps a sum for each row
    Activation("atty", "L B T C", ALWAYS),
    Activation("attproj", "L B T C"),
    Activation("residual2", "L B T C", ALWAYS),  # the stream between a block's halves
    Activation("ln2", "L B T C", 2),
    Activation("ln2_mean", "L B T", ALWAYS, wide=True),
    Activation("ln2_rstd", "L B T", ALWAYS, wide=True),
    Activation("fch", "L B T F", ALWAYS),
    Activation("fch_gelu", "L B T F", 1),
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


def letters(config: ModelConfig) -> dict[str, int]:
    """Return what the letters of the tensors' shapes stand for, and NH."""
    return {
        "C": config.channels, "Q": (config.num_heads + 2 * config.kv_heads) * config.head_size, "F": config.hidden,
        "K": config.kv_heads * config.head_size,
        "L": config.num_layers, "NH": config.num_heads,
        "V": config.vocab_size, "Vp": config.padded_vocab_size, "maxT": config.max_seq_len,
    }  # fmt: skip
