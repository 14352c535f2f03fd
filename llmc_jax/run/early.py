"""Early stopping: which validations bring the loss down, and when enough in a row did not.

All of it follows from the validation losses, which are the same in every process, and lies in each checkpoint. So all
processes stop at the same step, and so does a run that was killed and went on.
"""

import math

from llmc_jax.checkpoint.contents import Counters
from llmc_jax.config.train import TrainConfig


def judged(counters: Counters, step: int, loss: float, delta: float) -> Counters:
    """Return the counters after a validation before step `step`.

    It is an improvement where the loss lies more than `delta` below that of the last improvement; NaN and infinity are
    none. So small gains count together once they add up to more than delta.
    """
    counters = counters._replace(val_loss=loss, validated=step)
    if math.isfinite(loss) and (counters.best_loss is None or loss < counters.best_loss):
        counters = counters._replace(best_loss=loss, best_step=step)
    if math.isfinite(loss) and (counters.improved is None or loss < counters.improved - delta):
        return counters._replace(improved=loss, stale=0)
    return counters._replace(stale=counters.stale + 1)


def stops_early(config: TrainConfig, counters: Counters) -> bool:
    """Return whether so many validations in a row were no improvement that the run ends."""
    return 0 < config.patience <= counters.stale
