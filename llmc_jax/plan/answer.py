"""The answer to `plan`: whether a configuration fits on a device that need not be there, how fast it is, how long it
takes, what it costs. Plain data, and `as_json` for programs; report.py makes text of it.

Leaves out how each figure is found: memory.py, time.py, course.py.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from llmc_jax.config.checks import validate
from llmc_jax.config.model import ModelConfig
from llmc_jax.config.train import AUTO_BATCH, TrainConfig
from llmc_jax.errors import InputError
from llmc_jax.kernels import Choice, Machine
from llmc_jax.kernels.plain import to_json
from llmc_jax.machine import cards
from llmc_jax.machine.cards import Card
from llmc_jax.machine.device import describe_device
from llmc_jax.machine.gpus import Target
from llmc_jax.machine.jax_setup import MEMORY_SHARE, configure
from llmc_jax.machine.target import machine_of, this_machine
from llmc_jax.models.gpt2.tensors import num_parameters
from llmc_jax.plan.asked import checked_model
from llmc_jax.plan.calibrate import is_measured
from llmc_jax.plan.course import Course, course, data_of, forward_of, price_of
from llmc_jax.plan.memory import Memory, computed
from llmc_jax.plan.network import GBIT, Network, network_of
from llmc_jax.plan.plan import Plan, make_plan
from llmc_jax.plan.search import Largest, auto_sizes, largest_size, mark_fastest, sizes, ways
from llmc_jax.plan.separate import CPU, Problem, Request, compiled_apart, is_kept, python_that_compiles
from llmc_jax.plan.time import StepTime, step_time

Told = Callable[[str], None]
ERROR = 0.05  # that computed memory may be off by; benchmarks/results/plan_memory.md has less


class Place(NamedTuple):
    """The device that is planned for, and how many of them a run takes which does not say it."""

    name: str | None  # a GPU's short name; None: the device at hand
    label: str  # what a reader calls it
    machine: Machine
    memory: int | None  # bytes in all
    available: int | None  # of these, what JAX's allocator may take
    card: Card | None  # power and links; None: not known
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
    """What a configuration comes to on a device."""

    setting: Setting
    place: Place
    kernels: tuple[Choice, ...]
    memory: Memory  # compiled where that was wanted and can be
    computed: Memory
    not_compiled: str | None  # why not, where it was wanted
    step: StepTime
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


def gpu_place(name: str) -> Place:
    """Return a GPU by a name that `cards.named` knows. Raises InputError."""
    target: Target = cards.named(name)
    card = cards.card_of(target)
    return Place(
        cards.short_name(target), target.device_kind, machine_of(target.device_kind), card.memory,
        int(MEMORY_SHARE * card.memory), card, 1,
    )  # fmt: skip


def place_named(name: str | None) -> Place:
    """Return a GPU by name; None: the device at hand. Raises InputError."""
    return place_here() if name is None else gpu_place(name)


def place_here() -> Place:
    """Return the device at hand. Initialises JAX's backend."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # a plan takes none of a GPU's memory
    configure()
    device, machine = describe_device(), this_machine()
    card = cards.CARDS.get(machine.kind)
    devices = 1 if machine.platform == "cpu" else device.num_devices
    return Place(None, device.kind, machine, device.memory_bytes, device.memory_bytes, card, devices)


# ----- the answer -----------------------------------------------------------------------------------------------------


def answer(config: TrainConfig, place: Place, wishes: Wishes | None = None, told: Told = lambda words: None) -> Answer:
    """Return what a configuration comes to on a device.

    config: `asked_config` of train.py's flags. told: is told of what takes seconds before it begins.
    Raises InputError for what cannot run there.
    """
    wishes = wishes or Wishes()
    asked = replace(config, devices=config.devices or place.devices)
    validate(asked)
    planner = Planner(checked_model(asked), place, network_of(place.machine.kind, wishes.network), told)
    config = planner.with_batch(asked)
    plan = planner.plan(config)
    if place.machine.platform == "cpu" and not is_measured(plan.dtype):
        told("measuring this CPU once, which takes ten seconds")
    memory, step, largest = planner.memory(plan), planner.time(plan), planner.largest(config)
    found = Compiled(memory, largest, None) if wishes.quick else compiled(planner, config, memory, largest)
    return Answer(
        setting=setting_of(plan, auto_batch=config != asked),
        place=place,
        kernels=plan.choices,
        memory=found.memory,
        computed=memory,
        not_compiled=found.problem,
        step=step,
        course=course_of(plan, place, step, wishes),
        largest=found.largest,
        not_known=tuple(not_known(planner, found, step)),
    )


