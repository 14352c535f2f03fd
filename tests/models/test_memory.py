"""The memory of a step: what is kept against the model's own forward, and what fits, or is refused with advice."""

from dataclasses import replace
from typing import Any

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc_jax.config.model import Attention, ModelConfig, parse_descriptor
from llmc_jax.machine.gpus import card_memory_bytes
from llmc_jax.models.gpt2 import model as gpt2
from llmc_jax.models.layout import flat_size, views
from llmc_jax.models.memory import (
    chosen_logit_rows,
    estimated_step_bytes,
    kept_in_a_layer,
    required_memory_bytes,
)
from llmc_jax.models.work import Shape, array_bytes
from llmc_jax.plan.moments import kept_for_backward

GIB = 2**30
D12 = parse_descriptor("d12")
SMALL = ModelConfig(max_seq_len=64, vocab_size=257, padded_vocab_size=384, num_layers=3, num_heads=4, channels=32)
FEWER = replace(SMALL, mlp_channels=96, attention=Attention(window=4, kv_heads=2))  # keys and values


def kept_by_the_model(config: ModelConfig, shape: Shape) -> list[int]:
    """Bytes of each array that the model's own forward pass keeps for its backward."""
    execution = gpt2.Execution(recompute=shape.recompute, recompute_blocks=shape.recompute_blocks)
    dtype = {"fp32": "float32", "bf16": "bfloat16"}[shape.dtype]
    kept = jax.eval_shape(
        lambda flat, tokens: gpt2.forward_stream(views(flat, config), tokens, config, execution)[1],
        jax.ShapeDtypeStruct((flat_size(config),), dtype), jax.ShapeDtypeStruct((shape.batch, shape.sequence), "int32"),
    )  # fmt: skip
    return sorted(each.size * each.dtype.itemsize for each in jax.tree.leaves(kept))


def at_the_end(config: ModelConfig, shape: Shape) -> list[int]:
    """Bytes of each array that is kept behind the layers."""
    return [array_bytes(name, config, shape) for name in ("residual", "lnf_mean", "lnf_rstd")]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("recompute", [0, 1, 2])
@pytest.mark.parametrize("config", [SMALL, FEWER], ids=["GPT-2", "KV2, F96"])
def test_activations_are_what_the_model_keeps(config: ModelConfig, recompute: int, dtype: str) -> None:
    shape = Shape(2, 16, recompute=recompute, dtype=dtype)
    inside = kept_in_a_layer(config, shape, recompute)
    assert sorted([*inside.values()] * 3 + at_the_end(config, shape)) == kept_by_the_model(config, shape)
    assert inside["qkv"] == 2 * 16 * (32 + 2 * config.kv_heads * 8) * shape.element


@pytest.mark.parametrize("blocks", [1, 2, 3, 5])
def test_recomputing_whole_blocks_keeps_one_stream_a_stretch(blocks: int) -> None:
    shape = Shape(2, 16, recompute_blocks=blocks)
    kept = kept_for_backward(SMALL, shape)
    assert kept + sum(at_the_end(SMALL, shape)) == sum(kept_by_the_model(SMALL, shape))
    assert kept == -(-3 // blocks) * 4 * 2 * 16 * 32


def test_attention_without_its_matrix_keeps_a_float_a_row() -> None:
    assert kept_in_a_layer(D12, Shape(4, 1024, flash=True, dtype="bf16"), 1)["att"] == 4 * 12 * 1024 * 4


# ----- whether it fits ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "bytes_per_parameter"),
    [
        # parameters, m and v, gradient, the step's slices of the weights, and the sum of several gradients
        ({}, 4 + 8 + 4 + 4),
        ({"master_weights": False}, 4 + 8 + 4 + 4),
        ({"micro_batches": 3}, 4 + 8 + 4 + 4 + 4),
        ({"buffers": 1}, 4 + 4 + 4 + 4),  # of an optimizer that keeps one buffer
        ({"dtype": "bf16"}, (4 + 2) + 8 + 2 + 2),
        ({"dtype": "bf16", "master_weights": False}, 2 + 8 + 2 + 2),
        ({"dtype": "bf16", "micro_batches": 3}, (4 + 2) + 8 + 2 + 2 + 4),
    ],
)
def test_state_by_precision(change: dict[str, Any], bytes_per_parameter: int) -> None:
    assert required_memory_bytes(SMALL, Shape(2, 16)._replace(**change)).state == bytes_per_parameter * flat_size(SMALL)


def test_activations_by_precision_blocks_and_rows_of_logits() -> None:
    """Of a layer C, 3C, C, C and 4C values a token; with the T x T matrix a row of it for each head."""
    n, row, logits = 2 * 16, 2 * 16 * 10 * 32, 2 * 16 * 384

    def needed(**change: Any) -> int:
        return required_memory_bytes(SMALL, Shape(2, 16, flash=True)._replace(**change)).activations

    assert needed() == needed(recompute=0) == 4 * (3 * row + logits)
    assert needed(flash=False) - needed() == 4 * 3 * 2 * 4 * 16 * 16
    assert needed(dtype="bf16") == 2 * (3 * row + logits)
    assert needed(logit_rows=8) == 4 * (3 * row + 8 * 384)
    assert needed(logit_rows=1000) == needed()  # there are only 32 rows
    # the inputs of the blocks that are kept, and one stretch of blocks with everything
    assert needed(recompute_blocks=1) == 4 * (3 * n * 32 + row + logits)
    assert needed(recompute_blocks=2) == 4 * (2 * n * 32 + 2 * row + logits)
    assert needed(recompute_blocks=3) == needed(recompute_blocks=99) == 4 * (n * 32 + 3 * row + logits)


