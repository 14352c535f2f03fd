"""How long a step takes on a device that need not be here: each operation, what is sent, and all of it.

An estimate from a plan, in milliseconds, compiling nothing. FLOPs and bytes are models/gpt2/work.py's, rates
efficiency.py's, sending network.py's.

- A product takes its FLOPs over a share of the peak, divided by the share of the multiprocessors that its tiles of
  128 x 256 keep busy; never less than its bytes at the speed of a copy.
- Attention takes its FLOPs inside the mask over a share of its own; where its T x T matrix is made, products and
  several passes over that.
- Anything else takes its bytes at a share of the bandwidth; a small kernel 2 us.
- Each kernel is followed by a gap.

The ends of an interval are of all shares at once, the lowest or the highest. Leaves out what XLA fuses otherwise than
the model is written, waiting for data, and the host.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Literal, NamedTuple

from llmc_jax.config.model import ModelConfig
from llmc_jax.models.gpt2.operations import BLOCK, END, row_of
from llmc_jax.models.gpt2.tensors import letters
from llmc_jax.models.gpt2.work import Shape, Work, array_bytes, flops_per_token, rows_at_once, step_work
from llmc_jax.models.tensors import sizes
from llmc_jax.plan.efficiency import (
    ATTENTION,
    ATTENTION_BACKWARD,
    COPY,
    MATRIX,
    MEMORY,
    PRODUCTS,
    Efficiency,
    Hardware,
    filled,
    gpu,
    roofline,
)
from llmc_jax.plan.interval import Interval, certain, total
from llmc_jax.plan.network import Compute, Network, collective_seconds, hidden_shares, network_of, step_of
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


class Exchange(NamedTuple):
    """One collective of an update."""

    kind: str  # all-reduce, reduce-scatter, all-gather
    about: str  # a layer, wte, the loss, the norm, the weights
    bytes: int
    times: int
    seconds: Interval  # all times together
    hidden: float  # share of them beside computing


class StepTime(NamedTuple):
    """What a step takes."""

    kind: str  # the device, as JAX names it
    operations: tuple[OperationTime, ...]
    exchanges: tuple[Exchange, ...]
    launches: int  # kernels of a step on one device
    gaps: Interval  # seconds between them
    network: Interval  # seconds that sending adds
    floor: float  # seconds of computing at the peaks
    seconds: Interval
    tokens: int  # of an update, over all devices
    flops: dict[Definition, int]  # of the model for these tokens, by definition
    peak: float  # FLOP/s of all devices; 0 where it is not known
    bound: str  # what most of the time goes to: products, memory, launches, network

    @property
    def tokens_per_second(self) -> Interval:
        """Return the tokens that all devices train on in a second."""
        return self.seconds.rate(self.tokens)

    @property
    def measured(self) -> bool:
        """Return whether every rate was measured on this kind of device."""
        return all(each.efficiency.measured_on == self.kind for each in self.operations) and not self.exchanges

    def mfu(self, definition: Definition = "palm") -> Interval | None:
        """Return the share of the peak that the model's FLOPs come to; None where no peak is known."""
        return self.seconds.rate(self.flops[definition] / self.peak) if self.peak else None


def step_time(plan: Plan, hardware: Hardware | None = None, network: Network | None = None) -> StepTime:
    """Return what a step of a plan takes. hardware: None: the plan's GPU. Raises InputError for one not known.

    network: between the devices of a plan for several; None: as `network_of` has it for this kind.
    """
    hardware = hardware or gpu(plan.machine.kind, plan.product_precision)
    times = times_of(plan, hardware)
    operations = tuple(together(each for _, each in times))
    launches = sum(each.launches for each in operations)
    gaps = hardware.gap.times(launches)
    computing = total([gaps, *(each.seconds for each in operations)])
    seconds, exchanges = computing, tuple[Exchange, ...]()
    if plan.parallel.devices > 1:
        seconds, exchanges = exchanged(computes_of(times, plan, hardware), plan, network or network_of(hardware.kind))
    added = Interval(*(both - one for both, one in zip(seconds, computing, strict=True)))
    return StepTime(
        hardware.kind, operations, exchanges, launches, gaps, added, sum(each.floor for each in operations), seconds,
        plan.config.tokens_per_step, model_flops(plan), plan.parallel.devices * hardware.flops,
        bound_of(operations, gaps.typical, added.typical),
    )  # fmt: skip


