"""Collectives are found in a program's text in each of XLA's spellings, and what runs beside them.

The texts are lines of programs compiled for 8 GPUs by JAX 0.11.2 and 0.12.0.1, shortened: a training step with one
collective for each layer, and small programs.
"""

import pytest

from benchmarks import sent
from benchmarks.hlo import num_bytes
from benchmarks.sent import Collective, Operation, scope_of, sent_bytes
from llmc_jax.machine.hlo import Module

HEADER = "HloModule jit_step, is_scheduled=true, entry_computation_layout={()->()}, num_partitions=8\n\n"
GROUPS = "channel_id=1, replica_groups=mesh['d'=8] {'d'}, use_global_device_ids=true, dimensions={0}"
CONFIG = 'backend_config={"operation_queue_id":"0","collective_backend_config":{"is_sync":%s,"is_pipelined":false}}'
ASYNC, SYNC = CONFIG % "false", CONFIG % "true"

SUM = """%region_17.18 (a: bf16[], b: bf16[]) -> bf16[] {
  %a = bf16[] parameter(0), metadata={op_name="reduce_scatter"}
  %b = bf16[] parameter(1), metadata={op_name="reduce_scatter"}
  ROOT %add.1 = bf16[] add(%a, %b), metadata={op_name="add" stack_frame_id=12}
}

"""
LAYER_2 = 'metadata={op_name="jit(step)/shard_map/backward/layer_02/reduce/reduce_scatter" scheduling_name="x"}'
# Between start and done: a product, a kernel, a fusion, and what takes no time.
WORK = """  %bitcast.145.0 = bf16[8192,768]{1,0} bitcast(%param.1)
  %custom-call.75 = (bf16[3072,768]{1,0}, s8[4194304]{0}) custom-call(%param.1, %bitcast.145.0), \
custom_call_target="__cublas$lt$matmul", metadata={op_name="jit(step)/shard_map/backward/layer_01/fc/no,ni->oi/dot_\
general" stack_frame_id=182}, backend_config={"gemm_backend_config":{"beta":0}}
  %get-tuple-element.402.0 = bf16[3072,768]{1,0} get-tuple-element(%custom-call.75), index=0
  %mpmd_map.429 = bf16[8192,768]{1,0} custom-call(%param.1), custom_call_target="mosaic_gpu_v2", \
metadata={op_name="jit(step)/shard_map/backward/layer_01/gelu/jit(gelu_backward)/gelu_backward/mpmd_map"}
  %loop_pad_fusion.2 = bf16[7088128]{0} fusion(%get-tuple-element.402.0), kind=kLoop, calls=%fused_pad.2, \
metadata={op_name="jit(step)/shard_map/backward/layer_01/jit(_pad)/pad"}
"""
BETWEEN = (
    Operation("custom-call.75", "custom-call", "__cublas$lt$matmul", "backward/layer_01/fc", True),
    Operation("mpmd_map.429", "custom-call", "mosaic_gpu_v2", "backward/layer_01/gelu/gelu_backward", False),
    Operation("loop_pad_fusion.2", "fusion", "", "backward/layer_01", False),
)


def entry(lines: str, before: str = SUM) -> str:
    """A program whose main computation has two arrays and these lines."""
    return f"""{HEADER}{before}ENTRY %main.0_spmd (param.1: bf16[8192,768], param.2: bf16[7088128]) -> bf16[8] {{
  %param.1 = bf16[8192,768]{{1,0}} parameter(0), metadata={{op_name="x"}}
  %param.2 = bf16[7088128]{{0}} parameter(1)
{lines}
  ROOT %tuple.86.0 = (bf16[8192,768]{{1,0}}) tuple(%param.1)
}}
"""


def only(lines: str, before: str = SUM) -> Collective:
    """The one collective of such a program."""
    (found,) = sent.collectives(entry(lines, before))
    return found


def reduce_scatter(config: str, done_metadata: str = LAYER_2) -> str:
    return f"""  %reduce-scatter-start.2 = ((bf16[7088128]{{0}}), bf16[886016]{{0}}) \
reduce-scatter-start(%param.2), {GROUPS}, to_apply=%region_17.18, {LAYER_2}, {config}
{WORK}  %reduce-scatter-done.2 = bf16[886016]{{0}} reduce-scatter-done(%reduce-scatter-start.2), {done_metadata}
  %late = bf16[8]{{0}} fusion(%reduce-scatter-done.2), kind=kLoop, calls=%fused"""


