"""What the devices send each other in one update, from shapes alone: no device, no compilation, instant.

The same collectives as in the compiled program, with the same bytes (tests/aot/test_several.py holds both against each
other), for sums that are made as is fastest. In a fixed order there are others, which are not here. Leaves out how long
they take.
"""

from typing import NamedTuple

from llmc_jax.config.model import ModelShape
from llmc_jax.models.layout import num_layers
from llmc_jax.models.units import Unit, row_size, units
from llmc_jax.training.parallel.stage import Parallel

NUMBER = 4  # bytes of a loss or a norm


class Sent(NamedTuple):
    """One collective of an update. Its bytes are those of the whole array that it is about, on one device."""

    kind: str  # all-reduce, reduce-scatter, all-gather, all-to-all
    about: str  # the name of a unit, or loss, norm, weights of a unit, matrices
    bytes: int
    times: int = 1  # in an update
    beside: str = ""  # forward, backward: sent while that goes on with other layers; else while nothing is computed


def of_update(
    config: ModelShape, parallel: Parallel, micro_batches: int, element: int, matrices: bool = False
) -> list[Sent]:
    """Return every collective of an update, in the order in which it can begin; none of one device.

    micro_batches: of each device. element: bytes of what the model computes in, which the weights are gathered in, and
    the gradients of one micro-batch are. matrices: the optimizer needs those of the layers whole (matrices.py).
    """
    assert not parallel.fixed, parallel
    if parallel.devices == 1:
        return []
    at_once = parallel.stage == 2 or micro_batches == 1  # else they are summed over micro-batches first, in float32
    width, times = (element, micro_batches if parallel.stage == 2 else 1) if at_once else (4, 1)
    one, beside = micro_batches == 1, "backward" if at_once else ""
    kind = "reduce-scatter" if parallel.splits else "all-reduce"
    found, layers = units(config), num_layers(config)
    order = (*reversed(found[len(found) - layers :]), *reversed(found[: len(found) - layers]))
    C = row_size(config)
    gradients = [Sent(kind, unit.name, width * C * _rows(unit, parallel), times, beside) for unit in order]
    sent = [Sent("all-reduce", "loss", NUMBER, 1, "backward" if one else ""), *gradients]
    if parallel.splits:
        hidden = order[:layers] if one else ()  # for the others the embedding waits
        sizes = ((unit, element * C * _rows(unit, parallel), "forward" if unit in hidden else "") for unit in found)
        sent = [Sent("all-gather", f"weights of {unit.name}", size, 1, at) for unit, size, at in sizes] + sent
        sent.append(Sent("all-reduce", "norm", NUMBER))
        if matrices:
            rows = _rows(found[-1], parallel) * C
            sent += 2 * -(-layers // parallel.devices) * [Sent("all-to-all", "matrices", element * rows)]  # both ways
    return sent


def _rows(unit: Unit, parallel: Parallel) -> int:
    """Return the rows that are sent of a unit: where they are split, as many as the devices divide."""
    return parallel.devices * unit.share(parallel.devices) if parallel.splits else unit.rows
