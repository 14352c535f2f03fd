"""A step's memory on one device by kind: computed from shapes alone, or with the compiler's word on how much it is.

The compiler says the bytes of the whole program. What each kind takes of them is computed either way, and where the two
differ, the difference is a row of its own. What no program has (the CUDA context, NCCL's buffers) stands apart, as
estimates with their sources. Leaves out what decides the program of a run (models/memory.py), and what a program
holds from moment to moment (moments.py).
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from llmc_jax.machine.cards import CARDS
from llmc_jax.machine.gpus import MIB, multiprocessors_of
from llmc_jax.machine.jax_setup import MEMORY_SHARE
from llmc_jax.plan.moments import largest_moment, state_kinds

if TYPE_CHECKING:  # it imports JAX, which whoever reads what was kept does without
    from llmc_jax.plan.plan import Plan

CPU = "cpu"  # the processor at hand, as a target
Kinds = Mapping[str, int]
KINDS = (
    "parameters",  # what the step updates, the copy that the model computes with, and slices of it
    "optimizer",  # its buffers: AdamW's m and v
    "gradients",  # of the parameters: of one tensor, flat, summed over micro-batches
    "activations",  # what the forward keeps for the backward
    "logits",  # and their gradient
    "working arrays",  # what is made and used within a layer or the head
    "workspace",  # of the libraries' products
    "communication",  # what comes from other devices
    "batch",  # tokens, and the step's numbers
)


class Part(NamedTuple):
    """Bytes that no compiled program has."""

    name: str
    bytes: int
    source: str  # where the estimate comes from


class Memory(NamedTuple):
    """Bytes of a step on one device, at the moment that needs most."""

    source: str  # "computed" or "compiled"
    moment: str  # the one that needs most, as computed
    kinds: Kinds  # bytes by kind, every one of KINDS, as computed
    unexplained: int  # the compiler's bytes less those of all kinds, negative where it takes fewer; 0 where computed
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


def computed(plan: "Plan") -> Memory:
    """Return a step's memory from shapes alone; it may take what the plan has, or JAX's share of the card."""
    moment, temporary = largest_moment(plan)
    found = state_kinds(plan.model, plan.shape) + temporary
    row, available = CARDS.get(plan.machine.kind), plan.available
    card = None if row is None else row.memory
    if available is None and card is not None:
        available = int(MEMORY_SHARE * card)
    return Memory("computed", moment, {kind: found[kind] for kind in KINDS}, 0, outside(plan), available, card)


# ----- compiled -------------------------------------------------------------------------------------------------------

# LLVM need not optimize what never runs. Buffers are assigned before it: the memory is the same to the byte, and the
# step of GPT-2 1558M on 8 H100s is compiled in 17 s in place of 49.
UNOPTIMIZED = (("xla_backend_optimization_level", 0),)


def compiled(plan: "Plan", target: str) -> Memory:
    """Compile a plan's step in this process; return its memory.

    target: that the plan was made for. Raises InputError as `compile_step`.
    """
    from llmc_jax.plan import compiled as steps  # here: it imports JAX

    quick, options = computed(plan), (*plan.execution.compiler_options, *(() if target == CPU else UNOPTIMIZED))
    program = steps.compile_step(plan, target, options)
    return quick._replace(source="compiled", unexplained=program.memory.total - quick.program)


# ----- beside the program ---------------------------------------------------------------------------------------------


# CUDA's context: 555 MiB on a card of 188 multiprocessors, 107 MiB on one of 34: 3 MiB for each of them.
CONTEXT = "ggml-org/llama.cpp#23604: 555 MiB on an RTX PRO 6000, 107 on an RTX 4060 Ti: 3 MiB per multiprocessor"
PER_MULTIPROCESSOR = 3 * MIB
MULTIPROCESSORS = 132  # where the card is not known: an H100's
# NCCL's buffers: of each connection 4 MiB, and those of its two protocols for little data: 9.19 MiB in all. A channel
# has three: the one before in the ring, and one up and one down in the tree.
NCCL = (
    "NVIDIA/nccl#391, #1450 (4 MiB a connection and channel, 9.19 with the protocols for little data), nccl-tests#100 "
    "(24 channels on 8 A100s with NVLink), #228 (2 over PCIe); a user of nccl#864 saw 1.6 GB"
)
CONNECTION, CONNECTIONS = int(9.19 * MIB), 3
CHANNELS = {True: 24, False: 2}  # with NVLink, over PCIe


def outside(plan: "Plan") -> tuple[Part, ...]:
    """Return what no compiled program has, estimated: nothing of it was measured with this program."""
    kind = plan.machine.kind
    if plan.machine.platform == "cpu":
        return ()
    parts = (Part("CUDA context", PER_MULTIPROCESSOR * (multiprocessors_of(kind) or MULTIPROCESSORS), CONTEXT),)
    if plan.parallel.devices == 1:
        return parts
    card = CARDS.get(kind)
    channels = CHANNELS[card is None or card.nvlink]
    return (*parts, Part("NCCL's buffers", channels * CONNECTIONS * CONNECTION, NCCL))
