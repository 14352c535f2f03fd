"""Arrays of training states that tests make up, and a run that the first version of this program left."""

import tarfile
from pathlib import Path

import numpy as np

from llmc_jax.config.model import ModelConfig
from llmc_jax.models.gpt2.tensors import flat_size, tensor_specs

FORMAT_1 = Path(__file__).parent / "golden" / "state_format_1.tar.xz"


def joined(arrays: dict[str, np.ndarray], model: ModelConfig) -> dict[str, np.ndarray]:
    """The arrays of a state with its tensors (`params/wte`, …) put into flat buffers, zeros behind them."""
    specs = {spec.name: spec for spec in tensor_specs(model)}
    found: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        buffer, _, part = name.partition("/")
        if part not in specs:
            found[name] = array
            continue
        flat = found.setdefault(buffer, np.zeros(flat_size(model), array.dtype))
        flat[specs[part].offset :][: array.size] = array.reshape(-1)
    return found


def unpack_format_1(folder: Path) -> Path:
    """Unpacks that run's folder, with its data and losses beside it, and returns it."""
    with tarfile.open(FORMAT_1) as archive:
        archive.extractall(folder, filter="data")
    return folder / "run"