# ----- asynchronous or not ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "done_metadata", "between"),
    [(ASYNC, LAYER_2, BETWEEN), (SYNC, LAYER_2, ()), (ASYNC, f"{LAYER_2}, {SYNC}", BETWEEN)],
)
def test_a_pair_has_what_is_scheduled_between_its_start_and_its_done(
    config: str, done_metadata: str, between: tuple[Operation, ...]
) -> None:
    """A start that is not marked as synchronous: what else is marked so further down does not count."""
    found = only(reduce_scatter(config, done_metadata))
    assert found == Collective(
        "reduce-scatter", "reduce-scatter-start.2", ("backward/layer_02/reduce",), 2 * 7088128, 1, 8, bool(between),
        between, "main.0_spmd", 1,
    )  # fmt: skip
    assert found.products == bool(between)


@pytest.mark.parametrize(("config", "asynchronous"), [(ASYNC, True), (SYNC, False)])
@pytest.mark.parametrize("where", ["start", "wrapped"])
def test_a_pair_may_wrap_a_computation_with_the_collective(config: str, asynchronous: bool, where: str) -> None:
    """It is found once: what the start calls is not a collective of its own."""
    start, wrapped = (config, "") if where == "start" else ("backend_config={}", f", {config}")
    inside = f"""%async_computation.2 (param_0.338: bf16[7088128]) -> bf16[886016] {{
  %param_0.338 = bf16[7088128]{{0}} parameter(0), metadata={{scheduling_name="param_0.338"}}
  ROOT %reduce_scatter.28.1 = bf16[886016]{{0}} reduce-scatter(%param_0.338), {GROUPS}, to_apply=%region_17.18, \
{LAYER_2}{wrapped}
}}

"""
    found = only(
        f"""  %reduce-scatter-start.2 = ((bf16[7088128]{{0}}), bf16[886016]{{0}}) async-start(%param.2), \
calls=%async_computation.2, {LAYER_2}, {start}
{WORK}  %update = ((bf16[7088128]{{0}}), bf16[886016]{{0}}) async-update(%reduce-scatter-start.2)
  %reduce-scatter-done.2 = bf16[886016]{{0}} async-done(%update), {LAYER_2}
  %late = bf16[8]{{0}} fusion(%reduce-scatter-done.2), kind=kLoop, calls=%fused""",
        SUM + inside,
    )
    expected = ("reduce-scatter", 14176256, 8, ("backward/layer_02/reduce",))
    assert (found.kind, found.bytes, found.devices, found.scopes) == expected
    assert (found.asynchronous, found.between) == (asynchronous, BETWEEN if asynchronous else ())


def test_pairs_that_cross_have_each_their_own_work_and_not_each_other() -> None:
    second = WORK.replace("custom-call.75", "custom-call.76").replace("mpmd_map.429", "mpmd_map.430")
    first, other, alone = sent.collectives(
        entry(f"""  %all-reduce-start = ((f32[]), f32[]) all-reduce-start(%loss), channel_id=1, replica_groups={{}}, \
to_apply=%region, {ASYNC}
{WORK.replace("loop_pad_fusion.2", "loss")}  %all-to-all-start.2 = ((bf16[8,886016]{{1,0}}), bf16[8,886016]{{1,0}}) \
all-to-all-start(%param.2), {GROUPS}, {LAYER_2}, {ASYNC}
{second}  %all-reduce-done = f32[] all-reduce-done(%all-reduce-start)
  %copy-start = (f32[], f32[], u32[]) copy-start(%all-reduce-done)
  %copy-done = f32[] copy-done(%copy-start)
  %psum.4 = f32[] all-reduce(%all-reduce-done), replica_groups={{}}, to_apply=%region, {SYNC}
  %sort.1 = f32[] sort(%all-reduce-done)
  %all-to-all-done.2 = bf16[8,886016]{{1,0}} all-to-all-done(%all-to-all-start.2), {LAYER_2}""")
    )
    names = ["custom-call.75", "mpmd_map.429", "loss", "custom-call.76", "mpmd_map.430", "loop_pad_fusion.2"]
    assert [operation.name for operation in first.between] == names
    assert [operation.name for operation in other.between] == [*names[3:], "sort.1"]
    assert (alone.name, alone.asynchronous) == ("psum.4", False)
    assert (first.kind, first.devices, other.kind, other.arrays) == ("all-reduce", 8, "all-to-all", 1)


def test_a_pair_whose_done_is_in_another_round_of_a_loop_has_all_that_follows() -> None:
    text = "\n".join(line for line in reduce_scatter(ASYNC).splitlines() if "-done" not in line and "late" not in line)
    assert only(text).between == BETWEEN


