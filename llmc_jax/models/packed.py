"""A model's weights as one array, which its tensors are views of: as kernels that decode read them.

A program then takes one argument for all weights: with one for each layer of each tensor the host needs longer to hand
them over than a GPU to make a token. Leaves out how they get there (generate/model.py) and the kernels.
"""

from dataclasses import dataclass
from functools import partial

import jax

from llmc_jax.config.model import CAUSAL, ModelConfig, ModelShape
from llmc_jax.models.layout import tensor_specs
from pallas_kernels.tuning import HEAD_SIZES


@partial(jax.tree_util.register_dataclass, data_fields=["rows"], meta_fields=["shape", "target", "interpret"])
@dataclass(frozen=True)
class Packed:
    """The tensors of a model by name, as its family's `params` has them: each a part of `rows`, copied when asked for.

    rows (R, C): the flat buffer without its padding, in rows of C channels; every tensor of GPT-2 begins with one.
    target: the architecture whose kernels decode ("sm_90"). interpret: they are simulated on a CPU, for tests.
    """

    rows: jax.Array
    shape: ModelShape
    target: str
    interpret: bool = False

    def __getattr__(self, name: str) -> jax.Array:
        spec = None if name.startswith("_") else next((s for s in tensor_specs(self.shape) if s.name == name), None)
        if spec is None:
            raise AttributeError(name)
        C = self.rows.shape[1]
        return self.rows[spec.offset // C : (spec.offset + spec.size) // C].reshape(spec.shape)


def refusal(shape: ModelShape) -> str:
    """Return why no kernels decode a model; empty where they do."""
    if not isinstance(shape, ModelConfig) or shape.family != "gpt2":
        return f"they compute GPT-2, not the family {shape.family}"
    if shape.attention != CAUSAL:
        return f"they compute causal softmax attention, not {shape.attention.words}"
    if shape.channels % 32 or shape.head_size not in HEAD_SIZES:
        found = f"C={shape.channels}, heads of {shape.head_size}"
        return f"they take C in steps of 32 and heads in steps of 16 up to 128, not {found}"
    if shape.hidden != 4 * shape.channels or shape.padded_vocab_size % 16:
        return f"they take F=4C and Vp in steps of 16, not F={shape.hidden}, Vp={shape.padded_vocab_size}"
    return ""
