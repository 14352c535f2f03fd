"""FLOPs and bytes of a training step from its shape alone: no device, no compilation, instant.

Products of matrices are counted exactly, two operations for each multiplication and addition, as the compiled program
makes them (tests/models/gpt2/test_work.py holds both against each other). Bytes are compulsory ones: each array that an
operation takes is read once, each that it returns is written once. Leaves out the operations of everything that is not
a product: they are few, and such an operation waits for memory; and how much memory a step takes (memory.py).

    B batch, T sequence length, C channels, L layers, NH heads, HS head size, V vocabulary, Vp padded vocabulary,
    n = B T rows of a micro-batch, N parameters
"""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Literal, NamedTuple

from llmc_jax.config.model import ModelShape, attention_of
from llmc_jax.models.family import family_of
from llmc_jax.models.gpt2 import operations as gpt2
from llmc_jax.models.layout import head_spec, letters, matrix_shapes, num_layers, num_parameters, tensor_specs
from llmc_jax.models.tensors import Activation, Operation, Tables, Tensor, sizes

PHASES = ("forward", "backward", "update")
WHOLE = "model"  # the operation that a model without tables is, as a whole
MATRICES = "matrices"  # what an optimizer does with the matrices of the layers
# The named scopes by which a program's instructions are told apart; a family uses these names for what is alike.
OF_THE_MODEL = tuple(dict.fromkeys(each.name for each in (gpt2.EMBEDDING, *gpt2.BLOCK, *gpt2.END)))
OPERATIONS = (*OF_THE_MODEL, "gradient", "norm", "adamw", "optimizer", MATRICES, "cast")
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
    optimizer: str = "adamw"  # its scope: one of OPERATIONS
    buffers: int = 2  # what it keeps: each as large as the parameters, in float32
    products: int = 0  # steps of Newton's and Schulz's iteration that it makes of each matrix of the layers
    devices: int = 1  # that the state is split over
    stage: int = 0  # of ZeRO
    # Products that end in what would be a pass over their result, by the operation: head, fc in GELU, fcproj backwards.
    fused: tuple[str, ...] = ()
    sums: int = 0  # gradients in float32 that a tree of sums over micro-batches keeps; 0: there is no tree

    @property
    def rows(self) -> int:
        return self.batch * self.sequence

    @property
    def element(self) -> int:
        """Return the bytes of one element of what the model computes in."""
        return COMPUTE_BYTES[self.dtype]


def rows_at_once(shape: Shape) -> int:
    """Return the rows of logits that exist at a time: the largest divisor of n that is at most `logit_rows`."""
    n, limit = shape.rows, shape.logit_rows
    if limit <= 0 or limit >= n:
        return n
    return next(size for size in range(limit, 0, -1) if n % size == 0)


def tables_of(config: ModelShape) -> Tables | None:
    """Return the tables of a model; None: its family has none."""
    make = family_of(config).tables
    return None if make is None else make(config)


def activations_of(config: ModelShape) -> tuple[Activation, ...]:
    """Return the table of a model's activations; empty where its family has none."""
    tables = tables_of(config)
    return () if tables is None else tables.activations


@lru_cache(maxsize=4096)
def row_of(name: str, config: ModelShape) -> Activation:
    """Return the row of a value, as one layer has it: of an activation, of a weight, or of the gradient of either."""
    rows: dict[str, Activation | Tensor] = {row.name: row for row in activations_of(config)}
    rows |= {spec.name: spec.tensor for spec in tensor_specs(config)}
    own = name.rpartition(".")[2]
    row = rows[own] if own in rows else rows[own.removeprefix("d")]
    wide = isinstance(row, Activation) and row.wide and row.name == own
    kept_below = row.kept_below if isinstance(row, Activation) else 0
    return Activation(own, row.shape.removeprefix("L "), kept_below, wide)


@lru_cache(maxsize=4096)  # every layer asks the same
def array_bytes(name: str, config: ModelShape, shape: Shape) -> int:
    """Return the bytes of a value, a weight or a gradient, of one that each layer has in one of them."""
    row, numbers = row_of(name, config), {**letters(config), "B": shape.batch, "T": shape.sequence}
    if row.name == "att" and shape.flash:  # a float32 for each row of the matrix
        return 4 * math.prod(sizes("B NH T", numbers))
    return (4 if row.wide else shape.element) * math.prod(sizes(row.shape, numbers))


class Work(NamedTuple):
    """What one operation does in one step, over all micro-batches."""

    phase: str  # one of PHASES
    operation: str  # one of OPERATIONS
    layer: int | None  # None outside the layers
    flops: int  # of its matrix products
    bytes: int  # that it must read and write
    times: int = 1  # how often it runs, each time on arrays of its own: flops and bytes are of all times together


# ----- work of a step -----------------------------------------------------------------------------------------------


