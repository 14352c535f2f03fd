"""Trains a tiny model spread over devices in all sorts of ways, and says what came out, to the bit.

    python -m tests.training.parallel.spread < cases.json > results.json

A process of pytest has one CPU device. This program has 8, pretended, and makes all runs that a file of tests asks for,
because what takes the time is to start it and to compile. With a mistake in the collectives too: tests look whether
their comparisons show it.
"""

import fcntl
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[3]
DEVICES = 8
SHAPE = "L2-NH2-C48-V97-T32"
B, T = 2, 24


class Case(NamedTuple):
    """A run."""

    devices: int = 1
    stage: int = 0
    fixed: bool = False
    dtype: str = "fp32"
    masters: bool = True
    rounding: str = "nearest"
    micro_batches: int = 8  # of an update, on all devices together
    steps: int = 4
    seed: int = 0  # of the tokens
    lr: float = 1e-2
    clip: float = 1.0
    decay: str = "matrices"
    loss_scale: float = 1024.0
    scale_factor: float = 2.0
    skip_loss_z: float = 0.0
    skip_norm_z: float = 0.0
    recompute: int = 1
    recompute_blocks: int = 0
    logit_rows: int = 0
    mistake: str = ""  # a name in mistakes.py
    quick: bool = True  # to compile; else as a run is compiled
    shape: str = SHAPE
    model_file: str = ""  # of --model
    optimizer: str = "adamw"

    def alone(self) -> "Case":
        """The same run on one device, without a mistake."""
        return self._replace(devices=1, stage=0, mistake="")

    def on(self, devices: int, stage: int, **changes: Any) -> "Case":
        """The same run on so many devices."""
        return self._replace(devices=devices, stage=stage, **changes)


# What is an argument of the step, and so needs no other program.
NUMBERS: dict[str, Any] = dict.fromkeys(
    ("steps", "seed", "lr", "clip", "loss_scale", "scale_factor", "skip_loss_z", "skip_norm_z"), 0
)
COMPILED: dict[Case, Any] = {}


