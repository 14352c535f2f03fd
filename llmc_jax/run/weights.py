"""The state that a run begins with, on its devices: random, of another program's checkpoint, or of an earlier one.

Leaves out which of them it is (inputs.py), and how a file is read (checkpoint/).
"""

import threading
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llmc_jax.base.errors import FormatError, naming
from llmc_jax.checkpoint import sources
from llmc_jax.checkpoint.llmc import warnings_of
from llmc_jax.checkpoint.store import Checkpoint
from llmc_jax.models.layout import flat_size, initial
from llmc_jax.plan.plan import Plan
from llmc_jax.run.inputs import Inputs
from llmc_jax.training.parallel.placement import Placement
from llmc_jax.training.state import DTYPES, TrainState, initial_state


def first_state(parameters: np.ndarray, plan: Plan, place: Placement | None = None) -> TrainState:
    """Return the state before the first step, on the device; or where place says, on several.

    parameters (flat_size,) float32 on the host.
    """
    start = jax.jit(initial_state, static_argnames=("dtype", "master_weights", "optimizer"), donate_argnums=0)
    scale = float(plan.config.loss_scale) if plan.dtype == "fp16" else None
    alone = place is None or place.mesh is None
    small = jnp.array(parameters if alone else parameters[:1])
    how = {"master_weights": plan.master_weights, "loss_scale": scale, "optimizer": plan.optimizer}
    found = start(small, DTYPES[plan.dtype], **how)
    if place is None or alone:
        return found

    def flat(name: str) -> np.ndarray | None:
        return parameters.astype(found.flat[name].dtype) if name in ("params", "copy") else None

    return place.state(found, flat)


def read_state(checkpoint: Checkpoint, fresh: TrainState, place: Placement) -> TrainState:
    """Return the stored state on the devices.

    fresh: a state of the run with buffers of one element. It says which buffers and dtypes the run has, and what begins
    anew where a converted checkpoint lacks it (loss scale, outliers).
    Raises FormatError if the checkpoint holds no such state.
    """
    stored, folder = checkpoint.manifest.tensors, checkpoint.folder
    missing = [name for name in ("step", "updates", *fresh.flat) if name not in stored]
    if missing:
        raise FormatError(f"{folder}: has no {missing[0]} ({len(missing)} arrays of the state are missing)")

    def read(name: str, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
        value = checkpoint.read(name)
        if (value.shape, value.dtype) != (shape, dtype):
            found, expected = f"{value.dtype}{value.shape}", f"{dtype}{shape}"
            raise FormatError(f"{folder}: {name} is {found}; this run has {expected}")
        return value

    def small(name: str, like: Any) -> Any:
        return jnp.array(read(name, like.dtype, like.shape))

    def group(name: str) -> Any:
        like = getattr(fresh, name)
        if like is None or any(f"{name}/{field}" not in stored for field in like._fields):
            return like
        return type(like)(*(small(f"{name}/{field}", value) for field, value in like._asdict().items()))

    size = (flat_size(checkpoint.metadata.identity.model),)
    rest = fresh._replace(
        step=small("step", fresh.step),
        updates=small("updates", fresh.updates),
        loss_scale=group("loss_scale"),
        outliers=group("outliers"),
    )
    return place.state(rest, lambda name: read(name, fresh.flat[name].dtype, size))


def drawn_beside(given: Inputs) -> "Future[np.ndarray]":
    """Begin to draw the random weights in a thread, while the device is started and the kernels are tried."""
    drawing: Future[np.ndarray] = Future()

    def draw() -> None:
        try:
            drawing.set_result(initial(given.model.config, given.config.seed))
        except BaseException as error:
            drawing.set_exception(error)

    threading.Thread(target=draw, name="random weights", daemon=True).start()  # if the run cannot begin, nobody waits
    return drawing


def starting_weights(
    plan: Plan, place: Placement, given: Inputs, drawing: "Future[np.ndarray] | None"
) -> tuple[TrainState, tuple[str, ...]]:
    """Return the state that the run begins with, on the devices, and warnings about what it was read from.

    drawing: the random weights, of a run that begins with such.
    """
    config, source, earlier = plan.config, given.model.source, given.earlier
    if earlier is not None:
        return read_state(earlier, first_state(np.zeros(1, np.float32), plan), place), ()
    if drawing is not None:
        return first_state(drawing.result(), plan, place), ()
    assert source is not None
    flag = "--init-from" if config.init_from else "-e"
    with naming(flag):
        flat = sources.flat_parameters(source)
    warnings = (*source.warnings, *warnings_of(flat, source.config))
    return first_state(flat, plan, place), tuple(f"{flag} {source.path}: {warning}" for warning in warnings)
