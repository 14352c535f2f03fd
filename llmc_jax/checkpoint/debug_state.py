"""llm.c's debug states (magic 20240327) of version 2: read, and made of any model and batch.

Leaves out comparing them with anything.

    B batch, T sequence length, V vocabulary, N parameters

A header of 256 int32 (magic, version, B, T), then x and y (B, T) int32, logits (B, T, V) float32, the mean loss, and
the gradients of the 16 tensors, float32 in the order of the model file, the rows of wte from V on zero. Neither V nor
the model's shape is in the file, so it is read beside a model.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from llmc_jax.base import magics
from llmc_jax.base.errors import FormatError, InputError
from llmc_jax.base.files import opened, refuse_existing, stamp_of
from llmc_jax.checkpoint import llmc
from llmc_jax.checkpoint.reading import HEADER_BYTES, HEADER_INTS, Stored, Summed, check_size, read_at, read_header_ints
from llmc_jax.checkpoint.source import Source, gpt2_shape
from llmc_jax.checkpoint.sources import flat_parameters
from llmc_jax.config.model import ModelConfig
from llmc_jax.data.tokenfile import open_token_file
from llmc_jax.models.layout import num_parameters, views

WHAT = "a debug state of llm.c"
VERSION = 2
SEED = 1337  # of the tokens of a debug state that was given none


@dataclass(frozen=True)
class DebugState:
    """A debug state beside its model, checked. logits and gradient are read when they are first asked for."""

    path: Path
    config: ModelConfig
    x: np.ndarray  # (B, T) int32
    y: np.ndarray  # (B, T) int32
    loss: float
    stored_logits: Stored
    stored_gradient: Stored

    @cached_property
    def logits(self) -> np.ndarray:
        """Read them: (B, T, V) float32. Raises FormatError if the file has changed since it was opened."""
        return self.stored_logits.whole()

    @cached_property
    def gradient(self) -> np.ndarray:
        """Read it: (N,) float32, in the order of Params. Raises FormatError if the file has changed."""
        return self.stored_gradient.read()


def read_debug_state(path: str | Path, config: ModelConfig) -> DebugState:
    """Open a debug state of a model of this shape; reads the tokens and the loss.

    Raises FormatError if the file is missing, no debug state, not as long as its header and the model's shape say, or
    holds tokens that the model does not know. Source: llm.c train_gpt2.py, `write_state`.
    """
    path = Path(path)
    with opened(path) as file:
        _, version, B, T = read_header_ints(file, path, magics.DEBUG_STATE, WHAT)[:4].tolist()
        _check_header(path, version, B, T, config)
        stamp, V = stamp_of(file), config.vocab_size
        logits = Stored(path, stamp, "logits", "fp32", (B, T, V), HEADER_BYTES + 8 * B * T)
        gradient = Stored(path, stamp, "gradients", "fp32", (num_parameters(config),), logits.end + 4)
        words = f"a debug state with B={B} T={T} for a model with {llmc.shape_words(config)}"
        check_size(path, stamp.size, gradient.end, words, "of another model")
        tokens = np.frombuffer(read_at(file, path, HEADER_BYTES, 8 * B * T), "<i4").astype(np.int32)
        loss = float(np.frombuffer(read_at(file, path, logits.end, 4), "<f4")[0])
    x, y = tokens.reshape(2, B, T)
    for name, ids in (("x", x), ("y", y)):
        if ids.min() < 0 or ids.max() >= config.vocab_size:
            known = f"the model knows 0 to {V - 1}; it is damaged, or of another model"
            raise FormatError(f"{path}: {name} holds tokens from {ids.min()} to {ids.max()}, but {known}")
    return DebugState(path, config, x, y, loss, logits, gradient)


def _check_header(path: Path, version: int, B: int, T: int, config: ModelConfig) -> None:
    if version != VERSION:
        raise FormatError(
            f"{path}: version {version} (header int 1) cannot be read; expected {VERSION}, as llm.c writes"
        )
    if B < 1 or T < 1:
        raise FormatError(f"{path}: B={B}, T={T} (header ints 2 and 3); both must be at least 1")
    if config.max_seq_len < T:
        raise FormatError(f"{path}: T={T}, but the model has {config.max_seq_len} positions; it is another model's")


# --- writing ---


def computed(flat: Any, x: np.ndarray, y: np.ndarray, config: ModelConfig, execution: Any) -> list[np.ndarray]:
    """Return logits (B, T, V), loss and gradient (flat_size,) of a batch, as our forward and backward make them.

    They compute in the dtype of the flat buffer, as an Execution says; logits and gradient are float32.
    """
    import jax
    import jax.numpy as jnp

    from llmc_jax.models.gpt2.model import forward, loss_fn

    @jax.jit
    def compiled(flat: Any, x: Any, y: Any) -> Any:
        loss, gradient = jax.value_and_grad(loss_fn)(flat, x, y, config, execution)
        logits, _ = forward(views(flat, config), x, config, execution)
        return logits[..., : config.vocab_size].astype(jnp.float32), loss, gradient.astype(jnp.float32)

    return [np.asarray(each) for each in compiled(flat, x, y)]


def make_debug_state(
    source: Source, out: Path, tokens: Path | None, B: int, T: int, force: bool = False
) -> tuple[float, tuple[str, ...]]:
    """Write the debug state of a model and one batch, computed here in fp32; return the loss and warnings.

    tokens: a token file whose first B T + 1 tokens are the batch; None: random tokens, always the same. llm.c's
    test_gpt2.c reads it as gpt2_124M_debug_state.bin beside a version 3 model named gpt2_124M.bin. The gradient's rows
    of wte from V on are written as zeros, as by llm.c's train_gpt2.py, `write_state`.

    Raises InputError if an input cannot be read or does not fit, or if `out` is there already (without force) or cannot
    be written.
    """
    import jax

    from llmc_jax.models.execution import PLAIN

    config = gpt2_shape(source.config, "debug states")
    V, C = config.vocab_size, config.channels
    if B < 1 or not 1 <= T <= config.max_seq_len:
        raise InputError(f"batch size {B}, length {T}: B must be at least 1, and T from 1 to {config.max_seq_len}")
    refuse_existing(out, force)
    ids = _batch(tokens, V, B * T + 1)
    x, y = ids[:-1].reshape(B, T), ids[1:].reshape(B, T)
    header = np.zeros(HEADER_INTS, np.int32)
    header[:4] = (magics.DEBUG_STATE, VERSION, B, T)
    with llmc.new_file(out) as temporary:  # first: whether it can be written should be known before the work
        temporary.touch()
        with jax.default_matmul_precision("highest"):  # no TF32
            logits, loss, gradient = computed(flat_parameters(source), x, y, config, PLAIN)
        gradient = gradient.copy()  # that can be written
        gradient[V * C : config.padded_vocab_size * C] = 0
        with temporary.open("wb") as file:
            summed = Summed(file)
            for ids in (header, x, y):
                summed.write(np.ascontiguousarray(ids, "<i4").data)
            for values in (logits, loss, gradient[: num_parameters(config)]):
                summed.write(np.ascontiguousarray(values, "<f4").data)
            summed.check(out)
        made = read_debug_state(temporary, config)
        odd = () if np.isfinite(made.loss) else (f"loss: {made.loss}",)
        return made.loss, (*made.stored_logits.warnings(), *made.stored_gradient.warnings(), *odd)


def _batch(tokens: Path | None, V: int, count: int) -> np.ndarray:
    """Return `count` tokens, int32."""
    if tokens is None:
        return np.random.default_rng(SEED).integers(0, V, count, np.int32)
    with open_token_file(tokens) as file:
        if file.num_tokens < count:
            raise InputError(f"{tokens}: holds {file.num_tokens:,} tokens; the batch takes {count:,}")
        ids = file.read(0, count)
        if foreign := file.foreign_id(0, ids, V):
            raise InputError(f"{tokens}: {foreign}; take a file of the model's tokenizer")
    return ids.astype(np.int32)
