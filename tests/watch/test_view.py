"""What is kept of a run's events, and that the view of any fits the terminal and obeys nothing."""

import math
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from llmc_jax.base.streams import escaped
from llmc_jax.logs import state
from llmc_jax.logs.state import DIED, RUNNING, UNKNOWN, run_state
from llmc_jax.machine.nvml import GpuReading
from llmc_jax.watch.story import Story
from llmc_jax.watch.view import Moment, Room, view

NOW = 1_800_000_000.0
START = {
    "event": "start", "step": 0, "steps": 100, "host": "elsewhere", "pid": 3, "time": NOW, "flops_per_token": 1e6,
    "peak_flops": 1e11, "precision": "bf16",
}  # fmt: skip


def train(step: int, loss: float = 3.0, **fields: Any) -> dict[str, Any]:
    usual = {"norm": 1.0, "lr": 1e-3, "ms": 500.0, "tokens_per_second": 2e4, "tokens": 64 * step}
    return {"event": "train", "step": step, "loss": loss, **usual, "time": NOW + step + 1, **fields}


def story(*events: dict[str, Any]) -> Story:
    made = Story()
    made.take(events)
    return made


def moment(made: Story, runs: bool | None = True, now: float = NOW + 100, **fields: Any) -> Moment:
    with patch.object(state, "is_there", lambda *_: runs):
        return Moment("a run", made, run_state(made.seen, now), now, **fields)


def shown(made: Moment, width: int = 80, height: int | None = 24, ascii_only: bool = False) -> list[str]:
    return [line.plain for line in view(made, Room(width, height, ascii_only))]


def test_the_time_left_counts_the_pauses_between_steps() -> None:
    made = story(START, *map(train, range(11)))  # a step takes 0.5 s, and one begins each second
    state = moment(made).state
    assert (state.state, state.step) == (RUNNING, 11)
    assert made.left(state, NOW + 11) == pytest.approx(89 * 1.0)
    assert made.left(state, NOW + 21) == pytest.approx(89 - 10)
    assert made.left(state, NOW + 1e6) == 0
    assert made.left(moment(made, runs=False).state, NOW + 11) is None


def test_speed_and_utilization_are_those_of_the_screen_of_the_run() -> None:
    made = story(START, train(0, tokens_per_second=1.0), train(1), train(2))
    assert made.tokens_per_second() == pytest.approx(2e4)
    assert made.utilization() == "20.0% bf16 MFU"


def test_the_best_validation_is_the_least_finite_loss() -> None:
    losses = [4.0, 3.0, math.nan, 3.5]
    made = story(START, *({"event": "val", "step": step, "loss": loss} for step, loss in enumerate(losses)))
    assert any("best val 3.0000 at step 1" in line for line in shown(moment(made)))


def test_steps_without_an_update_are_counted() -> None:
    made = story(START, *(train(step, math.nan, skipped=True) for step in (3, 4, 9)))
    assert made.skipped == 3 and len(made.losses["train"]) == 6
    assert any("3 skipped" in line for line in shown(moment(made), 120))


def test_the_last_hundred_events_are_kept() -> None:
    made = Story()
    made.take([START, *({"event": "removed", "step": step} for step in range(1000))])
    assert len(made.events) == 100 and made.events[-1]["step"] == 999


def test_another_start_begins_the_pace_anew() -> None:
    made = story(START, train(0), train(1), {**START, "event": "resume", "step": 2, "time": NOW + 5000})
    assert made.left(moment(made, now=NOW + 5001).state, NOW + 5001) is None


def test_the_view_has_what_the_run_said() -> None:
    events = [START, *(train(step, 5.0 - step / 50) for step in range(50)), {"event": "val", "step": 50, "loss": 4.25}]
    sample = {"event": "sample", "step": 40, "tokens": 9, "text": "def f():\n    return 1\n"}
    gpu = {"event": "gpu", "step": 0, "compute_percent": 91, "clock_mhz": 1700, "max_clock_mhz": 1980, "cap": "power"}
    text = "\n".join(shown(moment(story(*events, sample, gpu))))
    for part in ("a run", "50/100", "loss 4.02", "val 4.25", "50%", "    return 1", "started", "●", "⠤"):
        assert part in text, part
    assert "91%" in text and "1700 of 1980 MHz" in text


