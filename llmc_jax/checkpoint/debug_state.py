"""llm.c's debug states (magic 20240327), versions 1 and 2, read.

Leaves out comparing them with anything.

    B batch, T sequence length, V vocabulary, Vp padded vocabulary, N parameters

A header of 256 int32 (magic, version, B, T), then x and y (B, T) int32, logits (B, T, V) float32, the mean loss, and
the gradients of the 16 tensors, float32 in the order of the model file: in version 2 with Vp rows of wte, those from V
on zero, in version 1 with V. Neither V nor the model's shape is in the file, so it is read beside a model.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from llmc_jax.base import magics
from llmc_jax.base.errors import FormatError
from llmc_jax.base.files import opened, stamp_of
from llmc_jax.checkpoint import llmc
from llmc_jax.checkpoint.reading import HEADER_BYTES, Stored, check_size, read_at, read_header_ints
from llmc_jax.config.model import ModelConfig
from llmc_jax.models.gpt2.tensors import num_parameters

WHAT = "a debug state of llm.c"
VERSIONS = (1, 2)


@dataclass(frozen=True)
class DebugState:
    """A debug state beside its model, checked. logits and gradient are read when they are first asked for."""

    path: Path
    config: ModelConfig
    version: int
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
        stored = self.stored_gradient.read()
        if self.version == 2:
            return stored
        end = self.config.vocab_size * self.config.channels
        wte = llmc.with_padding(stored[:end].reshape(-1, self.config.channels), self.config)
        return np.concatenate([wte.reshape(-1), stored[end:]])


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
        left_out = 0 if version == 2 else (config.padded_vocab_size - V) * config.channels
        logits = Stored(path, stamp, "logits", "fp32", (B, T, V), HEADER_BYTES + 8 * B * T)
        gradient = Stored(path, stamp, "gradients", "fp32", (num_parameters(config) - left_out,), logits.end + 4)
        words = f"a debug state of version {version} with B={B} T={T} for a model with {llmc.shape_words(config)}"
        check_size(path, stamp.size, gradient.end, words, "of another model")
        tokens = np.frombuffer(read_at(file, path, HEADER_BYTES, 8 * B * T), "<i4").astype(np.int32)
        loss = float(np.frombuffer(read_at(file, path, logits.end, 4), "<f4")[0])
    x, y = tokens.reshape(2, B, T)
    for name, ids in (("x", x), ("y", y)):
        if ids.min() < 0 or ids.max() >= config.vocab_size:
            known = f"the model knows 0 to {V - 1}; it is damaged, or of another model"
            raise FormatError(f"{path}: {name} holds tokens from {ids.min()} to {ids.max()}, but {known}")
    return DebugState(path, config, version, x, y, loss, logits, gradient)


def _check_header(path: Path, version: int, B: int, T: int, config: ModelConfig) -> None:
    if version not in VERSIONS:
        raise FormatError(f"{path}: version {version} (header int 1) is unknown; llm.c's debug states have 1 and 2")
    if B < 1 or T < 1:
        raise FormatError(f"{path}: B={B}, T={T} (header ints 2 and 3); both must be at least 1")
    if config.max_seq_len < T:
        raise FormatError(f"{path}: T={T}, but the model has {config.max_seq_len} positions; it is another model's")
