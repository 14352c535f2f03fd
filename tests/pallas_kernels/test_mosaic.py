"""The grid of a launch: which axis is CUDA's x, and that batches of millions of tokens fit into it."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jaxlib.mlir import ir

from llmc_jax import deviceless
from pallas_kernels import adamw, classifier, embedding, gelu, layernorm, mosaic, softmax
from tests.aot.cases import Vp

TOKENS = 2**22  # of a micro-batch: its logits alone are more than any card of today holds
C = 128


def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def launched(lowered: Any) -> list[tuple[int, ...]]:
    """The grids (x, y, z) of a program's Mosaic kernels, from the modules that the compiler gets."""
    modules: list[bytes] = []

    def visit(operation: Any) -> ir.WalkResult:
        if operation.name == "stablehlo.custom_call" and "mosaic_gpu" in str(operation.attributes["call_target_name"]):
            modules.append(ir.StringAttr(operation.attributes["mhlo.backend_config"]["module"]).value_bytes)
        return ir.WalkResult.ADVANCE

    lowered.compiler_ir().operation.walk(visit)
    context = ir.Context()
    context.allow_unregistered_dialects = True
    grids = []
    for module in modules:
        text = str(ir.Module.parse(module, context=context))
        constants = dict(re.findall(r'(%\d+) = "\S+arith\.constant"\(\) \{value = (\d+) : index\}', text))
        [operands] = re.findall(r'gpu\.launch"\(%\d+, (%\d+), (%\d+), (%\d+),', text)
        grids.append(tuple(int(constants[name]) for name in operands))
    return grids


def test_the_last_axis_is_cuda_s_x() -> None:
    """Windows of 32 tokens in each of two blocks of columns, and the blocks of the positions' sums."""
    given = array(TOKENS // 1024, 1024, 2048), array(TOKENS // 1024, 1024, dtype=jnp.int32), array(Vp, 2048)
    lowered = deviceless.lower_for(embedding.embedding_backward, given, "h200")
    windows = (TOKENS // 32, 2, 1)
    assert launched(lowered) == [windows, windows, (1024 * 2048 // 1024, 1, 1)]


rows, weights, fp32_rows = array(TOKENS, C), array(C), array(TOKENS, dtype=jnp.float32)
CALLS: dict[str, Callable[[], Any]] = {
    "embedding": lambda: jax.eval_shape(
        embedding.embedding_backward, array(TOKENS, 1, C), array(TOKENS, 1, dtype=jnp.int32), array(256, C)
    ),
    "layernorm": lambda: jax.eval_shape(layernorm.layernorm_forward, rows, weights, weights),
    "layernorm's backward": lambda: jax.eval_shape(
        layernorm.layernorm_backward, rows, rows, weights, fp32_rows, fp32_rows
    ),
    "gelu": lambda: jax.eval_shape(gelu.gelu_forward, array(TOKENS, 4 * 1600)),
    "classifier": lambda: jax.eval_shape(
        partial(classifier.classifier, vocab_size=50257), array(TOKENS, Vp), array(TOKENS, dtype=jnp.int32), fp32_rows
    ),
    "softmax": lambda: jax.eval_shape(partial(softmax.softmax_forward, scale=1.0), array(2**18, 16, 64, 64)),
    "the norm": lambda: jax.eval_shape(adamw.global_norm, array(2**33)),
}


@pytest.mark.parametrize("kernel", CALLS)
def test_a_batch_of_four_million_tokens_fits_into_the_grid(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []
    check = mosaic._check_grid

    def noting(name: str, grid: Any, grid_names: Any) -> None:
        check(name, grid, grid_names)
        seen.append(tuple(grid))

    monkeypatch.setattr(mosaic, "_check_grid", noting)
    CALLS[kernel]()
    assert seen


@pytest.mark.parametrize(
    ("grid", "axis", "size", "limit"),
    [
        ((65_536, 1), "b", "65,536", "65,535"),
        ((65_536, 1, 1), "a", "65,536", "65,535"),
        ((2**31,), "c", "2,147,483,648", "2,147,483,647"),
    ],
)
def test_a_grid_that_cuda_would_not_launch_is_refused(grid: tuple[int, ...], axis: str, size: str, limit: str) -> None:
    names = ("a", "b", "c")[-len(grid) :]
    with pytest.raises(ValueError, match=rf"some_kernel: {size} .*'{axis}'.* {limit}"):
        mosaic._check_grid("some_kernel", grid, names)
    largest = (2**31 - 1,) if len(grid) == 1 else grid[::-1]  # as many blocks on the last axis are none too many
    mosaic._check_grid("some_kernel", largest, names)