def step_work(config: ModelShape, shape: Shape) -> list[Work]:
    """Return every operation of one training step: of the forward pass, the backward pass and the update, in order."""
    tables = tables_of(config)
    model = (
        _whole(config, shape)
        if tables is None
        else [*_forward(config, shape, tables), *_backward(config, shape, tables)]
    )
    model = list(_fused(model, config, shape))
    A = shape.micro_batches
    repeated = [work._replace(flops=A * work.flops, bytes=A * work.bytes, times=A * work.times) for work in model]
    return [*repeated, *_update(config, shape)]


def products_flops(config: ModelShape, shape: Shape) -> int:
    """Return the operations of all matrix products of a step, exactly those that the program makes."""
    return sum(work.flops for work in step_work(config, shape))


def _whole(config: ModelShape, shape: Shape) -> list[Work]:
    """Return the work of a model without tables: 2 N operations a token forward and 4 N backward."""
    N, e = num_parameters(config), shape.element
    passes = ("forward", 1), ("backward", 2)
    return [Work(phase, WHOLE, None, times * 2 * N * shape.rows, times * 2 * e * N) for phase, times in passes]


def _forward(config: ModelShape, shape: Shape, tables: Tables) -> Iterator[Work]:
    (Vp, C), n, T, e = head_spec(config).shape, shape.rows, shape.sequence, shape.element
    chunks = n // rows_at_once(shape)
    # only the rows of wte that the tokens name, and the first T of wpe
    yield Work("forward", "embedding", None, 0, 4 * n + e * (2 * n * C + T * C))
    for layer in range(num_layers(config)):
        yield from _weighed("forward", block(tables, layer), layer, config, shape)
    lnf, head, _ = _weighed("forward", tables.end, None, config, shape)
    yield from (lnf, head._replace(times=chunks))
    # The logits become their own gradient. The sum over a row is a product on a CPU alone (ops/classifier.py).
    yield Work("forward", "classifier", None, 0, e * 2 * n * Vp + 4 * 3 * n, chunks)


