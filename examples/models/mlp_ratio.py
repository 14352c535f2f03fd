"""GPT-2 whose MLP has another width than 4 C: F = 8/3 C, rounded up to a multiple of 8.

F is a letter of the shape. Whatever knows the tensors (initialisation, files, memory, FLOPs) takes it from there, so
only what -e describes changes: forward and backward are GPT-2's. (One F alone needs no file: -e L4-NH4-C256-F512.)

A layer has 4 C C weights in attention and 2 F C in the MLP: 12 C C with F = 4 C, 8 C C with 2 C, 9 1/3 C C with 8/3 C.
Compare the loss at equal steps, at equal time, and at equal weights, with more layers.
"""

from dataclasses import replace

from llmc_jax.config.model import ModelConfig, parse_descriptor
from llmc_jax.models.gpt2.family import FAMILY as GPT2

RATIO = 8 / 3
MULTIPLE = 8  # a GPU's matrix units take so many 16-bit numbers at once


def parse(descriptor: str) -> ModelConfig:
    """Return the shape of a descriptor of -e. Raises InputError for one that is none."""
    shape = parse_descriptor(descriptor)
    return (
        shape
        if shape.mlp_channels
        else replace(shape, mlp_channels=-(-round(RATIO * shape.channels) // MULTIPLE) * MULTIPLE)
    )


FAMILY = GPT2._replace(name="mlp-ratio", parse=parse)
