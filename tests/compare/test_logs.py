"""Logs compared by hand-made numbers, and fuzzed. tests/logs/test_reading.py reads them."""

import json
import math
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmc_jax.base.errors import FormatError
from llmc_jax.base.plain import to_json
from llmc_jax.compare import logs
from llmc_jax.compare.command import DIFFERS, main
from llmc_jax.logs.curves import Curve, median
from llmc_jax.logs.reading import Log, read_log
from llmc_jax.run.figures import StepFigures
from llmc_jax.run.folder import RunLog
from tests.printed_logs import c_main_log, mutated, pairs, written


def curve(values: Any, steps: Any = None) -> Curve:
    values = np.asarray(values, np.float64)
    return Curve(np.arange(len(values)) if steps is None else np.asarray(steps, np.int64), values)


def log_of(train: Any = (), val: Curve | None = None, decimals: int | None = None, ms: Any = ()) -> Log:
    none = curve([])
    return Log("log", "made up", {"train.loss": curve(train), "val.loss": val or none, "ms": curve(ms)}, decimals)


def one_difference(a: Any, b: Any, tolerance: float = 0.01, window: int = 1, **more: Any) -> logs.Difference:
    return logs.differences([log_of(a, **more), log_of(b, **more)], tolerance, window)[0]


def test_differences_by_hand() -> None:
    a, b = Curve(np.array([0, 1, 3, 5]), np.array([4.0, 3.0, 2.0, 1.0])), curve([9.0, 3.5, 8.0, 1.0])
    found = logs.difference(a, b)
    assert pairs(found) == [(0, 5.0), (1, 0.5), (3, -1.0)]
    each = one_difference([4, 3, 2, 1], [4, 3.5, 2, 0.25])
    assert (each.largest, each.largest_at) == (0.75, 3)
    assert each.mean == (0.5 + 0.75) / 4
    assert (each.first_beyond, each.parts) == (1, 1)


def test_values_that_are_not_finite_differ_only_from_others() -> None:
    a = [math.nan, math.inf, -math.inf, 1.0, math.inf, math.nan]
    b = [math.nan, math.inf, math.inf, math.nan, 1.0, math.inf]
    assert logs.difference(curve(a), curve(b)).values.tolist() == [0, 0, math.inf, math.inf, math.inf, math.inf]
    each = one_difference(a, b)
    assert (each.largest, each.largest_at) == (math.inf, 2) and each.mean == 0 and each.parts == 2
    each = one_difference([1.0] * 9, [1.0] * 4 + [math.nan] + [1.0] * 4, window=3)
    assert each.averaged.tolist() == [0, 0, 0, 0, math.inf, 0, 0, 0, 0]
    assert each.parts is None and "they do not part" in logs.verdict(each)


def brute_parts(each: logs.Difference) -> int | None:
    """Where they part, word by word from the definition."""
    count = len(each.steps)
    for index in range(count):
        rest = [abs(value) > each.tolerance for value in each.averaged[index:]]
        if rest[0] and 2 * sum(rest) > len(rest) and 10 * len(rest) >= count:
            return int(each.steps[index])
    return None


def brute_average(values: list[float], window: int) -> list[float]:
    half, out = window // 2, []
    for index, value in enumerate(values):
        near = [v for v in values[max(0, index - half) : index + half + 1] if math.isfinite(v)]
        out.append(sum(near) / len(near) if math.isfinite(value) else math.inf)
    return out


LOSSES = st.sampled_from([0.0, 0.005, 0.02, -0.02, 0.5, math.nan])


@settings(deadline=None)
@given(st.lists(LOSSES, min_size=1, max_size=40), st.integers(1, 9))
def test_averages_and_partings_by_the_definition(values: list[float], window: int) -> None:
    each = one_difference([0.0] * len(values), values, window=window)
    np.testing.assert_allclose(each.averaged, brute_average(values, window), atol=1e-15)
    assert each.parts == brute_parts(each)
    beyond = [step for step, value in enumerate(each.averaged) if abs(value) > each.tolerance]
    assert each.first_beyond == (beyond[0] if beyond else None)


@pytest.mark.parametrize(
    ("a", "b", "decimals", "facts"),
    [
        ([], [], None, ["no common step"]),
        ([1, 2], [1, 2], None, ["equal", "all 2 common steps"]),
        ([1], [1], None, ["equal", "step 0"]),
        ([1.00004, 2], [1.0, 2], 4, ["equal", "to the precision of the logs"]),
        ([1.0002, 2], [1.0, 2], 4, ["together", "within 0.01", "0.0002, at step 0"]),
        ([1, 2], [1, 3], None, ["part at step 1", "larger than 0.01 at 1 of 1 steps", "1, at step 1"]),
    ],
)
def test_verdicts(a: list[float], b: list[float], decimals: int | None, facts: list[str]) -> None:
    words = logs.verdict(one_difference(a, b, decimals=decimals))
    assert words.startswith("B vs A, training: ") and all(fact in words for fact in facts)


