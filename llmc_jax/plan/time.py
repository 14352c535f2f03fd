"""How long a step takes on a device that need not be here: each operation, what is sent, and all of it.

An estimate from a plan, in milliseconds, compiling nothing. FLOPs and bytes are models/work.py's, rates
efficiency.py's, sending network.py's.

- A product takes its FLOPs over a share of the peak, divided by the share of the multiprocessors that its tiles (of
  128 x 256, and the others that its GPU takes) keep busy; never less than its bytes at the speed of a copy.
- Where XLA may make products itself, a bias is added by a kernel of its own (machine/compiling.py).
- Attention takes its FLOPs inside the mask over a share of its own; where its T x T matrix is made, products and
  several passes over that.
- Anything else takes its bytes at a share of the bandwidth, its own where that was measured; a small kernel 2 us.
- Each kernel is followed by a gap.

The ends of an interval are of all shares at once, the lowest or the highest. Leaves out what XLA fuses otherwise than
the model is written, waiting for data, and the host.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cache, partial
from typing import Any, Literal, NamedTuple, get_args

from llmc_jax.base.numbers import Interval, certain, total
from llmc_jax.config.model import ModelShape
from llmc_jax.machine.compiling import TRITON_GEMM
from llmc_jax.models.layout import letters, matrix_elements, num_layers
from llmc_jax.models.tensors import sizes
from llmc_jax.models.work import (
    MATRICES,
    WHOLE,
    Shape,
    Work,
    flops_per_token,
    row_of,
    rows_at_once,
    step_work,
    tables_of,
)
from llmc_jax.plan.cpu import FRESH, WEIGHTS, Calibration, calibration
from llmc_jax.plan.efficiency import (
    ATTENTION,
    ATTENTION_BACKWARD,
    COPY,
    MATRIX,
    MEMORY,
    OWN_PRODUCTS,
    PRODUCTS,
    Efficiency,
    Hardware,
    gpu,
    roofline,
)
from llmc_jax.plan.moments import largest_moment
from llmc_jax.plan.network import Compute, Network, network_of, step_of
from llmc_jax.plan.plan import Plan
from llmc_jax.training.parallel.traffic import Sent, of_update

Definition = Literal["llm.c", "palm"]


class OperationTime(NamedTuple):
    """One operation of one phase, over all layers and micro-batches of a step."""

    phase: str
    operation: str
    times: int  # it runs
    launches: int  # kernels
    flops: int  # of products
    bytes: int  # compulsory
    floor: float  # seconds at the peaks
    bound: str  # what its time is made of: products, memory, launches
    seconds: Interval  # without the gaps behind its kernels
    efficiency: Efficiency


class StepTime(NamedTuple):
    """What a step takes."""

    kind: str  # the device, as JAX names it
    operations: tuple[OperationTime, ...]
    seconds: Interval
    tokens: int  # of an update, over all devices
    flops: dict[Definition, int]  # of the model for these tokens, by definition
    peak: float = 0.0  # FLOP/s of all devices; 0 where it is not known
    gaps: Interval = certain(0.0)  # seconds between kernels
    exchanges: tuple[Sent, ...] = ()
    network: Interval = certain(0.0)  # seconds that sending adds

    @property
    def launches(self) -> int:
        """Return the kernels of a step on one device."""
        return sum(each.launches for each in self.operations)

    @property
    def floor(self) -> float:
        """Return the seconds of computing at the peaks."""
        return sum(each.floor for each in self.operations)

    @property
    def bound(self) -> str:
        """Return what most of the time goes to: products, memory, launches, network."""
        sums = {"products": 0.0, "memory": 0.0, "launches": self.gaps.typical, "network": self.network.typical}
        for each in self.operations:
            sums[each.bound] += each.seconds.typical
        return max(sums, key=lambda name: sums[name])

    @property
    def tokens_per_second(self) -> Interval:
        """Return the tokens that all devices train on in a second."""
        return self.seconds.rate(self.tokens)

    @property
    def rates_of(self) -> str | None:
        """Return the device that every rate of computing was measured on; None where some are estimates."""
        devices = {each.efficiency.measured_on for each in self.operations}
        return devices.pop() if len(devices) == 1 else None

    @property
    def measured(self) -> bool:
        """Return whether every rate was measured on this kind of device."""
        return self.rates_of == self.kind and not self.exchanges

    def mfu(self, definition: Definition = "palm") -> Interval | None:
        """Return the share of the peak that the model's FLOPs reach; None where no peak is known."""
        return self.seconds.rate(self.flops[definition] / self.peak) if self.peak else None


