"""A model's weights as one array, which its tensors are views of: as kernels that decode read them.

A program then takes one argument for all weights: with one for each layer of each tensor the host needs longer to hand
them over than a GPU to make a token. Leaves out how they get there (generate/model.py) and the kernels.
"""

from dataclasses import dataclass
from functools import partial

import jax

from llmc_jax.config.model import ModelShape
from llmc_jax.models.layout import tensor_specs


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
