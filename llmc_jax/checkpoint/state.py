"""A training state as the named arrays that a checkpoint holds, and back.

Leaves out how arrays are stored (store.py) and what a checkpoint holds beside them (contents.py).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from llmc_jax.base.errors import FormatError
from llmc_jax.checkpoint.store import Checkpoint
from llmc_jax.config.model import ModelShape
from llmc_jax.models.layout import flat_size

if TYPE_CHECKING:
    from llmc_jax.training.state import TrainState


def flat_buffers(state: "TrainState", model: ModelShape) -> dict[str, tuple[int, str]]:
    """Return elements and dtype of each flat buffer by name: `params`, `m`, …"""
    return {name: (flat_size(model), buffer.dtype.name) for name, buffer in state.flat.items()}


def small_arrays(state: "TrainState") -> dict[str, np.ndarray]:
    """Return the arrays by name that are no flat buffers: `step`, `updates`, … Every device has them."""
    arrays = {"step": np.asarray(state.step), "updates": np.asarray(state.updates)}
    for group in ("loss_scale", "outliers"):
        if (values := getattr(state, group)) is not None:
            arrays |= {f"{group}/{name}": np.asarray(value) for name, value in values._asdict().items()}
    return arrays


def read_state(
    checkpoint: Checkpoint,
    fresh: "TrainState",
    place: Callable[["TrainState", Callable[[str], np.ndarray]], "TrainState"],
) -> "TrainState":
    """Return the stored state on the devices.

    place: brings its flat buffers there, one after the other (`Placement.state`).

    fresh: a state of the run with buffers of one element. It says which buffers and dtypes the run has, and what begins
    anew where a converted checkpoint lacks it (loss scale, outliers).
    Raises FormatError if the checkpoint holds no such state.
    """
    import jax.numpy as jnp

    stored, folder = checkpoint.manifest.tensors, checkpoint.folder
    missing = [name for name in ("step", "updates", *fresh.flat) if not checkpoint.holds(name)]
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
    return place(rest, lambda name: read(name, fresh.flat[name].dtype, size))
