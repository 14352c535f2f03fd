"""The shape of a GPT-2 (`ModelConfig`), the descriptors that name one, and what the shape of any model has.

Leaves out its tensors (models/).
"""

import math
import re
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from llmc_jax.base.errors import InputError

GPT2_VOCAB = 50257
# dN -> (heads, channels)
GPT2_DEPTH_TO_SHAPE = {
    6: (6, 384), 12: (12, 768), 24: (16, 1024), 36: (20, 1280), 48: (25, 1600), 60: (30, 1920), 72: (30, 2880),
    84: (36, 3456),
}  # fmt: skip
# gpt3:cN -> (layers, head size); without c5140 of llm.c's table, which its own check refuses: heads of 128 do not fit
GPT3_CHANNELS_TO_SHAPE = {
    384: (6, 64), 768: (12, 64), 1024: (24, 64), 1536: (24, 96), 2048: (24, 128), 2560: (32, 80),
    4096: (32, 128), 12288: (96, 128),
}  # fmt: skip
# OpenAI's models by the names that Hugging Face gives them, and their shapes
PUBLISHED = {"gpt2": "d12", "gpt2-medium": "d24", "gpt2-large": "d36", "gpt2-xl": "d48"}


def divisors(number: int) -> list[int]:
    """Return all divisors of a positive number, the largest first; in as many steps as its square root."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)}, reverse=True)


def pad_vocab(vocab_size: int) -> int:
    """Return the next multiple of 128: llm.c pads the vocabulary so that the head's matrix product tiles evenly."""
    return -(-vocab_size // 128) * 128


class ModelShape(Hashable, Protocol):
    """What identifies a model: plain data, a frozen dataclass. A program is compiled for it, files and caches name it.

    What every family's shape has; a family knows its other fields.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def family(self) -> str:
        """Return the name of its family."""

    @property
    def source(self) -> str:
        """Return the digest of the file that its family stands in; empty: it is built in."""

    @property
    def vocab_size(self) -> int:
        """Return V, the ids that it knows."""

    @property
    def max_seq_len(self) -> int:
        """Return the most positions that it knows."""


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a GPT-2, or of a family that varies it. Field names are llm.c's (`GPT2Config` in train_gpt2.c).

    max_seq_len: most positions the model knows (maxT, rows of wpe); vocab_size: V; padded_vocab_size: Vp (rows of
    wte; rows V..Vp-1 are zero and stay zero); num_layers: L; num_heads: NH; channels: C; mlp_channels: F, 0 for 4C.
    """

    max_seq_len: int
    vocab_size: int
    padded_vocab_size: int
    num_layers: int
    num_heads: int
    channels: int
    mlp_channels: int = 0
    family: str = "gpt2"
    source: str = ""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, int) and value < (name != "mlp_channels"):
                raise InputError(f"model shape: {name} is {value}; it must be at least 1")
        if self.padded_vocab_size < self.vocab_size:
            raise InputError(
                f"model shape: padded vocabulary Vp={self.padded_vocab_size} is smaller than V={self.vocab_size}"
            )
        if self.channels % self.num_heads:
            raise InputError(
                f"model shape: channels C={self.channels} is not a multiple of the number of heads NH={self.num_heads}"
            )

    @property
    def head_size(self) -> int:
        return self.channels // self.num_heads

    @property
    def hidden(self) -> int:
        """Return F, the channels within the MLP."""
        return self.mlp_channels or 4 * self.channels


def _shape(max_seq_len: int, vocab_size: int, num_layers: int, num_heads: int, channels: int) -> ModelConfig:
    return ModelConfig(max_seq_len, vocab_size, pad_vocab(vocab_size), num_layers, num_heads, channels)


def _from_custom(descriptor: str) -> ModelConfig:
    fields: dict[str, int] = {}
    for part in descriptor.split("-"):
        match = re.fullmatch(r"(L|NH|C|V|T)(0*[1-9][0-9]{0,8})", part)
        if match is None or match[1] in fields:
            raise InputError(
                f"-e {descriptor}: {part!r} is not understood; write each of L, NH, C and, if wanted, V and T once, "
                "with a number that is at least 1, as in L4-NH4-C256-V257-T128"
            )
        fields[match[1]] = int(match[2])
    missing = [name for name in ("L", "NH", "C") if name not in fields]
    if missing:
        raise InputError(f"-e {descriptor}: {', '.join(missing)} missing; write for example L4-NH4-C256")
    channels, heads = fields["C"], fields["NH"]
    if channels % heads:
        raise InputError(
            f"-e {descriptor}: C={channels} channels cannot be split into NH={heads} heads; C must be a multiple of "
            f"NH: write NH{min(divisors(channels), key=lambda n: abs(n - heads))}, or C{-(-channels // heads) * heads}"
        )
    return _shape(fields.get("T", 1024), fields.get("V", GPT2_VOCAB), fields["L"], heads, channels)


def parse_descriptor(descriptor: str) -> ModelConfig:
    """Return the model of a descriptor: `d12`, `gpt2:d12`, `gpt3:c768`, or a custom `L4-NH4-C256[-V257][-T128]`.

    Custom ones default to V=50257 and T=1024, and pad V to a multiple of 128.
    Raises InputError with the list of known names if it is none of these.
    Source: llm.c train_gpt2.cu, `gpt2_set_hyperparameters` and `gpt3_set_hyperparameters`.
    """
    depth = re.fullmatch(r"(?:gpt2:)?d([0-9]{1,9})", descriptor)
    if depth and int(depth[1]) in GPT2_DEPTH_TO_SHAPE:
        return _shape(1024, GPT2_VOCAB, int(depth[1]), *GPT2_DEPTH_TO_SHAPE[int(depth[1])])
    gpt3 = re.fullmatch(r"gpt3:c([0-9]{1,9})", descriptor)
    if gpt3 and int(gpt3[1]) in GPT3_CHANNELS_TO_SHAPE:
        channels = int(gpt3[1])
        layers, head_size = GPT3_CHANNELS_TO_SHAPE[channels]
        return _shape(2048, GPT2_VOCAB, layers, channels // head_size, channels)
    if re.match(r"(L|NH|C|V|T)[0-9]", descriptor):
        return _from_custom(descriptor)
    depths = ", ".join(f"d{n}" for n in GPT2_DEPTH_TO_SHAPE)
    sizes = ", ".join(f"gpt3:c{n}" for n in GPT3_CHANNELS_TO_SHAPE)
    raise InputError(
        f"-e {descriptor}: no such model. Known: {depths} (or gpt2:dN), {sizes}, "
        "a custom shape such as L4-NH4-C256-V257-T128, "
        f"{', '.join(PUBLISHED)} or hf:OWNER/NAME of Hugging Face, or the path of a checkpoint"
    )


def described(name: str) -> ModelConfig | None:
    """Return the model of a descriptor; None for what is none."""
    try:
        return parse_descriptor(name)
    except InputError:
        return None