def model_flops(plan: Plan) -> dict[Definition, int]:
    """Return the FLOPs of the model for an update by each definition."""
    one, tokens = partial(flops_per_token, plan.model, plan.shape.sequence), plan.config.tokens_per_step
    return {"llm.c": tokens * one(definition="llm.c"), "palm": tokens * one(definition="palm")}


def bound_of(operations: Iterable[OperationTime], gaps: float, network: float) -> str:
    """Return what most of the time goes to."""
    sums = {"products": 0.0, "memory": 0.0, "launches": gaps, "network": network}
    for each in operations:
        sums[each.bound] += each.seconds.typical
    return max(sums, key=lambda name: sums[name])


# ----- one operation --------------------------------------------------------------------------------------------------

WEIGHTS = {each.name: each.weights[0] for each in (*BLOCK, *END) if each.function == "linear_forward"}
SLICES = 8  # kernels that cut the weights of a layer out of the flat buffer


class Task(NamedTuple):
    """One operation's work of one layer, and what its time depends on beside FLOPs and bytes."""

    work: Work
    kind: str  # of work, as efficiencies have it
    sides: tuple[tuple[int, int], ...]  # of the result of each of its products, which have equal FLOPs
    large: int  # kernels each time it runs
    small: int  # kernels that take the least time there is: sums of partial sums, scalars


# Kernels as tests/aot/test_step_table.py and results/step_table.md count them in compiled programs: (large, small).
_FORWARD = (1, 0)
_BACKWARD = dict.fromkeys(WEIGHTS, (2, 0)) | {
    "gelu": (1, 1), "ln1": (1, 1), "ln2": (1, 1), "lnf": (1, 1), "attention": (2, 1), "embedding": (1, 5),
}  # fmt: skip
_UPDATE = {"norm": (1, 7)}


