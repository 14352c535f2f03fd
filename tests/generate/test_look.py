"""What a model thinks of a text, and its attention, against the plain model in NumPy."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmc_jax.base.errors import InputError
from llmc_jax.base.plain import to_json
from llmc_jax.config.model import CAUSAL, RELU, Attention, ModelConfig, parse_descriptor
from llmc_jax.data.tokenizers import Tokenizer, bytes_tokenizer
from llmc_jax.generate import heads, look, scorer
from llmc_jax.generate.engine import kept_after_drop
from llmc_jax.generate.look import Seen
from llmc_jax.generate.model import Model
from llmc_jax.generate.text import piece, with_pieces
from llmc_jax.models.execution import PLAIN
from llmc_jax.models.gpt2.tensors import BY_NAME, Params
from llmc_jax.models.layout import flat_size, views
from llmc_jax.training.state import DTYPES
from tests import plain_model
from tests.generate import plain

pytestmark = pytest.mark.usefixtures("quick_compilation")

CONFIG = parse_descriptor("L2-NH2-C16-V257-T32")
T, V, Vp = CONFIG.max_seq_len, CONFIG.vocab_size, CONFIG.padded_vocab_size
TEXT = np.random.default_rng(3).integers(0, V, 2 * T + 17).tolist()


@pytest.fixture(autouse=True, scope="module")
def _few_rows() -> Iterator[None]:
    """Four rows of logits at a time: what is asked for begins and ends within such a chunk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(look, "LOGIT_BYTES", 7 * Vp * 4)
        yield


@cache
def flat(dtype: str) -> np.ndarray:
    """Weights as the dtype can hold them; those of the padding would be by far the likeliest."""
    values = plain_model.random_flat(CONFIG, flat_size(CONFIG), seed=1)
    views(values, CONFIG).wte[V:] = 9 * np.sign(views(values, CONFIG).lnfw)
    return np.asarray(jnp.asarray(values, DTYPES[dtype]), np.float64)


def shape(attention: Attention) -> ModelConfig:
    return replace(CONFIG, attention=attention)


@cache
def model(dtype: str = "fp32", attention: Attention = CAUSAL) -> Model:
    tensors: dict[str, Any] = {}
    for name, values in views(flat(dtype), CONFIG)._asdict().items():
        on_device = [jnp.asarray(each, DTYPES[dtype]) for each in (values if BY_NAME[name].layered else [values])]
        tensors[name] = tuple(on_device) if BY_NAME[name].layered else on_device[0]
    return Model(Path("m"), "state", 0, shape(attention), Params(**tensors), bytes_tokenizer(), "bytes", V - 1)


def expected(ids: list[int], dtype: str = "fp32", attention: Attention = CAUSAL) -> np.ndarray:
    """Log-probabilities (n, V) of what follows the end of text and each id but the last, each from its own context."""
    inputs = [V - 1, *ids[:-1]]
    rows, start = [], 0
    while len(rows) < len(ids):  # as a text is generated: a full window loses its oldest half before the next token
        end = min(start + T, len(ids))
        logits, _ = plain.forward(flat(dtype), np.array(inputs[start:end]), shape(attention))
        rows += list(plain.log_softmax(logits))[len(rows) - start :]
        start = end + 1 - T // 2
    return np.array(rows)


@pytest.mark.parametrize(
    ("dtype", "attention", "bound"),
    [
        ("fp32", CAUSAL, 2e-5),
        ("fp32", RELU._replace(window=5), 2e-5),
        # activations and logits have eight bits: a logit of 8 may be off by 1/64 from its own rounding alone
        ("bf16", CAUSAL, 0.1),
    ],
)
@pytest.mark.parametrize("length", [T - 9, len(TEXT)])
def test_look_against_the_plain_model(length: int, dtype: str, attention: Attention, bound: float) -> None:
    ids = TEXT[:length]
    want = expected(ids, dtype, attention)
    seen = look.look(model(dtype, attention), ids, candidates=4)
    assert [each.token for each in seen] == ids
    np.testing.assert_allclose([each.logprob for each in seen], want[range(length), ids], atol=bound)
    np.testing.assert_allclose([each.entropy for each in seen], -np.sum(np.exp(want) * want, axis=1), atol=bound)
    for each, row in zip(seen, want, strict=True):
        tokens = [token for token, _ in each.candidates]
        np.testing.assert_allclose([value for _, value in each.candidates], row[tokens], atol=bound)
        np.testing.assert_allclose(row[tokens], np.sort(row)[:-5:-1], atol=bound)  # the best, but for near ties
        assert np.sum(row > row[each.token] + 2 * bound) <= each.rank <= np.sum(row > row[each.token] - 2 * bound)
        assert (each.token in tokens) == (each.rank < 4) and (each.rank >= 4 or tokens[each.rank] == each.token)


