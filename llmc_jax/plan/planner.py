"""A model on a device: what each configuration of it takes, computed or compiled, and the largest -b of each.

Leaves out what the user is told of it (answer.py), and how memory and time are found (memory.py, separate.py, time.py).
"""

import os
from dataclasses import replace
from typing import NamedTuple

from llmc_jax.base.errors import InputError
from llmc_jax.config.model import ModelConfig
from llmc_jax.config.train import AUTO_BATCH, TrainConfig
from llmc_jax.kernels import Machine
from llmc_jax.machine import cards
from llmc_jax.machine.cards import Card
from llmc_jax.machine.device import describe_device
from llmc_jax.machine.jax_setup import MEMORY_SHARE, configure
from llmc_jax.machine.target import machine_of, this_machine
from llmc_jax.plan.memory import CPU, Memory, computed
from llmc_jax.plan.network import Network
from llmc_jax.plan.plan import Plan, make_plan
from llmc_jax.plan.search import Largest, auto_sizes, largest_size, limit_of, mark_fastest, sizes, ways
from llmc_jax.plan.separate import Say, compiled_apart
from llmc_jax.plan.time import step_time


class Place(NamedTuple):
    """The device that is planned for, and how many of them a run takes which does not say it."""

    name: str | None  # a GPU's short name; None: a CPU, or a GPU that nothing can be compiled for elsewhere
    label: str  # what a reader calls it
    machine: Machine
    memory: int | None  # bytes in all; None: not known
    available: int | None  # of these, what JAX's allocator may take
    card: Card | None  # power and links; None: not known
    devices: int


# ----- the device -----------------------------------------------------------------------------------------------------


def place_named(name: str | None) -> Place:
    """Return a GPU by a name that `cards.named` knows; None: the device at hand. Raises InputError."""
    if name is None:
        return place_here()
    target = cards.named(name)
    card = cards.card_of(target)
    return Place(
        cards.short_name(target), target.device_kind, machine_of(target.device_kind), card.memory,
        int(MEMORY_SHARE * card.memory), card, 1,
    )  # fmt: skip


def place_here() -> Place:
    """Return the device at hand. Initialises JAX's backend."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # a plan takes none of a GPU's memory
    configure()
    device, machine = describe_device(), this_machine()
    if machine.platform == "cpu":
        return Place(None, device.kind, machine, device.memory_bytes, device.memory_bytes, None, 1)
    card, name = cards.CARDS.get(machine.kind), cards.name_of(machine.kind)
    return Place(
        name, device.kind, machine, None if card is None else card.memory, device.memory_bytes, card, device.num_devices
    )


# ----- a model on it --------------------------------------------------------------------------------------------------


class Planner(NamedTuple):
    """A model on a device: the figures of each configuration there."""

    model: ModelConfig
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
                f"nothing can be compiled for {self.place.label} elsewhere: it is not in llmc_jax/machine/gpus.py"
            )
        if gpu == CPU and config.devices > 1:
            raise InputError("for several devices that a processor pretends to have nothing is compiled")
        shape = self.model  # whose file the process need not find
        model = f"L{shape.num_layers}-NH{shape.num_heads}-C{shape.channels}-V{shape.vocab_size}-T{shape.max_seq_len}"
        found, known = compiled_apart(gpu, replace(config, model=model), self.say), computed(self.plan(config))
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
        return mark_fastest([
            self._row(way, largest_size(way, self.fits)) for way in ways(config, self.model.num_layers)
        ])  # fmt: skip

    def _row(self, way: TrainConfig, size: int | None) -> Largest:
        """Return a way of computing with so many rows; None: not even the fewest fit."""
        step = None if size is None else step_time(self.plan(replace(way, batch_size=size)), network=self.network)
        shown = next(iter(sizes(way)), None) if size is None else size
        program = None if shown is None else computed(self.plan(replace(way, batch_size=shown))).program
        return Largest(
            way.recompute, way.recompute_blocks, way.zero_stage, size, program,
            step and step.seconds, step and step.tokens_per_second,
        )  # fmt: skip
