"""FLOPs and bytes of a training step from its shape alone: no device, no compilation, instant.

Products are counted exactly, two operations for each multiplication and addition, as the compiled program makes them
(tests/models/gpt2/test_work.py holds both against each other). Bytes are compulsory ones: each array that an
operation takes is read once, each that it returns is written once. Leaves out the operations of everything that is not
a product: they are few, and such an operation waits for memory; and how much memory a step takes (memory.py).

    B batch, T sequence length, C channels, L layers, NH heads, HS head size, V vocabulary, Vp padded vocabulary,
    n = B T rows of a micro-batch, N parameters
"""

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

from llmc_jax.config.model import ModelConfig
from llmc_jax.config.train import TrainConfig
from llmc_jax.models.gpt2.tensors import num_parameters
from llmc_jax.models.tensors import Activation, sizes

PHASES = ("forward", "backward", "update")
OPERATIONS = (
    "embedding", "ln1", "qkv", "attention", "attproj", "ln2", "fc", "gelu", "fcproj", "lnf", "head", "classifier",
    "gradient", "norm", "adamw", "cast",
)  # fmt: skip
COMPUTE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


class Shape(NamedTuple):
    """What shapes the program of a step beside the model."""

    batch: int  # B of a micro-batch
    sequence: int  # T
    micro_batches: int = 1
    recompute: int = 1  # -r
    recompute_blocks: int = 0  # --recompute-blocks
    logit_rows: int = 0  # rows of logits that exist at a time; 0: all
    dtype: str = "fp32"  # what the model computes in
    master_weights: bool = True
    flash: bool = False  # attention without the T x T matrix

    @property
    def rows(self) -> int:
        return self.batch * self.sequence

    @property
    def element(self) -> int:
        """Bytes of one element of what the model computes in."""
        return COMPUTE_BYTES[self.dtype]


def shape_of(config: TrainConfig, *, dtype: str, flash: bool, logit_rows: int) -> Shape:
    """The shape of a run's step. dtype, flash, logit_rows: what its `auto` came to."""
    return Shape(
        batch=config.batch_size,
        sequence=config.sequence_length,
        micro_batches=config.grad_accumulation,
        recompute=config.recompute,
        recompute_blocks=config.recompute_blocks,
        logit_rows=logit_rows,
        dtype=dtype,
        master_weights=config.master_weights,
        flash=flash,
    )


def rows_at_once(shape: Shape) -> int:
    """Return the rows of logits that exist at a time: the largest divisor of n that is at most `logit_rows`."""
    n, limit = shape.rows, shape.logit_rows
    if limit <= 0 or limit >= n:
        return n
    return next(size for size in range(limit, 0, -1) if n % size == 0)


def activation_bytes(row: Activation, config: ModelConfig, shape: Shape) -> int:
    """Return the bytes of an activation of one micro-batch, of one that each layer has in one of them."""
    letters = {
        "B": shape.batch, "T": shape.sequence, "C": config.channels, "NH": config.num_heads,
        "Vp": config.padded_vocab_size, "L": 1,
    }  # fmt: skip
    if row.name == "att" and shape.flash:  # a float32 for each row of the matrix
        return 4 * math.prod(sizes("B NH T", letters))
    return (4 if row.wide else shape.element) * math.prod(sizes(row.shape, letters))


class Work(NamedTuple):
    """What one operation does in one step, over all micro-batches."""

    phase: str  # one of PHASES
    operation: str  # one of OPERATIONS
    layer: int | None  # None outside the layers
    flops: int  # of its matrix products
    bytes: int  # that it must read and write
    times: int = 1  # how often it runs, each time on arrays of its own: flops and bytes are of all times together
    writes: bool = True  # something large; False: it only reads


# ----- work of a step -----------------------------------------------------------------------------------------------


