"""benchmarks/step_table.py: which group a kernel belongs to, what it costs, and what is kept and shown."""

from pathlib import Path

import pytest

from benchmarks import step_table
from benchmarks.step_table import GROUPS, Facts, Group, Table, make_table
from llmc_jax.base.errors import InputError
from llmc_jax.config.model import parse_descriptor
from llmc_jax.models.work import Shape, step_work

MODEL = parse_descriptor("L1-NH2-C128-V200-T64")
SHAPE = Shape(4, 64, dtype="bf16", flash=True)  # 256 rows
RATES = step_table.rates_of("h200", "bf16")
H200 = step_table.hardware_of("h200", "bf16")
GAP, LEAST = H200.gap.typical, H200.least
FORWARD, BACKWARD = "jit(step_fn)/jvp(forward)/layer_00", "jit(step_fn)/transpose(jvp(backward))/layer_00"


def line(shape: str, call: str, op_name: str, rest: str = "") -> str:
    return f'{shape} {call}, metadata={{op_name="{op_name}"}}{rest}'


def ours(operand: str, op_name: str) -> str:
    return line("bf16[256,128]{1,0}", f'custom-call(%{operand}), custom_call_target="mosaic_gpu_v2"', op_name)


def total(operand: str, shape: str, op_name: str) -> str:
    return line(shape, f"reduce(%{operand}, %zero)", op_name)


LIBRARY = 'custom-call(%x, %w), custom_call_target="__cublas$lt$matmul"'
GEMM = '{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]},"epilogue":"BIAS"}'
KERNELS = {
    "products forward": line(
        "bf16[256,512]{1,0}", LIBRARY, f"{FORWARD}/fc/dot_general", f', backend_config={{"gemm_backend_config":{GEMM}}}'
    ),
    "bias additions": line("bf16[256,128]{1,0}", "add(%x, %x)", f"{FORWARD}/qkv/add"),
    "bias gradients": total("x", "f32[128]{0}", f"{BACKWARD}/qkv/reduce_sum"),
    "sums of partial sums": total("partial", "f32[128]{0}", f"{BACKWARD}/fc/reduce_sum"),
    "attention forward": ours("x", f"{FORWARD}/attention/attention_forward/map"),
    "delta of attention": total("x", "f32[4,64,2]{2,1,0}", f"{BACKWARD}/attention/reduce_sum"),
    "attention backward": ours("x", f"{BACKWARD}/attention/attention_dq/map"),
    "layernorm forward": ours("x", f"{FORWARD}/ln1/layernorm_forward/map"),
    "layernorm backward": ours("x", f"{BACKWARD}/ln2/layernorm_backward/map"),
    "GELU forward": ours("x", f"{BACKWARD}/gelu/gelu_forward/map"),  # computed again
    "GELU backward": ours("x", f"{BACKWARD}/gelu/gelu_backward/map"),
    "slices of weights": line("bf16[128]{0}", "slice(%flat), slice={[0:128]}", "jit(step_fn)/jvp()/slice"),
    "AdamW": ours("flat", "jit(step_fn)/update/adamw/adamw_update/map"),
    "other": "f32[256,128]{1,0} copy(%wide)",
}
HEAD = """HloModule jit_step_fn, is_scheduled=true

ENTRY %main (x: bf16[256,128], w: bf16[512,128], partial: f32[16,128], flat: bf16[1000], wide: f32[9]) -> f32[9] {
  %x = bf16[256,128]{1,0} parameter(0)
  %w = bf16[512,128]{1,0} parameter(1)
  %partial = f32[16,128]{1,0} parameter(2)
  %flat = bf16[1000]{0} parameter(3)
  %wide = f32[256,128]{1,0} parameter(4)
  %zero = f32[] constant(0)
"""
PROGRAM = HEAD + "".join(f"  %k.{place} = {text}\n" for place, text in enumerate(KERNELS.values())) + "}\n"


@pytest.fixture(scope="module")
def table() -> Table:
    return make_table("a case", "0.0", PROGRAM, "h200", MODEL, SHAPE)


def test_every_kernel_is_in_its_group(table: Table) -> None:
    assert tuple(table.groups) == GROUPS
    assert {name: group.kernels for name, group in table.groups.items() if group.kernels} == dict.fromkeys(KERNELS, 1)
    assert table.total.kernels == len(KERNELS)
    assert table.tokens == 256


def test_bytes_and_seconds(table: Table) -> None:
    moved = table.groups["bias additions"].bytes
    assert moved == 2 * 2 * 256 * 128
    assert table.groups["bias additions"].seconds == LEAST + GAP > moved / RATES["memory"]
    product = table.groups["products forward"]
    assert product.flops == 2 * 256 * 512 * 128
    assert product.bytes == 2 * (256 * 128 + 512 * 128 + 256 * 512)
    assert product.seconds > product.flops / RATES["products"] + GAP


def test_kernels_that_write_parts_count_as_the_calculator_says(table: Table) -> None:
    work = {(each.phase, each.operation): each for each in step_work(MODEL, SHAPE)}
    for name, key in step_table.KNOWN_BYTES.items():
        assert table.groups[name].bytes == work[key].bytes
    attention = work["backward", "attention"]
    assert table.groups["attention backward"].flops == attention.flops
    slow = make_table("a case", "0.0", PROGRAM, "h200", MODEL, SHAPE, "300,1e-6")
    assert slow.groups["attention backward"].seconds == GAP + attention.flops / 1e6


def test_facts(table: Table) -> None:
    assert table.facts == Facts(copies=[], wide=["k.13 f32[256,128]"], epilogues={"BIAS": 1})
    large = PROGRAM.replace("f32[256,128]", "f32[256,1280]")
    found = make_table("a case", "0.0", large, "h200", MODEL, SHAPE).facts
    assert found.copies == ["f32[256,1280]"]


@pytest.mark.parametrize("text", ["300", "a,b", "1,2,3"])
def test_rates_that_are_none(text: str) -> None:
    with pytest.raises(InputError, match="--attention"):
        step_table.rates_of("h200", "bf16", text)
    assert step_table.rates_of("h200", "bf16", "300,250")["attention_backward"] == 250e12


def test_what_is_kept_is_what_was_found(table: Table, tmp_path: Path) -> None:
    path = tmp_path / "tables.json"
    step_table.write_tables(path, [table])
    assert step_table.read_tables(path) == {"a case": table}
    assert step_table.read_tables(tmp_path / "absent.json") == {}
    earlier = table._replace(groups={"AdamW": Group(7, 10, 0, 1.0)})
    text = step_table.render(table, earlier)
    assert "| AdamW | 7 | 0.00 | 1000.00 | 1 |" in text and "1000.0 ms" in text
    alone = step_table.render(table)
    assert [name for name in GROUPS if f"\n| {name} |" in alone] == [
        name for name, group in table.groups.items() if group.bytes
    ]


def test_committed_page_is_that_of_the_committed_figures() -> None:
    now = step_table.read_tables(step_table.NOW)
    assert list(now) == [f"{gpu} {words}" for gpu, words in step_table.CASES]
    assert step_table.RESULTS.read_text() == step_table.page(now)
