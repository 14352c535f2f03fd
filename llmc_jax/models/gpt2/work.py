"""FLOPs, bytes and memory of a training step from its shape alone: no device, no compilation, instant.

Products are counted exactly, two operations for each multiplication and addition, as the compiled program makes them
(tests/models/gpt2/test_work.py holds both against each other). Bytes are compulsory ones: each array that an
operation takes is read once, each that it returns is written once. Leaves out the operations of everything that is not
a product: they are few, and such an operation waits for memory.

    B batch, T sequence length, C channels, L layers, NH heads, HS head size, V vocabulary, Vp padded vocabulary,
    n = B T rows of a micro-batch, N parameters
"""

from collections.abc import Iterator
from typing import NamedTuple

from llmc_jax.config.model import ModelConfig
from llmc_jax.config.train import TrainConfig
from llmc_jax.models.gpt2.tensors import flat_size, num_parameters
from llmc_jax.training.outliers import WINDOW

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


# ----- memory -------------------------------------------------------------------------------------------------------


class Memory(NamedTuple):
    """Bytes of a training step by kind."""

    parameters: int  # the flat buffer, and its copy in the compute dtype where there is one
    optimizer: int  # m and v
    scalars: int  # the step counters, the loss scale
    gradient: int  # the flat gradient; with several micro-batches also their sum
    activations: int  # what the forward keeps for the backward
    head: int  # the logits that exist at a time

    @property
    def state(self) -> int:
        """What stays from step to step: the arguments that the compiled step overwrites with its results."""
        return self.parameters + self.optimizer + self.scalars


def memory(config: ModelConfig, shape: Shape) -> Memory:
    """Bytes of a training step by kind."""
    size, e = flat_size(config), shape.element
    masters = 4 if shape.master_weights else e
    rows = rows_at_once(shape)
    return Memory(
        parameters=size * (masters + (e if has_copy(shape) else 0)),
        optimizer=8 * size,
        scalars=8 + 4 * (2 * WINDOW + 1) + (8 if shape.dtype == "fp16" else 0),  # counters, outliers, loss scale
        gradient=size * (e if shape.micro_batches == 1 else e + 4),
        activations=sum(activations(config, shape).values()),
        head=e * rows * config.padded_vocab_size,
    )


def rows_at_once(shape: Shape) -> int:
    """Rows of logits that exist at a time: the largest divisor of n that is at most `logit_rows`."""
    n, limit = shape.rows, shape.logit_rows
    if limit <= 0 or limit >= n:
        return n
    return next(size for size in range(limit, 0, -1) if n % size == 0)


