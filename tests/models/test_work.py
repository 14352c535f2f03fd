"""The calculators agree with the compiled program: products to the operation, state to the byte."""

from collections import Counter
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from llmc_jax.config.model import ModelConfig, parse_descriptor
from llmc_jax.config.train import TrainConfig
from llmc_jax.models.execution import Execution
from llmc_jax.models.layout import flat_size, num_parameters
from llmc_jax.models.work import Shape, Work, flops_per_token, products_flops, step_work
from llmc_jax.plan.moments import state_kinds
from llmc_jax.plan.program import Place, Program
from llmc_jax.training import outliers
from llmc_jax.training.optimizer import numbers_of
from llmc_jax.training.rules.adamw import ADAMW, AdamWNumbers
from llmc_jax.training.rules.muon import MUON
from llmc_jax.training.schedule import ScheduleNumbers
from llmc_jax.training.state import initial_state
from llmc_jax.training.step import StepNumbers, StepOptions, train_step
from tests.comparisons import QUICK
from tests.programs import products_flops as counted_in

DTYPES: dict[str, Any] = {"fp32": None, "bf16": jnp.bfloat16, "fp16": jnp.float16}
NUMBERS = StepNumbers(ScheduleNumbers(3e-4, 0, 1000, 1.0, 0, 1.0), AdamWNumbers(0.9, 0.95, 1e-8, 0.1), 1.0)
TINY = "L3-NH2-C32-V300-T16"
D12 = parse_descriptor("d12")


def state_of(config: ModelConfig, shape: Shape) -> Any:
    """The shapes of a training state as train.py makes it."""
    flat = jax.ShapeDtypeStruct((flat_size(config),), jnp.float32)
    scale = 128.0 if shape.dtype == "fp16" else None

    def begin(parameters: jax.Array) -> Any:
        return initial_state(
            parameters, DTYPES[shape.dtype], master_weights=shape.master_weights, loss_scale=scale,
            optimizer=MUON if shape.products else ADAMW,
        )  # fmt: skip

    return jax.eval_shape(begin, flat)


def lowered(model: str | ModelConfig, shape: Shape) -> Any:
    """The step of a model as train.py lowers it, from shapes alone."""
    config = parse_descriptor(model) if isinstance(model, str) else model
    tokens = jax.ShapeDtypeStruct((shape.micro_batches, shape.batch, shape.sequence), jnp.int32)
    execution = Execution(
        recompute=shape.recompute, recompute_blocks=shape.recompute_blocks, logit_rows=shape.logit_rows
    )
    optimizer = MUON if shape.products else ADAMW
    numbers = NUMBERS._replace(optimizer=numbers_of(optimizer, TrainConfig(weight_decay=0.1)))
    options = StepOptions("cosine", "matrices", execution, optimizer=optimizer)
    return train_step.lower(state_of(config, shape), tokens, tokens, numbers, config, options)


def without_phase_of_the_head(counted: Any) -> dict[tuple[Any, ...], int]:
    """FLOPs by place. The head goes backwards within the forward pass, so its phase is left out."""
    total: Counter[tuple[Any, ...]] = Counter()
    for (phase, operation, layer), flops in counted:
        total["" if operation == "head" else phase, operation, layer] += flops
    return {place: flops for place, flops in total.items() if flops}


def row_sums(shape: Shape) -> int:
    """The classifier's sums over rows of logits, Vp=384: a product with ones on a CPU alone, so it is not counted."""
    return shape.micro_batches * 2 * shape.rows * 384


def by_place(work: list[Work]) -> dict[tuple[Any, ...], int]:
    return without_phase_of_the_head(((each.phase, each.operation, each.layer), each.flops) for each in work)


SHAPES = [
    Shape(2, 8, recompute=0),
    Shape(2, 8, recompute=1),
    Shape(3, 16, recompute=2),
    Shape(2, 8, micro_batches=3),
    Shape(2, 8, recompute_blocks=2),
    Shape(2, 8, recompute_blocks=4),
    Shape(3, 5, logit_rows=4),  # 3 rows at a time: the largest divisor
    Shape(2, 8, dtype="bf16"),
]


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_those_of_the_program(shape: Shape) -> None:
    """Before XLA's optimisations; loops count as often as they run."""
    program = Program(lowered(TINY, shape).as_text(dialect="hlo"))
    found = counted_in(program)
    assert sum(found.values()) == products_flops(parse_descriptor(TINY), shape) + row_sums(shape)


@pytest.mark.slow
@pytest.mark.parametrize("softcap", [0.0, 2.0])  # whose gradient needs the scores once more
def test_products_of_another_attention(softcap: float) -> None:
    """Fewer heads of keys, and an F that is not 4 C."""
    config, shape = parse_descriptor("L2-NH4-C32-KV2-F48-V300-T16"), Shape(2, 8)
    config = replace(config, attention=config.attention._replace(softcap=softcap, window=4))
    found = counted_in(Program(lowered(config, shape).as_text(dialect="hlo")))
    assert sum(found.values()) == products_flops(config, shape) + row_sums(shape)


