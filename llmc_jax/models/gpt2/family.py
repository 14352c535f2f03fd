"""GPT-2 as a family of models. Knows no JAX."""

from typing import TYPE_CHECKING

from llmc_jax.config.model import ModelConfig, parse_descriptor
from llmc_jax.models.family import Family
from llmc_jax.models.gpt2.init import random_parameters
from llmc_jax.models.gpt2.operations import TABLES
from llmc_jax.models.gpt2.tensors import TENSORS, Params, letters

if TYPE_CHECKING:
    from llmc_jax.models.program import Program


def program() -> "Program":
    """Return what computes a GPT-2."""
    from llmc_jax.models.gpt2.program import PROGRAM  # here: it imports JAX

    return PROGRAM


FAMILY = Family(
    name="gpt2",
    shape=ModelConfig,
    parse=parse_descriptor,
    tensors=lambda shape: TENSORS,
    letters=letters,
    initial=random_parameters,
    program=program,
    params=Params,
    tables=lambda shape: TABLES,
)