def activations(config: ModelConfig, shape: Shape) -> dict[str, int]:
    """Bytes of each tensor that the forward keeps for the backward, over all layers."""
    n, C, L, e = shape.rows, config.channels, config.num_layers, shape.element
    if shape.recompute_blocks:
        stretches = -(-L // shape.recompute_blocks)
        kept = {"residual1": stretches * e * n * C}
    else:
        att = shape.batch * config.num_heads * shape.sequence * (4 if shape.flash else e * shape.sequence)
        kept = {
            "residual1": L * e * n * C,
            "ln1": L * e * n * C if shape.recompute < 2 else 0,
            "ln1_mean, ln1_rstd": L * 8 * n,
            "qkv": L * e * 3 * n * C,
            "att": L * att,
            "atty": L * e * n * C,
            "residual2": L * e * n * C,
            "ln2": L * e * n * C if shape.recompute < 2 else 0,
            "ln2_mean, ln2_rstd": L * 8 * n,
            "fch": L * e * 4 * n * C,
            "fch_gelu": L * e * 4 * n * C if shape.recompute < 1 else 0,
        }
    return kept | {"residual": e * n * C, "lnf_mean, lnf_rstd": 8 * n, "dlnf": e * n * C}


class Temporaries(NamedTuple):
    """Bytes that the compiled step needs beside its arguments, at the three moments that may need most."""

    head: int  # the logits and their gradient, the head's gradient, all activations
    block: int  # backward through the last block: all activations and what that block works with
    gradient: int  # the pieces of the gradient, and the flat one that they are joined to

    @property
    def peak(self) -> int:
        return max(self)


def temporaries(config: ModelConfig, shape: Shape) -> Temporaries:
    """An estimate of the compiled step's temporaries, for attention with its T x T matrix, computed by XLA on a CPU.

    All through the forward pass and until a block's backward is done there is a second copy of its weights: XLA slices
    them out of the flat buffer once. What one block works with is taken as the larger of attention's (one more matrix,
    and what is computed again) and the MLP's (four arrays of its hidden layer). Where the buffers come to lie is XLA's
    affair and adds up to a tenth; in bf16 a CPU also keeps wide copies, which are not counted.
    """
    n, C, e = shape.rows, config.channels, shape.element
    weights = flat_size(config) * e
    sums = 4 * flat_size(config) if shape.micro_batches > 1 else 0
    dwte = 4 * config.padded_vocab_size * C
    kept = sum(activations(config, shape).values())
    matrix = shape.batch * config.num_heads * shape.sequence * (4 if shape.flash else e * shape.sequence)
    if shape.recompute_blocks:
        stretch = min(shape.recompute_blocks, config.num_layers)
        again = stretch * (16 * e * n * C + 16 * n + matrix)
    else:
        again = e * n * C * ((4 if shape.recompute >= 1 else 0) + (2 if shape.recompute >= 2 else 0))
    return Temporaries(
        head=sums + weights + kept + 2 * e * rows_at_once(shape) * config.padded_vocab_size + dwte,
        block=sums + weights + kept + max(again + matrix, 16 * e * n * C),
        gradient=sums + 2 * weights,
    )


# ----- llm.c's own figures ------------------------------------------------------------------------------------------


def llmc_activations(config: ModelConfig, B: int, T: int) -> int:
    """num_activations as llm.c's train_gpt2.c prints it: elements of all activation tensors, kept or not.

    Source: llm.c train_gpt2.c, `fill_in_activation_sizes`.
    """
    n, C, L, NH, Vp = B * T, config.channels, config.num_layers, config.num_heads, config.padded_vocab_size
    per_layer = 18 * n * C + 4 * n + 2 * B * NH * T * T
    return L * per_layer + 2 * n * C + 2 * n + 2 * n * Vp + n


def llmc_fp32_bytes(config: ModelConfig, B: int, T: int) -> tuple[int, int]:
    """Bytes that train_gpt2_fp32.cu allocates for activations and for their gradients.

    Source: llm.c train_gpt2_fp32.cu, `fill_in_activation_sizes` and `fill_in_grad_act_sizes`.
    """
    n, C, L, NH, Vp = B * T, config.channels, config.num_layers, config.num_heads, config.padded_vocab_size
    per_layer = 18 * n * C + 4 * n + B * NH * T * T
    kept = L * per_layer + 2 * n * C + 2 * n + n + n * max(3 * C, NH * T, Vp)
    gradients = 4 * n * C + B * NH * T * T + n * C
    return 4 * kept, 4 * gradients


def llmc_mixed_bytes(config: ModelConfig, B: int, T: int, recompute: int, *, cudnn: bool) -> int:
    """Bytes that train_gpt2.cu allocates for activations in bf16, as its `allocating ... for activations` line.

    Source: llm.c train_gpt2.cu, `fill_in_activation_sizes`.
    """
    n, C, L, NH, Vp = B * T, config.channels, config.num_layers, config.num_heads, config.padded_vocab_size
    layer = 10 + (2 if recompute < 2 else 0)  # atty, residual2, residual3, fch, qkvr; ln1 and ln2
    layers = L * layer + 4 * (L if recompute < 1 else 1)  # and fch_gelu
    bf16 = n * C * (layers + 7) + n * max(3 * C, NH * T, Vp)  # and encoded, lnf, two scratch buffers; the logits
    fp32 = 4 * L * n + 3 * n  # means and rstds, losses
    attention = B * NH * L * T * (4 if cudnn else 2 * T)
    return 2 * bf16 + 4 * fp32 + attention
