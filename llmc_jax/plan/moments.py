"""The moments of a step's program that may need most memory, and what lies there by kind, from shapes alone.

    head          all activations, the logits, and the gradients that the head makes
    last layer    the backward begins: all activations, and what one layer's backward works with
    first layer   the backward ends: the gradients of all layers, and what that layer works with
    gradient      the activations are gone: the gradients of the tensors, and the flat one that they are joined to
    sum           a sum of gradients is put in its place, and XLA copies the sums as it chooses the place

Unless blocks are computed again, nothing says when the head makes wte's gradient, and so XLA has several orders of the
program to choose from:

    LATE     at the end of the backward: the gradient of the logits is kept so long
    AT_ONCE  in the head
    EARLY    in the head, and the buffers that attention's backward writes to are made before it, for all layers: an
             order that goes by how little each instruction adds, and the logits add more

It takes one that needs little. Which are open to a program was read off compiled ones (benchmarks/plan_memory.py). On
a processor the head is another: the classifier's result is not written over the logits, and has 32 bits.

    B batch, T sequence length, C channels, L layers, Vp padded vocabulary, n = B T rows of a micro-batch,
    e bytes of an element of what the model computes in
"""

from collections import Counter
from typing import TYPE_CHECKING

from llmc_jax.config.model import ModelShape
from llmc_jax.machine.gpus import MIB
from llmc_jax.models.layout import flat_size, head_spec, matrix_elements, num_layers
from llmc_jax.models.memory import kept_in_a_layer
from llmc_jax.models.work import Shape, array_bytes, has_copy, rows_at_once, tables_of

if TYPE_CHECKING:  # it imports JAX, which whoever reads what was kept does without
    from llmc_jax.plan.plan import Plan

WORKSPACE = 32 * MIB  # what XLA gives cuBLASLt to work in
LATE, AT_ONCE, EARLY = "late", "at once", "early"
Kinds = Counter[str]  # bytes by kind


def state_kinds(config: ModelShape, shape: Shape) -> Kinds:
    """Return the bytes of the program's arguments: what stays from step to step, and the batch."""
    from llmc_jax.training import outliers  # here: it imports JAX

    e, whole = shape.element, flat_size(config)
    part = part_size(config, shape) if shape.stage else whole
    return Counter({
        "parameters": (e + 4 if has_copy(shape) else 4 if shape.master_weights else e) * part,
        "optimizer": 4 * shape.buffers * part,
        "batch": 2 * 4 * shape.rows * shape.micro_batches + outliers.BYTES,
    })  # fmt: skip


def part_size(config: ModelShape, shape: Shape) -> int:
    """Return the elements of a split buffer that each device has."""
    from llmc_jax.models.units import split_size  # here: it imports JAX

    return split_size(config, shape.devices) // shape.devices


def moments(plan: "Plan") -> dict[str, Kinds]:
    """Return the bytes beside the arguments by kind, at each moment that may need most.

    Of a model without tables the activations are not known: what this returns of one is less than it takes.
    """
    if tables_of(plan.model) is None:
        head = Kinds({"logits": logits(plan), "gradients": 4 * head_spec(plan.model).size})
        return {"head": sums(plan) + head, "gradient": sums(plan) + joined(plan)}
    found = (_of_order(plan, order) for order in orders(plan))
    return min(found, key=lambda order: max(each.total() for each in order.values()))


def largest_moment(plan: "Plan") -> tuple[str, Kinds]:
    """Return the moment that needs most beside the arguments, and its bytes by kind."""
    return max(moments(plan).items(), key=lambda each: each[1].total())


def orders(plan: "Plan") -> tuple[str, ...]:
    """Return the orders that XLA chooses from.

    In chunks the head is a loop, in which nothing is put off, and where blocks are computed again the backward waits
    for it. On several devices XLA puts off what nothing waits for, so that a layer's gradients are sent as soon as they
    exist.
    """
    shape = plan.shape
    if chunked(shape) or on_cpu(plan) or shape.recompute_blocks:
        return (AT_ONCE,)
    if plan.parallel.fixed:  # the tree of sums; an odd number of micro-batches is a loop within it
        return (LATE, EARLY) if shape.micro_batches & (shape.micro_batches - 1) else (EARLY,)
    if plan.parallel.devices > 1:
        return (LATE,)
    if hopper(plan):
        return LATE, EARLY
    return (LATE,) if shape.recompute == 2 else (LATE, AT_ONCE)


