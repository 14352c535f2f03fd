"""Questions with several answers: against the plain model item by item, and by hand."""

import math
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from llmc_jax.config.model import ModelConfig
from llmc_jax.data.evalfile import Item
from llmc_jax.evaluate import subjects
from llmc_jax.evaluate.choices import Answer, answers, rows_of_items
from llmc_jax.generate.scorer import Scored, ScoreOptions, Scorer, score
from llmc_jax.machine.device import devices_of
from llmc_jax.models.execution import PLAIN
from llmc_jax.training.parallel.placement import placement
from llmc_jax.training.parallel.stage import Parallel
from tests.evaluate.models import CONFIG, TOKENS_PER_BATCH, flat
from tests.generate import plain

pytestmark = pytest.mark.usefixtures("quick_compilation")


def items(count: int, completions: int) -> list[Item]:
    """Items of all lengths, the longest of which just fit."""
    rng = np.random.default_rng(7)

    def ids(most: int) -> tuple[int, ...]:
        return tuple(int(x) for x in rng.integers(0, 257, rng.integers(1, most + 1)))

    made = [
        Item(str(i), ids(24), tuple(ids(25) for _ in range(completions)), int(rng.integers(completions)))
        for i in range(count)
    ]
    whole = tuple(range(24))
    return [*made, Item("full", whole, (tuple(range(25)),) * completions, 0)]


def item_losses(
    item: Item, completion: tuple[int, ...], values: np.ndarray | None = None, config: ModelConfig = CONFIG
) -> tuple[np.ndarray, np.ndarray]:
    """Losses (k,) of a completion's tokens by the plain model, and which id it holds for likeliest before each."""
    ids = np.array(item.context + completion)
    logits, _ = plain.forward(flat() if values is None else values, ids[:-1], config)
    at = np.arange(len(item.context) - 1, len(ids) - 1)
    return -plain.log_softmax(logits)[at, ids[at + 1]], logits[at].argmax(1)


def scorer() -> Scorer:
    return Scorer(jnp.asarray(flat()), CONFIG, PLAIN, placement(CONFIG, Parallel(), devices_of(1)), TOKENS_PER_BATCH)


def chosen(answer: Answer) -> tuple[int, int]:
    """The completions that are chosen by their sum and by their mean: those that make the answer right."""
    labels = range(len(answer.losses))
    return (
        [answer._replace(label=label).right for label in labels].index(True),
        [answer._replace(label=label).right_norm for label in labels].index(True),
    )


def test_answers_are_the_plain_models_item_by_item() -> None:
    asked = items(6, 3)
    found = answers(asked, score(scorer(), rows_of_items(asked)))
    for item, answer in zip(asked, found, strict=True):
        losses = [item_losses(item, completion)[0] for completion in item.completions]
        sums, means = [float(x.sum()) for x in losses], [float(x.mean()) for x in losses]
        assert answer.losses == pytest.approx(sums, abs=5e-4)
        assert answer.tokens == tuple(map(len, item.completions))
        assert answer.label == item.label and answer.written is None
        assert chosen(answer) == (np.argmin(sums), np.argmin(means))
        assert (answer.right, answer.right_norm) == (np.argmin(sums) == item.label, np.argmin(means) == item.label)
    assert any(by_sum != by_mean for by_sum, by_mean in map(chosen, found))  # so the two are told apart
    assert chosen(found[-1])[0] == 0  # of equals the first


@pytest.mark.slow
def test_what_the_model_would_write_is_the_plain_models_item_by_item() -> None:
    asked = [*items(2, 1), *(written_by_the_model(context, 3) for context in [(1, 2), (200,), (5,) * 20])]
    found = answers(asked, score(scorer(), rows_of_items(asked), ScoreOptions(rank=True)))
    for item, answer in zip(asked, found, strict=True):
        best = item_losses(item, item.completions[0])[1]
        assert answer.written == (tuple(best) == item.completions[0],)
    assert [each.written for each in found].count((True,)) == 3


def written_by_the_model(context: tuple[int, ...], tokens: int) -> Item:
    completion: tuple[int, ...] = ()
    for _ in range(tokens):
        ids = np.array(context + completion)
        completion += (int(plain.forward(flat(), ids, CONFIG)[0][-1].argmax()),)
    return Item("", context, (completion,), 0)


def scored(*losses: list[float]) -> list[Scored]:
    return [Scored(row, np.array(each, np.float32), None) for row, each in enumerate(losses)]


def test_hand_made_items() -> None:
    """Two items of two and three completions: the first is right by its sum alone, the second by its mean alone."""
    asked = [Item("a", (1,), ((2,), (3, 4)), 0), Item("b", (1,), ((2, 3), (4,), (5,)), 0)]
    told = scored([2.0], [1.0, 1.5], [1.0, 1.0], [1.5], [3.0])
    found = answers(asked, reversed(told))
    assert found == [Answer(0, (2.0, 2.5), (1, 2)), Answer(0, (2.0, 1.5, 3.0), (2, 1, 1))]
    assert [*map(chosen, found)] == [(0, 1), (1, 0)]
    assert [(each.right, each.right_norm) for each in found] == [(True, False), (False, True)]


def test_hand_made_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second would have been written but for its last token; perplexity is that of whole words: 2 and 8."""
    asked = subjects.Questions("lambada", Path("file"), [Item("a", (1,), ((2,),), 0), Item("b", (1,), ((2, 3),), 0)])
    told = [[math.log(2.0)], [math.log(2.0), math.log(4.0)]], [[0], [0, 7]]
    made = [Scored(row, np.array(losses), np.array(rank)) for row, (losses, rank) in enumerate(zip(*told, strict=True))]
    monkeypatch.setattr(subjects, "score", lambda scorer, rows, wanted: made if wanted.rank else None)
    found = subjects.questions_result(scorer(), asked)
    accuracy, perplexity = found.figures
    assert accuracy.mean == (0.5, 0.5)
    assert (*perplexity.mean,) == pytest.approx((4.0, 4.0 * math.log(2.0)))


def test_an_answer_is_missing_where_the_scoring_was_stopped() -> None:
    with pytest.raises(KeyError):
        answers([Item("a", (1,), ((2,), (3,)), 0)], scored([1.0]))


@pytest.mark.parametrize(
    ("losses", "first"),
    [((1.0, 1.0), 0), ((2.0, 1.0, 1.0), 1), ((math.inf, math.inf), 0), ((2.0, math.nan, 1.0), 2), ((math.nan, 1.0), 0)],
)
def test_equals_and_nan_are_decided_as_llm_c_does(losses: tuple[float, ...], first: int) -> None:
    assert chosen(Answer(0, losses, (1,) * len(losses))) == (first, first)