@pytest.mark.parametrize(("runs", "state"), [(False, DIED), (None, UNKNOWN)])
def test_of_a_run_that_died_the_last_line_is_shown(runs: bool | None, state: str) -> None:
    made = moment(story(START, train(0), train(1, 2.125)), runs=runs, now=NOW + 5000)
    assert made.state.state == state
    assert any("step 1" in line and "2.125" in line for line in shown(made)[:3])


@pytest.mark.parametrize(("width", "height"), [(20, 6), (60, 24), (80, 10), (200, 50)])
def test_it_fits_and_the_important_lines_come_first(width: int, height: int) -> None:
    text = {"event": "sample", "step": 1, "tokens": 9, "text": "long " * 500}
    events = [START, *map(train, range(60)), text, *({"event": "removed", "step": step} for step in range(50))]
    lines = shown(moment(story(*events)), width, height)
    assert len(lines) <= height and max(map(cell_len, lines)) <= width
    assert any("60/100" in line for line in lines[:3])
    assert height < 24 or sum("│" in line for line in lines) >= 3


def test_a_terminal_without_unicode_gets_ascii() -> None:
    events = [START, *map(train, range(60)), {"event": "val", "step": 60, "loss": 2.0}]
    assert all(line.isascii() for line in shown(moment(story(*events)), ascii_only=True))


def test_hostile_text_is_shown_and_not_obeyed() -> None:
    hostile = "\x1b[2J\x1b]0;title\x07 [bold]not markup[/bold] \u202e \x9b31m\ta\r\nb"
    events = [
        {**START, "host": hostile}, train(0), {"event": "sample", "step": 0, "tokens": 1, "text": hostile},
        {"event": "save_failed", "step": 0, "problem": hostile}, {"event": hostile, "step": 0},
        {"event": "end", "step": 1, "outcome": hostile},
    ]  # fmt: skip
    made = moment(story(*events), notes=(hostile.replace("\n", " "),))
    lines = shown(made._replace(notes=()), 200, None)
    assert all(line.isprintable() for line in lines) and any("[bold]not markup" in line for line in lines)
    last = moment(story({**START, "precision": hostile}, train(0), {"event": "sample", "step": hostile, "text": "x"},
                        {"event": hostile}), False)  # fmt: skip
    assert all(line.isprintable() for line in shown(last, 200, None))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0, 1e308])
def test_numbers_that_no_run_writes_have_a_view(value: float) -> None:
    reading = {"event": "gpu", "step": 0, **dict.fromkeys(set(GpuReading._fields) - {"cap"}, value)}
    events = [{**START, "peak_flops": value}, {**train(0), "memory": value, "loss": value}, train(1), reading]
    assert shown(moment(story(*events)))


VALUES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
    | st.lists(st.integers(), max_size=1) | st.sampled_from(["nan", "done", NOW, NOW + 1, 10, 0.5])
)  # fmt: skip
NAMES = [
    "step", "steps", "time", "loss", "norm", "lr", "ms", "tokens", "tokens_per_second", "memory", "skipped", "text",
    "outcome", "host", "pid", "path", "clock_mhz", "cap", "compute_percent", "flops_per_token", "peak_flops",
    "accuracy_norm", "words", "memory_used_bytes", "power_watts",
]  # fmt: skip
KINDS = ["start", "resume", "train", "val", "eval", "sample", "gpu", "checkpoint", "end", "data", "warnings", "new"]
EVENTS = st.lists(
    st.builds(
        lambda kind, fields: {**fields, "event": kind},
        st.sampled_from(KINDS),
        st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=8),
    ),
    max_size=12,
)


@given(EVENTS, st.integers(20, 120), st.none() | st.integers(6, 50), st.sampled_from([True, False, None]))
def test_any_events_have_a_view_that_fits(
    events: list[dict[str, Any]], width: int, height: int | None, runs: bool | None
) -> None:
    lines = shown(moment(story(*events), runs), width, height)
    assert height is None or len(lines) <= height
    assert all(escaped(line) == line and cell_len(line) <= width for line in lines)