def tasks_of(plan: Plan) -> list[Task]:
    """Return the work of a step on one device in order; of an update that is split only the device's part."""
    model, shape = plan.model, plan.shape
    parts = plan.parallel.devices if plan.parallel.splits else 1
    work = step_work(model, shape)
    once = {(each.operation, each.layer): each.flops for each in work if each.phase == "forward"}
    slices = Task(Work("forward", "weights", None, 0, 0, model.num_layers), MEMORY, (), 0, SLICES)
    found = [slices]
    for each in work:
        if each.phase == "update":
            found.append(
                Task(each._replace(bytes=each.bytes // parts), MEMORY, (), *_UPDATE.get(each.operation, (1, 2)))
            )
            continue
        if plan.execution.gelu_fusion and each.phase == "forward" and each.operation == "gelu":
            continue  # the product before it does it, and writes its result as well
        if plan.execution.gelu_fusion and each.phase == "forward" and each.operation == "fc":
            each = each._replace(bytes=each.bytes + shape.micro_batches * array_bytes("fch_gelu", model, shape))
        again = each.phase == "backward" and each.flops == once.get((each.operation, each.layer), -1) > 0
        forward = again or each.phase == "forward"
        found.append(_task(each, forward, model, shape))
    return found


def _task(work: Work, forward: bool, model: ModelConfig, shape: Shape) -> Task:
    """Return the task of a work of the model. forward: it is a forward, perhaps computed again by the backward."""
    large, small = _FORWARD if forward else _BACKWARD.get(work.operation, _FORWARD)
    if work.operation in WEIGHTS:
        return Task(work, PRODUCTS, _sides(work, forward, model, shape), large, small)
    if work.operation == "attention":
        kind = MATRIX if not shape.flash else ATTENTION if forward else ATTENTION_BACKWARD
        return Task(work, kind, (), large, small)
    return Task(work._replace(flops=0), MEMORY, (), large, small)  # a classifier's sum over a row is no product


def _sides(work: Work, forward: bool, model: ModelConfig, shape: Shape) -> tuple[tuple[int, int], ...]:
    """Return the sides of the results of a linear layer's products, one forward and two backward."""
    outputs, inputs = sizes(row_of(WEIGHTS[work.operation]).shape, letters(model))
    rows = rows_at_once(shape) if work.operation == "head" else shape.rows
    return ((rows, outputs),) if forward else ((rows, inputs), (outputs, inputs))


def task_seconds(task: Task, hardware: Hardware) -> Interval:
    """Return the seconds of a task on a GPU by its products or its bytes, without small kernels and gaps."""
    work, shares = task.work, hardware.shares
    by_products, moved = work.flops / hardware.flops, work.bytes / hardware.bandwidth
    if task.kind == PRODUCTS:
        fill = [1 / filled(*sides, hardware.multiprocessors) for sides in task.sides]
        by_products *= sum(fill) / len(fill)
        return _larger(shares[PRODUCTS].seconds(by_products), shares[COPY].seconds(moved))
    if task.kind == MATRIX:
        return total([shares[PRODUCTS].seconds(by_products), shares[MATRIX].seconds(moved)])
    if task.kind == MEMORY:
        return shares[MEMORY].seconds(moved)
    return _larger(shares[task.kind].seconds(by_products), shares[MEMORY].seconds(moved))


def times_of(plan: Plan, hardware: Hardware) -> list[tuple[Task, OperationTime]]:
    """Return every task of a step on one device and what it takes."""
    return [(task, timed(task, hardware)) for task in tasks_of(plan)]


def timed(task: Task, hardware: Hardware) -> OperationTime:
    """Return what a task takes."""
    work = task.work
    floor, bound = roofline(work, hardware.roof)
    least, small = (work.times * count * hardware.least for count in (task.large, task.small))
    by_work = task_seconds(task, hardware)
    seconds = total([_larger(by_work, certain(least)), certain(small)])
    if by_work.typical < seconds.typical / 2:
        bound = "launches"
    return OperationTime(
        work.phase, work.operation, work.times, work.times * (task.large + task.small), work.flops, work.bytes, floor,
        bound, seconds, hardware.shares[task.kind],
    )  # fmt: skip


def _larger(one: Interval, other: Interval) -> Interval:
    return Interval(*map(max, one, other))


def together(times: Iterable[OperationTime]) -> Iterator[OperationTime]:
    """Yield the operations of each phase, all layers together. What bounds most of the time of one bounds it."""
    groups: dict[tuple[str, str], list[OperationTime]] = {}
    for each in times:
        groups.setdefault((each.phase, each.operation), []).append(each)
    for found in groups.values():
        largest = max(found, key=lambda each: each.seconds.typical)
        yield largest._replace(
            times=sum(each.times for each in found),
            launches=sum(each.launches for each in found),
            flops=sum(each.flops for each in found),
            bytes=sum(each.bytes for each in found),
            floor=sum(each.floor for each in found),
            seconds=total(each.seconds for each in found),
        )


# ----- several devices ------------------------------------------------------------------------------------------------


def computes_of(times: Sequence[tuple[Task, OperationTime]], plan: Plan, hardware: Hardware) -> list[Compute]:
    """Return what one device computes, in parts beside which something is sent, at each end of the intervals."""
    return [_compute(times, plan.shape.micro_batches, hardware.gap, at) for at in range(3)]


def _compute(times: Sequence[tuple[Task, OperationTime]], micro_batches: int, gap: Interval, at: int) -> Compute:
    layers: dict[int, float] = {}
    before = end = update = 0.0
    for (work, *_), each in times:
        seconds = each.seconds[at] + each.launches * gap[at]
        if work.phase == "update":
            update += seconds
        elif work.phase == "backward" and work.layer is not None:
            layers[work.layer] = layers.get(work.layer, 0.0) + seconds / micro_batches
        elif work.phase == "backward" and work.operation in ("embedding", "gradient"):
            end += seconds / micro_batches
        else:
            before += seconds / micro_batches
    return Compute(before, tuple(layers[layer] for layer in sorted(layers, reverse=True)), end, update)


def sent_by(plan: Plan) -> list[Sent]:
    """Return every collective of an update. In a fixed order there are others, which are taken to cost the same."""
    parallel = plan.parallel._replace(fixed=False)
    return of_update(plan.model, parallel, plan.shape.micro_batches, plan.shape.element)


def exchanged(computes: Sequence[Compute], plan: Plan, network: Network) -> tuple[Interval, tuple[Exchange, ...]]:
    """Return the seconds of an update on one of several devices, and what they send each other.

    computes: at the low, the typical and the high end.
    """
    devices, A, sent = plan.parallel.devices, plan.shape.micro_batches, sent_by(plan)
    ends = network.ends()
    pairs = list(zip(computes, ends, strict=True))
    seconds = Interval(*(step_of(compute, sent, devices, A, end).overlapped for compute, end in pairs))
    hidden = hidden_shares(computes[1], sent, devices, A, ends[1])
    exchanges = tuple(
        Exchange(
            each.kind, each.about, each.bytes, each.times,
            Interval(*(each.times * collective_seconds(each.kind, each.bytes, devices, end) for end in ends)),
            hidden.get(each.about, 0.0),
        )
        for each in sent
    )  # fmt: skip
    return seconds, exchanges
