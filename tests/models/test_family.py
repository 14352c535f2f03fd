"""A user's file as a family: what is wrong with one is said, its digest tells it apart, GPT-2's weights start it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc_jax.base.errors import InputError
from llmc_jax.checkpoint.llmc import write_model
from llmc_jax.checkpoint.sources import flat_parameters, open_source
from llmc_jax.config.model import parse_descriptor
from llmc_jax.config.train import TrainConfig
from llmc_jax.models import family
from llmc_jax.models.family import UnknownFamily, family_of, shape_from_json, shape_to_json
from llmc_jax.models.layout import flat_size, initial, num_parameters, tensor_specs, views
from llmc_jax.plan.compiled import arguments, plan_for
from llmc_jax.plan.separate import digest
from llmc_jax.run.programs import shared_of
from llmc_jax.training.optimizer import decay_ranges, frozen_ranges
from tests import plain_model
from tests.families import FROZEN, TOY, none_loaded, shape_of

GPT2 = "from llmc_jax.models.gpt2.family import FAMILY as GPT2\n"
RECORD = "FAMILY: "
WRONG = {
    "syntax": ("x = 1\ndef f(:\n", ["line 2: SyntaxError"]),
    "error": ("def f():\n    return 1 / 0\n\nf()\n", ["line 2: f: ZeroDivisionError"]),
    "import": ("import no_such_module\n", ["line 1: ModuleNotFoundError", "no_such_module"]),
    "none": ("x = 1\n", ["no FAMILY"]),
    "other": ("FAMILY = 'toy'\n", ["FAMILY of the type str"]),
    "built in": (f"{GPT2}FAMILY = GPT2\n", [RECORD, "'gpt2'"]),
    "name": (f"{GPT2}FAMILY = GPT2._replace(name='A b')\n", [RECORD, "'A b'"]),
    "shape": (f"{GPT2}FAMILY = GPT2._replace(name='a', shape=dict)\n", [RECORD, "frozen dataclass"]),
    "thawed": (TOY.read_text().replace("(frozen=True)", ""), [RECORD, "frozen dataclass"]),
    "field": (TOY.read_text().replace('    source: str = ""\n', ""), [RECORD, "no source"]),
}


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", WRONG)
def test_a_file_that_is_no_family(name: str, tmp_path: Path) -> None:
    text, words = WRONG[name]
    with none_loaded(), pytest.raises(InputError) as error:
        family.load(written(tmp_path / "m.py", text))
    said = str(error.value)
    assert said.startswith(f"--model {tmp_path / 'm.py'}: ") and "\n" not in said
    assert [word for word in words if word not in said] == [], said


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path / "m.py", tmp_path):
        with pytest.raises(InputError, match=f"--model {path}: cannot be read"):
            family.load(path)


def test_a_file_is_run_once_for_each_content(tmp_path: Path) -> None:
    text = f"{GPT2}import pathlib\npathlib.Path(__file__ + 'x').open('a').write('.')\n"
    file = written(tmp_path / "m.py", f"{text}FAMILY = GPT2._replace(name='counted')\n")
    with none_loaded():
        first = family.load(file)
        assert family.load(file) is first is family.family_named("counted", first.source)
        written(file, file.read_text() + "\n")
        assert family.load(file).source != first.source and family.family_named("counted", first.source) is first
    assert (tmp_path / "m.pyx").read_text() == ".."


# ----- plain data -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("descriptor", "file"), [("toy-V61-C8-T16", TOY), ("L1-NH1-C16-V61-T16", FROZEN)])
def test_a_shape_comes_back_from_json(descriptor: str, file: Path) -> None:
    """Whatever its own class takes for the usual family."""
    shape = shape_of(descriptor, file)
    stored = json.loads(json.dumps(shape_to_json(shape)))
    assert shape_from_json(stored) == shape and family_of(shape).content == file.read_bytes()
    with none_loaded(), pytest.raises(UnknownFamily) as error:
        shape_from_json(stored)
    assert (error.value.name, error.value.source) == (file.stem, shape.source)


def test_two_files_of_one_name_are_two_models(tmp_path: Path) -> None:
    """Nothing that was kept for the one is taken for the other: no plan, no program."""
    other = written(tmp_path / "toy.py", TOY.read_text() + "\n")
    shapes = [shape_of("toy-V61-C8-T16", file) for file in (TOY, other)]
    assert [shape.family for shape in shapes] == ["toy", "toy"] and shapes[0] != shapes[1]
    config = TrainConfig(model="toy-V61-C8-T16", model_file="toy.py", batch_size=2, sequence_length=16)
    plans = [plan_for("cpu", config, shape) for shape in shapes]
    assert len({digest("h100", config, shape) for shape in shapes}) == 2
    assert len({shared_of(plan, arguments(plan), {}) for plan in plans}) == 2
    with none_loaded():
        family.accept(family.load(other))
        assert family_of(shapes[0]).source == shapes[1].source  # the changed file is taken for the first one


# ----- what a family gives --------------------------------------------------------------------------------------------


def test_what_is_frozen_has_no_update_and_no_decay() -> None:
    shape = shape_of("L2-NH1-C16-V61-T16", FROZEN)
    flat = np.zeros(num_parameters(shape), np.int8)
    for start, stop in frozen_ranges(shape):
        flat[start:stop] += 1
    for start, stop in decay_ranges(shape, "all"):
        flat[start:stop] += 2
    frozen = {"wpe": 1, "fcw": [1, 2]}
    for name, values in views(flat, shape)._asdict().items():
        layers = values if name == "fcw" else values[None]
        assert [set(layer.flat) for layer in layers] == [{n} for n in np.atleast_1d(frozen.get(name, 2))], name


def variant(folder: Path, change: str) -> Any:
    """The shape of a GPT-2 that a user's file changes."""
    return shape_of("L1-NH1-C16-V61-T16", written(folder / "m.py", f"{GPT2}FAMILY = GPT2._replace(name='v', {change})"))


