"""How long devices take to send each other what an update needs, and how much of that is hidden behind computing.

Nothing here is measured: no two GPUs have run this yet.

- A collective takes its ring inside a node, then one between the nodes, of an equal part of it from each GPU. A hop of
  a ring takes 1 us inside a node and 5 us between two, a collective 10 us to start. An all-reduce is a reduce-scatter
  and an all-gather.
- A layer's gradients are sent while the layers below are computed, and its weights while those above it are, one
  collective after the other, and computing is not slowed by it. What comes before the forward or after the backward is
  never hidden: the weights that the embedding waits for, what is left of the layers' gradients, wte's (which the
  embedding completes last), the norm. With several micro-batches, stages 0 and 1 send their sum at the end of the
  update, and 1 and 2 the weights at its beginning, beside nothing; stage 2 sends each micro-batch's gradients.

What is sent, and beside what, is training/parallel/traffic.py's list, as in compiled programs.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from llmc_jax.base.errors import InputError
from llmc_jax.machine.cards import CARDS, NVLINK4, PCIE4
from llmc_jax.training.parallel.traffic import Sent

GBIT = 1e9 / 8  # bytes per second
BETWEEN = 400  # Gbit/s of each GPU between machines, unless said otherwise
# Of a link as it is sold, estimates: over PCIe, GPUs share switches and the host's memory.
NVLINK_REACHED, PCIE_REACHED = 0.8, 0.5


class Network(NamedTuple):
    """How fast GPUs send. Bytes per second and GPU in one direction; seconds."""

    node: int = 8  # GPUs of one machine: HGX boards have as many, and the clouds rent as many others in one
    inside: float = NVLINK4  # of an H100
    between: float = BETWEEN * GBIT
    reached: float = NVLINK_REACHED  # of inside
    reached_between: float = 0.8
    hop_inside: float = 1e-6
    hop_between: float = 5e-6
    start: float = 10e-6

    def ends(self) -> "tuple[Network, Network, Network]":
        """Return it at its fastest, as it is, and at its slowest: an estimate of how far `reached` may be off."""
        fast, slow = (
            self._replace(reached=min(0.95, by * self.reached), reached_between=min(0.95, by * self.reached_between))
            for by in (1.15, 0.7)
        )
        return fast, self, slow


def network_of(kind: str, gbit: float | None = None) -> Network:
    """Return the network of machines with a GPU, its link as machine/cards.py has it, else PCIe.

    gbit: Gbit/s for each GPU between machines; None: BETWEEN. Raises InputError for a speed that cannot be.
    """
    if gbit is not None and not 0 < gbit < math.inf:
        raise InputError(f"--network {gbit:g}: expected Gbit/s of each GPU between machines, above 0")
    known = Network() if gbit is None else Network(between=gbit * GBIT)
    if (card := CARDS.get(kind)) is None:
        return known._replace(inside=PCIE4, reached=PCIE_REACHED)
    reached = NVLINK_REACHED if card.nvlink else PCIE_REACHED
    return known._replace(inside=card.link, reached=reached)


class Compute(NamedTuple):
    """Seconds that one GPU computes."""

    before: float  # of each micro-batch, until the backward reaches the last layer
    forward: tuple[float, ...]  # of that, the layers, from the first to the last
    layers: tuple[float, ...]  # backward, from the last layer to the first
    end: float  # of the backward: the embedding
    update: float


def collective_seconds(kind: str, size: int, devices: int, network: Network) -> float:
    """Return how long a collective of an array of `size` bytes takes, hierarchical: a ring in nodes, then of nodes."""
    if devices == 1:
        return 0.0
    inside = min(devices, network.node)
    nodes = math.ceil(devices / inside)
    ring = size * (inside - 1) / inside / (network.reached * network.inside) + (inside - 1) * network.hop_inside
    ring += size / inside * (nodes - 1) / nodes / (network.reached_between * network.between)
    ring += (nodes - 1) * network.hop_between
    return network.start + ring * (2 if kind == "all-reduce" else 1)


def step_of(
    compute: Compute, sent: Sequence[Sent], devices: int, micro_batches: int = 1, network: Network | None = None
) -> float:
    """Return how many seconds an update takes on each of some GPUs.

    What each micro-batch sends goes one after the other, as soon as it is ready and the one before it is through.
    """
    ready, clock = {"loss": compute.before}, compute.before
    for layer, each in zip(reversed(range(len(compute.layers))), compute.layers, strict=True):
        clock += each
        ready[f"layer {layer}"] = clock
    clock += compute.end
    free, alone = 0.0, 0.0  # free: when the last collective is done
    there = reached = 0.0  # when a layer's weights are, and the forward comes to it
    layers = iter(compute.forward)
    for one in sent:
        seconds = collective_seconds(one.kind, one.bytes, devices, network or Network())
        if one.beside == "backward":
            free = max(free, ready.get(one.about, clock)) + seconds
        elif one.beside == "forward":
            there += seconds
            reached = max(reached, there) + next(layers, 0.0)
        else:
            alone += one.times * seconds
    waited = max(0.0, reached - sum(compute.forward))
    return micro_batches * max(clock, free) + waited + alone + compute.update