# ----- bytes and arrays ---------------------------------------------------------------------------------------------


def test_joined_arrays_count_together() -> None:
    name = "jit(step)/shard_map/update/(unit_00/gather/all_gather:unit_01/gather/all_gather)"
    found = only(f"""  %one = bf16[886016]{{0:S(1)}} fusion(%param.1), kind=kLoop, calls=%fused
  %two = bf16[886016]{{0}} fusion(%param.1), kind=kLoop, calls=%fused
  %all-gather-start.2 = ((bf16[886016]{{0:S(1)}}, bf16[886016]{{0}}), (bf16[7088128]{{0:S(1)}}, bf16[7088128]{{0}})) \
all-gather-start(%one, %two), {GROUPS}, metadata={{op_name="{name}" scheduling_name="all-gather-start.2"}}, {ASYNC}
  %all-gather-done.2 = (bf16[7088128]{{0:S(1)}}, bf16[7088128]{{0}}) all-gather-done(%all-gather-start.2)""")
    assert (found.bytes, found.arrays, found.asynchronous, found.between) == (2 * 2 * 7088128, 2, True, ())
    assert found.scopes == ("update/unit_00/gather", "update/unit_01/gather")


def test_all_reduces_that_are_copied_together_are_as_many_as_have_named_it() -> None:
    name = "jit(body)/shard_map/backward/(layer_00/reduce/psum:layer_01/reduce/psum)"
    found = only(f"""  %wrapped_concatenate = bf16[14176256]{{0}} fusion(%param.2, %param.2), kind=kLoop, calls=%wrapped
  %psum.3 = bf16[14176256]{{0}} all-reduce(%wrapped_concatenate), channel_id=1, replica_groups=mesh['d'=8] {{'d'}}, \
use_global_device_ids=true, to_apply=%region_17.18, metadata={{op_name="{name}"}}, {SYNC}""")
    assert (found.bytes, found.arrays) == (2 * 14176256, 2)
    assert found.scopes == ("backward/layer_00/reduce", "backward/layer_01/reduce")


def test_an_all_to_all_in_pieces_is_one_array() -> None:
    """As on CPUs: an operand for each device."""
    pieces = "\n".join(f"  %piece.{i} = f32[1,128]{{1,0}} slice(%param.1), slice={{[{i}:8]}}" for i in range(8))
    names = ", ".join(f"%piece.{i}" for i in range(8)).replace("%piece.5", "/*index=5*/%piece.5")
    shapes = ", ".join(["f32[1,128]{1,0}"] * 8)
    found = only(f"{pieces}\n  %all-to-all = ({shapes}) all-to-all({names}), replica_groups=mesh['d'=8] {{'d'}}")
    assert (found.bytes, found.arrays, found.devices, found.asynchronous) == (8 * 128 * 4, 1, 8, False)
    whole = only(f"  %both = (bf16[8]{{0}}, bf16[8]{{0}}) all-to-all(%param.2, %param.2), {GROUPS}")
    assert whole.arrays == 2


@pytest.mark.parametrize(
    ("kind", "sent"),
    [
        ("all-reduce", 2 * 700), ("reduce-scatter", 700), ("all-gather", 700), ("all-to-all", 700),
        ("collective-permute", 800),
    ],
)  # fmt: skip
def test_what_each_device_sends(kind: str, sent: int) -> None:
    assert sent_bytes(Collective(kind, "", (), 800, 1, 8, False, (), "", 1)) == sent
    if kind != "collective-permute":
        assert sent_bytes(Collective(kind, "", (), 800, 1, 1, False, (), "", 1)) == 0


def test_the_larger_side_counts() -> None:
    sides = {"all-reduce": 16, "reduce-scatter": 16, "all-to-all": 16, "collective-permute": 16, "all-gather": 128}
    for kind, expected in sides.items():
        line = f"  %in = f32[4]{{0}} fusion(%param.1), kind=kLoop, calls=%f\n  %it = f32[1]{{0}} {kind}(%in), {GROUPS}"
        assert only(line).bytes == expected, kind


@pytest.mark.parametrize(
    ("groups", "devices"),
    [
        ("replica_groups=mesh['d'=8] {'d'}", 8),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}", 4),
        ("replica_groups=mesh['a'=2,'b'=4] {'a','b'}", 8),
        ("replica_groups=mesh['a'=2,'b'=4], device_ids=(0,4,1,5,2,6,3,7) {'a','b':(1)2}", 4),
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", 2),
        ("replica_groups=[2,4]<=[8]", 4),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", 4),
        ("replica_groups={}", 8),
        ("to_apply=%region_17.18", 8),
    ],
)
def test_devices_of_a_group(groups: str, devices: int) -> None:
    found = only(f"  %psum.1 = bf16[7088128]{{0}} all-reduce(%param.2), {groups}, dimensions={{0}}")
    assert found.devices == devices