def kept(config: ModelConfig, shape: Shape) -> int:
    """Bytes of the state by kind, with its counters and the loss scale."""
    kinds = state_kinds(config, shape)
    return kinds["parameters"] + kinds["optimizer"] + 8 + outliers.BYTES + 8 * (shape.dtype == "fp16")


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [Shape(3, 16, micro_batches=2, recompute=0), Shape(2, 8, recompute_blocks=2, logit_rows=8),
     Shape(1, 16, dtype="bf16"), Shape(1, 16, optimizer="optimizer", products=5)],
    ids=str,
)  # fmt: skip
def test_the_compiled_program(shape: Shape) -> None:
    """After them: products by place, and the bytes that the step overwrites with its results."""
    config = parse_descriptor(TINY)
    compiled = lowered(TINY, shape).compile(QUICK)
    found = counted_in(Program(compiled.as_text()))
    assert None not in found
    counted = [(tuple(place or Place("", "")), flops) for place, flops in found.items()]
    sums = {("forward", "classifier", None): row_sums(shape)}
    assert without_phase_of_the_head(counted) == by_place(step_work(config, shape)) | sums
    assert compiled.memory_analysis().alias_size_in_bytes == kept(config, shape)


@pytest.mark.parametrize(
    "shape",
    [
        Shape(2, 8),
        *(Shape(2, 8, dtype=dtype, master_weights=own) for dtype in ("bf16", "fp16") for own in (True, False)),
    ],
)
def test_the_state_is_what_training_keeps(shape: Shape) -> None:
    config = parse_descriptor(TINY)
    assert kept(config, shape) == sum(
        each.size * each.dtype.itemsize for each in jax.tree.leaves(state_of(config, shape))
    )


# 6N + 6LCT at the model's longest sequence, computed outside this project from llm.c's sources
@pytest.mark.parametrize(
    ("descriptor", "flops"),
    [("d12", 803_478_528), ("d48", 9_817_977_600), ("gpt3:c384", 212_815_872), ("gpt3:c4096", 41_562_193_920)],
)
def test_flops_per_token_is_llmcs(descriptor: str, flops: int) -> None:
    config = parse_descriptor(descriptor)
    assert flops_per_token(config, config.max_seq_len) == flops


def test_palm_counts_attention_twice() -> None:
    config = parse_descriptor("d12")
    llmc, palm = flops_per_token(config, 512), flops_per_token(config, 512, definition="palm")
    assert palm - llmc == 6 * 12 * 768 * 512
    assert llmc - flops_per_token(config, 0) == 6 * 12 * 768 * 512


def test_flops_are_close_to_the_usual_counts() -> None:
    """6N counts wpe, biases and layernorms as if they were multiplied; attention is counted half or whole."""
    whole = products_flops(D12, Shape(4, 1024)) / 4096
    assert whole == pytest.approx(flops_per_token(D12, 1024, definition="palm"), rel=0.01)
    flash = products_flops(D12, Shape(4, 1024, flash=True)) / 4096  # half of it, and the scores once more
    assert flops_per_token(D12, 1024) < flash < whole


def test_bytes_are_each_array_once() -> None:
    """Counted from the arrays' shapes: B=2 T=8 in bf16, C=32, Vp=384."""
    config, shape = parse_descriptor(TINY), Shape(2, 8, dtype="bf16", recompute=0)
    work = {(each.phase, each.operation, each.layer): each.bytes for each in step_work(config, shape)}
    N, nC = num_parameters(config), 16 * 32
    assert work["forward", "gelu", 1] == 2 * (4 * nC + 4 * nC)
    assert work["backward", "gelu", 1] == 2 * (3 * 4 * nC + 4 * 32)  # with the gradient of the bias before it
    assert work["forward", "qkv", 0] == 2 * (nC + 96 * 32 + 96 + 3 * nC)
    assert work["backward", "qkv", 0] == 2 * (3 * nC + nC + 96 * 32 + nC + 96 * 32)
    assert work["backward", "ln2", 2] == 2 * (4 * nC + 4 * 32) + 4 * 2 * 16
    assert work["forward", "ln2", 2] == 2 * (2 * nC + 2 * 32 + 2 * nC) + 4 * 2 * 16
    assert work["forward", "classifier", None] == 2 * 2 * 16 * 384 + 4 * 3 * 16
    assert work["update", "norm", None] == 2 * N
    assert work["update", "adamw", None] == (2 + 2 * 12 + 2) * N  # the gradient; params, m and v; the copy


def test_how_often_each_runs_on_arrays_of_its_own() -> None:
    """Two micro-batches, and the logits of each in four parts; the update is one, whose norm only reads."""
    shape = Shape(2, 8, micro_batches=2, logit_rows=4)
    work = {(each.phase, each.operation): each for each in step_work(parse_descriptor(TINY), shape)}
    assert work["forward", "gelu"].times == 2
    assert [work[phase, "head"].times for phase in ("forward", "backward")] == [8, 8]
    assert work["forward", "classifier"].times == 8
    assert work["update", "adamw"].times == work["update", "norm"].times == 1
