"""The timeline of a layer: boxes where its operations ran, without the time of other layers, drawn into a PNG."""

from pathlib import Path

import pytest

from llmc_jax.plan.program import Program
from llmc_jax.profile.picture import Box, draw_layer, layer_boxes
from llmc_jax.profile.trace import Span, Trace

PROGRAM = Program(
    """HloModule jit_step, is_scheduled=true

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %add.0 = f32[8]{0} add(%x, %x), metadata={op_name="j/forward/layer_00/ln1/add"}
  %mul.0 = f32[8]{0} multiply(%x, %x), metadata={op_name="j/forward/layer_00/ln1/mul"}
  %exp.0 = f32[8]{0} exponential(%x), metadata={op_name="j/forward/layer_00/gelu/exp"}
  %exp.1 = f32[8]{0} exponential(%x), metadata={op_name="j/forward/layer_01/gelu/exp"}
  ROOT %neg.0 = f32[8]{0} negate(%x), metadata={op_name="j/backward/layer_00/gelu/neg"}
}
"""
)


def traced(*spans: tuple[str, float, float]) -> Trace:
    """Times in microseconds; the step before is another one, in which nothing of layer 0 is at the same place."""
    kept = [Span(name, 1e3 * start, 1e3 * end, "t") for name, start, end in spans]
    return Trace((Span("exp.0", 0, 5, "t"), *kept), ((0, 10), (1000, 1e9)), False)


def test_an_operation_is_one_box_while_any_part_of_it_runs() -> None:
    trace = traced(
        ("add.0", 100, 110), ("mul.0", 110.01, 120), ("mul.0", 115, 130), ("exp.0", 125, 150), ("exp.1", 150, 160)
    )
    assert layer_boxes(trace, PROGRAM, 0, "forward") == [
        Box("ln1", 0, pytest.approx(30), 0),
        Box("gelu", pytest.approx(25), pytest.approx(50), 1),  # at the same time: the row above
    ]
    assert layer_boxes(trace, PROGRAM, 1, "forward") == [Box("gelu", 0, pytest.approx(10), 0)]
    assert layer_boxes(trace, PROGRAM, 1, "backward") == []


def test_time_in_which_nothing_of_the_layer_runs_is_left_out() -> None:
    trace = traced(("add.0", 100, 110), ("exp.0", 5000, 5040), ("mul.0", 5020, 5060), ("exp.0", 5061, 5070))
    boxes = layer_boxes(trace, PROGRAM, 0, "forward")
    expected = [("ln1", 0, 10, 0), ("gelu", 10, 80, 0), ("ln1", 30, 70, 1)]  # a short pause belongs to the box
    assert [box[:1] + tuple(map(pytest.approx, box[1:])) for box in boxes] == expected


def test_a_picture(tmp_path: Path) -> None:
    out = tmp_path / "layer.png"
    assert not draw_layer(traced(("add.0", 1, 2)), PROGRAM, 7, out, "")
    assert not out.exists()
    trace = traced(("add.0", 100, 200), ("exp.0", 210, 300), ("neg.0", 5000, 9000))
    draw_layer(trace, PROGRAM, 0, out, "a layer")
    assert out.read_bytes().startswith(b"\x89PNG") and out.stat().st_size > 5000
