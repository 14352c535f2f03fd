"""The choices that a model is computed by: recomputation, logits at a time, the implementation of each operation."""

from typing import Any, NamedTuple

import jax

from llmc_jax.machine import compiling
from llmc_jax.ops.table import XLA, Operations

# A value that XLA must compute as such. What lies between two of these is compiled alike wherever it stands, so that
# what the backward recomputes has the bits of what the forward computed: without them XLA fuses each place differently.
pinned: Any = jax.lax.optimization_barrier
scope = jax.named_scope


class Execution(NamedTuple):
    """The choices that a model is computed by. Static, and of no influence on the results but for their rounding."""

    op: Operations = XLA  # which implementation of each operation
    recompute: int = 0  # llm.c's -r: the backward computes again 0 nothing, 1 GELU, 2 GELU and layernorms
    recompute_blocks: int = 0  # N > 0: only the stream before every N-th block is kept, all else computed again
    logit_rows: int = 0  # rows of logits that exist at a time; 0: all B T of them
    compiler_options: compiling.Settings = ()  # of XLA, which every program of the run is compiled with


PLAIN = Execution()  # every operation as ops/ has it, everything kept


def layer_scope(layer: int) -> Any:
    """Return the named scope of one layer, by which profiles tell them apart."""
    return scope(f"layer_{layer:02d}")
