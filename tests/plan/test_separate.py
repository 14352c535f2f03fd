"""Steps compiled apart: what is kept by content, and what becomes of a process that fails."""

import dataclasses
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmc_jax.base.errors import InputError
from llmc_jax.base.plain import to_json
from llmc_jax.config.model import ModelConfig, parse_descriptor
from llmc_jax.config.train import TrainConfig
from llmc_jax.machine import gpus
from llmc_jax.models.family import shape_to_json
from llmc_jax.plan import separate
from llmc_jax.plan.memory import CPU, KINDS, Memory, Part
from llmc_jax.plan.separate import compiled_apart, digest

CONFIG = TrainConfig(model="L1-NH2-C16", batch_size=2, sequence_length=16)
MODEL = parse_descriptor(CONFIG.model)
FOUND = Memory("compiled", "backward head", dict.fromkeys(KINDS, 5), 7, (Part("context", 3, "a guess"),), None, None)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[int]]:
    """The -b that are compiled, by a compiler that always finds the same."""
    found: list[int] = []
    monkeypatch.setenv("LLMC_JAX_CACHE", str(tmp_path))
    monkeypatch.setattr(separate, "_compiled", lambda gpu, config, model, say: found.append(config.batch_size) or FOUND)
    yield found


def changed(**change: Any) -> tuple[str, TrainConfig, ModelConfig]:
    config = dataclasses.replace(CONFIG, **change)
    return "h100", config, parse_descriptor(config.model)


def test_what_was_compiled_is_kept(calls: list[int]) -> None:
    for size in (2, 4, 2, 4):
        assert compiled_apart(*changed(batch_size=size)) == FOUND
    assert calls == [2, 4]


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"kinds": {}}', json.dumps(to_json(FOUND)).replace("7", '"7"')])
def test_a_damaged_answer_is_made_anew(damage: str, calls: list[int], tmp_path: Path) -> None:
    compiled_apart(*changed())
    (file,) = tmp_path.glob("plan/*")
    file.write_text(damage)
    assert compiled_apart(*changed()) == FOUND and len(calls) == 2
    assert json.loads(file.read_text()) == to_json(FOUND)


def test_what_cannot_be_kept_is_made_every_time(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(separate, "write_bytes", full)
    assert [compiled_apart(*changed()) for _ in range(2)] == [FOUND, FOUND] and len(calls) == 2


SAME = {"learning_rate": 0.1, "max_steps": 7, "output_dir": "x", "seed": 3, "val_every": 9, "weight_decay": 0.0}
OTHER = {"batch_size": 4, "recompute": 2, "weight_decay": 0.1, "model": "d6", "devices": 8, "dtype": "fp32"}


@pytest.mark.parametrize("name", SAME)
def test_what_the_program_does_not_depend_on_makes_no_difference(name: str) -> None:
    assert digest(*changed(**{name: SAME[name]})) == digest(*changed())


@pytest.mark.parametrize("name", OTHER)
def test_what_the_program_depends_on_does(name: str) -> None:
    assert digest(*changed(**{name: OTHER[name]})) != digest(*changed())


def test_the_card_counts_with_all_that_is_known_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = digest(*changed())
    assert digest("a100", CONFIG, MODEL) != before != digest(CPU, CONFIG, MODEL)
    monkeypatch.setitem(gpus.TARGETS, "h100", gpus.TARGETS["h100"]._replace(multiprocessors=100))
    assert digest(*changed()) != before


def test_without_a_compiler_for_gpus_it_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LLMC_JAX_CACHE", str(tmp_path))
    monkeypatch.setattr(separate, "PLUGINS", ())
    monkeypatch.setattr(separate, "installed", lambda *names: {"jax": "none"})
    with pytest.raises(InputError, match="make plan-tools"):
        compiled_apart(*changed())


def test_a_process_that_ends_is_one_line_and_nothing_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    failing = tmp_path / "python"
    failing.write_text("#!/bin/sh\necho first >&2\necho the reason >&2\nexit 3\n")
    failing.chmod(0o755)
    monkeypatch.setenv("LLMC_JAX_CACHE", str(tmp_path))
    monkeypatch.setattr(separate, "python_that_compiles", lambda: str(failing))
    with pytest.raises(InputError, match="the reason") as caught:
        compiled_apart(*changed())
    assert "first" not in str(caught.value) and "\n" not in str(caught.value) and not list(tmp_path.glob("plan/*"))


@pytest.mark.slow
def test_a_process_compiles_for_the_processor_at_hand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LLMC_JAX_CACHE", str(tmp_path))
    said = list[str]()
    found = compiled_apart(CPU, CONFIG, MODEL, said.append)
    assert found.source == "compiled" and found.kinds["logits"] > 2 * 16 * 50304 * 4 and len(said) == 1
    assert compiled_apart(CPU, CONFIG, MODEL, said.append) == found and len(said) == 1


@pytest.mark.parametrize("change", [{"strict_kernels": True, "kernels": "pallas"}, {"devices": 2}])
def test_bad_input_of_the_process_is_a_problem(change: dict[str, Any]) -> None:
    config = dataclasses.asdict(dataclasses.replace(CONFIG, **change))
    asked = {"gpu": CPU, "config": config, "model": shape_to_json(MODEL)}
    assert set(separate.answer(asked)) == {"problem"}
