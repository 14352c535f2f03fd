"""The loss of each token of many rows, against the plain model in NumPy, and on several devices."""

import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc_jax.generate.scorer import SHORTEST, Row, ScoreOptions, Scorer, batches, padded_length, rows_of, score
from llmc_jax.machine.device import devices_of
from llmc_jax.models.execution import PLAIN
from llmc_jax.models.layout import separate
from llmc_jax.training.parallel.placement import placement
from llmc_jax.training.parallel.stage import Parallel
from tests.evaluate.models import CONFIG, TOKENS_PER_BATCH, flat, texts
from tests.generate import plain

ROOT = Path(__file__).resolve().parents[2]


def scorer(weights: Any = None) -> Scorer:
    place = placement(CONFIG, Parallel(), devices_of(1))
    return Scorer(jnp.asarray(flat()) if weights is None else weights, CONFIG, PLAIN, place, TOKENS_PER_BATCH)


def rows() -> list[Row]:
    return [Row(*text) for text in texts()]


@cache
def of_one_device() -> tuple[np.ndarray, np.ndarray]:
    """Losses and ranks, row after row."""
    found = sorted(score(scorer(), rows(), ScoreOptions(rank=True)), key=lambda each: each.row)
    assert [each.row for each in found] == list(range(len(rows())))
    return np.concatenate([each.losses for each in found]), np.concatenate([each.rank for each in found])


def test_losses_against_the_plain_model() -> None:
    losses, ranks = [], []
    for ids, first in texts():
        logits, _ = plain.forward(flat(), ids[:-1], CONFIG)
        own = plain.log_softmax(logits)[range(len(ids) - 1), ids[1:]]
        losses.append(-own[first - 1 :])
        ranks.append(np.sum(own[:, None] < plain.log_softmax(logits)[:, : CONFIG.vocab_size], axis=1)[first - 1 :])
    found = of_one_device()
    np.testing.assert_allclose(found[0], np.concatenate(losses), atol=2e-5)
    np.testing.assert_array_equal(found[1], np.concatenate(ranks))
    assert 0 < np.sum(found[1] == 0) < len(found[1])  # both are there: the likeliest, and others


def test_weights_may_be_tensors_and_ranks_need_not_be_asked() -> None:
    weights = separate(jnp.asarray(flat()), CONFIG)
    found = sorted(score(scorer(weights), rows()), key=lambda each: each.row)
    assert all(each.rank is None for each in found)
    np.testing.assert_allclose(np.concatenate([each.losses for each in found]), of_one_device()[0], atol=2e-6)


def test_a_row_has_the_same_bits_whatever_stands_beside_it() -> None:
    alone = [next(score(scorer(), [row])).losses for row in rows()]
    np.testing.assert_array_equal(np.concatenate(alone), of_one_device()[0])


@pytest.mark.slow
def test_several_devices_give_the_bits_of_one(tmp_path: Path) -> None:
    """With three some batches are left over, whose number is no multiple of it."""
    file = tmp_path / "found.npz"
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.evaluate import models; models.main()"
    subprocess.run([sys.executable, "-c", code, "3", str(file)], cwd=ROOT, check=True)
    with np.load(file) as found:
        np.testing.assert_array_equal(found["losses"], of_one_device()[0])
        np.testing.assert_array_equal(found["rank"], of_one_device()[1])


def test_stop_ends_between_two_batches() -> None:
    found = list(score(scorer(), rows(), stop=lambda: True))
    assert len(found) == rows_of(32, TOKENS_PER_BATCH)


@given(st.lists(st.integers(2, 49), max_size=40), st.integers(1, 300))
def test_every_row_is_in_one_batch_of_few_shapes(lengths: list[int], tokens_per_batch: int) -> None:
    asked = [Row(np.arange(1, n + 1)) for n in lengths]
    seen = []
    for batch in batches(asked, tokens_per_batch, 48):
        R, length = batch.inputs.shape
        assert length in (SHORTEST, 48) and rows_of(length, tokens_per_batch) == R
        for at, (number, row) in enumerate(batch.rows):
            n = len(row.ids) - 1
            assert padded_length(n, 48) == length
            np.testing.assert_array_equal(batch.inputs[at], np.pad(row.ids[:-1], (0, length - n)))
            np.testing.assert_array_equal(batch.targets[at], np.pad(row.ids[1:], (0, length - n)))
            seen.append(number)
    assert sorted(seen) == list(range(len(lengths)))
