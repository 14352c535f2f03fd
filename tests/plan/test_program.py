"""Programs' text is read right: places, products, loops, and whose a fusion is."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks.hlo import num_bytes
from benchmarks.launches import launched, moved_bytes
from llmc_jax.machine.hlo import elements
from llmc_jax.plan.program import Place, Program, place_of
from tests.programs import products_flops


@pytest.mark.parametrize(
    ("op_name", "place"),
    [
        ("jit(step_fn)/jvp(forward)/layer_03/qkv/...i,oi->...o/dot_general", Place("forward", "qkv", 3)),
        ("jit(step_fn)/transpose(jvp(backward))/layer_11/ln2/reduce_sum", Place("backward", "ln2", 11)),
        ("jit(step_fn)/forward/embedding/gather", Place("forward", "embedding")),
        ("jit(step_fn)/update/adamw/mul", Place("update", "adamw")),
        ("jit(step_fn)/update/mul", Place("update", "other")),
        ("jit(step_fn)/jvp(forward)/layer_00/slice", Place("forward", "weights", 0)),
        ("jit(step_fn)/jvp()/slice", Place("forward", "weights")),
        ("jit(step_fn)/transpose(jvp())/mul", Place("backward", "other")),
        ("jit(step_fn)/jvp(forward)/while/body/head/dot_general", Place("forward", "head")),
        ("jit(step_fn)/jvp(forward)/backward/head/dot_general", Place("backward", "head")),  # the innermost phase
        ("jit(s)/jvp(forward)/lnf/add;jit(s)/transpose(jvp(backward))/lnf/mul", Place("forward", "lnf")),
        ("jit(step_fn)/backward/layer_07/attention/jit(_where)/select_n", Place("backward", "attention", 7)),
        ("state.params", None),
        ("", None),
    ],
)
def test_places(op_name: str, place: Place | None) -> None:
    assert place_of(op_name) == place


def test_shapes() -> None:
    assert elements("f32[4,64]{1,0}") == 256
    assert num_bytes("bf16[4,64]{1,0}") == 512
    assert num_bytes("(f32[2,3]{1,0}, s8[100]{0}, pred[], u32[])") == 24 + 100 + 1 + 4
    assert num_bytes("f8e4m3fn[8]{0}") == 8


def test_products_of_a_program_with_loops() -> None:
    """(20, 30) times (30, 30) in a loop of 4 within a loop of 7, and (30, 20) times (20, 30) outside."""
    w = jnp.ones((30, 30))

    def inner(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        with jax.named_scope("forward"), jax.named_scope("fc"):
            return jnp.tanh(x @ w), None

    def outer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jax.lax.scan(inner, x, None, length=4)[0], None

    def run(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        with jax.named_scope("backward"), jax.named_scope("qkv"):
            alone = x.T @ x
        return jax.lax.scan(outer, x, None, length=7)[0], alone

    lowered = jax.jit(run).lower(jax.ShapeDtypeStruct((20, 30), jnp.float32))
    inside, outside = 4 * 7 * 2 * 20 * 30 * 30, 2 * 30 * 20 * 30
    before = Program(lowered.as_text(dialect="hlo"))  # without scopes
    assert products_flops(before) == {None: inside + outside}
    compiled = Program(lowered.compile().as_text() or "")
    assert products_flops(compiled) == {Place("forward", "fc"): inside, Place("backward", "qkv"): outside}


HEADER = "HloModule jit_step, is_scheduled=true\n\n"
FUSION = (
    HEADER
    + """%fused (p: f32[8,8], q: f32[8,8]) -> f32[8,8] {
  %p = f32[8,8]{1,0} parameter(0)
  %q = f32[8,8]{1,0} parameter(1)
  %dot.1 = f32[8,8]{1,0} dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="j/forward/layer_00/fc/dot"}
  ROOT %tanh.1 = f32[8,8]{1,0} tanh(%dot.1), metadata={op_name="j/forward/layer_00/gelu/tanh"}
}

ENTRY %main (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8]{1,0} parameter(0), metadata={op_name="x"}
  %c = f32[8,8]{1,0} copy(%x)
  %fusion.1 = f32[8,8]{1,0} fusion(%x, %c), kind=kOutput, calls=%fused, metadata={op_name="j/forward/layer_00/gelu/tanh"}
  ROOT %neg.1 = f32[8,8]{1,0} negate(%fusion.1)
}
"""  # noqa: E501
)


def test_a_fusion_belongs_to_what_does_most_in_it() -> None:
    """1,024 operations of a product against 64 tanh; the root's own scope is the other one."""
    program = Program(FUSION)
    owner = program.owners["fusion.1"]
    assert owner.place == Place("forward", "fc", 0)
    assert owner.mixed == pytest.approx(65 / (1024 + 65))
    assert products_flops(program) == {Place("forward", "fc", 0): 1024}


def test_an_instruction_without_a_scope_belongs_to_its_neighbours() -> None:
    """To who made what it reads, or else to who reads it."""
    owners = Program(FUSION).owners
    assert owners["neg.1"] == owners["fusion.1"]
    assert owners["c"] == owners["fusion.1"]
    assert "x" not in owners