def step_work(config: ModelConfig, shape: Shape) -> list[Work]:
    """Every operation of one training step, in the order of the forward pass, the backward pass and the update."""
    model = [*_forward(config, shape), *_backward(config, shape)]
    A = shape.micro_batches
    repeated = [work._replace(flops=A * work.flops, bytes=A * work.bytes, times=A * work.times) for work in model]
    return [*repeated, *_update(config, shape)]


def products_flops(config: ModelConfig, shape: Shape) -> int:
    """Operations of all matrix products of a step, exactly those that the program makes."""
    return sum(work.flops for work in step_work(config, shape))


def _forward(config: ModelConfig, shape: Shape) -> Iterator[Work]:
    n, C, Vp, T, e = shape.rows, config.channels, config.padded_vocab_size, shape.sequence, shape.element
    chunks = n // rows_at_once(shape)
    yield Work("forward", "embedding", None, 0, 4 * n + e * (2 * n * C + T * C))
    for layer in range(config.num_layers):
        yield from block_forward(config, shape, layer, "forward")
    yield Work("forward", "lnf", None, 0, _residual_layernorm_bytes(n, C, e))
    yield Work("forward", "head", None, 2 * n * C * Vp, e * (n * C + Vp * C + n * Vp), chunks)
    # The logits become their own gradient. The sum over a row is a product with ones.
    yield Work("forward", "classifier", None, 2 * n * Vp, e * 2 * n * Vp + 4 * 3 * n, chunks)


def _residual_layernorm_bytes(n: int, C: int, e: int) -> int:
    """The stream and what is added read, both sums written, with w, b, mean and rstd."""
    return e * (4 * n * C + 2 * C) + 4 * 2 * n


def block_forward(
    config: ModelConfig, shape: Shape, layer: int, phase: str, *, last_product: bool = True
) -> Iterator[Work]:
    """One block. phase: 'backward' where it is computed again; then its last product may not be needed."""
    n, C, e = shape.rows, config.channels, shape.element
    first = layer == 0  # the embedding has made the whole stream: nothing to add
    yield Work(phase, "ln1", layer, 0, e * (2 * n * C + 2 * C) + 8 * n if first else _residual_layernorm_bytes(n, C, e))
    yield _linear_forward(phase, "qkv", layer, shape, C, 3 * C)
    kept = shape.batch * config.num_heads * shape.sequence * (4 if shape.flash else e * shape.sequence)
    yield Work(phase, "attention", layer, 2 * _attention_product(config, shape), e * 4 * n * C + kept)
    yield _linear_forward(phase, "attproj", layer, shape, C, C)
    yield Work(phase, "ln2", layer, 0, _residual_layernorm_bytes(n, C, e))
    yield _linear_forward(phase, "fc", layer, shape, C, 4 * C)
    yield Work(phase, "gelu", layer, 0, e * 8 * n * C)
    if last_product:
        yield _linear_forward(phase, "fcproj", layer, shape, 4 * C, C)


def _linear_forward(phase: str, name: str, layer: int, shape: Shape, inputs: int, outputs: int) -> Work:
    n, e = shape.rows, shape.element
    return Work(phase, name, layer, 2 * n * inputs * outputs, e * (n * (inputs + outputs) + (inputs + 1) * outputs))


def _attention_product(config: ModelConfig, shape: Shape) -> int:
    """One of attention's products over all heads; without the T x T matrix only what lies inside the mask."""
    T = shape.sequence
    pairs = T * (T + 1) // 2 if shape.flash else T * T
    return 2 * shape.batch * config.num_heads * config.head_size * pairs


