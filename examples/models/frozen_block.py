"""GPT-2 with one block that does not learn: its tensors are frozen.

    forward     as ever
    backward    as ever: the layers below need the gradient that comes through the block
    update      the block's tensors get none, no weight decay either, and are not in the norm of the gradient

Random as the block is, the others learn to use what it makes, or to get round it by the skip path. Compare the loss
with GPT-2's for the first block, one in the middle and the last.
"""

from llmc_jax.config.model import ModelConfig
from llmc_jax.models.gpt2.family import FAMILY as GPT2

LAYER = 0


def frozen(shape: ModelConfig) -> tuple[str, ...]:
    """Return the names of all tensors of the layer."""
    return tuple(f"{tensor.name} {LAYER}" for tensor in GPT2.tensors(shape) if tensor.layered)


FAMILY = GPT2._replace(name="frozen-block", frozen=frozen)