@pytest.mark.parametrize("target", ["__cublas$gemm", "__cublas$lt$matmul"])
def test_a_library_call_is_a_product(target: str) -> None:
    text = (
        HEADER
        + """ENTRY %main (x: bf16[4,6], w: bf16[6,10]) -> bf16[4,10] {
  %x = bf16[4,6]{1,0} parameter(0)
  %w = bf16[6,10]{1,0} parameter(1)
  %gemm.1 = (bf16[4,10]{1,0}, s8[1024]{0}) custom-call(%x, %w), custom_call_target="TARGET", metadata={op_name="j/forward/head/dot"}, backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
  ROOT %out = bf16[4,10]{1,0} get-tuple-element(%gemm.1), index=0
}
"""  # noqa: E501
    )
    program = Program(text.replace("TARGET", target))
    assert products_flops(program) == {Place("forward", "head"): 2 * 4 * 10 * 6}
    (gemm, times), *rest = launched(program)
    assert (gemm.name, times, rest) == ("gemm.1", 1, [])
    assert moved_bytes(program, gemm) == 2 * (4 * 6 + 6 * 10 + 4 * 10)  # without the workspace


PARTS = (
    HEADER
    + """%takes_a_part (p: f32[1000], i: s32[], q: f32[10]) -> (f32[10], f32[1000]) {
  %p = f32[1000]{0} parameter(0)
  %i = s32[] parameter(1)
  %q = f32[10]{0} parameter(2)
  %slice.1 = f32[10]{0} dynamic-slice(%p, %i), dynamic_slice_sizes={10}
  %add.1 = f32[10]{0} add(%slice.1, %q)
  %bitcast.1 = f32[1000]{0} bitcast(%p)
  %update.1 = f32[1000]{0} dynamic-update-slice(%bitcast.1, %add.1, %i)
  ROOT %tuple.1 = (f32[10]{0}, f32[1000]{0}) tuple(%add.1, %update.1)
}

%body (s: (s32[], f32[1000], f32[10])) -> (s32[], f32[1000], f32[10]) {
  %s = (s32[], f32[1000]{0}, f32[10]{0}) parameter(0)
  %n = s32[] get-tuple-element(%s), index=0
  %a = f32[1000]{0} get-tuple-element(%s), index=1
  %b = f32[10]{0} get-tuple-element(%s), index=2
  %part.1 = (f32[10]{0}, f32[1000]{0}) fusion(%a, %n, %b), kind=kLoop, calls=%takes_a_part
  %c = f32[10]{0} get-tuple-element(%part.1), index=0
  %d = f32[1000]{0} get-tuple-element(%part.1), index=1
  ROOT %t = (s32[], f32[1000]{0}, f32[10]{0}) tuple(%n, %d, %c)
}

%condition (s: (s32[], f32[1000], f32[10])) -> pred[] {
  %s.1 = (s32[], f32[1000]{0}, f32[10]{0}) parameter(0)
  ROOT %true = pred[] constant(true)
}

ENTRY %main (x: f32[1000], y: f32[10]) -> f32[1000] {
  %x = f32[1000]{0} parameter(0)
  %y = f32[10]{0} parameter(1)
  %zero = s32[] constant(0)
  %empty.1 = f32[1000]{0} custom-call(), custom_call_target="AllocateBuffer"
  %start.1 = (f32[10]{0}, f32[10]{0}) copy-start(%y)
  %done.1 = f32[10]{0} copy-done(%start.1)
  %first = (s32[], f32[1000]{0}, f32[10]{0}) tuple(%zero, %x, %done.1)
  %while.1 = (s32[], f32[1000]{0}, f32[10]{0}) while(%first), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %last = f32[1000]{0} get-tuple-element(%while.1), index=1
  ROOT %sum.1 = f32[1000]{0} add(%last, %last)
}
"""  # noqa: E501
)


def test_what_is_launched_and_how_often() -> None:
    found = {each.name: times for each, times in launched(Program(PARTS))}
    assert found == {"part.1": 3, "start.1": 1, "sum.1": 1}


def test_of_an_array_only_the_part_that_is_taken_is_moved() -> None:
    """A slice and the index and q read, a slice and the changed part written; an array given twice is read once."""
    program = Program(PARTS)
    assert moved_bytes(program, program.by_name["part.1"]) == 4 * (10 + 1 + 10) + 4 * (10 + 10)
    assert moved_bytes(program, program.by_name["sum.1"]) == 4 * 2000


def test_what_waits_for_its_helpers() -> None:
    line = (
        '  %ynn.1 = f32[] fusion(%x), kind=kCustom, calls=%f, backend_config={"fusion_config":{"kind":"__ynn_fusion"}}'
    )
    program = Program(f"{HEADER}ENTRY %main (x: f32[]) -> f32[] {{\n  %x = f32[] parameter(0)\n{line}\n}}\n")
    assert (program.whole, program.name) == ({"ynn.1"}, "jit_step")
