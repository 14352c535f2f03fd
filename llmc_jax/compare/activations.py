"""One batch through the model, operation by operation, with everything in between: kept, written, read, compared.

The values are those of models/gpt2/model.py. Beside them stands the list of the operations that make them,
by which one operation can be computed from inputs of another program. Leaves out what is printed (debug_state.py).

    B batch, T sequence length, C channels, L layers, NH heads, V vocabulary, Vp padded vocabulary
"""

import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from llmc_jax.base.errors import FormatError, InputError
from llmc_jax.base.files import opened, read_json_object, refusing, stamp_of
from llmc_jax.compare.tensors import Difference, Limit, difference
from llmc_jax.config.model import ModelConfig
from llmc_jax.models.gpt2.model import BlockParams, Execution, backward, flatten_gradients, forward_stream
from llmc_jax.models.gpt2.operations import Operation, backward_operations, forward_operations, full_name, row_of
from llmc_jax.models.gpt2.tensors import Params, letters, views
from llmc_jax.models.tensors import sizes
from llmc_jax.ops.embedding import embedding_forward
from llmc_jax.ops.linear import linear_backward, linear_forward
from llmc_jax.ops.residual import residual_forward

Values = dict[str, Any]  # by name: NumPy arrays, float32 or float64; of `att` also what only our attention understands


class Batch(NamedTuple):
    """What the model is given."""

    x: np.ndarray  # (B, T) int32
    y: np.ndarray  # (B, T) int32


@dataclass(frozen=True)
class Model:
    """What computes it."""

    config: ModelConfig
    params: Params  # in the dtype that the model computes in
    execution: Execution

    @cached_property
    def functions(self) -> dict[str, Callable[..., Any]]:
        """Return what runs the operations, by their function; each gives the outputs in the order of the list."""
        op, heads, V = self.execution.op, self.config.num_heads, self.config.vocab_size

        def rows(x: jax.Array) -> jax.Array:  # (B, T, …) as (B T, …)
            return x.reshape(-1, *x.shape[2:])

        def layernorm_forward(x: jax.Array, w: jax.Array, b: jax.Array) -> tuple[Any, ...]:
            out, mean, rstd = op.layernorm_forward(x, w, b)
            return mean, rstd, out

        def classifier_backward(logits: jax.Array, y: jax.Array) -> jax.Array:
            dlosses = jnp.full((y.size,), 1.0 / y.size, _wide(logits))
            return op.classifier(rows(logits), rows(y), dlosses, V)[1].reshape(logits.shape)

        def head_backward(dlogits: jax.Array, lnf: jax.Array, wte: jax.Array) -> tuple[Any, ...]:
            dlnf, dwte = linear_backward(rows(dlogits), rows(lnf), wte, dw_dtype=_wide(lnf))
            return dlnf.reshape(lnf.shape), dwte

        def embedding_backward(dx: jax.Array, x: jax.Array, dwte: jax.Array) -> tuple[Any, ...]:
            dwte, dwpe = op.embedding_backward(dx, x, dwte)
            unused = self.config.max_seq_len - dwpe.shape[0]
            return jnp.pad(dwpe, ((0, unused), (0, 0))), dwte.astype(self.params.wte.dtype)

        plain: dict[str, Callable[..., Any]] = {
            "embedding_forward": embedding_forward,
            "residual_forward": residual_forward,
            "layernorm_forward": layernorm_forward,
            "linear_forward": lambda x, w, b=None: linear_forward(x, w, b),
            "attention_forward": lambda qkv: op.attention_forward(qkv, heads)[::-1],
            "gelu_forward": op.gelu_forward,
            "classifier_forward": lambda x, y: op.classifier_forward(rows(x), rows(y), V)[0].reshape(y.shape),
            "mean": jnp.mean,
            "classifier_backward": classifier_backward,
            "head_backward": head_backward,
            "layernorm_backward": lambda d, x, mean, rstd, w: op.layernorm_backward(d, x, w, mean, rstd),
            "linear_backward": linear_backward,
            "gelu_backward": op.gelu_backward,
            "residual_layernorm_backward": lambda d, dout, x, mean, rstd, w: op.residual_layernorm_backward(
                d, dout, x, w, mean, rstd
            ),
            "attention_backward": lambda *saved: op.attention_backward(*saved, heads),
            "embedding_backward": embedding_backward,
        }
        return {name: jax.jit(function) for name, function in plain.items()}