def step_time(plan: Plan, hardware: Hardware | Calibration | None = None, network: Network | None = None) -> StepTime:
    """Return what a step of a plan takes. Raises InputError for a GPU that is not known.

    hardware: None: the plan's GPU; of a plan for a CPU the one at hand, which is measured if it has not been yet.
    network: between the devices of a plan for several; None: as `network_of` has it for this kind.
    """
    one, tokens, devices = partial(flops_per_token, plan.model), plan.config.tokens_per_step, plan.parallel.devices
    flops = {name: tokens * one(plan.shape.sequence, definition=name) for name in get_args(Definition)}
    if plan.machine.platform == "cpu":
        here = hardware if isinstance(hardware, Calibration) else calibration(plan.dtype)
        operations = tuple(together(_times_on_cpu(plan, here)))
        return StepTime(here.device, operations, total(each.seconds for each in operations), tokens, flops)
    card = hardware if isinstance(hardware, Hardware) else gpu(plan.machine.kind, plan.product_precision)
    times = list(times_of(plan, card))
    operations = tuple(together(each for _, each in times))
    gaps = card.gap.times(sum(each.launches for each in operations))
    computing = total([gaps, *(each.seconds for each in operations)])
    step = StepTime(card.kind, operations, computing, tokens, flops, devices * card.flops, gaps)
    if devices == 1:
        return step
    # in a fixed order there are other collectives, which are taken to cost the same
    parallel, shape = plan.parallel._replace(fixed=False), plan.shape
    sent = of_update(plan.model, parallel, shape.micro_batches, shape.element, bool(shape.products))
    seconds = on_several(times, plan, card, network or network_of(card.kind), sent)
    # sorted, because what is computed fast hides less
    added = Interval(*sorted(both - alone for both, alone in zip(seconds, computing, strict=True)))
    return step._replace(seconds=seconds, exchanges=tuple(sent), network=added)


def _times_on_cpu(plan: Plan, here: Calibration) -> Iterator[OperationTime]:
    """Yield every operation of a step, and taking the memory for its temporaries anew, unless they are few.

    Several devices that a CPU pretends to have share it.
    """
    devices, (_, needed) = plan.parallel.devices, largest_moment(plan)
    taken = Work("forward", FRESH, None, 0, needed.total() if needed.total() > KEPT else 0)
    for work in (taken, *(each for each, _ in works_of(plan))):
        seconds, (floor, bound) = here.seconds(work), roofline(work, here.roof)
        share = min(1.0, floor / seconds) if seconds else 1.0
        yield OperationTime(
            work.phase, work.operation, work.times, 0, work.flops, work.bytes, devices * floor, bound or "memory",
            here.spread.times(devices * seconds), Efficiency(share, share, share, here.device, "measured here"),
        )  # fmt: skip


# ----- one operation --------------------------------------------------------------------------------------------------

KEPT = 32 * 2**20  # bytes up to which glibc keeps memory that has been given back (mallopt(3), M_MMAP_THRESHOLD)
IN_A_STEP = 19  # kernels of one step of an iteration over matrices of three shapes
SLICES = 8  # kernels that cut the weights of a layer out of the flat buffer
# Kernels that write the gradient where it lies: for each layer those of its matrices, and the rest.
LARGE_PIECES, PIECES = 4, 7


# Kernels as tests/aot/test_step_table.py and results/step_table.md count them in compiled programs: (large, small).
# A small one takes the least time there is: sums of partial sums, scalars.
_BACKWARD = {
    "gelu": (1, 1), "ln1": (1, 1), "ln2": (1, 1), "lnf": (1, 1), "attention": (2, 1), "embedding": (1, 5),
}  # fmt: skip
_UPDATE = {"norm": (1, 7)}