class Compiled(NamedTuple):
    """What the compiler says of a configuration and of the fastest way to compute it, as far as it says anything."""

    memory: Memory
    largest: tuple[Largest, ...]
    problem: str | None  # why something was not compiled


def compiled(planner: "Planner", config: TrainConfig, memory: Memory, largest: tuple[Largest, ...]) -> Compiled:
    """Return the memory of a configuration as compiled in a process of its own.

    So is the fastest of the largest, where that may change it. memory, largest: as computed, which stays where there
    is no compiler.
    """
    best = next((row for row in largest if row.fastest and planner.close(config, row)), None)
    wanted = [config, *([planner.config_of(config, best)] if best else [])]
    own, *rest = planner.compile(wanted)
    if isinstance(own, Problem):
        return Compiled(memory, largest, own.what)
    if best is None or isinstance(rest[0], Problem):
        return Compiled(own, largest, None)
    checked = planner.checked(wanted[1], best, rest[0])
    return Compiled(own, mark_fastest([checked if row is best else row for row in largest]), None)


def course_of(plan: Plan, place: Place, step: StepTime, wishes: Wishes) -> Course | None:
    """Return the course of a run; None where nothing says how many steps it makes."""
    config = plan.config
    return course(
        step.seconds, config, forward=forward_of(step, config.grad_accumulation), tokens=wishes.tokens,
        data=data_of(config), card=place.card, price=price_of(place.name, wishes.price),
    )  # fmt: skip


def not_known(planner: "Planner", found: Compiled, step: StepTime) -> Iterator[str]:
    """Yield what a reader must know of the limits of an answer."""
    network = planner.network
    if not step.measured:
        yield (
            "Times: nothing of this was measured on this device. They are FLOPs and bytes over the shares of the peaks "
            "that other programs reached; --operations names each."
        )
    if step.exchanges:
        inside = f"{planner.place.card.link_name} " if planner.place.card else ""
        yield (
            f"Sending: no two GPUs have run this yet. {inside}is taken at {100 * network.reached:.0f} % of "
            f"{network.inside / 1e9:g} GB/s, the network between machines of {network.node} at "
            f"{100 * network.reached_between:.0f} % of {network.between / GBIT:g} Gbit/s for each GPU (--network)."
        )
    if found.memory.source == "computed":
        why = f"; {found.problem}" if found.problem else ""
        yield f"Memory: computed from shapes, not compiled (docs/plan.md has the errors of that){why}."
    yield "Nothing here counts other programs on the device, clocks that fall when it is hot, or waiting for data."


