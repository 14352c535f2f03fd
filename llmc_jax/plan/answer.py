"""The answer to `plan`: whether a configuration fits on a device that need not be there, how fast it is, how long it
takes, what it costs. Plain data, and `as_json` for programs; report.py makes text of it.

Leaves out how each figure is found: memory.py, time.py, course.py.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from llmc_jax.base.errors import InputError
from llmc_jax.base.plain import to_json
from llmc_jax.config.checks import validate
from llmc_jax.config.model import ModelShape
from llmc_jax.config.train import AUTO_BATCH, TrainConfig
from llmc_jax.kernels import Choice, Machine
from llmc_jax.machine import cards
from llmc_jax.machine.device import describe_device
from llmc_jax.machine.gpus import machine_of, this_machine
from llmc_jax.machine.jax_setup import MEMORY_SHARE, configure
from llmc_jax.models.layout import num_layers, num_parameters
from llmc_jax.models.work import tables_of
from llmc_jax.plan.asked import checked_model
from llmc_jax.plan.course import Course, course, data_of, forward_of, price_of
from llmc_jax.plan.cpu import calibration
from llmc_jax.plan.memory import CPU, Memory, computed
from llmc_jax.plan.network import GBIT, Network, network_of
from llmc_jax.plan.plan import Plan, make_plan, recomputes
from llmc_jax.plan.search import Largest, auto_sizes, largest_size, limit_of, sizes, ways
from llmc_jax.plan.separate import Say, compiled_apart
from llmc_jax.plan.time import StepTime, step_time
from llmc_jax.plan.token import Token, tokens_of


class Place(NamedTuple):
    """The device that is planned for, and how many of them a run takes which does not say it."""

    name: str | None  # a GPU's short name; None: a CPU, or a GPU that nothing can be compiled for elsewhere
    machine: Machine
    available: int | None  # bytes that JAX's allocator may take; None: not known
    devices: int


class Setting(NamedTuple):
    """What is planned, with what each `auto` came to."""

    model: str  # as -e names it
    parameters: int
    batch_size: int
    auto_batch: bool  # whether -b was auto
    sequence_length: int
    tokens: int  # of an update, over all devices
    micro_batches: int  # of each device in an update
    devices: int
    zero_stage: int
    recompute: int
    recompute_blocks: int
    logit_rows: int
    dtype: str
    products: str  # what the matrix products are computed in
    master_weights: bool


class Answer(NamedTuple):
    """Memory and time of a configuration on a device."""

    setting: Setting
    place: Place
    kernels: tuple[Choice, ...]
    memory: Memory  # compiled where that was wanted and can be
    step: StepTime
    tokens: dict[str, Token]  # a generated one, by --kernels of `generate`
    network: Network | None  # that several devices are taken to have
    course: Course | None  # None: nothing says how many steps the run makes
    largest: tuple[Largest, ...]
    not_known: tuple[str, ...]  # for a reader


class Wishes(NamedTuple):
    """What a user says beside train.py's flags."""

    quick: bool = False  # compile nothing
    tokens: float | None = None  # to train on, in place of -x
    price: float | None = None  # USD for an hour of one device
    network: float | None = None  # Gbit/s of each device between machines


# ----- the device -----------------------------------------------------------------------------------------------------


def place_of(name: str | None) -> Place:
    """Return a GPU by a name that `cards.named` knows; None: the device at hand. Raises InputError."""
    if name is not None:
        kind = cards.named(name).device_kind
        return Place(cards.name_of(kind), machine_of(kind), int(MEMORY_SHARE * cards.CARDS[kind].memory), 1)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # a plan takes none of a GPU's memory
    configure()
    device, machine = describe_device(), this_machine()
    devices = 1 if machine.platform == "cpu" else device.num_devices
    return Place(cards.name_of(machine.kind), machine, device.memory_bytes, devices)


# ----- a model on it --------------------------------------------------------------------------------------------------


class Planner(NamedTuple):
    """A model on a device: the figures of each configuration there."""

    model: ModelShape
    place: Place
    network: Network
    say: Say = lambda words: None

    def plan(self, config: TrainConfig) -> Plan:
        """Return the plan of a configuration; whether it fits is a question of its own. Raises InputError."""
        available = self.place.available
        if available and self.place.machine.platform == "cpu":  # shared by the devices that it pretends to have
            available //= max(1, config.devices)
        return make_plan(config, self.model, self.place.machine, memory=available)

    def compiled(self, config: TrainConfig) -> Memory:
        """Return what a configuration takes as compiled. Raises InputError where nothing can be compiled."""
        gpu = CPU if self.place.machine.platform == "cpu" else self.place.name
        if gpu is None:
            raise InputError(
                f"nothing can be compiled for {self.place.machine.kind} elsewhere: it is not in "
                "llmc_jax/machine/gpus.py"
            )
        if gpu == CPU and config.devices > 1:
            raise InputError("for several devices that a processor pretends to have nothing is compiled")
        found, known = compiled_apart(gpu, config, self.model, self.say), computed(self.plan(config))
        return found._replace(available=known.available, card=known.card, outside=known.outside)

    def fits(self, config: TrainConfig) -> bool:
        """Return whether a configuration fits with room to spare; where the memory is not known, nothing does."""
        found = computed(self.plan(config))
        return bool(found.fits) and found.program <= limit_of(self.place.machine.platform, found.available or 0)

    def with_batch(self, config: TrainConfig) -> TrainConfig:
        """Return a configuration with a number for -b auto: the largest that fits, or the least where none does.

        It is one of those that train.py may choose.
        """
        if config.batch_size != AUTO_BATCH:
            return config
        possible = auto_sizes(config)
        if not possible:
            raise InputError(
                f"-d {config.total_batch_size}: no -b divides it on {config.devices} devices; take another"
            )
        fitting = (size for size in possible if self.fits(replace(config, batch_size=size)))
        return replace(config, batch_size=next(fitting, possible[-1]))

    def largest(self, config: TrainConfig) -> tuple[Largest, ...]:
        """Return the largest -b of each way of computing a configuration, and the fastest of them marked."""
        if self.place.available is None:
            return ()
        rows = [self._largest(way) for way in ways(config, num_layers(self.model), recomputes(self.model))]
        best = max(rows, key=lambda row: row.tokens_per_second.typical if row.tokens_per_second else 0.0)
        return tuple(row._replace(fastest=row is best and row.batch_size is not None) for row in rows)

    def _largest(self, way: TrainConfig) -> Largest:
        size = largest_size(way, self.fits)
        shown = next(iter(sizes(way)), None) if size is None else size
        plan = None if shown is None else self.plan(replace(way, batch_size=shown))
        return Largest(
            way.recompute, way.recompute_blocks, way.zero_stage, size, plan and computed(plan).program,
            step_time(plan, network=self.network).tokens_per_second if plan and size else None,
        )  # fmt: skip