def hopper(plan: "Plan") -> bool:
    """Return whether all products are cuBLASLt's: they read their slice of the weights where it lies."""
    return plan.machine.target == "sm_90"


def on_cpu(plan: "Plan") -> bool:
    return plan.machine.platform == "cpu"


def chunked(shape: Shape) -> bool:
    """Return whether the logits are made a chunk of rows at a time, in a loop."""
    return rows_at_once(shape) < shape.rows


# ----- the moments ----------------------------------------------------------------------------------------------------


def _of_order(plan: "Plan", order: str) -> dict[str, Kinds]:
    """Return the moments of a program in one order."""
    layers, config, shape = slices(plan) + (early(plan) if order == EARLY else Kinds()), plan.model, plan.shape
    behind = Kinds({"gradients": array_bytes("dwte_head", config, shape)})  # the head, while the layers go backwards
    if order == LATE:
        behind = Kinds({"logits": logits(plan), "activations": array_bytes("lnf", config, shape)})
    share = stretch(plan) / num_layers(plan.model)
    of_first = Kinds({kind: int(share * size) for kind, size in layers.items()})  # those of the others are done with
    whole = gathered(plan)
    always = whole if shape.micro_batches > 1 or shape.sums else Kinds()  # beyond the backward of their layer
    found = {
        "head": sums(plan) + layers + whole + _head(plan, order),
        "last layer": sums(plan) + layers + whole + behind + _layer(plan, 0),
        "first layer": sums(plan) + of_first + always + behind + _layer(plan, num_layers(plan.model) - stretch(plan)),
        "gradient": sums(plan) + always + joined(plan),
    }
    if plan.parallel.fixed and plan.parallel.devices > 1:
        found["sum"] = sums(plan) + sums(plan)
    if plan.shape.products:
        found["update"] = sums(plan) + matrices(plan)
    return found


def stretch(plan: "Plan") -> int:
    """Return how many layers the backward makes ready at once: those that are computed again together, or one."""
    return min(max(plan.shape.recompute_blocks, 1), num_layers(plan.model))


