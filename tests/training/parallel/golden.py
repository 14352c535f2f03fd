"""Repeats llm.c's golden run on several devices, and says its losses.

    python -m tests.training.parallel.golden FOLDER < spreads.json > losses.json

FOLDER: the one with model.bin and train.bin. A spread: devices, stage, whether in a fixed order. An update's 4 rows are
as many micro-batches.
"""

import json
import sys
from pathlib import Path

import numpy as np

STEPS = 41


def losses(folder: Path, devices: int, stage: int, fixed: bool) -> list[float]:
    """The losses of the run."""
    import jax

    from llmc_jax.checkpoint.sources import flat_parameters, open_source
    from llmc_jax.data.loader import TokenLoader
    from llmc_jax.training import step
    from llmc_jax.training.parallel.placement import placement
    from llmc_jax.training.parallel.stage import Parallel
    from llmc_jax.training.state import initial_state
    from tests.comparisons import QUICK, step_numbers

    model = open_source(folder / "model.bin")
    config, flat = model.config, flat_parameters(model)
    loader = TokenLoader([folder / "train.bin"], 4, 64, vocab_size=config.vocab_size, shuffle=True, flag="-i")
    place = placement(config, Parallel(devices, stage, fixed), jax.devices()[:devices])
    like = initial_state(jax.numpy.asarray(flat))
    before = {name: np.array(array) for name, array in like.flat.items()}
    state = place.state(like, before.__getitem__)
    numbers = place.everywhere(step_numbers(lr=1e-3, warmup=0, total=1, final=1.0, beta2=0.999))
    options = step.StepOptions("constant", "none", parallel=place.parallel)
    call = jax.jit(lambda *given: step.step_fn(*given, config, options), donate_argnums=0)
    tokens = place.tokens((4, 1, 64))
    with place.context():
        compiled = call.lower(state, tokens, tokens, numbers).compile(QUICK)
    found = []
    for _ in range(STEPS):
        inputs, targets = (rows.reshape(4, 1, 64)[place.own(4)] for rows in loader.next_batch())
        state, metrics = compiled(state, place.batch(inputs), place.batch(targets), numbers)
        found.append(float(metrics.loss))
    return found


def main() -> None:
    json.dump([losses(Path(sys.argv[1]), *spread) for spread in json.load(sys.stdin)], sys.stdout)


if __name__ == "__main__":
    main()