def _wide(x: jax.Array) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)


def shape_of(name: str, config: ModelConfig, B: int, T: int) -> tuple[int, ...]:
    """Return the shape under which a value is written and compared: of logits without the padding."""
    row = row_of(name)
    shape = row.shape.replace("Vp", "V") if row.name in LOGITS else row.shape
    return sizes(shape, letters(config, B, T))


LOGITS = ("logits", "dlogits")


# ----- the operations, in the order of computation -------------------------------------------------------------------


def operations(config: ModelConfig, *, gradients: bool) -> Iterator[Operation]:
    """Yield all operations, each after those whose outputs it takes."""
    yield from forward_operations(config.num_layers)
    if gradients:
        yield from backward_operations(config.num_layers)


def names_of(config: ModelConfig, *, gradients: bool) -> list[str]:
    """Return the names of all values in the order of computation, the batch first."""
    listed = operations(config, gradients=gradients)
    return ["x", "y", *(name for operation in listed for name in operation.outputs)]


# ----- the values that the model itself makes ------------------------------------------------------------------


def own_values(model: Model, batch: Batch, *, gradients: bool) -> Values:
    """Return every value of a batch, from the model's own forward and backward.

    What these do not return comes from the list of operations: attproj, fcproj and the gradients of activations.
    """
    config, p, layers = model.config, model.params, range(model.config.num_layers)
    execution = model.execution._replace(recompute=0, recompute_blocks=0)
    lnf, kept = jax.jit(lambda p, x: forward_stream(p, x, config, execution))(p, batch.x)
    made = {full_name(name, layer): each for layer in layers for name, each in kept.blocks[layer]._asdict().items()}
    made[full_name("residual1", config.num_layers)] = kept.residual
    made |= {"lnf": lnf, "lnf_mean": kept.lnf_mean, "lnf_rstd": kept.lnf_rstd}
    values: Values = {"x": batch.x, "y": batch.y}
    values |= {name: _written(name, value, config) for name, value in made.items()}
    _complete(values, forward_operations(config.num_layers), model)
    if gradients:
        _complete(values, islice(backward_operations(config.num_layers), 2), model)  # the classifier and the head
        of_head = (_device(name, values[name], model) for name in ("dlnf", "dwte_head"))
        backwards = jax.jit(lambda d, dwte, p, x, a: backward(d, dwte, p, x, a, config, execution))
        of_weights = backwards(*of_head, p, batch.x, kept)
        found = views(flatten_gradients(of_weights, config, p.wte.dtype), config)
        for name, tensor in found._asdict().items():
            layered = name in BlockParams._fields
            own = {full_name(f"d{name}", at): tensor[at] for at in layers} if layered else {f"d{name}": tensor}
            values |= {name: _host(value) for name, value in own.items()}
        _complete(values, backward_operations(config.num_layers), model)
    return values


def _complete(values: Values, listed: Iterator[Operation], model: Model) -> None:
    """Compute what the list gives and the values lack."""
    for operation in listed:
        if any(name not in values for name in operation.outputs):
            for name, found in zip(operation.outputs, computed(operation, values, model), strict=True):
                values.setdefault(name, found)


