"""The check of a user's model finds nothing in right ones, and each mistake that is put into them."""

import math
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from llmc_jax.base.errors import InputError
from llmc_jax.models import check
from llmc_jax.models.check import LEVELS, Compared, check_step
from llmc_jax.models.execution import PLAIN
from llmc_jax.models.family import parsed
from tests.families import none_loaded
from tests.models.own_models import GPT2, SMALL, changed, line_of, loaded

SHAPE = "L2-NH2-C8-V13-T8"
LAYERED = {"ln1w", "ln1b", "qkvw", "qkvb", "attprojw", "attprojb", "ln2w", "ln2b", "fcw", "fcb", "fcprojw", "fcprojb"}


@pytest.fixture(autouse=True)
def _none_loaded() -> Iterator[None]:
    with none_loaded():
        yield


def of_gpt2(folder: Path, *words: str, levels: int = 5) -> dict[tuple[str, str], Compared]:
    """Compare the gradients of GPT-2's file with words replaced, of one batch. By function and level."""
    family = loaded(changed(GPT2, *words), folder)
    shape = parsed(SHAPE, family)
    with jax.enable_x64(True), pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "LEVELS", dict([*LEVELS.items()][:levels]))
        found = check.gradients(shape, check.batches(shape)[-1:])
    return {(each.function, each.level): each for each in found}


def wrong(found: dict[tuple[str, str], Compared]) -> dict[tuple[str, str], list[str]]:
    return {key: each.wrong for key, each in found.items() if each.wrong}


# ----- gradients ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_right_file_agrees_at_every_level(tmp_path: Path) -> None:
    found = of_gpt2(tmp_path)
    by_hand = {(function, level) for level in LEVELS for function in ("loss", "loss_and_gradients")}
    assert set(found) == by_hand | {("hidden", "-r 0")}
    assert wrong(found) == {}
    assert all({"loss", "wte", "lnfb"} | LAYERED <= set(each.errors) for key, each in found.items() if key in by_hand)
    assert 0 < max(max(found[key].errors.values()) for key in by_hand) < 1e-13  # they are computed in two ways


def test_what_is_no_number_is_wrong_and_worst() -> None:
    found = Compared("loss", "-r 0", 1.0, {"wte": 2.0, "wpe": math.nan, "fcw": 1.0})
    assert (found.wrong, found.worst) == (["wte", "wpe"], "wpe")


def test_a_wrong_bias_gradient_is_named(tmp_path: Path) -> None:
    words = ("return dx, dbias, found", "return dx, dbias, found._replace(fcb=1.01 * found.fcb)")
    found = of_gpt2(tmp_path, *words, levels=1)
    assert wrong(found) == {("loss", "-r 0"): ["fcb"]}
    assert found["loss", "-r 0"].worst == "fcb"
    assert found["loss", "-r 0"].errors["fcb"] == pytest.approx(0.01)


def test_a_backward_that_asks_for_a_value_cannot_be_compiled(tmp_path: Path) -> None:
    with pytest.raises(jax.errors.ConcretizationTypeError):
        of_gpt2(tmp_path, "return dx, dbias, found", "return dx * (float(dbias[0]) < 9), dbias, found", levels=1)


def test_a_loss_without_its_weight(tmp_path: Path) -> None:
    words = ("_replace(block=block, ", "_replace(block=block, loss=lambda *given: model.loss_fn(*given[:5]), ")
    found = of_gpt2(tmp_path, *words, levels=1)
    assert set(found["loss", "-r 0"].wrong) >= {"loss", "wte", "lnfb"} | LAYERED


def test_another_gelu_when_it_is_computed_again(tmp_path: Path) -> None:
    call, op = "shape, execution)\n", "execution._replace(op=execution.op._replace({}))"
    found = of_gpt2(
        tmp_path,
        f"model.block_forward(x, pending, p, {call}",
        f"model.block_forward(x, pending, p, shape, {op.format('gelu_forward=jax.nn.silu')})\n",
        f"model.block_backward(dx, dbias, p, a, {call}",
        f"model.block_backward(dx, dbias, p, a, shape, {op.format('gelu_backward=silu_backward')})\n",
    )
    assert wrong(found) == {("loss", "-r 1"): ["fcprojw"], ("loss", "-r 2"): ["fcprojw"]}


def test_what_several_devices_use_is_compared_too(tmp_path: Path) -> None:
    words = ("model.loss_and_gradients(*given)", "model.loss_and_gradients(*given[:6])")  # on_block is forgotten
    found = wrong(of_gpt2(tmp_path, *words, levels=1))
    assert {key: set(names) for key, names in found.items()} == {("loss_and_gradients", "-r 0"): LAYERED}


def test_a_step_of_several_devices_is_tried_before_a_run(tmp_path: Path) -> None:
    """There weights come as tensors; the file's line is named, and one device does without."""
    text = changed(
        GPT2, "loss_and_gradients(*given)\n\n    block", "loss_and_gradients(1.0 * given[0], *given[1:])\n\n    block"
    )
    shape = parsed(SHAPE, loaded(text, tmp_path))
    check_step(shape, (1, 8), jnp.float32, PLAIN)
    with pytest.raises(InputError, match=f"line {line_of(text, '1.0 * given')}:"):
        check_step(shape, (1, 8), jnp.float32, PLAIN, splits=True)


