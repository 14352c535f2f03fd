"""The table adds up: times to the step, floors to the machine's rates, work to the operations."""

import pytest

from llmc_jax.models.work import Work
from llmc_jax.plan.efficiency import Roof, roofline
from llmc_jax.plan.program import Program
from llmc_jax.profile.table import (
    Line,
    as_json,
    as_text,
    report_from_trace,
)
from llmc_jax.profile.trace import Span, Trace

RATES = Roof(flops=1e9, bandwidth=1e8)
PROGRAM = Program(
    """HloModule jit_step, is_scheduled=true

ENTRY %main (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8]{1,0} parameter(0)
  %dot.0 = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, metadata={op_name="j/forward/layer_00/fc/dot"}
  %dot.1 = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, metadata={op_name="j/forward/layer_01/fc/dot"}
  %exp.1 = f32[8,8]{1,0} exponential(%x), metadata={op_name="j/backward/layer_01/gelu/exp"}
  ROOT %add.1 = f32[8,8]{1,0} add(%x, %x), metadata={op_name="j/update/adamw/add"}
}
"""
)
WORK = [
    Work("forward", "fc", 0, 2_000_000, 10_000),
    Work("forward", "fc", 1, 2_000_000, 10_000),
    Work("backward", "gelu", 1, 0, 300_000),
    Work("update", "adamw", None, 0, 100_000),
]
MS = 1e6  # nanoseconds


def step_at(start: float) -> list[Span]:
    """10 ms of a step, of which 9 ms are accounted for: 8 of the model's, 1 of an instruction that no one knows."""
    spans = [("dot.0", 0, 3), ("dot.1", 3, 5), ("exp.1", 5, 7), ("unheard", 7, 8), ("add.1", 8, 9)]
    return [Span(name, (start + a) * MS, (start + b) * MS, "t") for name, a, b in spans]


TRACE = Trace((*step_at(0), *step_at(20)), ((0.0, 10 * MS), (20 * MS, 30 * MS)))


def found(lines: tuple[Line, ...]) -> dict[tuple[str, str], Line]:
    return {(line.phase, line.operation): line for line in lines}


def test_times_are_per_step_and_floors_those_of_the_rates() -> None:
    """fc: 4 MFLOP at 1 GFLOP/s; gelu: 300 kB at 100 MB/s. All adds up to the step."""
    report = report_from_trace(TRACE, PROGRAM, WORK, RATES)
    lines = found(report.lines)
    product, gelu = lines["forward", "fc"], lines["backward", "gelu"]
    assert (product.seconds, product.calls, gelu.seconds) == (pytest.approx(5e-3), 2, pytest.approx(2e-3))
    assert (product.floor, product.bound, product.gap) == (pytest.approx(4e-3), "products", pytest.approx(1.25))
    assert (gelu.floor, gelu.bound) == (pytest.approx(3e-3), "memory")
    assert (report.step, report.unknown, report.idle) == pytest.approx((10e-3, 1e-3, 1e-3))
    assert sum(line.seconds for line in report.lines) + report.unknown + report.idle == pytest.approx(report.step)
    assert as_json(report)["operations"][0] == product._asdict() | {"gap": product.gap}


def test_work_is_where_it_ran() -> None:
    """Nothing ran under the backward pass of fc, so the forward line has its work too; what ran nowhere has no line."""
    work = [*WORK, Work("backward", "fc", 1, 500_000, 0), Work("backward", "qkv", 1, 7, 7)]
    lines = found(report_from_trace(TRACE, PROGRAM, work, RATES).lines)
    assert lines["forward", "fc"].flops == 4_500_000
    assert ("backward", "fc") not in lines and ("backward", "qkv") not in lines


@pytest.mark.parametrize(("unheard", "says_something"), [(0.0, True), (2.0, True), (2.5, False), (350.0, False)])
def test_a_trace_of_nameless_kernels_is_no_table(unheard: float, says_something: bool) -> None:
    """As CUDA graphs leave them. At most a fifth of the time may have no operation."""
    known = [Span("dot.0", 0, 8 * MS, "t")]
    trace = Trace((*known, Span("command_buffer", 8 * MS, (8 + unheard) * MS, "t")), ((0.0, 400 * MS),))
    report = report_from_trace(trace, PROGRAM, WORK, RATES)
    assert (report.problem == "") == says_something


def test_an_empty_trace_is_no_table() -> None:
    assert report_from_trace(Trace((), ((0.0, MS),)), PROGRAM, WORK, RATES).problem
    assert not report_from_trace(TRACE, PROGRAM, WORK, RATES).problem


def test_a_trace_without_marked_steps_is_one_step() -> None:
    report = report_from_trace(TRACE._replace(steps=()), PROGRAM, WORK, RATES)
    assert (report.step, report.idle) == pytest.approx((18e-3, 0.0))


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        ((0, 0), (0.0, "")),
        ((10**9, 1), (1.0, "products")),
        ((1, 10**8), (1.0, "memory")),
        ((0, 10**8), (1.0, "memory")),
    ],
)
def test_roofline(work: tuple[int, int], expected: tuple[float, str]) -> None:
    seconds, bound = roofline(Work("update", "adamw", None, *work), RATES)
    assert (seconds, bound) == (pytest.approx(expected[0]), expected[1])


def test_the_text() -> None:
    text = as_text(report_from_trace(TRACE, PROGRAM, WORK, RATES))
    rows = [line.split() for line in text.splitlines()]
    assert rows[0][:3] == ["operation", "calls", "ms"]
    assert rows[2][:5] == ["forward", "fc", "2", "5.000", "50.0%"]
    assert ["of", "no", "operation", "1.000", "10.0%"] in rows
    assert ["nothing", "runs", "1.000", "10.0%"] in rows
    assert rows[-1][:5] == ["step", "4", "10.000", "100.0%", "0.00"]
    for rates in (RATES, None):  # work without rates has no floors
        headings = as_text(report_from_trace(TRACE, PROGRAM, WORK, rates)).splitlines()[0]
        assert ("floor" in headings) == (rates is not None)


def test_the_order_is_that_of_the_model_and_back() -> None:
    """Whatever the order in which instructions ran; the joined gradient stands behind all of the backward pass."""
    ran = [(phase, operation) for phase in ("backward", "forward") for operation in ("lnf", "qkv", "ln1", "embedding")]
    ran = [("update", "norm"), ("backward", "gradient"), *ran]
    lines = "".join(
        f'  %a.{i} = f32[8] add(%x, %x), metadata={{op_name="j/{p}/{o}/add"}}\n' for i, (p, o) in enumerate(ran)
    )
    program = Program(f"HloModule jit_step, is_scheduled=true\n\nENTRY %main (x: f32[8]) -> f32[8] {{\n"
                      f"  %x = f32[8] parameter(0)\n{lines}}}\n")  # fmt: skip
    trace = Trace(tuple(Span(f"a.{i}", i * MS, (i + 1) * MS, "t") for i in range(len(ran))), ())
    assert [(line.phase, line.operation) for line in report_from_trace(trace, program, [], RATES).lines] == [
        *(("forward", each) for each in ("embedding", "ln1", "qkv", "lnf")),
        *(("backward", each) for each in ("lnf", "qkv", "ln1", "embedding", "gradient")),
        ("update", "norm"),
    ]
