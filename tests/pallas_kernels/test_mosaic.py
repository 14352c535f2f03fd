"""The grid of a launch, and what the functions written in MLIR do, which interpret mode does not run."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic import gpu as mgpu
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func

from llmc_jax.machine import deviceless
from pallas_kernels import adamw, classifier, embedding, gelu, layernorm, mosaic, softmax
from tests.aot.cases import Vp
from tests.pallas_kernels.test_attention_layout import elements

TOKENS = 2**22  # of a micro-batch: its logits alone are more than any card of today holds
C = 128


def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


class Launch(NamedTuple):
    """How a kernel is launched."""

    grid: tuple[int, ...]  # x, y, z
    threads: int  # of a block
    shared_memory: int  # bytes of a block


def launches(lowered: Any) -> list[Launch]:
    """Those of a program's Mosaic kernels, from the modules that the compiler gets."""
    modules: list[bytes] = []

    def visit(operation: Any) -> ir.WalkResult:
        if operation.name == "stablehlo.custom_call" and "mosaic_gpu" in str(operation.attributes["call_target_name"]):
            modules.append(ir.StringAttr(operation.attributes["mhlo.backend_config"]["module"]).value_bytes)
        return ir.WalkResult.ADVANCE

    lowered.compiler_ir().operation.walk(visit)
    context = mlir.make_ir_context()
    mgpu.dialect.register_dialect(context)
    context.allow_unregistered_dialects = True
    found = []
    for module in modules:
        text = str(ir.Module.parse(module, context=context))
        constants = dict(re.findall(r'(%\d+) = "\S+arith\.constant"\(\) \{value = (\d+) : \w+\}', text))
        [operands] = re.findall(r'gpu\.launch"\(%\d+, ([^)]*)\)', text)
        numbers = [int(constants[name]) for name in operands.split(", ")]
        found.append(Launch(tuple(numbers[:3]), numbers[3] * numbers[4] * numbers[5], numbers[6]))
    return found


def test_the_last_axis_is_cuda_s_x() -> None:
    """Windows of 32 tokens in each of two blocks of columns, and the blocks of the positions' sums."""
    given = array(TOKENS // 1024, 1024, 2048), array(TOKENS // 1024, 1024, dtype=jnp.int32), array(Vp, 2048)
    lowered = deviceless.lower_for(embedding.embedding_backward, given, "h200")
    windows = (TOKENS // 32, 2, 1)
    assert [launch.grid for launch in launches(lowered)] == [windows, windows, (1024 * 2048 // 1024, 1, 1)]


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


@pytest.mark.parametrize(("nproc", "pjrt_nproc", "threads"), [("", "", 2), ("8", "", 8), ("8", "3", 3)])
def test_warpgroups_that_would_wait_for_ever_are_not_interpreted(
    nproc: str, pjrt_nproc: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPROC", nproc)
    monkeypatch.setenv("PJRT_NPROC", pjrt_nproc)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1}, raising=False)
    make = partial(mosaic.kernel, lambda *_: None, name="some_kernel", out_type=array(1), grid=(1,), grid_names=("a",))
    make(warpgroups=threads - 1, interpret=True)
    make(warpgroups=threads, interpret=False)
    with pytest.raises(RuntimeError, match=rf"some_kernel: .* {threads} warpgroups .*has {threads}: .*NPROC=8"):
        make(warpgroups=threads, interpret=True)


# ----- registers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vector", [1, 2, 4, 8])
def test_a_flat_layout_s_registers_are_a_row_for_each_warp(vector: int) -> None:
    """Thread t holds the elements from t `vector` on: what `by_warp` relies on."""
    shape = 4, 32 * vector
    held = elements(mosaic.row_layout(shape[1], vector).to_mgpu(), shape)  # (1, 4 warps, 32 lanes, vector, 2)
    assert held.shape == (1, 4, 32, vector, 2)
    flat = held[..., 0] * shape[1] + held[..., 1]
    np.testing.assert_array_equal(flat.reshape(-1), np.arange(4 * 32 * vector))


def run(operations: Any, given: np.ndarray) -> np.ndarray:
    """What a few of MLIR's operations on one vector compute; the last one's result."""
    dtypes = {"i32": "<i4", "f32": "<f4"}
    values: dict[Any, np.ndarray] = {}
    for operation in operations:
        inputs = [values.get(operand, given) for operand in operation.operands]
        match operation.name:
            case "vector.bitcast":
                result = inputs[0].view(dtypes[str(ir.VectorType(operation.result.type).element_type)])
            case "arith.constant":
                [number] = set(ir.DenseIntElementsAttr(operation.attributes["value"]))
                result = np.int32(number)
            case "arith.shli":
                result = inputs[0] << inputs[1]
            case "arith.andi":
                result = inputs[0] & inputs[1]
            case "vector.shuffle":
                result = np.concatenate(inputs)[list(ir.DenseI64ArrayAttr(operation.attributes["mask"]))]
        values[operation.result] = result
    return result


@pytest.mark.parametrize("count", [2, 4, 8])
def test_bf16_registers_are_widened(count: int) -> None:
    given = np.asarray(jnp.array([1.5, -0.0, 3.4e38, 1e-40, -jnp.inf, 7.0, -2.25, 1e-3], jnp.bfloat16)[:count])
    with mlir.make_ir_context(), ir.Location.unknown():
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):
            register = ir.VectorType.get((count,), ir.BF16Type.get())
            function = func.FuncOp("widen", ([register], []))
            with ir.InsertionPoint(function.add_entry_block()):
                mosaic._widened_register(function.arguments[0])
        widened = run(function.entry_block.operations, given)
    assert widened.dtype == np.float32
    np.testing.assert_array_equal(widened, given.astype(np.float32))
