"""A small model for the tests of evaluation, and rows of tokens of many lengths. As a program: their losses on devices.

python tests/evaluate/models.py DEVICES FILE
"""

import sys
from functools import cache
from pathlib import Path

import numpy as np

from llmc_jax.config.model import parse_descriptor
from llmc_jax.models.layout import flat_size
from tests import plain_model
from tests.generate import plain

CONFIG = parse_descriptor("L2-NH2-C16-V257-T48")  # T is no power of two
TOKENS_PER_BATCH = 100  # three rows of 32 positions, or two of 48


def flat() -> np.ndarray:
    """Weights, those of the padding as they should be: 0."""
    values = plain_model.random_flat(CONFIG, flat_size(CONFIG), seed=1)
    values[CONFIG.vocab_size * CONFIG.channels : CONFIG.padded_vocab_size * CONFIG.channels] = 0
    return values.astype(np.float32)


@cache
def texts() -> list[tuple[np.ndarray, int]]:
    """Rows of ids, and the first of them that is scored: of two ids to as many as fit.

    The last id of every other row is the one that the model holds for likeliest there.
    """
    rng = np.random.default_rng(5)
    lengths = [2, 49, 3, 33, 34, 20, 48, 17, 30, 49, 9]
    made = [(rng.integers(0, 257, n), int(rng.integers(1, n))) for n in lengths]
    for ids, _ in made[::2]:
        ids[-1] = plain.forward(flat(), ids[:-1], CONFIG)[0][-1].argmax()
    return made


def main() -> None:
    import jax

    from llmc_jax.generate.scorer import Row, ScoreOptions, Scorer, score
    from llmc_jax.machine.device import devices_of
    from llmc_jax.models.execution import PLAIN
    from llmc_jax.training.parallel.placement import placement
    from llmc_jax.training.parallel.stage import Parallel

    devices = int(sys.argv[1])
    jax.config.update("jax_num_cpu_devices", devices)
    place = placement(CONFIG, Parallel(devices), devices_of(devices))
    scorer = Scorer(place.everywhere(flat()), CONFIG, PLAIN, place, TOKENS_PER_BATCH)
    found = sorted(score(scorer, [Row(*text) for text in texts()], ScoreOptions(rank=True)), key=lambda each: each.row)
    losses, rank = (np.concatenate([getattr(each, name) for each in found]) for name in ("losses", "rank"))
    np.savez(Path(sys.argv[2]), losses=losses, rank=rank)


if __name__ == "__main__":
    main()
