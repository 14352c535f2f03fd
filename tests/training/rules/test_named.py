"""Optimizers by name, and in files of the user's."""

from pathlib import Path

import pytest

from llmc_jax.base.errors import InputError
from llmc_jax.config.train import OPTIMIZERS, TrainConfig
from llmc_jax.plan.compiled import plan_for
from llmc_jax.training.optimizer import numbers_of
from llmc_jax.training.rules import named

EXAMPLE = Path(__file__).parents[3] / "examples/optimizers/signum.py"
TEXT = EXAMPLE.read_text()


def test_each_name_is_that_optimizer() -> None:
    assert {name: named(name).name for name in OPTIMIZERS} == {name: name for name in OPTIMIZERS}
    assert {name: len(named(name).buffers) for name in OPTIMIZERS} == {
        "adamw": 2, "adam": 2, "sgd": 0, "momentum": 1, "nesterov": 1, "adagrad": 1, "rmsprop": 1, "muon": 2,
        "muon-polar": 2,
    }  # fmt: skip


def test_numbers_are_options() -> None:
    config = TrainConfig(momentum=0.5, beta1=0.6, beta2=0.7, eps=0.1, weight_decay=0.2)
    for name in OPTIMIZERS:
        found = numbers_of(named(name), config)._asdict()
        assert found == {each: getattr(config, each) for each in found} and "weight_decay" in found


def test_a_file_s_optimizer_has_its_digest(tmp_path: Path) -> None:
    found = named(str(EXAMPLE))
    assert (found.name, found.buffers, found.content) == ("signum", ("m",), EXAMPLE.read_bytes())
    other = tmp_path / "other.py"
    other.write_text(TEXT + "\n")
    assert found.key.partition("@")[0] == "signum" and named(str(other)).key != found.key
    assert named(str(EXAMPLE)) is found  # it is loaded once


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1\n", ["defines no OPTIMIZER"]),
        ("OPTIMIZER = 3\n", ["OPTIMIZER of the type int"]),
        ("x = 1 / 0\n", ["line 1", "ZeroDivisionError"]),
        (TEXT.replace('"signum"', '"adamw"'), ["'adamw'"]),
        (TEXT.replace('"signum"', '"A b"'), ["'A b'"]),
        (TEXT.replace('("m",', '("params",'), ["'params'"]),
        (TEXT.replace('("beta1",)', '("beta7",)'), ["'beta7'"]),
        (TEXT.replace('("beta1",)', '("schedule",)'), ["'schedule'"]),
        (TEXT.replace("(RULE,)", "(RULE, RULE._replace(couples=True))"), ["rule_of"]),
        (TEXT.replace("jnp.sign(m)", "jnp.sgin(m)"), ["line 16", "AttributeError"]),
        (TEXT.replace("jnp.sign(m)", "m.sum()"), ["change", "()"]),
        (TEXT.replace("jnp.sign(m)", "0.0"), ["change", "()"]),
        (TEXT.replace("jnp.sign(m)", "m if n.beta1 > 0 else g"), ["line 16", "TracerBoolConversionError"]),
        (TEXT.replace("(RULE,)", "()"), ["tuple of Rules"]),
        (TEXT.replace("(RULE,)", "RULE"), ["tuple of Rules"]),
        (TEXT.replace("(RULE,)", "[RULE]"), ["TypeError", "list"]),
        (TEXT.replace('(("m", mean),)', '(("m", mean), ("m", mean))'), ["twice"]),
        (TEXT.replace('("m",', '("../m",'), ["'../m'"]),
        ("import sys; sys.exit(0)", ["line 1", "SystemExit"]),
    ],
)
def test_a_file_that_is_no_optimizer(text: str, words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(text)
    with pytest.raises(InputError) as error:
        named(str(path))
    said = str(error.value)
    assert said.count("\n") == 0 and said.count("--optimizer") == 1 and str(path) in said
    assert [word for word in words if word not in said] == [], said


def test_a_file_that_has_changed_is_another_optimizer(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(TEXT)
    before = named(str(path))
    path.write_text(TEXT.replace("jnp.sign(m)", "m"))
    assert named(str(path)).key != before.key


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (", rule_of=lambda tensor: RULE._replace(couples=True)", ["wte", "none of `rules`"]),
        (", rule_of=lambda tensor: tensor.nothing", ["line 17", "AttributeError"]),
    ],
)
def test_rules_that_do_not_fit_a_model_are_refused_by_its_plan(more: str, words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(TEXT.replace('("beta1",)', f'("beta1",){more}'))
    with pytest.raises(InputError) as error:
        plan_for("cpu", TrainConfig(model="L1-NH2-C16-V32-T16", sequence_length=8, optimizer=str(path)))
    said = str(error.value)
    assert said.count("\n") == 0 and str(path) in said and [word for word in words if word not in said] == [], said


def test_a_rule_for_matrices_is_for_those_of_layers_alone(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(TEXT.replace("jnp.sign(m))", "m, matrix=jnp.sign)"))
    with pytest.raises(InputError, match=r"wte: .* for matrices"):
        plan_for("cpu", TrainConfig(model="L1-NH2-C16-V32-T16", sequence_length=8, optimizer=str(path)))


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(InputError, match=r"--optimizer nothere\.py"):
        named("nothere.py")