def computed(operation: Operation, values: Mapping[str, Any], model: Model) -> list[Any]:
    """Return the operation's outputs on the host, from its inputs among the values."""
    tensors = [getattr(model.params, name) for name in operation.weights]
    weights = tensors if operation.layer is None else [tensor[operation.layer] for tensor in tensors]
    inputs = [_device(name, values[name], model) for name in operation.inputs]
    of_the_head = (operation.name, operation.function) == ("head", "linear_backward")
    found = model.functions["head_backward" if of_the_head else operation.function](*inputs, *weights)
    found = found if isinstance(found, tuple) else (found,)
    # the first layernorm also gives the gradient of a bias below it, which the embedding lacks
    return [_written(name, found[at], model.config) for at, name in enumerate(operation.outputs)]


def _host(value: Any) -> np.ndarray:
    """Bring to the host in float32 (float64 if it is that): 16-bit values are widened exactly."""
    array = np.asarray(value)
    return array if array.dtype.itemsize == 8 else array.astype(np.float32)


def _device(name: str, value: Any, model: Model) -> Any:
    """Return a value as the operations take it: in the model's dtype, the padding of the vocabulary back in place."""
    own = name.rpartition(".")[2]
    if own in ("x", "y"):
        return jnp.asarray(value, jnp.int32)
    if not isinstance(value, np.ndarray):  # what only our attention understands
        return value
    dtype = model.params.wte.dtype
    if own in LOGITS:
        padding = model.config.padded_vocab_size - value.shape[-1]
        value = np.pad(value, [(0, 0)] * (value.ndim - 1) + [(0, padding)])
    return jnp.asarray(value, _wide(model.params.wte) if row_of(own).wide else dtype)


def _written(name: str, value: Any, config: ModelConfig) -> Any:
    """Bring a value to the host, logits without their padding; not what only our attention understands."""
    own = name.rpartition(".")[2]
    if own == "att" and not (isinstance(value, jax.Array) and value.ndim == 4):
        return value
    return _host(value)[..., : config.vocab_size] if own in LOGITS else _host(value)


# ----- beside another program's --------------------------------------------------------------------------------------


class Step(NamedTuple):
    """One value of both sides, ours beside theirs."""

    name: str
    operation: str
    total: Difference  # of two whole computations: what came with the inputs is in it
    local: Difference  # of our operation on their inputs: what this operation adds
    covers: tuple[str, ...]  # values that they do not give and that lie between their inputs and this one


def allowed(ours: str, theirs: str) -> float:
    """Return the relative error of one operation that rounding explains, by what the two sides compute in.

    A product of float32 differs by some 1e-6 between programs; one of bf16 is rounded to 8 bits, 2^-9 at most on either
    side, after inputs that were themselves rounded. Several times that is allowed, which mistakes exceed by far.
    """
    return max(ALLOWED[ours], ALLOWED[theirs])


ALLOWED = {"fp32": 2e-5, "bf16": 1e-2, "fp16": 2e-3, "fp64": 2e-5}
TOTAL = 10  # what a whole computation may differ by, in units of what one operation may


def steps(model: Model, ours: Values, theirs: Values, tolerance: float) -> Iterator[Step]:
    """Yield every value that they give, in the order of computation, beside ours.

    tolerance: the relative error that one operation may have; TOTAL times it for the whole computation. theirs need not
    be complete: what is missing is computed from what they have, and the local error is then that of several
    operations.
    """
    gradients = has_gradients(theirs)
    values = {"x": ours["x"], "y": ours["y"], **theirs}
    missing: dict[str, tuple[str, ...]] = {}  # computed by us for them: what was computed to get it
    for operation in operations(model.config, gradients=gradients):
        found = dict(zip(operation.outputs, computed(operation, values, model), strict=True))
        covered = tuple(dict.fromkeys(name for given in operation.inputs for name in missing.get(given, ())))
        for name, value in found.items():
            if name not in theirs or not isinstance(value, np.ndarray):
                values[name] = value
                missing[name] = (*covered, name)
        for name in operation.outputs:
            if name in theirs and isinstance(found[name], np.ndarray):
                scale = _scale(name, values)
                total = difference(ours[name], theirs[name], _limit(TOTAL * tolerance, scale))
                local = difference(found[name], theirs[name], _limit(tolerance, scale))
                yield Step(name, operation.function, total, local, covered)


