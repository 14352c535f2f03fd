"""A training state as the named arrays that a checkpoint holds, and back.

Leaves out how arrays are stored (store.py) and what a checkpoint holds beside them (contents.py).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from llmc_jax.checkpoint.store import Checkpoint
from llmc_jax.config.model import ModelConfig
from llmc_jax.errors import FormatError
from llmc_jax.models.gpt2.tensors import Params, flat_size, tensor_specs, views

if TYPE_CHECKING:
    from llmc_jax.training.state import TrainState


def named_arrays(
    state: "TrainState", model: ModelConfig, on_host: Callable[[Any], np.ndarray] = np.asarray
) -> dict[str, np.ndarray]:
    """Return the arrays by name: `params/wte`, `m/wte`, …, `step`. On a CPU they are views of the device's buffers.

    on_host: returns a flat buffer (flat_size,) of the state, wherever it lies.
    """
    arrays: dict[str, np.ndarray] = {}
    for buffer, flat in state.flat.items():
        tensors = views(on_host(flat), model)
        arrays |= {f"{buffer}/{name}": tensor for name, tensor in tensors._asdict().items()}
    arrays |= {"step": np.asarray(state.step), "updates": np.asarray(state.updates)}
    for group in ("loss_scale", "outliers"):
        if (values := getattr(state, group)) is not None:
            arrays |= {f"{group}/{name}": np.asarray(value) for name, value in values._asdict().items()}
    return arrays


def _flat(checkpoint: Checkpoint, buffer: str) -> np.ndarray:
    """Return a buffer of TrainState (flat_size,) with its padding, from the stored tensors."""
    model = checkpoint.metadata.identity.model
    flat: np.ndarray | None = None
    for spec in tensor_specs(model):
        values = checkpoint.read(f"{buffer}/{spec.name}")
        if values.shape != spec.shape:
            raise FormatError(
                f"{checkpoint.folder}: {buffer}/{spec.name} has the shape {values.shape}; the model's has {spec.shape}"
            )
        if flat is None:
            flat = np.zeros(flat_size(model), values.dtype)
        flat[spec.offset : spec.offset + spec.size] = values.reshape(-1)
    assert flat is not None
    return flat


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
    wanted = ["step", "updates", *(f"{buffer}/{name}" for buffer in fresh.flat for name in Params._fields)]
    missing = [name for name in wanted if name not in stored]
    if missing:
        raise FormatError(f"{folder}: holds no {missing[0]} ({len(missing)} arrays of the state are missing)")

    def checked(name: str, value: np.ndarray, dtype: Any, shape: tuple[int, ...]) -> Any:
        if (value.shape, value.dtype) != (shape, dtype):
            found, expected = f"{value.dtype}{value.shape}", f"{dtype}{shape}"
            raise FormatError(f"{folder}: {name} is {found}; this run has {expected}")
        return value

    def small(name: str, like: Any) -> Any:
        return jnp.array(checked(name, checkpoint.read(name), like.dtype, like.shape))

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
    return place(rest, lambda name: checked(name, _flat(checkpoint, name), fresh.flat[name].dtype, size))
