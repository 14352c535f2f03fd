"""Puts flat buffers on 8 pretended devices and reads them back, whole and in blocks, and says what differed.

    python -m tests.training.parallel.blocks < cases.json > results.json

A case: a model's shape, devices, whether the buffer is split, its dtype, and how many elements come to the host at a
time.
"""

import json
import sys
from typing import Any

import numpy as np


def differences(shape: str, devices: int, split: bool, dtype: str, window: int) -> list[str]:
    """What does not come back as it was."""
    import jax

    from llmc_jax.config.model import parse_descriptor
    from llmc_jax.models.layout import flat_size, num_parameters
    from llmc_jax.models.tensors import BLOCKS
    from llmc_jax.training.parallel import blocks
    from llmc_jax.training.parallel.placement import placement
    from llmc_jax.training.parallel.stage import Parallel
    from llmc_jax.training.state import initial_state

    blocks.WINDOW = window
    config = parse_descriptor(shape)
    size = flat_size(config) // BLOCKS
    place = placement(config, Parallel(devices, 1 if split else 0), jax.devices()[:devices])
    flat = np.random.default_rng(devices).normal(size=flat_size(config)).astype(jax.numpy.dtype(dtype))
    flat[num_parameters(config) :] = 0
    like = initial_state(jax.numpy.zeros(1, dtype))
    like = like._replace(buffers={"m": jax.numpy.zeros(1, dtype)})
    buffer = place.state(like, lambda _: flat).buffers["m"]
    found = []
    if buffer.sharding.is_fully_replicated == split:
        found.append("split")
    last = num_parameters(config) // size
    for numbers in ([], [0], [5, 3], [last], [BLOCKS - 1], range(BLOCKS)):
        some = place.blocks(buffer, numbers)
        if list(some) != list(numbers):
            found.append(f"numbers {list(some)}")
        wrong = [k for k, block in some.items() if not same(block, flat[k * size : (k + 1) * size])]
        found += [f"block {k} of {list(numbers)}" for k in wrong]
    whole = place.whole(buffer)
    if whole is None or not same(whole, flat):
        found.append("whole")
    if not same(place.host(buffer), flat):
        found.append("host")
    return found


def same(ours: np.ndarray, theirs: np.ndarray) -> bool:
    return (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype) and ours.tobytes() == theirs.tobytes()


def main() -> None:
    cases: list[Any] = json.load(sys.stdin)
    json.dump([differences(*case) for case in cases], sys.stdout)


if __name__ == "__main__":
    main()