def test_groups_in_another_spelling_are_refused() -> None:
    with pytest.raises(ValueError, match=r"psum.1.*tiles"):
        only("  %psum.1 = bf16[7088128]{0} all-reduce(%param.2), replica_groups=tiles(2,4)")


def test_devices_that_pass_an_array_on() -> None:
    pairs = "{{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}"
    found = only(f"  %p = bf16[7088128]{{0}} collective-permute(%param.2), source_target_pairs={pairs}, {SYNC}")
    assert (found.kind, found.devices, found.bytes, found.asynchronous) == ("collective-permute", 8, 14176256, False)


# ----- where --------------------------------------------------------------------------------------------------------

LOOP = """%body (param: (s32[], bf16[512,512])) -> (s32[], bf16[512,512]) {
  %param = (s32[], bf16[512,512]{1,0}) parameter(0)
  %get-tuple-element.26 = bf16[512,512]{1,0} get-tuple-element(%param), index=1
  %all-reduce-start = ((bf16[512,512]{1,0}), bf16[512,512]{1,0}) all-reduce-start(%get-tuple-element.26), \
replica_groups=mesh['a'=2,'b'=4] {'a'}, to_apply=%region_17.18, metadata={op_name="jit(f)/while/body/reduce/psum"}
  %gemm_fusion_dot = bf16[512,512]{1,0} fusion(%get-tuple-element.26), kind=kCustom, calls=%fused_dot, \
backend_config={"fusion_backend_config":{"kind":"__triton_nested_gemm_fusion"}}
  %all-reduce-done = bf16[512,512]{1,0} all-reduce-done(%all-reduce-start)
  ROOT %tuple.14 = (s32[], bf16[512,512]{1,0}) tuple(%all-reduce-done, %all-reduce-done)
}

%condition (param.1: (s32[], bf16[512,512])) -> pred[] {
  %param.1 = (s32[], bf16[512,512]{1,0}) parameter(0)
  ROOT %loop_compare_fusion = pred[] fusion(%param.1), kind=kLoop, calls=%fused_compare
}

%fused_dot (param_0: bf16[512,512]) -> bf16[512,512] {
  %param_0 = bf16[512,512]{1,0} parameter(0)
  ROOT %dot.1 = bf16[512,512]{1,0} dot(%param_0, %param_0), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

"""
WHILE = """  %while.9 = (s32[], bf16[512,512]{1,0}) while(%param.1), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"5"}}"""


def test_one_in_a_loop_runs_as_often_as_the_loop() -> None:
    found = only(WHILE, SUM + LOOP)
    assert (found.computation, found.times, found.devices, found.scopes) == ("body", 5, 2, ("while/body/reduce",))
    assert found.between == (Operation("gemm_fusion_dot", "fusion", "__triton_nested_gemm_fusion", "", True),)


def test_one_that_nothing_calls_does_not_run() -> None:
    assert sent.collectives(entry(WHILE.replace("body=%body", "body=%condition"), SUM + LOOP)) == []


@pytest.mark.parametrize(
    ("op_name", "scope"),
    [
        ("jit(step)/shard_map/backward/layer_02/reduce/reduce_scatter", "backward/layer_02/reduce"),
        ("jit(step)/shard_map/backward/layer_00/fc/no,ni->oi/dot_general", "backward/layer_00/fc"),
        ("jit(step)/jit(main)/update/jit(_pad)/pad;jit(step)/forward/add", "update"),
        ("jit(step)/psum", ""), ("x", ""), ("", ""),
    ],
)  # fmt: skip
def test_scopes(op_name: str, scope: str) -> None:
    assert scope_of(op_name) == scope


def test_bytes_of_shapes() -> None:
    shape = "((bf16[8]{0:S(1)}), bf16[64,2]{1,0:T(8,128)}, pred[3], token[], f8e4m3fn[5], u32[])"
    assert num_bytes(shape) == 16 + 256 + 3 + 0 + 5 + 4
    name = "all-gather-start.2"
    line = f"  %{name} = ((bf16[8]{{0:S(1)}}), bf16[64]{{0:S(1)}}) all-gather-start(%param.2), dimensions={{0}}"
    assert Module(entry(line)).by_name[name].opcode == "all-gather-start"