@pytest.mark.parametrize("batch", [1, 2, 64])
def test_the_gradient_takes_the_place_of_activations(batch: int) -> None:
    """It is complete when they are gone: the larger of the two is needed, not both."""
    need = required_memory_bytes(SMALL, Shape(batch, 16))
    assert need.gradient == 4 * flat_size(SMALL)
    assert need.total == need.state - need.gradient + max(need.gradient, need.activations)
    split = required_memory_bytes(SMALL, Shape(batch, 16, devices=8, stage=1))
    assert split.gradient == need.gradient // 8


L12 = ModelConfig(1024, 50257, 50304, num_layers=12, num_heads=25, channels=1600)  # as wide as GPT-2 1558M


@pytest.mark.parametrize(
    ("model", "change", "compiled"),
    [
        (D12, {"batch": 64, "stage": 0}, 24_000_845_144),
        (D12, {"batch": 64, "stage": 1}, 22_693_387_348),
        (D12, {"batch": 64, "stage": 1, "micro_batches": 4}, 23_193_389_772),
        (D12, {"batch": 64, "stage": 2, "micro_batches": 4}, 22_757_740_748),
        # few activations, much of a gradient
        (L12, {"batch": 4, "recompute": 2, "devices": 1}, 8_199 * 2**20),
        (L12, {"batch": 4, "recompute": 2, "stage": 0}, 8_175 * 2**20),
        (L12, {"batch": 4, "recompute": 2, "stage": 1}, 3_624 * 2**20),
        (L12, {"batch": 4, "recompute": 2, "stage": 1, "micro_batches": 2}, 5_311 * 2**20),
        (L12, {"batch": 4, "recompute": 2, "stage": 2, "micro_batches": 2}, 3_832 * 2**20),
        (L12, {"batch": 4, "recompute": 2, "stage": 0, "micro_batches": 2, "sums": 2}, 12_336 * 2**20),
        (L12, {"batch": 4, "recompute": 2, "stage": 1, "micro_batches": 2, "sums": 2}, 8_387 * 2**20),
    ],
)
def test_a_step_over_8_gpus_takes_no_less_than_needed(
    model: ModelConfig, change: dict[str, int], compiled: int
) -> None:
    """compiled: arguments and temporaries on each H200 at T=1024 in bf16, as JAX 0.12.0.1 compiles it."""
    shape = Shape(sequence=1024, dtype="bf16", flash=True, **{"devices": 8, **change})  # type: ignore[arg-type]
    assert 0.7 * compiled < required_memory_bytes(model, shape, sliced_weights=False).total <= compiled


def test_numbers_are_python_ints_of_any_size() -> None:
    need = required_memory_bytes(parse_descriptor("gpt3:c12288"), Shape(10**9, 2048))
    assert type(need.state) is int and type(need.activations) is int
    assert need.activations > 2**64


# ----- rows of logits -----------------------------------------------------------------------------------------------


def on_a_gpu(batch: int, recompute: int) -> Shape:
    """With our kernels, at T=1024."""
    return Shape(batch, 1024, recompute=recompute, dtype="bf16", flash=True)


@pytest.mark.parametrize(
    ("batch", "recompute", "rows", "compiled"),
    [
        (64, 0, 0, 28_325_554_264),
        (64, 0, 32_768, 24_986_380_656),
        (64, 0, 8192, 22_513_838_448),
        (64, 1, 0, 23_941_559_384),
        (64, 2, 0, 21_480_456_280),
    ],
)
def test_a_step_takes_no_more_than_estimated(batch: int, recompute: int, rows: int, compiled: int) -> None:
    """compiled: arguments and temporaries of d12 at T=1024 as JAX 0.12.0.1 compiles it for an H200."""
    shape = on_a_gpu(batch, recompute)._replace(logit_rows=rows)
    assert compiled <= estimated_step_bytes(D12, shape) <= 1.4 * compiled


@pytest.mark.parametrize(
    ("card", "model", "batch", "recompute", "rows"),
    [
        ("NVIDIA H200", "d12", 64, 0, 0),
        ("NVIDIA H200", "d48", 16, 0, 0),
        ("NVIDIA H200", "d48", 40, 0, 8192),
        ("NVIDIA A100-SXM4-80GB", "d24", 64, 0, 32_768),
        ("NVIDIA A100-SXM4-80GB", "d24", 64, 1, 0),
        ("NVIDIA GeForce RTX 4090", "d12", 64, 1, 16_384),
        ("NVIDIA GeForce RTX 4090", "d12", 4, 0, 0),
        ("NVIDIA GeForce RTX 4090", "d48", 4, 0, 8192),  # which does not fit either: its message is check_fits' affair
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", "d12", 4, 0, 8192),  # nothing says how much memory it has
    ],
)
def test_as_many_rows_of_logits_as_a_card_s_memory_has_room_for(
    card: str, model: str, batch: int, recompute: int, rows: int
) -> None:
    assert chosen_logit_rows(parse_descriptor(model), on_a_gpu(batch, recompute), card_memory_bytes(card)) == rows


@given(st.integers(1, 200), st.integers(0, 2), st.integers(10**9, 10**12), st.integers(10**9, 10**12))
def test_more_memory_never_makes_the_chunks_smaller(batch: int, recompute: int, memory: int, other: int) -> None:
    def rows(memory: int) -> int:
        return chosen_logit_rows(D12, on_a_gpu(batch, recompute), memory) or batch * 1024

    few, many = sorted((memory, other))
    assert rows(few) <= max(rows(many), 8192)
    assert rows(few) >= 8192 or rows(few) == batch * 1024
