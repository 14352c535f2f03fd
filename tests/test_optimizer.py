"""AdamW, the global norm, clipping and the ranges of the weight decay."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmc_jax.config import ModelConfig
from llmc_jax.optimizer import AdamWNumbers, _in_ranges, adamw_update, clip_scale, decay_ranges, global_norm
from llmc_jax.params import FLAT_MULTIPLE, flat_size, num_parameters, tensor_specs
from tests import plain_model
from tests.comparisons import ADAMW_TOLERANCE, adamw_errors

SMALL = ModelConfig(max_seq_len=9, vocab_size=11, padded_vocab_size=16, num_layers=2, num_heads=2, channels=6)
NUMBERS = AdamWNumbers(beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01)


def one_update(p: Any, m: Any, v: Any, g: Any, *, update: int = 1, lr: float = 1e-3, decay: bool = False, **how: Any):
    """adamw_update of a few numbers, all of which decay or none."""
    arrays = [jnp.asarray(a, jnp.float32) for a in (p, m, v, g)]
    given = {"scale": jnp.float32(1), "apply": jnp.array(True), "numbers": NUMBERS} | how
    ranges = ((0, arrays[0].size),) if decay else ()
    return adamw_update(*arrays, learning_rate=jnp.float32(lr), update=update, decay=ranges, **given)


def test_worked_example() -> None:
    """w = 0.5, g = 0.2, lr = 0.001, decay 0.01: m = 0.02, v = 0.00004, mhat = 0.2, vhat = 0.04; w moves by 0.001005."""
    p, m, v = one_update([0.5], [0.0], [0.0], [0.2], decay=True)
    np.testing.assert_allclose(m, 0.02, rtol=1e-5)
    np.testing.assert_allclose(v, 0.00004, rtol=1e-4)
    np.testing.assert_allclose(p, 0.498995, rtol=0, atol=1e-7)


def test_the_first_update_moves_every_parameter_by_the_rate() -> None:
    """mhat = g and vhat = g^2, whatever the size of g: what the bias corrections are for."""
    gradient = np.array([1e-3, -1e-3, 5.0, -700.0])
    p, _, _ = one_update(np.zeros(4), np.zeros(4), np.zeros(4), gradient, lr=0.25)
    np.testing.assert_allclose(p, -0.25 * np.sign(gradient), rtol=1e-4)


def test_without_a_gradient_only_the_decay_moves_a_parameter() -> None:
    zero = np.zeros(3)
    p, m, v = one_update([2.0, -4.0, 0.0], zero, zero, zero, lr=0.5, decay=True)
    np.testing.assert_allclose(p, np.array([2.0, -4.0, 0.0]) * (1 - 0.5 * 0.01), rtol=1e-6)
    assert not np.any(m) and not np.any(v)


@pytest.mark.parametrize("rule", ["matrices", "all", "none"])
def test_several_updates_in_float64(rule: str) -> None:
    errors = adamw_errors(rule, SMALL, np.float64)
    assert max(errors.values()) <= ADAMW_TOLERANCE, errors


def test_several_updates_in_float32() -> None:
    errors = adamw_errors("matrices", SMALL, np.float32)
    assert max(errors.values()) <= 1e-6, errors


def test_not_applied_it_changes_no_bit() -> None:
    """Not even where the gradient, and so the new m, v and parameters, are NaN."""
    state = [np.array(values, np.float32) for values in ([1.5, -0.0, np.inf], [0.1, -0.0, 1e-40], [0.3, 0.0, 2.0])]
    after = one_update(*state, [np.nan, np.inf, 1.0], apply=jnp.array(False), decay=True)
    for found, before in zip(after, state, strict=True):
        np.testing.assert_array_equal(np.asarray(found).view(np.uint32), before.view(np.uint32))


@pytest.mark.parametrize("rule", ["matrices", "all"])
def test_decay_ranges_are_the_tensors_that_decay(rule: str) -> None:
    mask = np.zeros(flat_size(SMALL))
    ranges = decay_ranges(SMALL, rule)
    for start, stop in ranges:
        assert not mask[start:stop].any()  # they do not overlap
        mask[start:stop] = 1
    np.testing.assert_array_equal(mask[: num_parameters(SMALL)], plain_model.decay_mask(SMALL, rule))
    assert not mask[num_parameters(SMALL) :].any()
    assert all(earlier[1] < later[0] for earlier, later in itertools.pairwise(ranges))  # neighbours joined


def test_decay_ranges_name_llm_c_s_six_tensors() -> None:
    specs = {spec.name: spec for spec in tensor_specs(SMALL)}
    expected = [(0, specs["wpe"].offset + specs["wpe"].size)]  # wte and wpe, one range
    expected += [(specs[n].offset, specs[n].offset + specs[n].size) for n in ("qkvw", "attprojw", "fcw", "fcprojw")]
    assert decay_ranges(SMALL, "matrices") == tuple(expected)
    assert decay_ranges(SMALL, "all") == ((0, num_parameters(SMALL)),)


class Beyond32Bits(int):
    """A size that says it is above 2^32, so that the test needs no buffer of that size."""

    def __le__(self, other: object) -> bool:
        return False


@pytest.mark.parametrize("kind", [int, Beyond32Bits])
def test_positions_in_ranges(kind: type[int]) -> None:
    """Ranges that begin or end at a multiple of FLAT_MULTIPLE, or beside one; neighbours; the first and the last."""
    size, row = 4 * FLAT_MULTIPLE, FLAT_MULTIPLE
    ranges = (
        (0, 1),
        (row - 1, row),
        (row, row + 1),
        (2 * row - 1, 2 * row + 1),
        (2 * row + 5, 3 * row),
        (size - 1, size),
    )
    expected = np.zeros(size, bool)
    for start, stop in ranges:
        expected[start:stop] = True
    np.testing.assert_array_equal(_in_ranges(kind(size), ranges), expected)
    np.testing.assert_array_equal(_in_ranges(kind(size), ((0, size),)), np.ones(size, bool))
    np.testing.assert_array_equal(_in_ranges(kind(size), ()), np.zeros(size, bool))


def test_global_norm() -> None:
    flat = np.zeros(2 * FLAT_MULTIPLE, np.float32)
    flat[[0, 70_000, -1]] = 2.0, -3.0, 6.0
    assert float(global_norm(jnp.asarray(flat))) == 7.0


def test_global_norm_keeps_its_digits_over_many_elements() -> None:
    """A running float32 sum of 8 million squares, one after the other, gives a norm that is 0.1 % off."""
    flat = np.random.default_rng(0).normal(1.0, 0.1, 128 * FLAT_MULTIPLE).astype(np.float32)
    found = float(jax.jit(global_norm)(flat))
    np.testing.assert_allclose(found, np.linalg.norm(flat.astype(np.float64)), rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e30])
def test_global_norm_is_not_finite_where_a_gradient_is_not_or_its_square_overflows(bad: float) -> None:
    flat = np.zeros(FLAT_MULTIPLE, np.float32)
    flat[123] = bad
    assert not np.isfinite(global_norm(jnp.asarray(flat)))


@pytest.mark.parametrize(
    ("norm", "limit", "scale"),
    [
        (2.0, 1.0, 0.5),
        (0.5, 1.0, 1.0),
        (1.0, 1.0, 1.0),
        (8.0, 2.0, 0.25),
        (5.0, 0.0, 1.0),
        (5.0, -1.0, 1.0),
        (0.0, 1.0, 1.0),
    ],
)
def test_clip_scale(norm: float, limit: float, scale: float) -> None:
    assert float(clip_scale(jnp.float32(norm), jnp.float32(limit))) == scale