def _backward(config: ModelConfig, shape: Shape) -> Iterator[Work]:
    n, C, Vp, T, e = shape.rows, config.channels, config.padded_vocab_size, shape.sequence, shape.element
    # dlogits read once; dwte is summed in float32
    moved = e * (n * Vp + 2 * n * C + Vp * C) + 4 * Vp * C
    yield Work("backward", "head", None, 4 * n * C * Vp, moved, n // rows_at_once(shape))
    yield Work("backward", "lnf", None, 0, e * (3 * n * C + 4 * C) + 8 * n)
    blocks = shape.recompute_blocks
    for layer in reversed(range(config.num_layers)):
        if blocks:  # what the stretch's last block adds to the stream is kept by the next stretch
            ends = layer == config.num_layers - 1 or (layer + 1) % blocks == 0
            yield from block_forward(config, shape, layer, "backward", last_product=not ends)
        yield from _block_backward(config, shape, layer)
    yield Work("backward", "embedding", None, 0, 4 * n + e * (n * C + T * C) + 4 * 2 * min(n, Vp) * C)
    yield Work("backward", "gradient", None, 0, _gradient_bytes(config, shape))


def _block_backward(config: ModelConfig, shape: Shape, layer: int) -> Iterator[Work]:
    n, C, e = shape.rows, config.channels, shape.element
    recompute = 0 if shape.recompute_blocks else shape.recompute

    def layernorm(name: str) -> Work:
        again = e * (2 * n * C + 2 * C) + 8 * n if recompute >= 2 else 0
        written = 3 * C  # dw, db, and the gradient of the bias of the linear layer below
        return Work("backward", name, layer, 0, e * (4 * n * C + C + written) + 8 * n + again)

    def linear(name: str, inputs: int, outputs: int) -> Work:
        weights = 2 * inputs * outputs  # w read, dw written
        return Work("backward", name, layer, 4 * n * inputs * outputs, e * (n * (2 * inputs + outputs) + weights))

    yield linear("fcproj", 4 * C, C)
    yield Work("backward", "gelu", layer, 0, e * ((12 + (8 if recompute >= 1 else 0)) * n * C + 4 * C))
    yield linear("fc", C, 4 * C)
    yield layernorm("ln2")
    yield linear("attproj", C, C)
    kept = shape.batch * config.num_heads * shape.sequence * (4 if shape.flash else e * shape.sequence)
    products = 5 if shape.flash else 4  # without the matrix the scores are computed again
    yield Work("backward", "attention", layer, products * _attention_product(config, shape), e * (8 * n + 3) * C + kept)
    yield linear("qkv", C, 3 * C)
    yield layernorm("ln1")


def _gradient_bytes(config: ModelConfig, shape: Shape) -> int:
    """The pieces read and the flat gradient written; with several micro-batches their sum read and written too."""
    N = num_parameters(config)
    return 2 * shape.element * N + (8 * N if shape.micro_batches > 1 else 0)


def _update(config: ModelConfig, shape: Shape) -> Iterator[Work]:
    N = num_parameters(config)
    gradient = shape.element if shape.micro_batches == 1 else 4
    masters = 4 if shape.master_weights else shape.element
    copy = shape.element if has_copy(shape) else 0
    yield Work("update", "norm", None, 0, gradient * N, writes=False)
    yield Work("update", "adamw", None, 0, (gradient + 2 * masters + 4 * 4 + copy) * N)


def has_copy(shape: Shape) -> bool:
    """Whether the parameters exist twice, in float32 and in what the model computes in."""
    return shape.master_weights and shape.dtype != "fp32"


# ----- by the usual definitions -------------------------------------------------------------------------------------


def flops_per_token(
    config: ModelConfig, sequence_length: int, *, definition: Literal["llm.c", "palm"] = "llm.c"
) -> int:
    """Return the floating-point operations of forward and backward per token of a sequence of T tokens.

    6N for the matrix products (2N forward, 4N backward; N counts all parameters, padded rows included) and, for
    attention's products, 6LCT with "llm.c", which halves them as causality allows, or 12LCT with "palm".
    Sources: llm.c train_gpt2.cu, `gpt2_estimate_mfu`; Chowdhery et al., PaLM (2022), appendix B.
    """
    attention = {"llm.c": 6, "palm": 12}[definition] * config.num_layers * config.channels * sequence_length
    return 6 * num_parameters(config) + attention