class Planner(NamedTuple):
    """A model on a device: what each configuration comes to there."""

    model: ModelConfig
    place: Place
    network: Network
    told: Told = lambda words: None

    def plan(self, config: TrainConfig) -> Plan:
        """Return the plan of a configuration; whether it fits is a question of its own. Raises InputError."""
        return make_plan(config, self.model, self.place.machine)

    def memory(self, plan: Plan) -> Memory:
        """Return what a plan takes, computed."""
        return computed(plan, *self._limits(plan.parallel.devices))

    def _limits(self, devices: int) -> tuple[int | None, int | None]:
        """Return what a program may take, and the whole card; devices that a CPU pretends to have share its memory."""
        place = self.place
        if place.machine.platform == "cpu":
            return place.available and place.available // devices, None
        return place.available, place.memory

    def compile(self, configs: Sequence[TrainConfig]) -> list[Memory | Problem]:
        """Return what configurations take as compiled, each in a process of its own."""
        model = f"L{self.model.num_layers}-NH{self.model.num_heads}-C{self.model.channels}"
        model += f"-V{self.model.vocab_size}-T{self.model.max_seq_len}"  # whose file the process need not find
        gpu = self.place.name or CPU
        requests = [Request(gpu, replace(config, model=model)) for config in configs]
        anew = [each for each in requests if not is_kept(each)]
        if anew and (gpu == CPU or python_that_compiles()):
            flags = " and ".join(f"-b {each.config.batch_size}" for each in anew)
            self.told(f"compiling the step with {flags}, which is kept; --quick compiles nothing")
        found = compiled_apart(requests)
        limits = [self._limits(config.devices) for config in configs]
        return [
            each._replace(available=available, card=card) if isinstance(each, Memory) else each
            for each, (available, card) in zip(found, limits, strict=True)
        ]

    def close(self, config: TrainConfig, row: Largest) -> bool:
        """Return whether a row may be another one where computing is off by as much as it may be."""
        way = self.config_of(config, row)
        larger = next((size for size in sizes(way) if size > way.batch_size), None)
        limit = self._limits(config.devices)[0] or 0
        return (row.program or 0) > (1 - ERROR) * limit or (
            larger is not None and self._program(way, larger) < (1 + ERROR) * limit
        )

    def checked(self, way: TrainConfig, row: Largest, compiled: Memory) -> Largest:
        """Return a row as the compiler has it: where it is off, with the -b that its memory allows, compiled again."""
        available = self._limits(way.devices)[0]
        if row.program is None or available is None:
            return row
        limit = available * row.program / compiled.program  # bytes, as they are computed
        size = largest_size(way, lambda config: self.memory(self.plan(config)).program <= limit)
        if size == row.batch_size:
            return row._replace(program=compiled.program, source=compiled.source)
        if size is None:
            return row._replace(batch_size=None, step=None, tokens_per_second=None)
        (again,) = self.compile([replace(way, batch_size=size)])
        if isinstance(again, Problem) or not again.fits:
            return row if compiled.fits else self._row(way, size)
        return self._row(way, size)._replace(program=again.program, source=again.source)

    def time(self, plan: Plan) -> StepTime:
        """Return how long a step of a plan takes."""
        return step_time(plan, network=self.network)

    def fits(self, config: TrainConfig) -> bool:
        """Return whether a configuration fits; where the memory is not known, nothing does."""
        return bool(self.memory(self.plan(config)).fits)

    def with_batch(self, config: TrainConfig) -> TrainConfig:
        """Return a configuration with a number for -b auto: the largest that fits, or the least where none does.

        It is one of those that train.py may come to.
        """
        if config.batch_size != AUTO_BATCH:
            return config
        possible = auto_sizes(config)
        fitting = (size for size in possible if self.fits(replace(config, batch_size=size)))
        size = next(fitting, possible[-1] if possible else None)
        if size is None:
            raise InputError(
                f"-d {config.total_batch_size}: no -b divides it on {config.devices} devices; take another"
            )
        return replace(config, batch_size=size)

    def largest(self, config: TrainConfig) -> tuple[Largest, ...]:
        """Return the largest -b of each way of computing a configuration, and the fastest of them marked."""
        if self.place.available is None:
            return ()
        return mark_fastest([self._largest(way) for way in ways(config, self.model.num_layers)])

    def _largest(self, way: TrainConfig) -> Largest:
        size = largest_size(way, self.fits)
        if size is not None:
            return self._row(way, size)
        fewest = next(iter(sizes(way)), None)
        program = None if fewest is None else self._program(way, fewest)
        levels = (way.recompute, way.recompute_blocks, way.zero_stage)
        return Largest(*levels, None, program, "computed", None, None)

    def _row(self, way: TrainConfig, size: int) -> Largest:
        step = self.time(self.plan(replace(way, batch_size=size)))
        levels = (way.recompute, way.recompute_blocks, way.zero_stage)
        return Largest(*levels, size, self._program(way, size), "computed", step.seconds, step.tokens_per_second)

    def _program(self, way: TrainConfig, size: int) -> int:
        return self.memory(self.plan(replace(way, batch_size=size))).program

    def config_of(self, config: TrainConfig, row: Largest) -> TrainConfig:
        """Return the configuration of a row that fits."""
        assert row.batch_size is not None
        return replace(
            config, recompute=row.recompute, recompute_blocks=row.recompute_blocks, zero_stage=row.zero_stage,
            batch_size=row.batch_size,
        )  # fmt: skip


def setting_of(plan: Plan, *, auto_batch: bool = False) -> Setting:
    """Return what is planned."""
    config = plan.config
    return Setting(
        config.model, num_parameters(plan.model), config.batch_size, auto_batch, config.sequence_length,
        config.tokens_per_step, config.grad_accumulation, plan.parallel.devices, plan.parallel.stage, config.recompute,
        config.recompute_blocks, plan.execution.logit_rows, plan.dtype, plan.product_precision, plan.master_weights,
    )  # fmt: skip


# ----- as JSON --------------------------------------------------------------------------------------------------------


def as_json(found: Answer) -> dict[str, Any]:
    """Return an answer as JSON can hold it, with what its parts compute of themselves."""
    content: dict[str, Any] = to_json(found)
    memory, step = found.memory, found.step
    content["memory"] |= {name: getattr(memory, name) for name in ("program", "beside", "total", "fits", "spare")}
    content["step"] |= {
        "tokens_per_second": to_json(step.tokens_per_second), "measured": step.measured,
        "mfu": {name: to_json(step.mfu(name)) for name in ("llm.c", "palm")},
    }  # fmt: skip
    return content