class Result(NamedTuple):
    """What came out of a run."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    z: tuple[float, ...]  # of losses, then of norms; 0 for NaN
    applied: tuple[bool, ...]
    finite: tuple[bool, ...]
    scales: tuple[float, ...]
    digests: dict[str, str]  # of params, m, v, copy; of everything else in the state
    replicas: int  # at most so many different arrays where all devices should have the same one
    dust: float  # largest magnitude of what only fills up
    change: float  # norm of the difference between the parameters before and after


def results(cases: Sequence[Case], together: Path | None = None) -> dict[Case, Result]:
    """The results of cases, in one process; or if together is a file that holds them already, those.

    together: a file of all workers of pytest. One of them makes the runs, while the others wait.
    """
    if together is None:
        return _run(cases)
    with open(together.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not together.exists():
            together.write_text(json.dumps(list(_run(cases).values())))
        return _named(cases, json.loads(together.read_text()))


def _run(cases: Sequence[Case]) -> dict[Case, Result]:
    return _named(cases, answer("spread", cases))


def answer(program: str, asked: Any, *words: str) -> Any:
    """What a program of this folder, in a process with 8 devices, makes of what it is asked: both are JSON."""
    env = os.environ | {
        "JAX_PLATFORMS": "cpu", "NPROC": str(DEVICES), "TF_CPP_MIN_LOG_LEVEL": "2",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}",
    }  # fmt: skip
    command = [sys.executable, "-m", f"tests.training.parallel.{program}", *words]
    done = subprocess.run(
        command, input=json.dumps(asked), cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def _named(cases: Sequence[Case], values: list[Any]) -> dict[Case, Result]:
    found = [Result(*(tuple(each) if isinstance(each, list) else each for each in each_of))
             for each_of in values]  # fmt: skip
    return dict(zip(cases, found, strict=True))


# ----- in the process of its own --------------------------------------------------------------------------------------


def digest(array: Any) -> str:
    found = np.ascontiguousarray(array)
    return hashlib.sha256(f"{found.dtype}{found.shape}".encode() + found.tobytes()).hexdigest()[:16]


def replicas(tree: Any) -> int:
    """At most how many different arrays there are where each device has the whole of one."""
    import jax

    whole = [array for array in jax.tree.leaves(tree) if array.sharding.is_fully_replicated]
    return max(len({digest(shard.data) for shard in array.addressable_shards}) for array in whole)


class Ran(NamedTuple):
    """What a run leaves on the devices."""

    place: Any
    before: dict[str, np.ndarray]  # the flat buffers, on the host
    state: Any
    metrics: Any  # of the last step
    found: list[Any]  # the metrics of each step, on the host


def ran(case: Case) -> Ran:
    """Make the run, on the first of the devices that JAX has: of this process, or of all."""
    import jax
    import jax.numpy as jnp

    from llmc_jax.config.train import TrainConfig
    from llmc_jax.models.execution import Execution
    from llmc_jax.models.family import chosen, parsed
    from llmc_jax.models.layout import initial
    from llmc_jax.training import step
    from llmc_jax.training.optimizer import LossScaleNumbers, numbers_of
    from llmc_jax.training.outliers import WINDOW, Outliers
    from llmc_jax.training.parallel.placement import placement
    from llmc_jax.training.parallel.stage import Parallel
    from llmc_jax.training.rules import named
    from llmc_jax.training.state import DTYPES, initial_state
    from tests.comparisons import skewed_tokens, step_numbers

    config = parsed(case.shape, chosen(case.model_file))
    flat = initial(config, 42)
    place = placement(config, Parallel(case.devices, case.stage, case.fixed), jax.devices()[: case.devices])
    execution = Execution(recompute=case.recompute, recompute_blocks=case.recompute_blocks, logit_rows=case.logit_rows)
    optimizer = named(case.optimizer)
    options = step.StepOptions("constant", case.decay, execution, case.rounding, optimizer, place.parallel)
    scale = case.loss_scale if case.dtype == "fp16" else None
    like = initial_state(
        jnp.asarray(flat), DTYPES[case.dtype], master_weights=case.masters, loss_scale=scale, optimizer=optimizer
    )
    window = np.random.default_rng(5).normal((4.5, 1.5), (0.3, 0.5), (WINDOW, 2)).T.astype(np.float32)
    like = like._replace(outliers=Outliers(jnp.asarray(window), jnp.int32(WINDOW)))
    before = {name: np.array(array) for name, array in like.flat.items()}
    state = place.state(like, lambda name: None if name == "m" and place.mesh else before[name])  # it is zeros
    numbers = step_numbers(lr=case.lr, warmup=0, total=1, final=1.0, weight_decay=0.1, grad_clip=case.clip)._replace(
        optimizer=numbers_of(optimizer, TrainConfig(weight_decay=0.1)),
        loss_scale=LossScaleNumbers(2, case.scale_factor), seed=np.uint32(7), skip_loss_z=case.skip_loss_z,
        skip_norm_z=case.skip_norm_z,
    )  # fmt: skip
    numbers = place.everywhere(numbers)
    shape = (case.steps, case.micro_batches, B, T + 1)
    tokens = skewed_tokens(case.seed, config.vocab_size, shape)
    found = []
    call = step_of(
        case._replace(**NUMBERS), place, config, options, (state, place.tokens(tokens[0, :, :, 1:].shape), numbers)
    )
    for each in tokens[:, place.own(case.micro_batches)]:
        state, metrics = call(state, place.batch(each[..., :-1]), place.batch(each[..., 1:]), numbers)
        found.append(jax.device_get(metrics))
    return Ran(place, before, state, metrics, found)


def trained(case: Case) -> Result:
    """The run, and what came out of it."""
    import jax

    from llmc_jax.models.layout import num_parameters

    place, before, state, metrics, found = ran(case)
    after = {name: place.host(array) for name, array in state.flat.items()}
    rest = {"step": state.step, "updates": state.updates, "loss_scale": state.loss_scale, "outliers": state.outliers}
    N = num_parameters(place.model)
    return Result(
        losses=tuple(float(each.loss) for each in found),
        norms=tuple(float(each.norm) for each in found),
        z=tuple(float(np.nan_to_num(getattr(each, name))) for name in ("z_loss", "z_norm") for each in found),
        applied=tuple(bool(each.applied) for each in found),
        finite=tuple(bool(each.finite) for each in found),
        scales=tuple(float(each.loss_scale) for each in found),
        digests={name: digest(array[:N]) for name, array in after.items()}
        | {name: "".join(map(digest, jax.tree.leaves(jax.device_get(value)))) for name, value in rest.items()},
        replicas=replicas((state, metrics)),
        dust=max(dust(place, array) for array in state.flat.values()),
        change=float(np.linalg.norm(after["params"][:N].astype(np.float64) - before["params"][:N])),
    )


def step_of(program: Case, place: Any, config: Any, options: Any, shapes: Any) -> Any:
    """The step, compiled once for all runs that it serves. shapes: of a state, of tokens, of numbers."""
    import jax

    from llmc_jax.training import step
    from tests.comparisons import QUICK

    if program not in COMPILED:
        state, tokens, numbers = shapes
        call = jax.jit(lambda *given: step.step_fn(*given, config, options), donate_argnums=0)
        with place.context():
            lowered = call.lower(state, tokens, tokens, numbers)
        COMPILED[program] = lowered.compile(QUICK if program.quick else None)
    return COMPILED[program]


def dust(place: Any, array: Any) -> float:
    """The largest magnitude behind the 16 tensors of a flat buffer, or in the rows that fill up the parts of one."""
    from llmc_jax.models.layout import num_parameters
    from llmc_jax.models.units import split_on_host

    N = num_parameters(place.model)
    if array.sharding.is_fully_replicated:
        rest = np.asarray(array, np.float64)[N:]
    else:
        ones = np.zeros(place.host(array).shape)
        ones[:N] = 1
        rest = np.asarray(array, np.float64)[split_on_host(ones, place.model, place.parallel.devices) == 0]
    return float(np.abs(rest).max(initial=0.0))


def main() -> None:
    from tests.training.parallel import mistakes

    cases = [Case(*values) for values in json.load(sys.stdin)]
    found = []
    for case in cases:
        with mistakes.made(case.mistake):
            found.append(trained(case))
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
