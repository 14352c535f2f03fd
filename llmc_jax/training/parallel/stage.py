"""How a run is spread over devices, and where each array of its state lies.

    stage 0   everything on every device; gradients are summed over all (all-reduce)
    stage 1   the whole state split over the devices (ZeRO 1); a step gathers the low-precision weights to compute with,
              and gradients are summed and split once per update (reduce-scatter)
    stage 2   gradients split as well (ZeRO 2): a layer's are summed and split as soon as they exist

While a step computes, what the model computes with (the low-precision weights; in float32, or without master weights,
the parameters) is on every device in each stage. Leaves out the exchange itself (collectives.py, weights.py) and
bringing arrays there (placement.py).
"""

from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from llmc_jax.training.state import TrainState

AXIS = "data"  # the mesh's only axis: the devices, each with its part of the batch
EVERYWHERE, SPLIT = PartitionSpec(), PartitionSpec(AXIS)


class Parallel(NamedTuple):
    """How a run is spread over devices. Static: another one is another program."""

    devices: int = 1  # of all processes
    stage: int = 0
    fixed: bool = False  # sums in one order, whatever the number of devices

    @property
    def alone(self) -> bool:
        """Return whether nothing is exchanged, and sums are as they come."""
        return self.devices == 1 and not self.fixed

    @property
    def splits(self) -> bool:
        """Return whether parts of the state are split."""
        return self.devices > 1 and self.stage > 0

    @property
    def interleaved(self) -> bool:
        """Return whether device d takes the micro-batches d, d + n, … instead of its n-th of them in a row.

        Where each micro-batch's gradients are summed over the devices at once, in a fixed order, neighbours in the tree
        of sums must be on different devices.
        """
        return self.fixed and self.splits and self.stage == 2


ALONE = Parallel()


def state_specs(state: TrainState, parallel: Parallel) -> TrainState:
    """Return where each array of a state lies: a tree like it, of PartitionSpecs."""
    specs: TrainState = jax.tree.map(lambda _: EVERYWHERE, state)
    if not parallel.splits:
        return specs
    flat: Any = dict.fromkeys(state.flat, SPLIT)
    return specs.with_flat(flat)