def test_validations_over_another_number_of_batches_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where both logs say how many; one that does not say it is compared as ever."""
    for name, batches, loss in (("a", 5, 4.0), ("b", 20, 4.5)):
        (tmp_path / name).mkdir()
        with RunLog(tmp_path / name) as log:
            for step, count in ((0, batches), (2, batches), (3, 7)):
                log.val(step, loss=loss, batches=count)
            for step in range(3):
                log.train(StepFigures(step, loss=3.0, norm=1.0, lr=0.1, ms=1.0, tokens_per_second=1e3))
    assert main(["logs", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == DIFFERS  # by step 3
    _, val = json.loads(capsys.readouterr().out)["differences"]
    assert (val["steps"], val["parts"]) == ([3], 3)
    assert val["not_compared"] == [[step, 5, 20] for step in (0, 2)]
    a, b = (read_log(tmp_path / name) for name in "ab")
    (row, _, _) = logs.steps_table([a, b], [0, 2, 3]).splitlines()[2:]
    assert row.split() == ["0", "3.000000", "3.000000", "0", "4.000000", "4.500000"]
    silent = read_log(tmp_path / "b" / "main.log")
    assert not len(silent.of("val.batches").steps) and logs.differences([a, silent])[1].steps.tolist() == [0, 2, 3]
    a, b = (log._replace(curves={**log.curves, "val.loss": log.val.at(slice(2))}) for log in (a, b))
    found = logs.differences([a, b])
    assert not any(each.parts for each in found) and not len(found[1].steps)
    assert logs.verdict(found[1]).startswith("B vs A, validation: not compared at 2 common steps")


def test_speed_leaves_the_first_step_out() -> None:
    found = logs.figures_of(log_of([1, 1, 1, 1], ms=[9000, 10, 30, math.nan]))
    assert (found["median_ms"], found["steps_per_second"]) == (20, 50)
    assert median(log_of([1]).of("ms")) is None
    assert median(log_of([1], ms=[5]).of("ms")) == 5


def test_rows_are_steps_with_validations_of_all() -> None:
    a = log_of([1] * 100, curve([1] * 6, [0, 20, 40, 60, 80, 100]))
    b = log_of([1] * 100, curve([1] * 4, [0, 40, 80, 100]))
    assert logs.chosen_steps([a, b], 12) == [0, 40, 80, 100]
    assert logs.chosen_steps([a, b], 2) == [0, 100]
    assert logs.chosen_steps([a, log_of([1] * 5)], 9) == [0, 20, 40, 60, 80, 100]
    assert logs.chosen_steps([log_of([1] * 5), log_of([1] * 3)], 2) == [0, 2]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mutated(), mutated())
def test_whatever_is_read_can_be_compared(tmp_path: Path, a: bytes, b: bytes) -> None:
    found = []
    for name, data in (("a", a), ("b", b)):
        with suppress(FormatError):
            found.append(read_log(written(tmp_path / name, data)))
    if len(found) == 2:
        differences = logs.differences(found)
        assert logs.as_text(found, differences, 5)
        json.dumps(to_json(logs.as_json(found, differences, 5)), allow_nan=False)


# ----- the command --------------------------------------------------------------------------------------------------


@pytest.fixture
def two(tmp_path: Path) -> list[str]:
    """A run of 200 steps and another that leaves it at step 100."""
    train = {step: 3 + 1 / (1 + step) for step in range(200)}
    left = {step: loss + 0.001 * max(0, step - 99) for step, loss in train.items()}
    a = written(tmp_path / "a.log", c_main_log(train, {0: 4.5, 100: 3.25, 200: 3.125}))
    b = written(tmp_path / "b.log", c_main_log(left, {0: 4.5, 100: 3.25, 200: 3.375}))
    return [str(a), str(b)]


def test_the_command_prints_and_writes(two: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = tmp_path / "r.json"
    words = ["logs", *two, "--window", "1", "--json", str(result)]
    assert main(words) == DIFFERS
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 120 + len(two[0])
    row = next(line for line in text.splitlines() if line.startswith(" 100"))
    assert row.split() == ["100", "3.0099", "3.0109", "+0.001", "3.2500", "3.2500", "0"]
    assert "B vs A, training: they part at step 110: from there to step 199" in text
    assert "B vs A, validation: they part at step 200" in text
    found = json.loads(result.read_text())
    assert found["comparison"] == "logs" and [each["path"] for each in found["logs"]] == two
    train, val = found["differences"]
    assert (train["parts"], train["largest_at"], val["parts"]) == (110, 199, 200)
    assert train["values"][110] == pytest.approx(0.011, abs=1e-4)
    table = {name: values[1] for name, values in found["table"].items()}
    assert table == {"step": 100, "train": [3.0099, 3.0109], "val": [3.25, 3.25]}
    assert main(["logs", two[0], two[0], "--json"]) == 0  # alone, on the screen
    assert json.loads(capsys.readouterr().out)["differences"][0]["curve"] == "training"


REFUSED = {
    "one log": (["A"], "1 log given; two to 26"),
    "window": (["A", "B", "--window", "-1"], "--window -1: window must be at least 0"),
    "tolerance": (["A", "B", "--tolerance=nan"], "tolerance must be a number"),
    "rows": (["A", "B", "--rows", "0"], "--rows 0: rows must be at least 1"),
    "json": (["--json", "A", "B", "B"], r"must end in \.json"),
    "folder": (["A", "B", "--json", "nowhere/a.json"], "there is no folder nowhere"),
    "missing": (["A", "nothing.log"], "nothing.log: cannot read it: No such file"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_command_refuses(name: str, two: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words, expected = REFUSED[name]
    before = Path(two[0]).read_bytes()
    assert main(["logs", *({"A": two[0], "B": two[1]}.get(word, word) for word in words)]) == 2
    out, line = capsys.readouterr()
    assert not out and re.match("llmc-jax compare( logs)?: ", line) and line.count("\n") == 1
    assert re.search(expected, line), line
    assert Path(two[0]).read_bytes() == before
