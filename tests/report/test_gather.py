"""What a page shows is what a run logged; a damaged run shows what can be read of it."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from llmc_jax.base.errors import InputError
from llmc_jax.base.plain import to_json
from llmc_jax.report.content import Content, Run
from llmc_jax.report.gather import MOST_SAMPLES, content_of, names_of, read_runs
from llmc_jax.report.series import BINS, POINTS
from tests.printed_logs import OUTPUTS, written
from tests.report.runs import BEGAN, CONFIG, end, run_folder, start, train, usual, val


def content(*paths: Path) -> Content:
    found = content_of(read_runs(paths))
    json.dumps(to_json(found), allow_nan=False)
    return found


def one(path: Path) -> Run:
    (run,) = content(path).runs
    return run


def rows_of(run: Run, group: str) -> dict[str, str]:
    return dict(next(rows for name, rows in run.facts if name == group))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return one(run_folder(tmp_path_factory.mktemp("runs") / "demo", usual()))


def test_curves_are_what_was_logged(whole: Run) -> None:
    loss, losses = whole.curves["train.loss"], whole.curves["val.loss"]
    assert loss.x.step.tolist() == list(range(40)) and loss.y.tolist() == [5.0 - step / 40 for step in range(40)]
    assert losses.x.step.tolist() == [0, 10, 20, 30] and losses.y.tolist() == [5.0, 4.5, 4.0, 3.5]
    assert loss.mean is None and losses.mean is None  # nothing is thinned
    assert whole.curves["memory"].y.tolist() == [1.0] * 40
    assert whole.curves["flops"].y[0] == 16.0 * 1e6 / 1e9 and "mfu" not in whole.curves


def test_a_step_s_tokens_and_time_count_its_update_and_a_validation_s_do_not(whole: Run) -> None:
    loss, losses = whole.curves["train.loss"].x, whole.curves["val.loss"].x
    assert loss.tokens is not None and losses.tokens is not None and loss.time is not None and losses.time is not None
    assert loss.tokens.tolist() == [8 * (step + 1) for step in range(40)]
    assert losses.tokens.tolist() == [0, 80, 160, 240]
    assert loss.time.tolist() == [2.0 + step for step in range(40)]
    assert losses.time.tolist() == [1.5, 11.5, 21.5, 31.5]


def test_facts_and_status_of_a_run(whole: Run) -> None:
    assert (whole.name, whole.status.state, whole.status.step, whole.status.steps) == ("demo", "done", 40, 40)
    assert whole.notes == [] and whole.baseline == 2.4
    assert [(each.kind, each.step) for each in whole.events] == [("start", 0), ("end", 40)]
    assert [(each.step, each.tokens, each.text) for each in whole.samples] == [(40, 4, "<b>\n")]
    assert rows_of(whole, "Options: Optimizer")["--learning-rate"] == "0.004"
    assert rows_of(whole, "Options: others") == {"gone": "1"}
    assert rows_of(whole, "Operation implementations") == {"attention": "naive, xla (on a CPU)"}
    assert rows_of(whole, "Environment") == {"XLA_FLAGS": "--xla_x=1"}
    assert rows_of(whole, "Machine")["memory"] == "16.0 GiB"
    assert {"best validation loss", "speed", "tokens", "memory", "time"} <= dict(whole.summary).keys()


def test_passwords_in_addresses_are_not_shown(whole: Run) -> None:
    shown = json.dumps(to_json(whole))
    assert "host/x" in shown and "me:pass" not in shown


def test_utilization_where_the_peak_is_known(tmp_path: Path) -> None:
    run = one(run_folder(tmp_path / "a", [start(peak_flops=64e6), train(0)]))
    assert run.curves["mfu"].y.tolist() == [25.0] and "flops" not in run.curves


def test_hellaswag_in_percent(tmp_path: Path) -> None:
    rows = [
        start(),
        {"event": "eval", "step": 20, "accuracy": 0.5, "accuracy_norm": 0.25, "items": 4, "time": BEGAN + 9},
    ]
    run = one(run_folder(tmp_path / "a", rows))
    assert {key: (curve.x.step.tolist(), curve.y.tolist()) for key, curve in run.curves.items()} == {
        "accuracy": ([20], [50.0]), "accuracy_norm": ([20], [25.0]),
    }  # fmt: skip
    assert dict(run.summary)["HellaSwag"] == "25.00 % at step 20"


def test_a_log_where_some_events_lack_a_time_has_no_axis_of_time(tmp_path: Path) -> None:
    rows = usual()
    for row in rows[5:]:
        del row["time"]
    run = one(run_folder(tmp_path / "a", rows))
    assert all(curve.x.time is None for curve in run.curves.values()) and run.events[0].time is None


def test_long_curves_are_thinned_and_averaged(tmp_path: Path) -> None:
    events = [start(), *(train(step, loss=5.0) for step in range(6000))]
    events[3001]["loss"], events[3002]["loss"] = 90.0, "nan"
    curve = one(run_folder(tmp_path / "a", events)).curves["train.loss"]
    assert len(curve.y) <= POINTS and np.nanmax(curve.y) == 90.0
    assert curve.x.step[np.isnan(curve.y)].tolist() == [3001]
    assert curve.mean is not None and len(curve.mean.y) == BINS
    assert set(curve.mean.y.tolist()) == {5.0, (90 + 5 * 5) / 6}
    assert curve.mean.x.tokens is not None and (np.diff(curve.mean.x.tokens) > 0).all()


def test_what_happened_to_a_run(tmp_path: Path) -> None:
    events = [
        start(), train(0), train(1, skipped=True, loss="nan"), train(2, skipped=True), train(3), train(4, skipped=True),
        {"event": "checkpoint", "step": 4, "path": "state_00000004", "ms": 900.0, "waited_ms": 0.0, "time": BEGAN + 7},
        {"event": "resume", "step": 4, "steps": 9, "time": BEGAN + 50},
        {"event": "news", "step": 7, "x": 1}, {"event": "bad", "step": "x"},
    ]  # fmt: skip
    folder = run_folder(tmp_path / "a", events)
    run = one(folder)
    found = [(each.kind, each.step) for each in run.events]
    assert found == [
        ("start", 0), ("skipped", 1), ("skipped", 4), ("checkpoint", 4), ("resume", 4), ("news", 7),
    ]  # fmt: skip
    assert "1 to 2" in run.events[1].words
    assert (run.events[4].time, run.events[4].tokens, run.events[2].tokens) == (50.0, 32.0, 40.0)
    assert len(run.notes) == 1
    assert run.status.steps == 9


def test_of_very_many_events_and_samples_some_are_shown(tmp_path: Path) -> None:
    events = [start(), *({"event": "checkpoint", "step": step, "path": "x", "ms": 1} for step in range(2000))]
    events += [{"event": "sample", "step": step, "tokens": 1, "text": "x" * 20_000} for step in range(500)]
    run = one(run_folder(tmp_path / "a", events))
    assert len(run.events) == 400 and (run.events[0].step, run.events[-1].step) == (0, 1999)
    (gap,) = (each for each in run.events if each.kind == "left_out")
    assert f"{2001 - 399:,} more" in gap.words
    assert len(run.samples) == MOST_SAMPLES and (run.samples[0].step, run.samples[-1].step) == (0, 499)
    assert max(len(each.text) for each in run.samples) < 20_000


def test_the_status_of_a_run_that_has_not_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llmc_jax.logs import state

    monkeypatch.setattr(state, "is_there", lambda start, last: True)
    status = one(run_folder(tmp_path / "a", [start(), *map(train, range(10))])).status
    assert (status.state, status.step, status.steps) == ("running", 10, 40)
    monkeypatch.setattr(state, "is_there", lambda start, last: False)
    assert one(tmp_path / "a").status.state == "died"


@pytest.mark.parametrize("points", [0, 1])
def test_runs_that_hardly_began(points: int, tmp_path: Path) -> None:
    run = one(run_folder(tmp_path / "a", [start(), *map(train, range(points))]))
    assert ("train.loss" in run.curves) == bool(points) and run.events[0].kind == "start"


def test_a_damaged_run_shows_what_can_be_read(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "a", [train(0), train(1), end(2)], config=None, torn='nonsense\n{"event": "tr')
    run = one(folder)
    assert run.curves["train.loss"].x.step.tolist() == [0, 1] and len(run.notes) == 3
    (folder / "kernels.json").write_bytes(b"\xff[")
    run = one(folder)
    assert len(run.notes) == 4 and run.facts == []
    (folder / "metrics.jsonl").write_text("rubbish\n")
    with pytest.raises(InputError, match=r"a: no events found"):
        one(folder)


def test_a_copy_of_a_run_s_events_is_enough(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "a", usual(), config=None)
    copy = written(tmp_path / "copy.jsonl", (folder / "metrics.jsonl").read_bytes())
    run = one(copy)
    assert (run.name, run.kind, run.status.state, run.notes) == ("copy.jsonl", "metrics.jsonl of ours", "done", [])
    assert len(run.curves["norm"].y) == 40 and rows_of(run, "Model")["channels"] == "128"
    with pytest.raises(InputError, match=r"empty.jsonl: no events found"):
        one(written(tmp_path / "empty.jsonl", ""))


def test_logs_of_other_programs(tmp_path: Path) -> None:
    log = written(
        tmp_path / "out.txt", "tokens per iteration will be: 16\n" + "".join(OUTPUTS["output of llm.c's train_gpt2cu"])
    )
    run = one(log)
    assert run.kind == "output of a trainer" and run.status.state == "unknown"
    assert set(run.curves) == {
        "train.loss",
        "val.loss",
        "norm",
        "lr",
        "ms",
        "tokens_per_second",
        "mfu",
        "accuracy_norm",
    }
    assert run.curves["accuracy_norm"].y.tolist() == [24.995]
    time, tokens = run.curves["train.loss"].x.time, run.curves["val.loss"].x.tokens
    assert time is None and tokens is not None and tokens.tolist() == [0, 32]


def test_runs_over_each_other(tmp_path: Path) -> None:
    """Only what differs is listed, and not where a run is; a log without a configuration has no part in that."""
    options = {**CONFIG["options"], "seed": 43, "output_dir": "runs/b", "tf32": True}  # type: ignore[dict-item]
    other = {**CONFIG, "options": options, "environment": {"XLA_FLAGS": "--xla_x=1", "NPROC": "8"}}
    paths = (
        run_folder(tmp_path / "a", usual()),
        run_folder(tmp_path / "b", [start(config=other), val(0, 3.0)]),
        written(tmp_path / "c.log", "s:0 trl:4.0\n"),
    )
    found = content(*paths)
    assert [run.name for run in found.runs] == ["a", "b", "c.log"] and found.title == "a · b · c.log"
    assert found.differences is not None
    rows = [(each.group, each.name, each.values) for each in found.differences]
    assert rows == [("Options", "--seed", ["42", "43", ""]), ("Environment", "NPROC", ["", "8", ""])]
    assert {panel.key for panel in found.panels} == {"loss", "norm", "lr", "tokens_per_second", "ms", "flops", "memory"}
    assert content(paths[0]).differences is None


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["runs/a"], ["a"]),
        (["runs/a", "other/b/"], ["a", "b"]),
        (["x/run", "y/run"], ["x/run", "y/run"]),
        (["x/run", "x/run"], ["run (1)", "run (2)"]),
        (["/"], ["/"]),
    ],
)
def test_names_are_no_longer_than_need_be(paths: list[str], names: list[str]) -> None:
    found = names_of(paths)
    assert len(set(found)) == len(found) and (found == names or paths[0] == paths[-1])


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = st.fixed_dictionaries({}, optional=dict.fromkeys(("loss", "tokens", "skipped", "time", "text", "config"), ANY))
NUMBERS = st.fixed_dictionaries(
    {"event": st.sampled_from(["train", "val", "eval", "gpu"]), "step": st.integers(0, 9)},
    optional={name: st.floats() | st.integers() for name in ("loss", "ms", "tokens", "time", "accuracy", "memory")},
)
KINDS = st.sampled_from(["start", "resume", "sample", "end", "checkpoint", "warnings", "odd"])


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(NUMBERS | st.tuples(KINDS, st.integers(-1, 9) | ANY, FIELDS), max_size=8), ANY)
@example([{"event": "train", "step": 0, "loss": 1.0, "ms": math.inf, "tokens": 1e308}] * 2, {})
@example([{"event": "checkpoint", "step": 1, "ms": 10**400, "time": 10**400}], {})
@example([{"event": "train", "step": 0, "time": 1.0}, {"event": "checkpoint", "step": 0, "time": 10**400}], {})
def test_any_events_and_any_configuration_make_a_page(tmp_path: Path, found: list[Any], config: Any) -> None:
    rows = [each if isinstance(each, dict) else {"event": each[0], "step": each[1], **each[2]} for each in found]
    folder = tmp_path / "a"
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "kernels.json").write_text(json.dumps(config))
    try:
        run = one(folder)
    except InputError:
        return
    for curve in run.curves.values():
        assert len(curve.y) == len(curve.x.step)
        assert all(math.isfinite(step) for step in curve.x.step.tolist())
