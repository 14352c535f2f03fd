"""The memory that a training step needs at least, from its shape alone, by the table of activations.

Counted in C elements a token and layer, a GPT-2 keeps 16 C at -r 0, 12 C at -r 1, 10 C at -r 2, and the statistics.
What it needs at least are the 10 C. Leaves out what the compiled step takes by kind (plan/moments.py).

    B batch, T sequence length, C channels, L layers, NH heads, Vp padded vocabulary, n = B T rows of a micro-batch
"""

from typing import NamedTuple

from llmc_jax.config.model import ModelShape
from llmc_jax.machine.jax_setup import MEMORY_SHARE
from llmc_jax.models.layout import flat_size, head_spec, num_layers
from llmc_jax.models.tensors import ALWAYS
from llmc_jax.models.work import Shape, activations_of, array_bytes, has_copy


def kept_in_a_layer(config: ModelShape, shape: Shape, recompute: int) -> dict[str, int]:
    """Return the bytes of each activation that one layer keeps for the backward at a level of recomputation."""
    rows = (row for row in activations_of(config) if row.layered and recompute < row.kept_below)
    return {row.name: array_bytes(row.name, config, shape) for row in rows}


# ----- whether it fits ----------------------------------------------------------------------------------------------


class Needed(NamedTuple):
    """Bytes that one training step needs at least."""

    state: int  # parameters, the optimizer's buffers, gradient and the step's copies of the weights
    activations: int  # what the backward of one micro-batch reads
    gradient: int  # of the state: the gradient of one micro-batch

    @property
    def total(self) -> int:
        """Return the bytes at the moment that needs most: the gradient comes to be as the activations go."""
        return self.state + self.activations - min(self.activations, self.gradient)


def required_memory_bytes(config: ModelShape, shape: Shape, *, sliced_weights: bool = True) -> Needed:
    """Return the bytes that a training step needs at least on one device. Allocates nothing.

    State: flat buffers. The optimizer's have 4 bytes an element, the parameters 4, or 2, or both. During a step there
    are also the gradient, with several micro-batches in an update their sum in fp32, and with sliced_weights, as on a
    CPU, the slices of the weights that the compiled step makes. Over several devices ZeRO 1 splits the optimizer's
    buffers and all weights, of which a step gathers those that it computes with; ZeRO 2 the gradient and its sum as
    well, and both split a gradient that one micro-batch gives. In a fixed order there are several sums.
    Activations: what no level of recomputation spares, without the statistics: in each of L layers 10 C a token, and
    where the T x T matrix is kept, one row of T weights for each of NH heads; then the logits, Vp, of the rows that
    exist at a time. Everything else (layernorm's and GELU's outputs, temporary gradients) could be recomputed or
    reused. The gradient of a micro-batch is complete when the activations are gone, so the larger of the two counts. So
    the total is a lower bound: what exceeds it cannot run, what stays below it may still not.
    """
    e, size = shape.element, flat_size(config)
    of_state = shape.devices if shape.stage else 1
    split = 4 * has_copy(shape) + 4 * shape.buffers + e * bool(shape.stage)
    sums = 4 * (shape.sums or shape.micro_batches > 1)
    of_sums = shape.devices if shape.stage == 2 else 1
    of_gradient = shape.devices if shape.stage == 2 or (shape.stage and not sums) else 1
    gradient = e / of_gradient + sums / of_sums
    state = int((e + split / of_state + gradient + e * sliced_weights) * size)
    narrow = {row.name for row in activations_of(config) if not row.wide} - ({"att"} if shape.flash else set())
    kept = kept_in_a_layer(config, shape, ALWAYS - 1)
    layer = sum(num_bytes for name, num_bytes in kept.items() if name in narrow)
    layers = num_layers(config) * layer
    if shape.recompute_blocks:  # the kept inputs, and all activations of one stretch
        stretch = min(shape.recompute_blocks, num_layers(config))
        layers = -(-num_layers(config) // stretch) * kept["residual1"] + stretch * layer
    logits = min(shape.logit_rows or shape.rows, shape.rows) * head_spec(config).shape[0]
    return Needed(state, layers + e * logits, int(e / of_gradient * size))


LEAST_LOGIT_ROWS = 8192  # a chunk that keeps a GPU busy: 0.8 GB of bf16 logits for GPT-2
SPARE = 1.1  # bytes that a compiled step takes for each that it keeps: how XLA lays the buffers out


def estimated_step_bytes(config: ModelShape, shape: Shape) -> int:
    """Return the bytes that a compiled step takes on a GPU, rather too many: what surely fits, not what may be tried.

    Beyond `required_memory_bytes`: what -r leaves to be kept (6 C a token and layer, or 2 C), and the logits' gradient,
    which no kernel may write over the logits. 1.1 to 1.4 times what the compiler reports
    (tests/models/test_memory.py).
    """
    need = required_memory_bytes(config, shape, sliced_weights=False)
    kept = shape.element * min(shape.logit_rows or shape.rows, shape.rows) * head_spec(config).shape[0]
    if not shape.recompute_blocks:
        levels = (kept_in_a_layer(config, shape, level) for level in (shape.recompute, ALWAYS - 1))
        here, least = (sum(found.values()) for found in levels)
        kept += num_layers(config) * (here - least)
    return need.state + int(SPARE * (need.activations + kept))


def chosen_logit_rows(config: ModelShape, shape: Shape, memory: int | None) -> int:
    """Return how many rows of logits a GPU makes at a time: 0 (all) where they fit, or the largest power of two.

    shape: but for its logit_rows. memory: bytes of the whole card (`card_memory_bytes`), and never what is free: a run
    that is started again must compute as before. Never fewer than LEAST_LOGIT_ROWS, which is also the answer where
    memory is None.

    Why many: the gradient of the head's input is a product of `rows` x C, a block for each tile of 128 x 256. With 8192
    rows and C=768 these are 64 * 3 = 192 tiles on an H200's 132 multiprocessors, 1.45 waves that take the time of 2:
    73 % of them work. 32,768 rows are 5.82 waves of 6, 97 %, and all 65,536 of B=64 T=1024 11.6 of 12. With one chunk
    there is also no sum of the chunks' dwte, 4 Vp C bytes that each chunk reads and writes.
    """
    if memory is None:
        return LEAST_LOGIT_ROWS
    highest = (shape.rows - 1).bit_length()
    for rows in (0, *(2**k for k in range(highest - 1, LEAST_LOGIT_ROWS.bit_length() - 1, -1))):
        if estimated_step_bytes(config, shape._replace(logit_rows=rows)) <= MEMORY_SHARE * memory:
            return rows
    return LEAST_LOGIT_ROWS
