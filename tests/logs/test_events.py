"""Events read in little memory, and of a damaged file what can be read."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmc_jax.base.errors import InputError
from llmc_jax.logs import events as module
from llmc_jax.logs import follow
from llmc_jax.logs.events import figures, read_events


def file_of(path: Path, *events: Any, end: bytes = b"\n") -> Path:
    lines = [each if isinstance(each, bytes) else json.dumps(each).encode() for each in events]
    path.write_bytes(b"\n".join(lines) + end)
    return path


def train(step: int, **fields: Any) -> dict[str, Any]:
    return {"event": "train", "step": step, "loss": 5.0 - step, **fields, "time": 100.0 + step}


def test_figures_of_steps_and_all_other_events(tmp_path: Path) -> None:
    start = {"event": "start", "step": 0, "steps": 3, "time": 99.5}
    gpu = [
        {"event": "gpu", "step": step, "clock_mhz": 1000 + step, "cap": cap}
        for step, cap in enumerate(["no", "no", "power"])
    ]
    read = read_events(file_of(
        tmp_path / "m", start, train(0, norm="inf"), train(1), train(2, norm=0.5, loss_scale=8, skipped=True), *gpu,
    ))  # fmt: skip
    assert (read.others, read.notes, read.first_time) == ([start], [], 99.5)
    norm, loss, skipped = (figures(read, "train", name) for name in ("norm", "loss", "skipped"))
    assert (norm.steps.tolist(), norm.values.tolist()) == ([0, 2], [math.inf, 0.5])
    assert (loss.values.tolist(), loss.times.tolist()) == ([5.0, 4.0, 3.0], [100.0, 101.0, 102.0])
    assert (skipped.steps.tolist(), skipped.values.tolist()) == ([2], [1.0])
    assert np.isnan(figures(read, "gpu", "clock_mhz").times).all()
    assert not len(figures(read, "val", "loss").steps) and not len(figures(read, "train", "none").steps)


def test_a_step_logged_again_counts_once_as_it_was_last(tmp_path: Path) -> None:
    again = [{**train(step), "loss": 9.0 + step, "time": 200.0} for step in (1, 2)]
    loss = figures(
        read_events(file_of(tmp_path / "m", train(0), train(1), train(2), *again, train(3))), "train", "loss"
    )
    assert loss.steps.tolist() == [0, 1, 2, 3] and loss.values.tolist() == [5.0, 10.0, 11.0, 2.0]
    assert loss.times.tolist() == [100.0, 200.0, 200.0, 103.0]


BAD = [b"", b"nonsense", b"[]", b'"text"', b"{" * 100_000, b"\xff\xfe", b'{"event": 3}', b'{"event": "train"}',
       b'{"event": "train", "step": -1, "loss": 1}', b'{"event": "train", "step": 1.5}',
       b'{"event": "val", "step": 1%s}' % (b"0" * 99)]  # fmt: skip


def test_lines_that_are_no_events_are_left_out_and_counted(tmp_path: Path) -> None:
    read = read_events(file_of(tmp_path / "m", train(0), *BAD, train(1)))
    assert figures(read, "train", "loss").steps.tolist() == [0, 1]
    (note,) = read.notes
    assert f"{len(BAD)} lines without an event, the first is line 2" in note
    huge = b'{"event": "train", "step": 1, "loss": 1%s, "time": "x", "norm": [1]}' % (b"0" * 400)
    read = read_events(file_of(tmp_path / "m", huge))
    assert not read.notes and not len(figures(read, "train", "loss").steps) and read.first_time is None


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    read = read_events(file_of(tmp_path / "m", train(0), b'{"event": "train", "st', end=b""))
    assert figures(read, "train", "loss").steps.tolist() == [0] and len(read.notes) == 1


def test_figures_of_all_steps_are_no_copies(tmp_path: Path) -> None:
    """Of millions of steps each copy takes 30 MB; a field that some events lack is copied without them."""
    rows = [train(step, norm=1.0, **({} if step == 1 else {"z_loss": 0.5})) for step in range(3)]
    read = read_events(file_of(tmp_path / "m", *rows))
    loss, norm, z_loss = (figures(read, "train", name) for name in ("loss", "norm", "z_loss"))
    assert np.shares_memory(loss.steps, norm.steps) and np.shares_memory(loss.times, norm.times)
    assert np.shares_memory(loss.values, figures(read, "train", "loss").values)
    assert (z_loss.steps.tolist(), z_loss.times.tolist()) == ([0, 2], [100.0, 102.0])


def test_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "AT_ONCE", 1 << 9)
    monkeypatch.setattr(follow, "LONGEST", 1 << 10)
    monkeypatch.setattr(module, "MOST_OTHERS", 3)
    long = b'{"event": "x", "text": "%s"}' % (b"x" * (1 << 14))
    read = read_events(file_of(tmp_path / "m", train(0), long, train(1), *[{"event": "checkpoint", "step": 1}] * 5))
    assert len(read.others) == 3 and len(read.notes) == 2
    assert figures(read, "train", "loss").steps.tolist() == [0, 1]


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="none: cannot read it: No such file"):
        read_events(tmp_path / "none")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9), st.lists, max_leaves=3
)
EVENTS = st.dictionaries(
    st.sampled_from(["event", "step", "loss", "time", "x"]), VALUES | st.sampled_from(["train", "nan"])
)


SAME = st.fixed_dictionaries({
    "event": st.just("train"), "step": st.integers(0, 9), "loss": st.floats() | st.integers(-(2**70), 2**70),
    "skipped": st.booleans(),
    "time": st.floats(0, 1e9) | st.sampled_from(["x", -1]),
})  # fmt: skip


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(SAME, min_size=1, max_size=20), st.integers(1, 900))
def test_events_are_read_in_pieces_as_they_are_read_at_once(
    tmp_path: Path, rows: list[dict[str, Any]], piece: int
) -> None:
    whole = read_events(file_of(tmp_path / "m", *rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(follow, "AT_ONCE", piece)
        pieces = read_events(tmp_path / "m")
    kept = {row["step"]: row for row in rows}
    for name in ("loss", "skipped"):
        one, other = (figures(read, "train", name) for read in (whole, pieces))
        for field in ("steps", "values", "times"):
            np.testing.assert_array_equal(getattr(one, field), getattr(other, field))
        assert one.steps.tolist() == sorted(kept)
        np.testing.assert_array_equal(one.values, [float(kept[step][name]) for step in sorted(kept)])
    assert whole.first_time == pieces.first_time and whole.notes == pieces.notes == []


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(EVENTS.map(lambda event: json.dumps(event).encode()) | st.binary(max_size=30), max_size=8))
def test_any_file_is_read(tmp_path: Path, lines: list[bytes]) -> None:
    read = read_events(file_of(tmp_path / "m", *lines))
    for kind, table in read.tables.items():
        for name in table.columns:
            found = figures(read, kind, name)
            assert (np.diff(found.steps) > 0).all() and len(found.steps) == len(found.values) == len(found.times)
