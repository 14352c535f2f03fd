"""A step's memory on one device by kind: computed from shapes alone, or read out of the compiled program.

`computed` follows the program through the moments at which it may need most, and takes the largest:

    last layer    the backward has just begun: all activations are kept, and the gradient of the logits still is,
                  because the product that makes wte's gradient of it waits for the end
    head          all activations, the logits, and the gradients that the head makes
    first layer   the backward ends: the gradients of all layers are there, and the gradient of the logits still is
    gradient      the activations are gone: the gradients of the tensors, and the flat one that they are joined to

What no program has (the CUDA context, NCCL's buffers) stands apart, as estimates with their sources. Leaves out what
decides the program of a run (models/gpt2/memory.py) and how a program's arrays are read (buffers.py).

    B batch, T sequence length, C channels, L layers, Vp padded vocabulary, n = B T rows of a micro-batch,
    e bytes of an element of what the model computes in
"""

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from llmc_jax.config.model import ModelConfig
from llmc_jax.machine.gpus import card_memory_bytes
from llmc_jax.machine.jax_setup import MEMORY_SHARE
from llmc_jax.models.gpt2.memory import kept_in_a_layer
from llmc_jax.models.gpt2.tensors import flat_size
from llmc_jax.models.gpt2.units import split_rows, units
from llmc_jax.models.gpt2.work import Shape, array_bytes, has_copy, rows_at_once
from llmc_jax.plan.plan import Plan
from llmc_jax.training import outliers

KINDS = (
    "parameters",  # what the step updates, the copy that the model computes with, and slices of it
    "optimizer",  # its buffers: AdamW's m and v
    "gradients",  # of the parameters: of one tensor, flat, summed over micro-batches
    "activations",  # what the forward keeps for the backward
    "logits",  # and their gradient
    "working arrays",  # what is made and used within a layer or the head
    "workspace",  # of the libraries' products
    "communication",  # what comes from or goes to other devices
    "batch",  # tokens, and the step's numbers
)
Kinds = Mapping[str, int]


class Part(NamedTuple):
    """Bytes that no compiled program has."""

    name: str
    bytes: int
    source: str  # where the estimate comes from


class Memory(NamedTuple):
    """Bytes of a step on one device, at the moment that needs most."""

    source: str  # "computed" or "compiled"
    moment: str  # that of `computed`, or the operation that the compiled program is at
    kinds: Kinds  # bytes by kind, every one of KINDS
    unexplained: int  # of the compiled program: what no kind has; 0 where computed
    outside: tuple[Part, ...]  # beside the program, estimated
    available: int | None  # bytes that JAX's allocator may take; None: not known
    card: int | None  # bytes of the whole card; None: not known, or a CPU

    @property
    def program(self) -> int:
        """Return the bytes of the step's program, its arguments included."""
        return sum(self.kinds.values()) + self.unexplained

    @property
    def beside(self) -> int:
        """Return the bytes outside the program."""
        return sum(part.bytes for part in self.outside)

    @property
    def total(self) -> int:
        return self.program + self.beside

    @property
    def fits(self) -> bool | None:
        """Return whether the program fits into the allocator's share, and what is beside it into the rest of the card.

        None where the available memory is not known.
        """
        if self.available is None:
            return None
        return self.program <= self.available and (self.card is None or self.beside <= self.card - self.available)

    @property
    def spare(self) -> int | None:
        """Return the bytes that the allocator has beyond the program's, negative where they are too few."""
        return None if self.available is None else self.available - self.program


# ----- computed -------------------------------------------------------------------------------------------------------


def computed(plan: Plan, available: int | None = None, card: int | None = None) -> Memory:
    """Return a step's memory from shapes alone.

    available: bytes that the program may take; None: as the plan has it, or JAX's share of the card. card: bytes of
    the whole card; None: by its name.
    """
    shape = plan.shape
    moment, temporary = max(moments(plan).items(), key=lambda each: sum(each[1].values()))
    found = Counter(state_kinds(plan.model, shape)) + Counter(temporary)
    known = card or card_memory_bytes(plan.machine.kind)
    own = plan.available if available is None else available
    limit = int(MEMORY_SHARE * known) if own is None and known else own
    return Memory("computed", moment, {kind: found[kind] for kind in KINDS}, 0, outside(plan), limit, known)


def state_kinds(config: ModelConfig, shape: Shape) -> dict[str, int]:
    """Return the bytes of the program's arguments by kind: what stays from step to step, and the batch."""
    e, whole = shape.element, flat_size(config)
    part = split_rows(config, shape.devices) * config.channels if shape.stage else whole
    copy = e * whole if has_copy(shape) else 0
    return {
        "parameters": copy + (4 * part if copy else (4 if shape.master_weights else e) * whole),
        "optimizer": 4 * shape.buffers * part,
        "batch": 2 * 4 * shape.rows * shape.micro_batches + outliers.BYTES,
    }