def has_gradients(names: Iterable[str]) -> bool:
    """Return whether values of the backward pass are among them."""
    return any(name.rpartition(".")[2].startswith("d") for name in names)


def first_step(found: list[Step]) -> int | None:
    """Return where the disagreement begins: the first operation that fails by itself, else the first in total."""
    made = [at for at, step in enumerate(found) if not step.local.agrees]
    passed_on = (at for at, step in enumerate(found) if not step.total.agrees)
    return made[0] if made else next(passed_on, None)


def _scale(name: str, values: Values) -> float:
    """Return what the error of a value is measured by: its root mean square, of a mean at least the row's deviation."""
    scale = _rms(values[name])
    if name.endswith("_mean"):
        with np.errstate(divide="ignore"):
            scale = max(scale, _rms(1 / np.asarray(values[name.replace("_mean", "_rstd")], np.float64)))
    return scale


def _rms(values: Any) -> float:
    wide = np.asarray(values, np.float64)
    wide = wide[np.isfinite(wide)]
    return math.sqrt(float(np.mean(wide * wide))) if wide.size else 0.0


def _limit(tolerance: float, scale: float) -> Limit:
    """Return what errors are small by: altogether the tolerance, and at each element 10 times as much."""
    return Limit(10 * tolerance * scale, 10 * tolerance, rms=tolerance * scale)


# ----- folders -------------------------------------------------------------------------------------------------------

FORMAT = 1
INDEX = "index.json"
INDEX_BYTES = 1 << 24  # an index of 200 layers has a hundredth of that


class Folder(NamedTuple):
    """Another program's values, as read. dtype: what it computed in; ignored: .npy files whose names mean nothing."""

    values: Values
    dtype: str
    ignored: tuple[str, ...]


def write_folder(folder: Path, model: Model, values: Values, dtype: str, *, gradients: bool = True) -> int:
    """Write every array as <name>.npy, and index.json; the folder appears when complete. Returns their number.

    gradients: those of the backward pass too. Raises InputError if it exists already, or cannot be written.
    """
    check_new(folder)
    listed = names_of(model.config, gradients=gradients)
    arrays = {name: values[name] for name in listed if isinstance(values.get(name), np.ndarray)}
    rows = [{"name": name, "file": f"{name}.npy", "shape": array.shape} for name, array in arrays.items()]
    B, T = values["x"].shape
    index = {"format": FORMAT, "model": vars(model.config), "B": B, "T": T, "dtype": dtype, "arrays": rows}
    with (
        refusing(f"{folder}: cannot be written", "write elsewhere or free space"),
        tempfile.TemporaryDirectory(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent) as hidden,
    ):
        complete = Path(hidden) / folder.name
        complete.mkdir()
        for name, array in arrays.items():
            np.save(complete / f"{name}.npy", array, allow_pickle=False)
        (complete / INDEX).write_text(json.dumps(index, indent=1) + "\n")
        os.replace(complete, folder)
    return len(arrays)


def check_new(folder: Path) -> None:
    """Refuse a folder that cannot be made, before any work. Raises InputError."""
    if os.path.lexists(folder):
        raise InputError(f"{folder}: exists already; name a new folder")
    if not folder.absolute().parent.is_dir():
        raise InputError(f"{folder}: there is no folder {folder.parent}; make it first")


