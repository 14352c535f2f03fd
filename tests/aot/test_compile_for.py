"""`deviceless.compile_for` itself: memory to the byte, several GPUs, and what it refuses."""

import os
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from benchmarks import aot, assembler
from benchmarks.hlo import copied_arrays
from llmc_jax.base.errors import InputError
from llmc_jax.machine import deviceless, gpus
from pallas_kernels.gelu import gelu_forward

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(aot.problem()), reason=aot.problem()),
]

MIB = 2**20
x = jax.ShapeDtypeStruct((MIB,), jnp.float32)


def test_memory_is_exact() -> None:
    """One donated argument of 4 MiB, changed in place; another that is read; a sorted copy in between."""

    def step(state: jax.Array, data: jax.Array) -> jax.Array:
        return state + jnp.sort(data)[::-1]

    program = deviceless.compile_for(jax.jit(step, donate_argnums=0), (x, x), "a100")
    memory = program.memory
    assert (memory.arguments, memory.outputs, memory.aliased) == (8 * MIB, 4 * MIB, 4 * MIB)
    assert memory.temporaries >= 4 * MIB
    assert memory.total >= 12 * MIB
    assert "sm" not in program.target and "add" in program.hlo


def test_what_is_not_donated_is_seen_to_be_copied() -> None:
    def step(state: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(state, jnp.ones(8), (0,))

    kept, donated = jax.jit(step), jax.jit(step, donate_argnums=0)
    assert copied_arrays(deviceless.compile_for(kept, (x,), "h200").hlo, MIB) == [("f32[1048576]", 4 * MIB)]
    assert copied_arrays(deviceless.compile_for(donated, (x,), "h200").hlo, MIB) == []


def test_memory_is_that_of_one_of_several_gpus() -> None:
    mesh = deviceless.gpu_mesh("h200", (8,), ("data",))

    @jax.jit
    def step(state: tuple[jax.Array, jax.Array], scale: jax.Array) -> jax.Array:
        return scale * jnp.sum(state[0] * state[1])

    sharded = deviceless.compile_for(
        step, ((x, x), jax.ShapeDtypeStruct((), jnp.float32)), "h200", mesh=mesh, specs=((P("data"), P()), P())
    )
    assert sharded.memory.arguments == 4 * MIB // 8 + 4 * MIB + 4
    assert "all-reduce" in sharded.hlo
    uniform = deviceless.compile_for(
        step, ((x, x), jax.ShapeDtypeStruct((), jnp.float32)), "h200", mesh=mesh, specs=(P("data"), P())
    )
    assert uniform.memory.arguments == 2 * 4 * MIB // 8 + 4


def test_kernels_are_compiled_for_one_capability_in_a_process() -> None:
    """Programs without kernels may be compiled for any GPU before and after, and H100 and H200 are the same."""
    gelu = jax.jit(partial(gelu_forward, target="sm_90"))
    with assembler.kernel_resources() as kernels:
        deviceless.compile_for(gelu, (x,), "h200")
    assert [kernel.name for kernel in kernels] == ["gelu_forward"]
    assert 0 < kernels[0].registers <= 255 and kernels[0].spilled == 0
    deviceless.compile_for(gelu, (x,), "h100")
    deviceless.compile_for(jnp.sin, (x,), "rtx3090")
    with pytest.raises(InputError, match="start one process per GPU"):
        deviceless.compile_for(jax.jit(partial(gelu_forward, target="sm_80")), (x,), "a100")


def test_every_gpu_is_known_to_the_compiler() -> None:
    for name in gpus.TARGETS:
        assert deviceless.compile_for(jnp.sin, (x,), name).memory.arguments == 4 * MIB


def test_what_was_printed_is_shown_when_compiling_fails(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError), assembler.kernel_resources() as kernels:
        os.write(1, b"printed before")  # as the compiler does
        _ = 1 / 0
    captured = capfd.readouterr()
    assert kernels == [] and captured.out == "" and "printed before" in captured.err
