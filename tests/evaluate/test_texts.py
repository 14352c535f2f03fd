"""Losses of texts by row, against the plain model in NumPy and against training's validation."""

from functools import cache
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from llmc_jax.base.errors import FormatError
from llmc_jax.data.loader import TokenLoader
from llmc_jax.data.tokenfile import write_token_file
from llmc_jax.evaluate import texts
from llmc_jax.evaluate.texts import Losses, Piece
from llmc_jax.generate.scorer import Scorer
from llmc_jax.machine.device import devices_of
from llmc_jax.models.execution import PLAIN
from llmc_jax.training.parallel.placement import placement
from llmc_jax.training.parallel.stage import Parallel
from llmc_jax.training.step import evaluate_loss
from tests.evaluate.models import CONFIG, TOKENS_PER_BATCH, flat
from tests.generate import plain

pytestmark = pytest.mark.usefixtures("quick_compilation")

T = CONFIG.max_seq_len
IDS = np.random.default_rng(7).integers(0, 257, 230).astype(np.uint16)
BYTES = np.r_[np.ones(256, np.int64), 0]  # an end of text is none of the text


@cache
def scorer() -> Scorer:
    place = placement(CONFIG, Parallel(), devices_of(1))
    return Scorer(jnp.asarray(flat()), CONFIG, PLAIN, place, TOKENS_PER_BATCH)


def two_pieces() -> list[Piece]:
    return [texts.piece_of_ids("a", IDS[:130]), texts.piece_of_ids("b", IDS[130:])]


@cache
def plain_losses(start: int, end: int) -> np.ndarray:
    """Of all ids but the first between two places of IDS, each given those before it."""
    ids = IDS[start:end]
    logits, _ = plain.forward(flat(), ids[:-1], CONFIG)
    return -plain.log_softmax(logits)[range(len(ids) - 1), ids[1:]]


@cache
def found() -> Losses:
    return texts.losses(scorer(), two_pieces(), texts.rows_of_text(two_pieces(), T), BYTES)


# Rows of 48 positions by hand: 130 ids and 100 ids.
ROWS = [(0, 49), (48, 97), (96, 130), (130, 179), (178, 227), (226, 230)]


def test_rows_cover_both_pieces_and_neither_row_goes_beyond_its_piece() -> None:
    rows = texts.rows_of_text(two_pieces(), T)
    assert [(130 * each.piece + each.start, 130 * each.piece + each.end) for each in rows] == ROWS


def test_losses_by_row_are_those_of_the_plain_model() -> None:
    expected = [plain_losses(*row) for row in ROWS]
    np.testing.assert_allclose(found().sums, [each.sum() for each in expected], atol=5e-4)
    assert found().counts.tolist() == [48, 48, 33, 48, 48, 3] and found().tokens == 228


def test_figures_against_a_computation_by_hand() -> None:
    losses = np.concatenate([plain_losses(*row) for row in ROWS])
    targets = np.concatenate([IDS[start + 1 : end] for start, end in ROWS])
    loss, perplexity, bits = texts.figures(found())
    np.testing.assert_allclose(loss.value, losses.mean(), atol=1e-5)
    np.testing.assert_allclose(perplexity.value, np.exp(losses.mean()), rtol=1e-5)
    assert 256 in targets
    np.testing.assert_allclose(bits.value, losses.sum() / np.log(2) / np.sum(targets != 256), rtol=1e-5)
    assert [each.name for each in texts.figures(found()._replace(bytes=None))] == ["loss", "perplexity"]


def test_the_first_rows_have_the_loss_of_trainings_validation(tmp_path: Path) -> None:
    write_token_file(tmp_path / "a.bin", np.resize(IDS[::-1], 430))
    loader = TokenLoader(tmp_path / "a.bin", 2, T, vocab_size=257, shuffle=False, flag="-j")
    batches = [loader.next_batch() for _ in range(4)]
    expected = np.mean([float(evaluate_loss(jnp.asarray(flat()), x[0], y[0], CONFIG)) for x, y in batches])
    pieces = texts.pieces_of_files(str(tmp_path / "a.bin"), "--data", 257)
    loss, _ = texts.figures(texts.losses(scorer(), pieces, texts.rows_of_text(pieces, T, 8)))
    np.testing.assert_allclose(loss.value, expected, rtol=1e-6)


def test_an_id_that_the_model_does_not_have_is_refused(tmp_path: Path) -> None:
    write_token_file(tmp_path / "a.bin", np.array([1, 2, 300, 4]))
    pieces = texts.pieces_of_files(str(tmp_path / "a.bin"), "--data", 257)
    with pytest.raises(FormatError, match=r"token 2 .*id 300"):
        texts.losses(scorer(), pieces, texts.rows_of_text(pieces, T))