def moments(plan: Plan) -> dict[str, Counter[str]]:
    """Return the bytes beside the arguments by kind, at each moment that may need most.

    XLA has two orders to choose from: the product that makes wte's gradient of the logits' comes at once, or at the end
    of the backward, with the gradient of the logits kept so long. On one device it takes the one that needs less. On
    several it puts off what nothing waits for, so that a layer's gradients are sent as soon as they exist.
    """
    if chunked(plan.shape) or plan.parallel.fixed:  # it stands in a loop, or between barriers
        orders = [of_backward(plan, late=False)]
    elif plan.parallel.devices > 1:
        orders = [of_backward(plan, late=True)]
    else:
        orders = [of_backward(plan, late=late) for late in (False, True)]
    best = min(orders, key=lambda order: max(sum(kinds.values()) for kinds in order.values()))
    return best | {"gradient": sums(plan) + joined(plan)}


def chunked(shape: Shape) -> bool:
    """Return whether the logits are made a chunk of rows at a time, in a loop."""
    return rows_at_once(shape) < shape.rows


def of_backward(plan: Plan, late: bool) -> dict[str, Counter[str]]:
    """Return the moments from the head to the end of the backward. late: wte's gradient is made last."""
    config, shape = plan.model, plan.shape
    e, stream = shape.element, array_bytes("residual", config, shape)
    always = sums(plan) + slices(plan)
    kept, dwte = kept_for_backward(config, shape), 4 * config.padded_vocab_size * config.channels
    logits = Counter({"logits": e * rows_at_once(shape) * config.padded_vocab_size, "activations": stream})  # and lnf
    at_head = Counter({"gradients": dwte, "activations": stream, "working arrays": early(plan)})  # residual
    behind = logits if late else Counter({"gradients": dwte})
    layer = Counter({"working arrays": stream + work_of_a_layer(config, shape)})  # and the stream's gradient
    layers = config.num_layers
    last = Counter({"activations": sum(kept.values())})
    first = Counter({"activations": sum(size // layers for size in kept.values())})
    pieces = Counter({"gradients": e * (flat_size(config) - units(config)[0].rows * config.channels)})
    if chunked(shape):  # what the loop takes, in a form of its own: wte, the rows of lnf and of its gradient
        at_head += Counter({"parameters": e * config.padded_vocab_size * config.channels, "working arrays": stream})
    found = {"last layer": always + behind + last + layer, "first layer": always + behind + first + layer + pieces}
    return found if late else found | {"head": always + logits + last + at_head}


def kept_for_backward(config: ModelConfig, shape: Shape) -> dict[str, int]:
    """Return the bytes of what the forward keeps for the backward of the layers, of all of them together."""
    layers = config.num_layers
    if shape.recompute_blocks:
        return {"residual1": -(-layers // shape.recompute_blocks) * array_bytes("residual1", config, shape)}
    return {name: layers * size for name, size in kept_in_a_layer(config, shape, shape.recompute).items()}


def work_of_a_layer(config: ModelConfig, shape: Shape) -> int:
    """Return the bytes that the backward of a layer works with: the MLP's two gradients, or attention's matrices.

    Where whole blocks are computed again, also what their forward makes.
    """
    row = kept_in_a_layer(config, shape, 0)
    gelu = 0 if shape.recompute or shape.recompute_blocks else row["fch_gelu"]  # used already, of what is kept
    work = max(2 * row["fch"] - gelu, 0 if shape.flash else 2 * row["att"])
    stretch = min(shape.recompute_blocks, config.num_layers)
    again = stretch * sum(row.values()) - row["fch_gelu"] - row["residual1"] if stretch else 0
    return work + again


def early(plan: Plan) -> int:
    """Return the bytes of buffers that a kernel's results are put into, which XLA makes before their turn.

    On Hopper attention's backward writes dqkv into such a buffer; nothing that it waits for tells XLA when, so in some
    orders those of all layers are there when the backward begins.
    """
    if plan.machine.target != "sm_90" or not plan.shape.flash or chunked(plan.shape):
        return 0
    return plan.model.num_layers * array_bytes("qkv", plan.model, plan.shape)


def slices(plan: Plan) -> Counter[str]:
    """Return the slices of the weights that the forward makes and the backward uses again."""
    config, shape = plan.model, plan.shape
    if plan.machine.target == "sm_90" and not shape.recompute_blocks:
        return Counter()
    of_layers = 12 * config.num_layers * config.channels**2
    return Counter({"parameters": shape.element * of_layers})


def sums(plan: Plan) -> Counter[str]:
    """Return the sums of the gradients over micro-batches, in float32."""
    config, shape = plan.model, plan.shape
    count = shape.sums or (shape.micro_batches > 1)
    size = split_rows(config, shape.devices) * config.channels if shape.stage == 2 else flat_size(config)
    return Counter({"gradients": 4 * count * size})


def joined(plan: Plan) -> Counter[str]:
    """Return the gradients of the tensors and the flat one that they are joined to."""
    config, shape = plan.model, plan.shape
    size = flat_size(config) * shape.element
    again = size if shape.micro_batches == 1 and not shape.sums else 0
    return Counter({"gradients": size + again // (shape.devices if shape.stage else 1)})


# ----- beside the program ---------------------------------------------------------------------------------------------


def outside(plan: Plan) -> tuple[Part, ...]:
    """Return what no compiled program has, estimated."""
    return ()
