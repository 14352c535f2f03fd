"""XLA's options for several devices do what they are for: each layer's collective runs beside what follows it."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from benchmarks import aot
from benchmarks.sent import Collective, collectives
from llmc_jax.machine import compiling, deviceless, gpus

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(aot.problem()), reason=aot.problem()),
]

LAYERS, ROWS, WIDTH, DEVICES = 4, 512, 1024, 8
weights = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.bfloat16)
rows = jax.ShapeDtypeStruct((DEVICES * ROWS, WIDTH), jnp.bfloat16)


def send(kind: str, gradient: jax.Array) -> jax.Array:
    if kind == "all-reduce":
        return jax.lax.psum(gradient, "data")
    if kind == "all-to-all":
        return jnp.sum(jax.lax.all_to_all(gradient.reshape(DEVICES, -1), "data", 0, 0), 0)
    return jax.lax.psum_scatter(gradient, "data", tiled=True)


def sent(gpu: str, kind: str, options: compiling.Options) -> list[Collective]:
    """The collectives of a chain of products, whose weights' gradients are summed over devices, then gathered."""

    def step(weights: jax.Array, x: jax.Array) -> list[jax.Array]:
        found = []
        for layer in range(LAYERS):
            with jax.named_scope(f"layer_{layer:02d}"):
                found.append(send(kind, x.T @ x))
                x = jax.nn.gelu(x @ weights[layer])
        if kind == "all-gather":
            found = [jax.lax.all_gather(jnp.tanh(each), "data", tiled=True) for each in found]
        return found

    out = P() if kind in ("all-reduce", "all-gather") else P("data")
    function = jax.shard_map(step, in_specs=(P(), P("data")), out_specs=[out] * LAYERS, check_vma=False)
    mesh = deviceless.gpu_mesh(gpu, (DEVICES,), ("data",))
    program = deviceless.compile_for(
        jax.jit(function), (weights, rows), gpu, mesh=mesh, specs=(P(), P("data")), compiler_options=options
    )
    return [each for each in collectives(program.hlo) if each.kind == kind]


@pytest.mark.parametrize("kind", ["all-reduce", "reduce-scatter", "all-to-all"])
@pytest.mark.parametrize("gpu", ["h200", "a100"])
def test_each_layer_is_sent_while_the_next_are_computed(gpu: str, kind: str) -> None:
    target = gpus.known_target(gpu).architecture
    found = sent(gpu, kind, compiling.overlap(target, DEVICES, {}))
    assert [(each.arrays, each.bytes) for each in found] == [(1, 2 * WIDTH * WIDTH)] * LAYERS
    assert all(each.asynchronous for each in found[:-1])
    assert [each.scopes for each in found] == [(f"layer_{layer:02d}",) for layer in range(LAYERS)]
    for layer, each in enumerate(found[:-1]):
        beside = {operation.scope for operation in each.between if operation.product}
        assert beside >= {f"layer_{later:02d}" for later in range(layer + 1, LAYERS)}


@pytest.mark.parametrize("gpu", ["h200", "a100"])
def test_gathers_are_not_joined(gpu: str) -> None:
    found = sent(gpu, "all-gather", compiling.overlap(gpus.known_target(gpu).architecture, DEVICES, {}))
    assert [each.arrays for each in found] == [1] * LAYERS


def test_without_them_xla_joins_what_layers_send() -> None:
    assert [each.arrays for each in sent("h200", "reduce-scatter", ())] == [LAYERS]
    assert max(each.arrays for each in sent("h200", "all-reduce", ())) > 1