# ----- the answer -----------------------------------------------------------------------------------------------------


def answer(
    config: TrainConfig, gpu: str | None, wishes: Wishes, say: Say = lambda words: None, *, largest: bool = True
) -> Answer:
    """Return memory and time of a configuration on a device.

    config: `asked_config` of train.py's flags. gpu: as `place_of` knows it; None: the device at hand. say: is told
    of what takes seconds before it begins. largest: look for the largest -b of each way too. Raises InputError for what
    cannot run there.
    """
    place = place_of(gpu)
    asked = replace(config, devices=config.devices or place.devices, algorithms="")
    validate(asked)
    planner = Planner(checked_model(asked), place, network_of(place.machine.kind, wishes.network), say)
    config = planner.with_batch(asked)
    plan = planner.plan(config)
    measured = calibration(plan.dtype, say) if place.machine.platform == "cpu" else None
    step, rows = step_time(plan, measured, planner.network), planner.largest(config) if largest else ()
    memory, problem = computed(plan), None
    if not wishes.quick:
        try:
            memory = planner.compiled(config)
        except InputError as why:
            problem = str(why)
    return Answer(
        setting=setting_of(plan, auto_batch=config != asked),
        place=place,
        kernels=plan.choices,
        memory=memory,
        step=step,
        tokens=tokens_of(plan.model, place.machine, plan.dtype),
        network=planner.network if step.exchanges else None,
        course=course(
            step.seconds, config, forward=forward_of(step, config.grad_accumulation), tokens=wishes.tokens,
            data=data_of(config), price=price_of(place.name, wishes.price),
        ),
        largest=rows,
        not_known=tuple(not_known(planner, step, memory, problem)),
    )  # fmt: skip


def not_known(planner: Planner, step: StepTime, memory: Memory, problem: str | None) -> Iterator[str]:
    """Yield what a reader must know of the limits of an answer."""
    network = planner.network
    if not step.measured:
        whose = f"an {step.rates_of} reached with this program" if step.rates_of else "other programs reached"
        yield (
            "Times: nothing of this was measured on this device. They are FLOPs and bytes over the shares of the peaks "
            f"that {whose}; --operations names each."
        )
    if step.exchanges:
        card = cards.CARDS.get(planner.place.machine.kind)
        inside = f"{card.link_name} " if card else ""
        yield (
            f"Sending: no two GPUs have run this yet. {inside}is taken at {100 * network.reached:.0f} % of "
            f"{network.inside / 1e9:g} GB/s, the network between machines of {network.node} at "
            f"{100 * network.reached_between:.0f} % of {network.between / GBIT:g} Gbit/s for each GPU (--network)."
        )
    if memory.source == "computed":
        why = f"; {problem}" if problem else ""
        yield f"Memory: computed from shapes, not compiled (docs/plan.md has the errors of that){why}."
    if tables_of(planner.model) is None:
        yield (
            f"Memory: the family {planner.model.family} has no tables, so what is computed has none of what its forward"
            " keeps for its backward: -b may be too large. Times: they are those of 6 operations a parameter and token."
        )
    yield "Nothing here counts other programs on the device, clocks that fall when it is hot, or waiting for data."


def setting_of(plan: Plan, *, auto_batch: bool = False) -> Setting:
    """Return what is planned."""
    config = plan.config
    return Setting(
        config.model, num_parameters(plan.model), config.batch_size, auto_batch, config.sequence_length,
        config.tokens_per_step, config.grad_accumulation, plan.parallel.devices, plan.parallel.stage,
        plan.shape.recompute, plan.shape.recompute_blocks, plan.execution.logit_rows, plan.dtype,
        plan.product_precision, plan.master_weights,
    )  # fmt: skip


# ----- as JSON --------------------------------------------------------------------------------------------------------


def as_json(found: Answer) -> dict[str, Any]:
    """Return an answer as JSON can hold it, with what its parts compute of themselves."""
    content: dict[str, Any] = to_json(found)
    memory, step = found.memory, found.step
    content["memory"] |= {name: getattr(memory, name) for name in ("program", "beside", "total", "fits", "spare")}
    content["step"] |= {
        "launches": step.launches, "floor": step.floor, "bound": step.bound, "measured": step.measured,
        "tokens_per_second": to_json(step.tokens_per_second),
        "mfu": {name: to_json(step.mfu(name)) for name in ("llm.c", "palm")},
    }  # fmt: skip
    return content
