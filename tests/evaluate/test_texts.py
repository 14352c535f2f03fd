"""Losses of texts by row and by position, against the plain model in NumPy and against training's validation."""

from functools import cache
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc_jax.base.errors import FormatError, InputError
from llmc_jax.data.loader import TokenLoader
from llmc_jax.data.tokenfile import write_token_file
from llmc_jax.evaluate import texts
from llmc_jax.evaluate.texts import Losses, Piece, Span
from llmc_jax.generate.scorer import Scorer
from llmc_jax.machine.device import devices_of
from llmc_jax.models.gpt2.model import PLAIN
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
    logits, _ = plain.forward(flat(), ids[:-1], CONFIG, "softmax")
    return -plain.log_softmax(logits)[range(len(ids) - 1), ids[1:]]


@cache
def found(stride: int | None = None) -> Losses:
    rows = texts.spans(two_pieces(), T, stride)
    return texts.losses(scorer(), two_pieces(), rows, T, BYTES)


# Rows of 48 positions by hand: 130 ids and 100 ids.
ROWS = [(0, 49), (48, 97), (96, 130), (130, 179), (178, 227), (226, 230)]


def test_rows_cover_both_pieces_and_neither_row_goes_beyond_its_piece() -> None:
    rows = [(130 * each.piece + each.start, 130 * each.piece + each.end) for each in texts.spans(two_pieces(), T)]
    assert rows == ROWS and all(each.first == 1 for each in texts.spans(two_pieces(), T))


def test_losses_by_row_are_those_of_the_plain_model() -> None:
    expected = [plain_losses(*row) for row in ROWS]
    np.testing.assert_allclose(found().sums, [each.sum() for each in expected], atol=5e-4)
    assert found().counts.tolist() == [48, 48, 33, 48, 48, 3] and found().tokens == 228


def test_overlapping_rows_score_each_token_once_given_more_of_what_is_before_it() -> None:
    rows = texts.spans(two_pieces(), T, 20)
    assert [each for each in rows if each.piece == 1] == [
        Span(1, 0, 1, 49), Span(1, 20, 29, 69), Span(1, 40, 29, 89), Span(1, 60, 29, 100),
    ]  # fmt: skip
    expected = [plain_losses(130 * each.piece + each.start, 130 * each.piece + each.end) for each in rows]
    sums = [each[row.first - 1 :].sum() for each, row in zip(expected, rows, strict=True)]
    np.testing.assert_allclose(found(20).sums, sums, atol=5e-4)
    assert found(20).tokens == 228
    assert found(20).bin_counts.sum(0).tolist() == [
        2,
        2,
        4,
        8,
        16,
        32 + 7 * 4 + 1,
        135,
    ]  # the later rows score places 29 to 48


def test_figures_against_a_computation_by_hand() -> None:
    losses = np.concatenate([plain_losses(*row) for row in ROWS])
    targets = np.concatenate([IDS[start + 1 : end] for start, end in ROWS])
    loss, perplexity, bits = texts.figures(found())
    np.testing.assert_allclose(loss.value, losses.mean(), atol=1e-5)
    np.testing.assert_allclose(perplexity.value, np.exp(losses.mean()), rtol=1e-5)
    assert 256 in targets
    np.testing.assert_allclose(bits.value, losses.sum() / np.log(2) / np.sum(targets != 256), rtol=1e-5)
    assert [each.name for each in texts.figures(found()._replace(bytes=None))] == ["loss", "perplexity"]


def test_bins_of_positions_hold_all_tokens() -> None:
    bins = texts.figures_by_position(found(), T)
    assert [each.name for each in bins] == ["1", "2", "3-4", "5-8", "9-16", "17-32", "33-48"]
    expected = [plain_losses(*row) for row in ROWS]
    np.testing.assert_allclose(bins[3].value, np.concatenate([each[4:8] for each in expected]).mean(), atol=1e-5)
    np.testing.assert_array_equal(found().bin_counts.sum(1), found().counts)
    np.testing.assert_allclose(found().bin_sums.sum(1), found().sums, rtol=1e-12)


@given(st.lists(st.integers(0, 60), min_size=1, max_size=4), st.integers(1, 12), st.data())
def test_every_id_but_the_first_is_scored_once(sizes: list[int], positions: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, positions))
    pieces = [texts.piece_of_ids("", np.arange(size)) for size in sizes]
    seen = []
    for number, start, first, end in texts.spans(pieces, positions, stride):
        assert 1 <= first <= end - start - 1 <= positions
        context = start + first
        assert context >= min(positions - stride + 1, start + 1)  # as much before it as the stride promises
        seen += [(number, each) for each in range(start + first, end)]
    assert seen == [(number, each) for number, size in enumerate(sizes) for each in range(1, size)]


@given(st.integers(1, 3000))
def test_bins_divide_the_positions(positions: int) -> None:
    edges = texts.bin_edges(positions)
    assert edges[0] == 0 and edges[-1] == positions and edges == sorted(set(edges))
    assert len(texts.bin_names(positions)) == len(edges) - 1


def test_the_first_batches_have_the_loss_of_trainings_validation(tmp_path: Path) -> None:
    for name, size in (("a", 330), ("b", 250)):
        write_token_file(tmp_path / name, np.resize(IDS[::-1], size))
    pattern = str(tmp_path / "*")
    loader = TokenLoader(pattern, 2, T, vocab_size=257, shuffle=False, flag="-j")
    batches = [loader.next_batch() for _ in range(5)]  # 3 of one file, 2 of the other
    expected = np.mean([float(evaluate_loss(jnp.asarray(flat()), x[0], y[0], CONFIG)) for x, y in batches])
    pieces = texts.pieces_of_files(pattern, "--data", 257)
    rows = texts.first_batches(pieces, T, 2, 5)
    assert len(rows) == 10 and rows == texts.first_batches(pieces, T, 2, 9)
    loss, _ = texts.figures(texts.losses(scorer(), pieces, rows, T))
    np.testing.assert_allclose(loss.value, expected, rtol=1e-6)


def test_a_piece_too_small_for_a_batch_is_refused() -> None:
    with pytest.raises(InputError, match="b: holds 100 tokens"):
        texts.first_batches(two_pieces()[::-1], T, 3, 1)


def test_an_id_that_the_model_does_not_have_is_refused(tmp_path: Path) -> None:
    write_token_file(tmp_path / "a.bin", np.array([1, 2, 300, 4]))
    pieces = texts.pieces_of_files(str(tmp_path / "a.bin"), "--data", 257)
    with pytest.raises(FormatError, match=r"token 2 .*id 300"):
        texts.losses(scorer(), pieces, texts.spans(pieces, T), T)
