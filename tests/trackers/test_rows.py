"""What trackers are told of a run's events."""

import json
import math
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from llmc_jax.trackers.rows import Facts, Row, facts_of, row_of

FACTS = Facts("run", "/runs/run", "0" * 16, 0, False, {}, 100.0, 1000.0)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=9), each, max_size=3),
    max_leaves=9,
)


def test_a_step_is_its_numbers_by_name() -> None:
    event = {"event": "train", "step": 7, "loss": math.inf, "skipped": True, "tokens_per_second": 2.0, "time": 5.5}
    values = {"train/loss": math.inf, "train/skipped": 1.0, "train/tokens_per_second": 2.0, "train/mfu": 0.2}
    assert row_of(event, FACTS) == Row(7, 5.5, values, may_drop=True)
    assert "train/mfu" not in row_of(event, FACTS._replace(peak_flops=None)).values  # type: ignore[union-attr]


def test_validations_accuracies_and_gpus_have_their_own_names() -> None:
    names = {"val": "val/x", "eval": "hellaswag/x", "gpu": "gpu/x"}
    for kind, name in names.items():
        assert row_of({"event": kind, "step": 1, "x": 3, "time": 1.0}, FACTS) == Row(1, 1.0, {name: 3.0})


def test_a_sample_is_a_text_and_other_events_are_nothing() -> None:
    assert row_of({"event": "sample", "step": 1, "text": "<b>", "tokens": 3, "time": 1.0}, FACTS) == Row(
        1, 1.0, {}, "<b>"
    )
    assert row_of({"event": "checkpoint", "step": 1}, FACTS) is None


@given(event=st.dictionaries(st.sampled_from(["event", "step", "time", "loss", "text", "config"]), JSON, max_size=6),
       kind=st.sampled_from(["train", "val", "sample", "gpu", "eval"]))  # fmt: skip
def test_any_event_is_numbers_or_nothing(event: dict[str, Any], kind: str) -> None:
    row = row_of(event | {"event": kind}, FACTS)
    assert row is None or (row.step >= 0 and all(type(value) is float for value in row.values.values()))
    assert facts_of(Path("run"), b"first\n", event).step >= 0


def test_facts_are_options_and_machine_and_no_command_line(tmp_path: Path) -> None:
    config = {"options": {"learning_rate": 0.5}, "model": {"channels": 8}, "command_line": "train.py", "platform": "x"}
    start = {"event": "resume", "step": 9, "steps": 20, "config": config, "pid": 5}
    facts = facts_of(tmp_path / "run", b"a line\n", start)
    assert facts.parameters == {"learning_rate": 0.5, "model/channels": 8, "steps": 20}
    assert (facts.name, facts.step, facts.resumed) == ("run", 9, True)
    assert facts.run_id == facts_of(tmp_path / "moved", b"a line\n", {}).run_id != FACTS.run_id
    assert json.dumps(facts.parameters)
