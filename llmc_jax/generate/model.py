"""A checkpoint of any format as a model that can be asked: its weights on the device, its shape, its tokenizer.

Leaves out the formats (checkpoint/sources.py) and what is asked.
"""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from llmc_jax.base.errors import InputError
from llmc_jax.checkpoint.llmc import oddities
from llmc_jax.checkpoint.reading import not_finite
from llmc_jax.checkpoint.source import Source, slices_of
from llmc_jax.checkpoint.sources import open_source
from llmc_jax.checkpoint.tokenizer import choose_tokenizer
from llmc_jax.config.model import ModelShape
from llmc_jax.data.tokenizers import Tokenizer, drawable, usual_eot
from llmc_jax.kernels.choice import decoding_refusal
from llmc_jax.machine.device import available_memory_bytes, first_device, gib
from llmc_jax.models.layout import flat_size, num_parameters, params_type, pieces, tensor_specs, widths
from llmc_jax.models.packed import Packed
from llmc_jax.models.program import head_of
from llmc_jax.models.work import COMPUTE_BYTES
from llmc_jax.training.state import DTYPES


class Model(NamedTuple):
    """A model that can be asked.

    Its texts are computed by XLA's operations; tokens after the first by handwritten kernels, if they were asked for.

    weights: the tensors on the device, each in the dtype that the model computes in. Of those with a layer axis there
    is a tuple of L arrays: a program that takes a part of an array copies it first, and each token needs all. For
    kernels they are one array, `Packed`.
    end_of_text: the id that begins and ends a text.
    """

    path: Path
    kind: str  # as Source.kind has it
    step: int | None  # of training, where the format says it
    config: ModelShape
    weights: Any
    tokenizer: Tokenizer | None
    tokenizer_note: str  # where it comes from, or why there is none
    end_of_text: int
    warnings: tuple[str, ...] = ()

    @property
    def drawable(self) -> int:
        """Return how many ids are ever drawn: those of the tokenizer. The rows of the embedding behind are padding."""
        return drawable(self.tokenizer, self.config.vocab_size)

    @property
    def dtype(self) -> str:
        """Return what the model computes in: fp32, bf16 or fp16."""
        own = self.weights.rows if isinstance(self.weights, Packed) else head_of(self.weights, self.config)
        return next(name for name, dtype in DTYPES.items() if own.dtype == dtype)


def open_model(
    path: str | Path,
    *,
    dtype: str = "auto",
    tokenizer: str = "auto",
    step: int | None = None,
    model_file: str = "",
    weights: bool = True,
    target: str | None = None,
) -> Model:
    """Open a checkpoint of any format that `checkpoint.sources.open_source` knows, and put its weights on the device.

    dtype: fp32, bf16 or fp16; auto: bf16 on a GPU, fp32 on a CPU. tokenizer: as for `load_tokenizer`; auto: the one
    that the checkpoint brings along, else as its vocabulary suggests. step, model_file: as for `open_source`. weights:
    False leaves them out, for those who ask what the checkpoint says of tokens. target: the architecture whose kernels
    decode; the weights are `Packed` then.
    Raises InputError (FormatError for bad bytes) if it cannot be opened, the tokenizer does not fit, the weights
    need more memory than the device has, or the kernels cannot decode the model.
    """
    source = open_source(path, step=step, model_file=model_file)
    if target is not None and (why := decoding_refusal(source.config)):
        raise InputError(f"{path}: the kernels cannot decode this model: {why}; leave out --kernels pallas")
    if dtype == "auto":
        dtype = "fp32" if first_device().platform == "cpu" else "bf16"
    check_weights_fit(source, dtype)
    try:
        choice = choose_tokenizer(source, tokenizer)
    except InputError as error:  # of several checkpoints this is the one that it does not fit
        raise InputError(f"{path}: {error}") from error
    tensors, warnings = read_weights(source, dtype, target) if weights else (None, ())
    return Model(
        path=Path(path),
        kind=source.kind,
        step=source.step,
        config=source.config,
        weights=tensors,
        tokenizer=choice.tokenizer,
        tokenizer_note=choice.note,
        end_of_text=end_of_text(source, choice.tokenizer),
        warnings=(*source.warnings, *warnings),
    )


def check_weights_fit(source: Source, dtype: str) -> None:
    """Raise InputError where the weights alone need more memory than the device has."""
    needed, available = num_parameters(source.config) * COMPUTE_BYTES[dtype], available_memory_bytes()
    if available is not None and needed > available:
        advice = "--dtype bf16 takes half of that, a smaller model less" if dtype == "fp32" else "take a smaller model"
        found = f"need {gib(needed)} in {dtype}; this machine has {gib(available)}"
        raise InputError(f"{source.path}: the weights of this model {found}; {advice}")


def read_weights(source: Source, dtype: str, target: str | None = None) -> tuple[Any, tuple[str, ...]]:
    """Return the weights on the device, and warnings of what no sound checkpoint holds. target: as for `open_model`.

    bf16 takes the 16-bit weights of a training state that has them: the run has computed with these.
    """
    group = "copy" if dtype == source.dtype != "fp32" and "copy" in source.groups else "params"
    config, bad = source.config, dict[str, int]()

    def read(tensor: str, layer: int) -> np.ndarray:
        values = source.read(group, tensor, layer)
        bad[tensor] = bad.get(tensor, 0) + not_finite(values)
        return values

    if target is not None:
        rows = np.empty(num_parameters(config), DTYPES[dtype])
        for piece in pieces(config):
            rows[piece.start : piece.stop] = read(piece.spec.name, piece.layer).ravel().astype(rows.dtype)
        packed = Packed(jnp.asarray(rows.reshape(-1, widths(config)[0])), config, target)
        return packed, oddities(config, bad)
    tensors: dict[str, Any] = {}
    for spec in tensor_specs(config):
        layers = [jnp.array(read(piece.tensor, piece.layer), DTYPES[dtype]) for piece in slices_of(spec)]
        tensors[spec.name] = tuple(layers) if spec.tensor.layered else layers[0]
    return params_type(config)(**tensors), oddities(config, bad)


@partial(jax.jit, static_argnames="config")
def flat_weights(weights: Any, config: ModelShape) -> jax.Array:
    """Return a model's weights as one flat buffer (flat_size,), as the training step takes them."""
    pieces = [jnp.ravel(piece) for piece in jax.tree.leaves(weights)]  # layers of a tensor in their order
    padding = flat_size(config) - num_parameters(config)
    return jnp.concatenate([*pieces, jnp.zeros(padding, pieces[0].dtype)])


def end_of_text(source: Source, tokenizer: Tokenizer | None) -> int:
    """Return the id that begins and ends a text: the format's, else the tokenizer's, else the usual one.

    Of several in the format, the tokenizer's or else the first: the others end no text here.
    """
    V = source.config.vocab_size
    usual, limit = usual_eot(V) if tokenizer is None else tokenizer.eot, drawable(tokenizer, V)
    stored = None if source.special is None else source.special.eos
    listed = stored if isinstance(stored, list) else [stored]
    several = [token for token in listed if token is not None and token < limit]
    return usual if usual in several or not several else several[0]