def _fused(works: Sequence[Work], config: ModelShape, shape: Shape) -> Iterator[Work]:
    """Yield works where some products do what follows them (`Shape.fused`): its bytes are theirs, or nobody's.

    Of the classifier there remain passes over rows of C: the targets' logits; x / S; the product's result in float32,
    from which the targets' rows of wte are taken; what is taken from their gradient, in float32; and a number for each
    128 logits, written and read, and read twice for nothing.
    """
    (Vp, C), n, e = head_spec(config).shape, shape.rows, shape.element
    for work in works:
        place = work.phase, work.operation
        if place == ("forward", "classifier") and "head" in shape.fused:
            yield work._replace(bytes=n * C * (6 * e + 4 * 4) + 4 * 4 * n * Vp // 128 + 8 * min(n, Vp) * C)
        elif place == ("forward", "fc") and "fc" in shape.fused:
            yield work._replace(bytes=work.bytes + array_bytes("fch_gelu", config, shape))
        elif place == ("backward", "fcproj") and "fcproj" in shape.fused:
            yield work._replace(bytes=work.bytes + array_bytes("fch", config, shape))
        elif place == ("backward", "gelu") and "fcproj" in shape.fused:
            if shape.recompute and not shape.recompute_blocks:  # the forward's, again
                yield work._replace(bytes=2 * array_bytes("fch", config, shape))
        elif not (place == ("forward", "gelu") and "fc" in shape.fused):
            yield work


def block(tables: Tables, layer: int) -> tuple[Operation, ...]:
    """Return a block's operations. The first adds nothing to the stream, all of which the embedding makes."""
    return tables.block if layer else tables.block[1:]


def _backward(config: ModelShape, shape: Shape, tables: Tables) -> Iterator[Work]:
    (Vp, C), n, T, e = head_spec(config).shape, shape.rows, shape.sequence, shape.element
    _, head, lnf = _weighed("backward", tables.end_backward, None, config, shape)
    layers, recomputed = num_layers(config), _recomputed(config, shape, tables)
    yield from (head._replace(times=n // rows_at_once(shape)), lnf)
    blocks = shape.recompute_blocks
    for layer in reversed(range(layers)):
        if blocks:  # what the stretch's last block adds to the stream is kept by the next stretch
            ends = layer == layers - 1 or (layer + 1) % blocks == 0
            yield from _weighed("backward", block(tables, layer)[: -1 if ends else None], layer, config, shape)
        for work in _weighed("backward", tables.block_backward, layer, config, shape):
            again = (_bytes((each,), config, shape) for each in recomputed if each.name == work.operation)
            yield work._replace(bytes=work.bytes + sum(again))
    yield Work("backward", "embedding", None, 0, 4 * n + e * (n * C + T * C) + 4 * 2 * min(n, Vp) * C)
    yield Work("backward", "gradient", None, 0, _gradient_bytes(config, shape))


def _recomputed(config: ModelShape, shape: Shape, tables: Tables) -> list[Operation]:
    """Return the operations of a block that the backward runs again by themselves."""
    level = 0 if shape.recompute_blocks else shape.recompute
    return [each for each in tables.block if any(0 < row_of(name, config).kept_below <= level for name in each.outputs)]


def _weighed(
    phase: str, operations: Sequence[Operation], layer: int | None, config: ModelShape, shape: Shape
) -> Iterator[Work]:
    """Yield the work of each named scope: what its operations hand to each other is neither read nor written twice."""
    for name, found in groupby(operations, lambda each: each.name):
        together = tuple(found)
        flops = sum(_products(each, config, shape) for each in together)
        yield Work(phase, name, layer, flops, _bytes(together, config, shape))


@lru_cache(maxsize=4096)
def _bytes(operations: tuple[Operation, ...], config: ModelShape, shape: Shape) -> int:
    made = {name for each in operations for name in each.outputs}
    read = {name for each in operations for name in (*each.inputs, *each.weights)} - made
    return sum(array_bytes(name, config, shape) for name in (*read, *made))


@lru_cache(maxsize=4096)
def _products(operation: Operation, config: ModelShape, shape: Shape) -> int:
    """Return the floating-point operations of an operation's matrix products."""
    if operation.function in ("linear_forward", "linear_backward"):
        weights = math.prod(sizes(row_of(operation.weights[0], config).shape, letters(config)))
        return 2 * shape.rows * weights * (1 if operation.function == "linear_forward" else 2)
    # without the matrix the scores are computed again, and only what lies inside the mask
    T, flash = shape.sequence, shape.flash
    pairs = T * (T + 1) // 2 if flash else T * T
    again = flash or attention_of(config).softcap  # the backward computes the scores once more
    products = {"attention_forward": 2, "attention_backward": 5 if again else 4}.get(operation.function, 0)
    return products * 2 * shape.batch * letters(config)["C"] * pairs


def _gradient_bytes(config: ModelShape, shape: Shape) -> int:
    """Count the pieces read and the flat gradient written; with several micro-batches also their sum, both ways."""
    N = num_parameters(config)
    return 2 * shape.element * N + (8 * N if shape.micro_batches > 1 else 0)


def _update(config: ModelShape, shape: Shape) -> Iterator[Work]:
    N = num_parameters(config)
    gradient = shape.element if shape.micro_batches == 1 else 4
    masters = 4 if shape.master_weights else shape.element
    copy = shape.element if has_copy(shape) else 0
    yield Work("update", "norm", None, 0, gradient * N)
    yield Work("update", shape.optimizer, None, 0, (gradient + 2 * masters + 2 * 4 * shape.buffers + copy) * N)
    if shape.products:
        yield Work("update", MATRICES, None, *_iteration(config, shape))


def _iteration(config: ModelShape, shape: Shape) -> tuple[int, int]:
    """Return FLOPs and bytes of what all devices make of the matrices of the layers.

    Of one with m columns and n <= m rows X X^T and its product with X have 2 n n m operations each, the square of X X^T
    2 n n n. The bytes are those beside the products, as they are compiled for a GPU: X and the square are scaled, the
    square and X X^T are added. Of L layers, each of n devices takes L / n, rounded up.
    """
    flops = elements = 0
    for spec in tensor_specs(config):
        if spec.tensor.layer_matrix:
            for parts, *sides in matrix_shapes(spec, config):
                n, m = sorted(sides)
                flops += parts * (4 * n * n * m + 2 * n**3)
                elements += parts * (2 * n * m + 3 * n * n)
    devices = shape.devices if shape.stage else 1
    layers = -(-num_layers(config) // devices) * devices
    return shape.products * layers * flops, shape.products * layers * elements * shape.element


def has_copy(shape: Shape) -> bool:
    """Return whether the parameters exist twice, in float32 and in what the model computes in."""
    return shape.master_weights and shape.dtype != "fp32"


# ----- by the usual definitions -------------------------------------------------------------------------------------


def flops_per_token(config: ModelShape, sequence_length: int, *, definition: Literal["llm.c", "palm"] = "llm.c") -> int:
    """Return the floating-point operations of forward and backward per token of a sequence of T tokens.

    6N for the matrix products (2N forward, 4N backward; N counts all parameters, padded rows included) and, for
    attention's products, 6LCT with "llm.c", which halves them as causality allows, or 12LCT with "palm".
    Sources: llm.c train_gpt2.cu, `gpt2_estimate_mfu`; Chowdhery et al., PaLM (2022), appendix B.
    """
    numbers = letters(config)
    scores = numbers["L"] * numbers["C"] * sequence_length if numbers.get("NH") else 0
    return 6 * num_parameters(config) + {"llm.c": 6, "palm": 12}[definition] * scores