def _head(plan: "Plan", order: str) -> Kinds:
    """Return what lies in the head: its inputs lnf and residual, the logits, the gradients of lnf and of wte."""
    config, shape = plan.model, plan.shape
    stream, dwte = array_bytes("residual", config, shape), array_bytes("dwte_head", config, shape)
    found = Kinds({"activations": kept_for_backward(config, shape) + 2 * stream, "logits": logits(plan)})
    sliced = chunked(shape) or not hopper(plan)  # of the flat weights, as a product or a loop takes it
    if sliced and not plan.parallel.splits:
        found["parameters"] = shape.element * head_spec(config).size
    if order != LATE and (chunked(shape) or not on_cpu(plan)):
        found["gradients"] = dwte
    if on_cpu(plan):
        # the classifier's result; lnf's gradient, as two fusions have it; and in fp32, where the model does not stand
        # in a loop over micro-batches, two arrays a layer that XLA keeps of its layernorms: the stream less its mean
        found += Kinds({"logits": 4 * logits(plan) // shape.element, "working arrays": 2 * stream})
        if shape.micro_batches == 1 and shape.dtype == "fp32" and not shape.recompute_blocks:
            found["activations"] += 2 * num_layers(config) * stream
    elif chunked(shape):
        found["working arrays"] = stream
    if "head" in shape.fused:  # in float32: lnf's gradient before it is whole, and what is taken from the targets' rows
        found["working arrays"] += 4 * (rows_at_once(shape) + shape.rows) * head_spec(config).shape[1]
    return found


def _layer(plan: "Plan", above: int) -> Kinds:
    """Return what lies there as a layer, or a stretch of them, goes backwards: above it so many are done.

    The activations from it down, the stream's gradient, what the layer works with, and the gradients of those above.
    """
    config, shape = plan.model, plan.shape
    kept = kept_for_backward(config, shape) // (-(-num_layers(config) // stretch(plan)) if above else 1)
    pieces = shape.element * above * matrix_elements(config) // num_layers(config)
    if shape.stage:  # what was summed over the devices is split
        pieces //= shape.devices
    stream = array_bytes("residual", config, shape)
    return Kinds({"activations": kept, "working arrays": stream, "gradients": pieces}) + work_of_a_layer(plan)


def logits(plan: "Plan") -> int:
    """Return the bytes of the logits that exist at a time; their gradient is written over them."""
    return plan.shape.element * rows_at_once(plan.shape) * head_spec(plan.model).shape[0]


def kept_for_backward(config: ModelShape, shape: Shape) -> int:
    """Return the bytes of what the forward keeps for the backward of the layers, of all of them together."""
    layers = num_layers(config)
    if shape.recompute_blocks:
        return -(-layers // shape.recompute_blocks) * array_bytes("residual1", config, shape)
    return layers * sum(kept_in_a_layer(config, shape, shape.recompute).values())


def work_of_a_layer(plan: "Plan") -> Kinds:
    """Return what the backward of a layer works with, at the moment that needs most.

    - gelu: two gradients of the MLP's hidden layer; at -r 0 GELU's output is used up by then, of what is kept
    - fc: one such gradient, the buffer of dqkv, which is made before, ln2's gradient, and the workspace
    - attention with its matrix: two more of them
    Ampere's order on several devices puts off the weights' gradients, and keeps GELU's output so long. Where whole
    blocks are computed again, also what their forward makes.
    A processor's: one more of attention's matrices and what is computed again, or four arrays of the hidden layer.
    """
    config, shape = plan.model, plan.shape
    row = Kinds(kept_in_a_layer(config, shape, 0))  # 0 of what a family has not
    if on_cpu(plan):
        kept = 0 if shape.recompute_blocks else sum(kept_in_a_layer(config, shape, shape.recompute).values())
        again = stretch(plan) * sum(row.values()) - kept
        return Kinds({"working arrays": max(again + row["att"], 4 * row["fch"])})
    hidden = row["fch_gelu"]
    spent = 0 if shape.recompute or shape.recompute_blocks else hidden
    gelu = 2 * hidden - spent + (array_bytes("fcprojw", config, shape) if hidden else 0)
    if plan.parallel.devices > 1 and not hopper(plan):
        gelu += hidden
    found = [(gelu, 0), (2 * hidden - spent, WORKSPACE), (0 if shape.flash else 2 * row["att"], 0)]
    work, workspace_bytes = max(found, key=sum)
    again = stretch(plan) * sum(row.values()) - hidden - row["residual1"] if shape.recompute_blocks else 0
    return Kinds({"working arrays": work + again, "workspace": workspace_bytes})


def early(plan: "Plan") -> Kinds:
    """Return the buffers of all layers that attention's backward writes dqkv to: nothing says when they are made."""
    shape = plan.shape
    if not shape.flash:
        return Kinds()
    return Kinds({"working arrays": num_layers(plan.model) * array_bytes("qkv", plan.model, shape)})


def slices(plan: "Plan") -> Kinds:
    """Return the slices of the weights that the forward makes and the backward uses again."""
    config, shape = plan.model, plan.shape
    if hopper(plan) and not shape.recompute_blocks:
        return Kinds()
    return Kinds({"parameters": shape.element * matrix_elements(config)})


def gathered(plan: "Plan") -> Kinds:
    """Return the weights that a step gathers, where they are split; of one micro-batch beside the slices of them."""
    if not plan.parallel.splits:
        return Kinds()
    whole = Kinds({"parameters": plan.shape.element * flat_size(plan.model)})
    return whole if plan.shape.micro_batches > 1 else whole - slices(plan)


def sums(plan: "Plan") -> Kinds:
    """Return the sums of the gradients over micro-batches, in float32."""
    config, shape = plan.model, plan.shape
    count = shape.sums or int(shape.micro_batches > 1)
    return Kinds({"gradients": 4 * count * (part_size(config, shape) if shape.stage == 2 else flat_size(config))})


def joined(plan: "Plan") -> Kinds:
    """Return the gradients of the tensors, of which wte's is in float32, and the flat one that they are joined to."""
    config, shape = plan.model, plan.shape
    e, whole = shape.element, flat_size(config)
    wte = head_spec(config).size
    flat = e * whole if shape.micro_batches == 1 and not shape.sums else 0
    return Kinds({"gradients": 4 * wte + (e * (whole - wte) + flat) // (shape.devices if shape.stage else 1)})


def matrices(plan: "Plan") -> Kinds:
    """Return the gradient, and the matrices of the layers as often as they are there while others are made of them."""
    shape, parts = plan.shape, plan.shape.devices if plan.shape.stage else 1
    copies = (5.5 if on_cpu(plan) else 3) * shape.element * matrix_elements(plan.model)
    gradient = 0 if sums(plan).total() else shape.element * flat_size(plan.model)
    return Kinds({"gradients": gradient // parts, "working arrays": int(copies / parts)})