def test_equal_logits_are_ranked_by_id() -> None:
    logits = np.zeros((3, 8), np.float32)
    logits[1, 2], logits[2, 5:] = 300, 1e9  # a certainty; padding that must not count
    asked = scorer.ScoreOptions(rank=True, candidates=3)
    losses, rank, entropy, ids, logprobs = jax.jit(scorer.scores_of_logits, static_argnums=(2, 3, 4))(
        logits, np.array([3, 2, 4]), 5, PLAIN, asked
    )
    assert rank.tolist() == [3, 0, 4]
    assert ids.tolist() == [[0, 1, 2], [2, 0, 1], [0, 1, 2]]
    np.testing.assert_allclose(losses, [math.log(5), 0, math.log(5)], rtol=1e-6)
    np.testing.assert_allclose(entropy, [math.log(5), 0, math.log(5)], rtol=1e-6, atol=1e-30)
    np.testing.assert_allclose(logprobs[1], [0, -300, -300], rtol=1e-6)


def test_a_token_whose_logit_is_nan_never_ranks_first() -> None:
    logits = np.array([[np.nan] * 8, [0, np.nan, *[0] * 6], [0, np.nan, *[0] * 6]], np.float32)
    targets = np.array([0, 1, 0])
    _, rank, *_ = scorer.scores_of_logits(jnp.asarray(logits), targets, 5, PLAIN, scorer.ScoreOptions(rank=True))
    assert rank.tolist() == [5, 5, 1]