def read_folder(folder: Path, config: ModelConfig, batch: Batch) -> Folder:
    """Read what a folder has of a model's values; other files are left alone.

    Each value is <name>.npy, a plain array of float32, float64 or float16. logits and dlogits may have V or Vp columns,
    dwte V or Vp rows. index.json, if there, says what dtype it is of.

    Raises InputError (FormatError for bad bytes) if there is none, or it is of another model or batch.
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: {'a file' if folder.exists() else 'no such folder'}; expected one of .npy files")
    names = sorted(path.stem for path in folder.iterdir() if path.suffix == ".npy")
    B, T = batch.x.shape
    dtype = _read_index(folder / INDEX)
    for name in ("x", "y"):
        path = folder / f"{name}.npy"
        if name in names and not np.array_equal(_read_array(path, [(B, T)], ("i4", "i8")), getattr(batch, name)):
            raise InputError(f"{path}: other tokens than the debug state has; compare the same batch")
    known = names_of(config, gradients=True)
    found = [name for name in known[2:] if name in names]
    if not found:
        raise InputError(f"{folder}: has no value under a name such as encoded.npy, layer_00.ln1.npy or logits.npy")
    values = {name: _read_value(folder / f"{name}.npy", name, config, B, T) for name in found}
    if dtype is None:
        dtype = "fp16" if any(array.dtype == np.float16 for array in values.values()) else "fp32"
    values = {name: array if array.dtype == np.float64 else _host(array) for name, array in values.items()}
    return Folder(values, dtype, tuple(name for name in names if name not in known))


def _read_index(path: Path) -> str | None:
    """Return the dtype that index.json names; None without it."""
    if not os.path.lexists(path):
        return None
    index = read_json_object(path, INDEX_BYTES)
    dtype = index.get("dtype", "fp32")
    if not isinstance(dtype, str) or dtype not in ALLOWED:
        raise FormatError(f"{path}: dtype {dtype!r:.40}; expected one of {', '.join(ALLOWED)}")
    return dtype


def _read_value(path: Path, name: str, config: ModelConfig, B: int, T: int) -> np.ndarray:
    own, shape = name.rpartition(".")[2], shape_of(name, config, B, T)
    V, Vp = config.vocab_size, config.padded_vocab_size
    if own in LOGITS:
        return _read_array(path, [shape, (*shape[:-1], Vp)], ("f4", "f8", "f2"))[..., :V]
    if own in ("dwte", "dwte_head"):
        array = _read_array(path, [shape, (V, *shape[1:])], ("f4", "f8", "f2"))
        return np.pad(array, ((0, Vp - array.shape[0]), (0, 0)))
    return _read_array(path, [shape], ("f4", "f8", "f2"))


def _read_array(path: Path, shapes: list[tuple[int, ...]], kinds: tuple[str, ...]) -> np.ndarray:
    """Read an array of one of some shapes and types, which are looked at before its values are."""
    try:
        with opened(path) as file:  # a regular file
            mapped = np.load(path, mmap_mode="r", allow_pickle=False)
            shape, dtype = mapped.shape, mapped.dtype
            if extra := stamp_of(file).size - mapped.offset - mapped.nbytes:
                raise FormatError(f"{path}: {extra:,} bytes follow the array; write it with numpy.save")
    except InputError:
        raise
    except Exception:  # NumPy hands the header to Python's parser, which raises errors of many kinds at odd bytes
        raise FormatError(f"{path}: not a whole, plain array of NumPy's (.npy); write it with numpy.save") from None
    if shape not in shapes:
        expected = " or ".join(dict.fromkeys(map(str, shapes)))
        raise FormatError(f"{path}: shape {shape!s:.80}; expected {expected}")
    if dtype.str[1:] not in kinds:
        known = ", ".join(np.dtype(kind).name for kind in kinds)
        raise FormatError(f"{path}: type {dtype.str:.40}; expected {known} (bfloat16 is to be written as float32)")
    with refusing(f"{path}: cannot be read", "is the disk sound?"):  # a map's errors would be no exceptions
        return np.asarray(np.load(path, allow_pickle=False), dtype.newbyteorder("="), order="C")
