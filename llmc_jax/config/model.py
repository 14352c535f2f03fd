"""The shape of a GPT-2 (`ModelConfig`), the descriptors that name one, and what the shape of any model has.

Leaves out its tensors (models/).
"""

import math
import re
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Protocol

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


class Attention(NamedTuple):
    """Attention as a model has it: the keys that a row sees, and their weights. The defaults are GPT-2's."""

    weights: str = "softmax"  # or "relu": of each score alone, a row is not normalised
    mask: str = "causal"  # a row sees itself and those before it; "reversed": and those behind it; "none": all
    window: int = 0  # of these at most so many, the nearest, itself among them; 0: all
    prefix: int = 0  # and the first so many positions, wherever it stands
    documents: int = -1  # and none of another document: the id that each begins with; -1: a row sees across
    bias: str = ""  # added to scores: "alibi", a slope for each head times the distance
    scale: float = 0.0  # of scores; 0: 1/sqrt(HS)
    softcap: float = 0.0  # c: scores become c tanh(score / c); 0: they stay
    kv_heads: int = 0  # heads of keys and values, each for as many of queries; 0: NH

    @property
    def problem(self) -> str:
        """Return what is wrong with it; empty: nothing."""
        known = {"weights": ("softmax", "relu"), "mask": ("causal", "reversed", "none"), "bias": ("", "alibi")}
        if wrong := next((name for name, of in known.items() if getattr(self, name) not in of), ""):
            return f"{wrong} is {getattr(self, wrong)!r}; known are {', '.join(map(repr, known[wrong]))}"
        for name in ("window", "prefix", "scale", "softcap", "kv_heads"):
            if getattr(self, name) < 0:
                return f"{name} is {getattr(self, name)}; it must be at least 0"
        if self.mask != "causal" and (self.prefix or self.documents >= 0):
            return f"mask {self.mask!r} goes with neither a prefix nor documents"
        if self.prefix and (self.window or self.documents >= 0):  # what a row sees is one interval
            return f"prefix {self.prefix} goes with neither a window nor documents"
        return ""

    @property
    def words(self) -> str:
        """Return what it is, in words: "softmax attention", or "relu attention with window 128"."""
        usual = CAUSAL._asdict() | {"weights": self.weights}
        other = ", ".join(f"{name} {value}" for name, value in self._asdict().items() if value != usual[name])
        return f"{self.weights} attention{' with ' if other else ''}{other}"

    def counted(self, T: int) -> range:
        """Return the rows of T whose target, the next position, they do not see: those that have a loss."""
        if self.mask != "causal":
            return range(T - 1, T)
        return range(max(0, min(self.prefix, T) - 1), T)


CAUSAL, RELU = Attention(), Attention(weights="relu")  # what kernels compute


class ModelShape(Hashable, Protocol):
    """A model's identity: plain data, a frozen dataclass. A program is compiled for it, files and caches name it.

    Every family's shape has these fields; the family knows its others.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def family(self) -> str: ...  # the name of its family
    @property
    def source(self) -> str: ...  # the digest of the file that its family stands in; empty: it is built in
    @property
    def vocab_size(self) -> int: ...  # V, the ids that it knows
    @property
    def max_seq_len(self) -> int: ...  # the most positions that it knows


def attention_of(shape: ModelShape) -> Attention:
    """Return what a model's attention sees; of a family whose shape does not say it, as GPT-2's."""
    found: Attention = getattr(shape, "attention", CAUSAL)
    return found


def foresees(shape: ModelShape) -> bool:
    """Return whether rows of a model see their targets: what it writes, or thinks of a token, then means nothing."""
    return len(attention_of(shape).counted(shape.max_seq_len)) < shape.max_seq_len


def refuse_foresight(shape: ModelShape, what: str) -> None:
    """Raise InputError where rows of a model see their targets. what: is asked of it."""
    if foresees(shape):
        kind = attention_of(shape).words
        raise InputError(f"{what}: positions of this model see the tokens behind them ({kind})")


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a GPT-2, or of a family that varies it. Field names are llm.c's (`GPT2Config` in train_gpt2.c).

    max_seq_len: most positions the model knows (maxT, rows of wpe); vocab_size: V; padded_vocab_size: Vp (rows of
    wte; rows V..Vp-1 are zero and stay zero); num_layers: L; num_heads: NH; channels: C;
    mlp_channels: F, 0 for 4C; attention: what its rows see, and how.
    """

    max_seq_len: int
    vocab_size: int
    padded_vocab_size: int
    num_layers: int
    num_heads: int
    channels: int
    mlp_channels: int = 0
    attention: Attention = CAUSAL
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
        if self.num_heads % self.kv_heads:
            raise InputError(
                f"model shape: NH={self.num_heads} heads are not a multiple of KV={self.kv_heads} of keys and values"
            )
        if problem := self.attention.problem:
            raise InputError(f"model shape: attention: {problem}")

    @property
    def head_size(self) -> int:
        return self.channels // self.num_heads

    @property
    def kv_heads(self) -> int:
        """Return KV, the heads of keys and of values."""
        return self.attention.kv_heads or self.num_heads

    @property
    def hidden(self) -> int:
        """Return F, the channels within the MLP."""
        return self.mlp_channels or 4 * self.channels


def _shape(max_seq_len: int, vocab_size: int, num_layers: int, num_heads: int, channels: int) -> ModelConfig:
    return ModelConfig(max_seq_len, vocab_size, pad_vocab(vocab_size), num_layers, num_heads, channels)


def _from_custom(descriptor: str) -> ModelConfig:
    fields: dict[str, int] = {}
    for part in descriptor.split("-"):
        match = re.fullmatch(r"(L|NH|KV|C|F|V|T)(0*[1-9][0-9]{0,8})", part)
        if match is None or match[1] in fields:
            raise InputError(
                f"-e {descriptor}: {part!r} is not understood; write each of L, NH, C and, if wanted, KV, F, V and T "
                "once, with a number that is at least 1, as in L4-NH4-C256-V257-T128"
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
    shape = _shape(fields.get("T", 1024), fields.get("V", GPT2_VOCAB), fields["L"], heads, channels)
    usual = {"KV": heads, "F": 4 * channels}  # which stand as 0
    KV, F = (fields.get(name, 0) if fields.get(name) != number else 0 for name, number in usual.items())
    return replace(shape, mlp_channels=F, attention=CAUSAL._replace(kv_heads=KV))


def parse_descriptor(descriptor: str) -> ModelConfig:
    """Return the model of a descriptor: `d12`, `gpt2:d12`, `gpt3:c768`, or a custom
    `L4-NH4-C256[-KV2][-F1024][-V257][-T128]`.

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
    if re.match(r"(L|NH|KV|C|F|V|T)[0-9]", descriptor):
        return _from_custom(descriptor)
    depths = ", ".join(f"d{n}" for n in GPT2_DEPTH_TO_SHAPE)
    sizes = ", ".join(f"gpt3:c{n}" for n in GPT3_CHANNELS_TO_SHAPE)
    raise InputError(
        f"-e {descriptor}: no such model. Known: {depths} (or gpt2:dN), {sizes}, "
        "a custom shape such as L4-NH4-C256-V257-T128, "
        f"{', '.join(PUBLISHED)} or hf:OWNER/NAME of Hugging Face, or the path of a checkpoint"
    )
