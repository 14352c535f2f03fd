"""Steps compiled apart: what is kept by content, and what becomes of a process that fails."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmc_jax.base.plain import to_json
from llmc_jax.config.train import TrainConfig
from llmc_jax.machine import gpus
from llmc_jax.plan import separate
from llmc_jax.plan.memory import CPU, KINDS, Memory, Part
from llmc_jax.plan.separate import Problem, Request, compiled_apart, digest

CONFIG = TrainConfig(model="L1-NH2-C16", batch_size=2, sequence_length=16)
FOUND = Memory("compiled", "backward head", dict.fromkeys(KINDS, 5), 7, (Part("context", 3, "a guess"),), None, None)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Request]]:
    """The requests that are compiled, by a compiler that always finds the same."""
    found: list[Request] = []
    monkeypatch.setenv("LLMC_JAX_CACHE", str(tmp_path))
    monkeypatch.setattr(separate, "_compiled", lambda request: found.append(request) or FOUND)
    yield found


def changed(**change: object) -> Request:
    return Request("h100", dataclasses.replace(CONFIG, **change))  # type: ignore[arg-type]


def test_what_was_compiled_is_kept(calls: list[Request]) -> None:
    asked = [changed(), changed(batch_size=4), changed()]
    assert compiled_apart(asked) == [FOUND] * 3
    assert sorted(each.config.batch_size for each in calls) == [2, 4]
    assert compiled_apart(asked) == [FOUND] * 3 and len(calls) == 2


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"kinds": {}}', json.dumps(to_json(FOUND)).replace("7", '"7"')])
def test_a_damaged_answer_is_made_anew(damage: str, calls: list[Request]) -> None:
    compiled_apart([changed()])
    (kept,) = separate.folder().iterdir()
    kept.write_text(damage)
    assert compiled_apart([changed()]) == [FOUND] and len(calls) == 2
    assert json.loads(kept.read_text()) == to_json(FOUND)


def test_problems_are_not_kept(calls: list[Request], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(separate, "_compiled", lambda request: Problem("broken"))
    assert compiled_apart([changed()]) == [Problem("broken")]
    assert not separate.folder().exists() or not list(separate.folder().iterdir())


SAME = {"learning_rate": 0.1, "max_steps": 7, "output_dir": "x", "seed": 3, "val_every": 9, "weight_decay": 0.0}
OTHER = {"batch_size": 4, "recompute": 2, "weight_decay": 0.1, "model": "d6", "devices": 8, "dtype": "fp32"}


@pytest.mark.parametrize("name", SAME)
def test_what_the_program_does_not_depend_on_makes_no_difference(name: str) -> None:
    assert digest(changed(**{name: SAME[name]})) == digest(changed())


@pytest.mark.parametrize("name", OTHER)
def test_what_the_program_depends_on_does(name: str) -> None:
    assert digest(changed(**{name: OTHER[name]})) != digest(changed())


def test_the_card_counts_with_all_that_is_known_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = digest(changed())
    assert digest(Request("a100", CONFIG)) != before != digest(Request(CPU, CONFIG))
    monkeypatch.setitem(gpus.TARGETS, "h100", gpus.TARGETS["h100"]._replace(multiprocessors=100))
    assert digest(changed()) != before


def test_without_a_compiler_for_gpus_it_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LLMC_JAX_CACHE", str(tmp_path))
    monkeypatch.setattr(separate, "python_that_compiles", lambda: None)
    (problem,) = compiled_apart([changed()])
    assert isinstance(problem, Problem) and problem.what == separate.how_to_install()
    assert "\n" not in problem.what and ("make plan-tools" in problem.what or "pip install" in problem.what)


def test_a_process_that_ends_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    failing = tmp_path / "python"
    failing.write_text("#!/bin/sh\necho first >&2\necho the reason >&2\nexit 3\n")
    failing.chmod(0o755)
    monkeypatch.setenv("LLMC_JAX_CACHE", str(tmp_path))
    monkeypatch.setattr(separate, "python_that_compiles", lambda: str(failing))
    (problem,) = compiled_apart([changed()])
    assert isinstance(problem, Problem)
    assert "the reason" in problem.what and "first" not in problem.what and "\n" not in problem.what


def test_a_process_compiles_for_the_processor_at_hand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LLMC_JAX_CACHE", str(tmp_path))
    (found,) = compiled_apart([Request(CPU, CONFIG)])
    assert isinstance(found, Memory), found
    assert found.source == "compiled" and found.kinds["logits"] > 2 * 16 * 50304 * 4


@pytest.mark.parametrize("change", [{"model": "nonsense"}, {"devices": 2}])
def test_bad_input_of_the_process_is_a_problem(change: dict[str, Any]) -> None:
    asked = {"gpu": CPU, "config": dataclasses.asdict(dataclasses.replace(CONFIG, **change)), "facts": None}
    problem = separate.answer(asked)
    assert isinstance(problem, Problem) and "\n" not in problem.what
