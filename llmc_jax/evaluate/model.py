"""An opened checkpoint as a scorer: its weights on every device that evaluates. Leaves out opening it."""

from llmc_jax.evaluate.scorer import Scorer
from llmc_jax.generate.model import Model
from llmc_jax.machine.device import devices_of
from llmc_jax.training.parallel.placement import placement
from llmc_jax.training.parallel.stage import Parallel

TOKENS_ON_CPU, TOKENS_ON_GPU = 4096, 16384  # computed at a time: what keeps a device busy, and takes little memory


def scorer_of(model: Model, devices: int = 1, tokens_per_batch: int | None = None) -> Scorer:
    """Return a scorer of a model on the first so many devices, which must be there.

    tokens_per_batch: computed at a time on each device; None: what suits it.
    """
    place = placement(model.config, Parallel(devices), devices_of(devices))
    platform = devices_of(1)[0].platform
    at_once = tokens_per_batch or (TOKENS_ON_CPU if platform == "cpu" else TOKENS_ON_GPU)
    return Scorer(place.everywhere(model.weights), model.config, model.execution, place, at_once)