@pytest.mark.parametrize("positions", [1, 2, 5, 32])
@pytest.mark.parametrize("length", [0, 1, 31, 32, 33, 100])
def test_windows_take_each_position_once_with_half_of_T_before_it(length: int, positions: int) -> None:
    stride = positions + 1 - kept_after_drop(replace(CONFIG, max_seq_len=positions))
    found = list(scorer.cut(1 + length, positions, stride))
    assert [place for start, first, end in found for place in range(start + first, end)] == list(range(1, 1 + length))
    assert all(end - start <= positions + 1 for start, _, end in found)
    assert [start for start, *_ in found[:1]] == [0][:length]
    # with itself: the token that follows has so many before it
    assert all(first == positions - positions // 2 for _, first, _ in found[1:])


def test_a_text_that_fits_is_one_window() -> None:
    assert list(scorer.cut(1 + T, T, 1)) == [(0, 1, 1 + T)]
    assert look.look(model(), []) == []


@pytest.mark.parametrize("bad", [V, -1])  # V is an id of the padding
def test_foreign_ids_are_refused(bad: int) -> None:
    for ask in (look.look, lambda m, ids: heads.attention_weights(m, ids, 0)):
        with pytest.raises(InputError, match=f"has the id {bad};"):
            ask(model(), [0, bad])


# ----- attention ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", [CAUSAL, RELU._replace(window=5)])
def test_attention_against_the_plain_model(attention: Attention) -> None:
    ids = TEXT[: T - 9]
    found = heads.attention_weights(model("fp32", attention), ids, 1)
    assert found.shape == (CONFIG.num_heads, len(ids), len(ids)) and found.dtype == np.float32
    _, want = plain.forward(flat("fp32"), np.array(ids), shape(attention))
    np.testing.assert_allclose(found, want[1], atol=1e-5)
    assert not np.any(np.triu(found, 1))
    if attention == CAUSAL:
        np.testing.assert_allclose(found.sum(-1), 1, atol=1e-6)


def test_attention_of_what_is_not_there_is_refused() -> None:
    for layer in (-1, CONFIG.num_layers):
        with pytest.raises(InputError, match=f"--layer {layer}"):
            heads.attention_weights(model(), [1], layer)
    for ids in ([], [1] * (T + 1)):
        with pytest.raises(InputError, match="--attention"):
            heads.attention_weights(model(), ids, 0)


@pytest.mark.parametrize("attention", [RELU._replace(window=5), Attention(documents=7), Attention(kv_heads=1)])
def test_what_attention_hides_is_hidden_in_its_picture(
    attention: Attention, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(heads, "draw_attention", lambda *given: drawn.append(given))
    ids = [1, 2, 7, 3, 4, 5, 6, 7, 8]
    own = shape(attention)
    weights = jax.tree.map(jnp.zeros_like, views(jnp.zeros(flat_size(own)), own))
    heads.draw_text_attention(tmp_path / "a.png", model()._replace(config=own, weights=weights), ids, 0)
    ((_, _, labels, title, hidden),) = drawn
    expected = plain_model.mask(attention, jnp.array([[V - 1, *ids]]))[0]
    np.testing.assert_array_equal(hidden, ~np.asarray(expected))
    assert len(labels) == len(ids) + 1 and title.startswith(attention.words)


def test_picture_shows_the_weights_and_leaves_what_is_hidden_white(tmp_path: Path) -> None:
    """The future, and what a window of half the text hides."""
    from matplotlib.image import imread

    weights = np.tril(np.ones((1, 60, 60), np.float32))  # too many for labels
    heads.draw_attention(tmp_path / "w.png", weights, ["?"] * 60, "", ~(np.tri(60) > np.tri(60, k=-30)))
    heads.draw_attention(tmp_path / "a.png", weights, ["?"] * 60, "", np.tri(60) == 0)
    pixels = imread(tmp_path / "a.png")[..., :3]
    yellow = np.all(np.abs(pixels - (0.996, 0.910, 0.220)) < 0.01, axis=-1)
    white = np.all(pixels == 1, axis=-1)
    left = np.flatnonzero(yellow.any(axis=0))[0]
    rows = np.flatnonzero(yellow[:, left])  # of the first column, which all positions see
    side = rows[-1] - rows[0] + 1
    panel = slice(rows[0], rows[0] + side), slice(left, left + side)
    below = np.tril(np.ones((side, side), bool), -(side // 30))
    below[:, :2] = below[-2:] = False  # where the ticks begin
    assert yellow[panel][below].all() and white[panel][below.T].all()
    white = np.all(imread(tmp_path / "w.png")[..., :3] == 1, axis=-1)[panel]
    far = np.tril(np.ones((side, side), bool), -(side // 2 + side // 30))
    far[:, :2] = far[-2:] = False
    assert white[far].all() and not white[below & ~np.tri(side, k=-(side // 2 - side // 30)).astype(bool)].any()


# ----- shown --------------------------------------------------------------------------------------------------------


def seen_of(text: bytes, bits: list[float]) -> list[Seen]:
    best = ((97, math.log(0.5)), (10, math.log(1e-6)))
    return [Seen(token, -each * math.log(2), 3, math.log(4), best) for token, each in zip(text, bits, strict=True)]


@pytest.mark.parametrize(
    ("data", "shown"),
    [(b" the", " the"), (b"\x1b[2J\n", "\\x1b[2J\\n"), ("é".encode(), "é"), (b"\xc3", "\\xc3"),
     (b"\\n", "\\\\n"), ("\u202e".encode(), "\\u202e")],
)  # fmt: skip
def test_tokens_are_visible(data: bytes, shown: str) -> None:
    assert piece(Tokenizer("table", (data, b"x"), 1, "table", bytes_tokenizer().encode_text), 0) == shown


def test_table_and_plain_data() -> None:
    tokenizer = bytes_tokenizer()
    seen = seen_of(b"a\x07", [1, 30])
    head, _, first, second = look.probability_table(tokenizer, seen, width=200).splitlines()
    assert head.split() == ["position", "token", "probability", "rank", "bits", "entropy", "rank", "0", "rank", "1"]
    assert first.split() == ["0", '"a"', "50.00%", "3", "1.00", "2.00", '"a"', "50.00%", '"\\n"', "<0.01%"]
    assert second.split()[:6] == ["1", '"\\x07"', "<0.01%", "3", "30.00", "2.00"]
    assert "rank 1" in look.probability_table(tokenizer, seen, width=65).partition("hidden at this width")[2]

    rows = [with_pieces(tokenizer, each) for each in seen]
    assert json.loads(json.dumps(to_json(rows), allow_nan=False)) == rows
    assert rows[1] == {
        "piece": "\\x07", "token": 7, "logprob": seen[1].logprob, "rank": 3, "entropy": math.log(4),
        "candidates": [[97, "a", math.log(0.5)], [10, "\\n", math.log(1e-6)]],
    }  # fmt: skip
    assert [with_pieces(None, each)["piece"] for each in seen] == ["97", "7"]
