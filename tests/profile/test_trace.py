"""Traces are read as they were recorded: every thread's part, each moment once, on the CPU and from a GPU's streams."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from llmc_jax.plan.program import Program
from llmc_jax.profile.trace import (
    Span,
    read_trace,
    shared_time,
    trace_of,
)
from llmc_jax.run.record import slice_trace
from tests.profile.spaces import Event, handed_in, instruction, space, task

CPU = "/host:CPU"


def times(spans: tuple[Span, ...]) -> list[tuple[str, float, float, str, bool]]:
    return [(s.name, s.start / 1e3, s.end / 1e3, s.lane, s.begins) for s in spans]


def test_an_instruction_is_where_its_event_is() -> None:
    events = [instruction("dot.1", 10, 5), instruction("add.2", 20, 1), instruction("dot.1", 30, 9, "jit_other")]
    trace = trace_of(space({CPU: {"a": events}}), "jit_step")
    assert times(trace.spans) == [("dot.1", 10, 15, "a", True), ("add.2", 20, 21, "a", True)]


def test_the_innermost_of_nested_instructions_counts() -> None:
    events = [instruction("while.1", 0, 10), instruction("dot.2", 2, 3)]
    spans = trace_of(space({CPU: {"a": events}}), "jit_step").spans
    assert times(spans) == [
        ("while.1", 0, 2, "a", True), ("dot.2", 2, 5, "a", True), ("while.1", 5, 10, "a", False)
    ]  # fmt: skip


def test_a_task_belongs_to_the_instruction_that_handed_it_in() -> None:
    """Also when it was handed on, begins long after the instruction's own event, and other work lies between."""
    lanes = {
        "a": [instruction("add.1", 0, 4), handed_in(1, 7), instruction("dot.2", 10, 20)],
        "b": [*task(40, 50, 7), handed_in(45, 8)],
        "c": task(60, 61, 8),
    }
    spans = trace_of(space({CPU: lanes}), "jit_step").spans
    found = {(name, start, end, lane) for name, start, end, lane, _ in times(spans)}
    assert found == {
        ("add.1", 0, 1, "a"), ("add.1", 1, 4, "a"), ("dot.2", 10, 30, "a"), ("add.1", 40, 45, "b"),
        ("add.1", 45, 50, "b"), ("add.1", 60, 61, "c"),
    }  # fmt: skip
    assert sum(span.begins for span in spans) == 2


def test_the_scheduler_inside_a_task_is_nobodys_time() -> None:
    lanes = {
        "a": [instruction("add.1", 0, 1), handed_in(0.5, 7)],
        "b": [*task(10, 30, 7), Event("ThunkExecutor::Execute", 12, 18), instruction("dot.2", 14, 6)],
    }
    spans = trace_of(space({CPU: lanes}), "jit_step").spans
    found = [each[:3] for each in times(spans) if each[3] == "b"]
    assert found == [("add.1", 10, 12), ("dot.2", 14, 20)]


def test_helpers_of_a_whole_instruction_do_not_count() -> None:
    """They go on to help others under the number of the first."""
    lanes = {"a": [instruction("ynn.1", 0, 10), handed_in(1, 7), handed_in(2, 8)], "b": task(2, 900, 7)}
    spans = trace_of(space({CPU: lanes}), "jit_step", {"ynn.1"}).spans
    assert {(s.name, s.lane) for s in spans} == {("ynn.1", "a")}
    assert sum(s.end - s.start for s in spans) == 10_000


def test_kernels_of_a_gpu_count_and_the_host_does_not() -> None:
    kernel = Event("sm90_gemm", 5, 3, {"hlo_op": "custom-call.4", "hlo_module": "jit_step"})
    planes = {
        "/device:GPU:0": {"Stream #13(Compute)": [kernel], "XLA Ops": [kernel], "Steps": [Event("1", 0, 9)]},
        CPU: {"a": [instruction("custom-call.4", 0, 1), Event("train", 0, 9)]},
    }
    trace = trace_of(space(planes), "jit_step")
    assert times(trace.spans) == [("custom-call.4", 5, 8, "Stream #13(Compute)", True)]
    assert trace.steps == ((0, 9000),)


def test_moments_are_shared() -> None:
    spans = [Span("a", 0, 10, "x"), Span("b", 5, 15, "y"), Span("a", 20, 22, "x"), Span("c", 30, 30, "x")]
    uses = shared_time(spans)
    assert uses["a"].seconds == pytest.approx(9.5e-9) and uses["a"].calls == 2
    assert uses["b"].seconds == pytest.approx(7.5e-9)
    assert uses["c"] == (0.0, 1)
    assert sum(use.seconds for use in uses.values()) == pytest.approx(17e-9)
    twice = shared_time([Span("a", 0, 10, "x"), Span("a", 0, 10, "y", begins=False)])  # two threads of one instruction
    assert (twice["a"].seconds, twice["a"].calls) == (pytest.approx(10e-9), 1)


def test_a_loop_gets_what_its_instructions_leave() -> None:
    uses = shared_time([Span("while.1", 0, 100, "x"), Span("dot.2", 10, 40, "y")], containers=["while.1"])
    assert uses["dot.2"].seconds == pytest.approx(30e-9)
    assert uses["while.1"].seconds == pytest.approx(70e-9)


def test_a_live_trace(tmp_path: Path) -> None:
    """On this machine, as it is: every instruction that does anything is found in each step."""

    @jax.jit
    def run(x: jax.Array) -> jax.Array:
        with jax.named_scope("forward"):
            for index in range(2):
                with jax.named_scope(f"layer_{index:02d}"), jax.named_scope("fc"):
                    x = jnp.tanh(jax.lax.optimization_barrier(x @ x))
        return x.sum()

    x = jnp.ones((300, 300))
    compiled = run.lower(x).compile()
    compiled(x).block_until_ready()
    with slice_trace(tmp_path, 0, 3) as tick:
        for number in range(3):
            tick(number)
            compiled(x).block_until_ready()
    program = Program(compiled.as_text() or "")
    trace = read_trace(tmp_path, program.name, program.whole)
    assert len(trace.steps) == 3
    uses = shared_time(trace.spans)
    products = {name for name, each in program.by_name.items() if each.opcode == "dot" or "dot" in each.op_name}
    assert {program.owners[name].place.layer for name in products & uses.keys()} == {0, 1}
    assert all(use.calls == 3 and use.seconds > 0 for use in uses.values())
    assert sum(use.seconds for use in uses.values()) <= sum(end - start for start, end in trace.steps) * 1e-9