@cache
def linear(model: ModelShape) -> dict[str, str]:
    """Return the linear layers of a model, each with its weight."""
    tables = tables_of(model)
    found = () if tables is None else (*tables.block, *tables.end)
    return {each.name: each.weights[0] for each in found if each.function == "linear_forward"}


def works_of(plan: Plan) -> Iterator[tuple[Work, bool]]:
    """Yield the work of a step on one device in order, and whether it is a forward, perhaps computed again.

    Of an update that is split only this device's part.
    """
    model, shape = plan.model, plan.shape
    parts = plan.parallel.devices if plan.parallel.splits else 1
    work = step_work(model, shape)
    once = {(each.operation, each.layer): each.flops for each in work if each.phase == "forward"}
    # A Hopper GPU's program copies the weights of a product whose bias cuBLASLt adds out of the flat buffer, and other
    # cards' are taken to; a CPU's does so once.
    times = 1 if plan.machine.platform == "cpu" else shape.micro_batches
    copied = times * matrix_elements(model) * shape.element
    if num_layers(model):
        yield Work("forward", WEIGHTS, None, 0, 2 * copied, times), True
    for each in work:
        part = parts if each.phase == "update" else 1
        again = each.phase == "backward" and each.flops == once.get((each.operation, each.layer), -1) > 0
        yield (
            each._replace(flops=each.flops // part, bytes=each.bytes // part),
            again or each.phase == "forward",
        )


def times_of(plan: Plan, hardware: Hardware) -> Iterator[tuple[Work, OperationTime]]:
    """Yield every operation of a step on one GPU, layer by layer, and what it takes."""
    model, shape = plan.model, plan.shape
    biases_in_products = dict(plan.execution.compiler_options).get(TRITON_GEMM) is False
    for work, forward in works_of(plan):
        kind, large, small = _kernels(work, forward, model, shape)
        sides = _sides(work, forward, model, shape) if kind == PRODUCTS else ()
        added = work.bytes * (work.operation == MATRICES)  # of what is no product by itself, such as adding a bias
        if forward and sides and not biases_in_products and work.operation != "head":
            large, added = large + 1, 2 * shape.element * sides[0][0] * sides[0][1] * work.times
        ours = work.operation in shape.fused and forward == (work.operation != "fcproj")
        by_work = work_seconds(work, kind, sides, added, hardware, ours)
        least = certain(work.times * large * hardware.least)
        seconds = total([_larger(by_work, least), certain(work.times * small * hardware.least)])
        floor, bound = roofline(work, hardware.roof)
        yield work, OperationTime(
            work.phase, work.operation, work.times, work.times * (large + small), work.flops, work.bytes, floor,
            "launches" if by_work.typical < seconds.typical / 2 else bound, seconds,
            hardware.share(OWN_PRODUCTS if ours else kind),
        )  # fmt: skip


def _kernels(work: Work, forward: bool, model: ModelShape, shape: Shape) -> tuple[str, int, int]:
    """Return the kind of a work, as shares have it, and its kernels each time it runs, large and small.

    Of one that waits for memory the kind is its phase and operation. forward: it is one, perhaps computed again.
    """
    own = f"{work.phase} {work.operation}"
    if work.operation == WEIGHTS:
        return own, SLICES * num_layers(model), 0
    if work.operation == "gradient":
        return COPY, PIECES + LARGE_PIECES * num_layers(model), 0
    if work.operation == MATRICES:
        return PRODUCTS, IN_A_STEP * shape.products, 0
    if work.phase == "update":
        return own, *_UPDATE.get(work.operation, (1, 2))
    product = work.operation in linear(model) or work.operation == WHOLE
    large, small = (1, 0) if forward else (2, 0) if product else _BACKWARD.get(work.operation, (1, 0))
    if work.operation == "attention":
        own = MATRIX if not shape.flash else ATTENTION if forward else ATTENTION_BACKWARD
    return PRODUCTS if product else own, large, small


Sides = tuple[tuple[int, int], ...]  # of the result of each product of a work, which have equal FLOPs


def _sides(work: Work, forward: bool, model: ModelShape, shape: Shape) -> Sides:
    """Return the sides of the results of a linear layer's products, one forward and two backward.

    None are known of a model that is weighed as a whole.
    """
    if work.operation in (WHOLE, MATRICES):
        return ()
    outputs, inputs = sizes(row_of(linear(model)[work.operation], model).shape, letters(model))
    rows = rows_at_once(shape) if work.operation == "head" else shape.rows
    return ((rows, outputs),) if forward else ((rows, inputs), (outputs, inputs))


def work_seconds(work: Work, kind: str, sides: Sides, added: int, hardware: Hardware, ours: bool = False) -> Interval:
    """Return the seconds of a work on a GPU by its products or its bytes, without small kernels and gaps.

    ours: the first of its products is a kernel of ours, in tiles of its own.
    """
    shares = hardware.shares
    by_products, moved = work.flops / hardware.flops, work.bytes / hardware.bandwidth
    if kind == PRODUCTS:
        parts = [by_products / len(sides) / hardware.filled(*each) for each in sides] or [by_products]
        seconds = [shares[PRODUCTS].seconds(each) for each in parts]
        if ours:
            seconds[0] = shares[OWN_PRODUCTS].seconds(by_products / len(sides) / hardware.filled_by_own(*sides[0]))
        alone = shares[MEMORY].seconds(added / hardware.bandwidth)
        return total([alone, _larger(total(seconds), shares[COPY].seconds(moved))])
    if kind == MATRIX:
        return total([shares[PRODUCTS].seconds(by_products), shares[MATRIX].seconds(moved)])
    if kind in (ATTENTION, ATTENTION_BACKWARD):
        return _larger(shares[kind].seconds(by_products), shares[MEMORY].seconds(moved))
    return hardware.share(kind).seconds(moved)


def _larger(one: Interval, other: Interval) -> Interval:
    return Interval(*map(max, one, other))


SUMMED = ("times", "launches", "flops", "bytes", "floor")


def together(times: Iterable[OperationTime]) -> Iterator[OperationTime]:
    """Yield the operations of each phase, all layers together. What bounds most of the time of one bounds it."""
    groups: dict[tuple[str, str], list[OperationTime]] = {}
    for each in times:
        groups.setdefault((each.phase, each.operation), []).append(each)
    for found in groups.values():
        largest = max(found, key=lambda each: each.seconds.typical)
        sums: dict[str, Any] = {name: sum(getattr(each, name) for each in found) for name in SUMMED}
        yield largest._replace(**sums, seconds=total(each.seconds for each in found))


# ----- several devices ------------------------------------------------------------------------------------------------


def on_several(
    times: Sequence[tuple[Work, OperationTime]], plan: Plan, card: Hardware, network: Network, sent: Sequence[Sent]
) -> Interval:
    """Return the seconds of an update on one of several devices that send each other something."""
    devices, parts = plan.parallel.devices, plan.shape.micro_batches
    return Interval(
        *(
            step_of(_computing(times, parts, card, at), sent, devices, parts, end)
            for at, end in enumerate(network.ends())
        )
    )


def _computing(times: Sequence[tuple[Work, OperationTime]], parts: int, card: Hardware, at: int) -> Compute:
    """Return what one device computes, in parts beside which something is sent. at: an end of the intervals."""
    layers, forward = dict[int, float](), dict[int, float]()
    before = end = update = 0.0
    for work, each in times:
        seconds = each.seconds[at] + each.launches * card.gap[at]
        if work.phase == "update":
            update += seconds
        elif work.phase == "backward" and work.layer is not None:
            layers[work.layer] = layers.get(work.layer, 0.0) + seconds / parts
        elif work.phase == "backward" and work.operation in ("embedding", "gradient"):
            end += seconds / parts
        else:
            before += seconds / parts
            if work.phase == "forward" and work.layer is not None:
                forward[work.layer] = forward.get(work.layer, 0.0) + seconds / parts
    ordered = tuple(forward[layer] for layer in sorted(forward))
    return Compute(before, ordered, tuple(layers[layer] for layer in sorted(layers, reverse=True)), end, update)