@pytest.mark.parametrize("name", ["nope", "fcw 1", "wpe 0"])
def test_what_is_frozen_must_be_there(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"family v freezes '{name}'"):
        plan_for("cpu", "-b 1 -t 16", variant(tmp_path, f"frozen=lambda shape: ({name!r},)"))


def test_the_first_weights_must_be_all(tmp_path: Path) -> None:
    shape = variant(tmp_path, "initial=lambda shape, seed: GPT2.initial(shape, seed)[:5]")
    with pytest.raises(InputError, match=rf"family v: .*float32\[5\]; expected float32\[{flat_size(shape)}\]"):
        initial(shape, 1)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A GPT-2 of llm.c's."""
    shape = parse_descriptor("L1-NH1-C16-V61-T16")
    values = plain_model.random_flat(shape, num_parameters(shape), 0).astype(np.float32)
    write_model(tmp_path / "model.bin", shape, values)
    return tmp_path / "model.bin"


def test_gpt2s_weights_start_a_family_of_the_same_tensors(weights: Path) -> None:
    found, theirs = open_source(weights, model_file=str(FROZEN)), open_source(weights)
    assert found.config == shape_of("L1-NH1-C16-V61-T16", FROZEN) != theirs.config
    np.testing.assert_array_equal(flat_parameters(found), flat_parameters(theirs))


def test_gpt2s_weights_start_no_other(weights: Path, tmp_path: Path) -> None:
    shape = variant(tmp_path, "tensors=lambda shape: GPT2.tensors(shape)[:-1]")
    assert [spec.name for spec in tensor_specs(shape)][-1] == "lnfw"
    with pytest.raises(InputError, match=f"{weights}: .*lnfb is .*there, not here"):
        open_source(weights, model_file=str(tmp_path / "m.py"))
    with pytest.raises(InputError, match=f"{weights}: .*gpt2, not of toy"):
        open_source(weights, model_file=str(TOY))