# ----- decoding -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("returned", "bad"), [("y, ", []), ("y - x, ", ["decode"])])
def test_a_decoder_without_a_residual(tmp_path: Path, returned: str, bad: list[str]) -> None:
    family = loaded(changed(GPT2, "return y, ", f"return {returned}"), tmp_path)
    with jax.enable_x64(True):
        found = check.decoding(parsed(SHAPE, family))
    assert (found.level, found.wrong) == ("float64", bad)
    assert found.errors["prefill"] < 1e-14 and found.errors["decode"] > 0


# ----- a model that JAX differentiates --------------------------------------------------------------------------------


def of_small(folder: Path, *words: str) -> tuple[dict[str, Compared], list[str]]:
    found, notes = check.check(loaded(changed(SMALL, *words), folder), "4")
    return {f"{each.function} {each.level}": each for each in found}, notes


@pytest.mark.slow
def test_a_model_that_jax_differentiates_has_no_levels(tmp_path: Path) -> None:
    found, notes = of_small(tmp_path)
    assert list(found) == ["hidden -r 0", "loss_and_gradients -r 0", "decoder float64"]
    assert not any(each.wrong for each in found.values())
    assert [all(level in note for level in [*LEVELS][1:]) for note in notes] == [True, False]


def test_a_wrong_backward_of_an_operation_is_no_slope(tmp_path: Path) -> None:
    found, _ = of_small(tmp_path, "(2 * dout,)", "(3 * dout,)")
    assert {name: each.wrong for name, each in found.items() if each.wrong} == {"hidden -r 0": ["table"]}


def test_frozen_tensors_and_layers_are_left_out(tmp_path: Path) -> None:
    wrong_table = ("(2 * dout,)", "(3 * dout,)", 'head="out"', 'head="out", frozen=lambda shape: ("table", "scale 1")')
    found, notes = of_small(tmp_path, *wrong_table)
    assert set(found["hidden -r 0"].errors) == {"scale", "out"} and not found["hidden -r 0"].wrong
    assert any("table, scale 1" in note for note in notes)


def test_a_model_that_sees_the_future_is_no_failure(tmp_path: Path) -> None:
    found, notes = of_small(tmp_path, "return x * ", "x = x.at[:, 2].add(x[:, -1])\n    return x * ")
    assert list(found) == ["hidden -r 0", "loss_and_gradients -r 0"]  # no decoder is compared
    assert not any(each.wrong for each in found.values())
    assert any("position 2 sees later tokens" in note for note in notes)


# ----- files that cannot be used --------------------------------------------------------------------------------------

TRANSPOSED = "params.table[tokens].swapaxes(0, 1)"


@pytest.mark.parametrize(
    ("words", "line", "named"),
    [
        (['"L C"', '"L D"'], '"scale"', "D"),
        (['"L C"', '"C L"'], '"scale"', "L"),
        (['"scale", ', '"table", '], '"table"', "table"),
        (['"one"', '"ones"'], '"scale"', "'ones'"),
        (['head="out"', 'head="scale"'], '"scale"', "scale"),
        (['"Vp": 16', '"Vp": 8'], '"out"', "V=11"),
        (['head="out"', 'head="out", frozen=lambda shape: ("scale 2",)'], "scale 2", "'scale 2'"),
        (["channels: int", "channels: object", "Small(int(words))", "Small((1, 2))"], "class Small", "[1, 2]"),
        (["np.zeros(65536", "np.zeros(65535"], "def initial", "(65535,)"),
        (["np.zeros(65536, ", "np.full(65536, np.nan, "], "def initial", "NaN"),
        (["np.zeros(65536, ", "np.ones(65536, "], "def initial", "V=11"),
        (["params.table[tokens]", TRANSPOSED], "def hidden", "(2, 6, 4)"),
        (["return {", "return 1 / 0 or {"], "1 / 0", "ZeroDivisionError"),
        (["    x = double", "    assert tokens.sum() > 0\n    x = double"], "assert", "TracerBoolConversionError"),
        (["Program(hidden=hidden)", "None"], "FAMILY =", "NoneType"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, words: list[str], line: str, named: str) -> None:
    text = changed(SMALL, *words)
    with pytest.raises(InputError) as raised:
        of_small(tmp_path, *words)
    (said,) = str(raised.value).splitlines()
    assert said.startswith(f"{tmp_path / 'model.py'}: line {line_of(text, line)}: ")
    assert named in said


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (
            ("block = BLOCK._replace(", "block = BLOCK._replace(parameters=Moved, "),
            "Moved has fcb where the tensor fcw belongs",
        ),
        (("    qkvb: Any\n", "", "BLOCK._replace(", "BLOCK._replace(parameters=Moved, "), "qkvb"),
    ],
)
def test_the_parameters_of_a_block_are_the_tensors_in_their_order(
    tmp_path: Path, words: tuple[str, ...], named: str
) -> None:
    family = loaded(changed(GPT2, *words), tmp_path)
    with pytest.raises(InputError) as raised:
        check.check(family, SHAPE)
    said = str(raised.value)
    assert said.startswith(f"{tmp_path / 'model.py'}: line {line_of(GPT2, 'class Moved')}: ") and named in said
