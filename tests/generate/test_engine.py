"""Generation against what the whole model thinks of its text, its windows, its ends, what may not change a token."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmc_jax.base.errors import InputError
from llmc_jax.generate import engine
from llmc_jax.generate.engine import Drawn, Dropped, Request, generate, kept_after_drop
from llmc_jax.generate.look import look
from llmc_jax.generate.model import Model, open_model
from llmc_jax.generate.sampling import Sampling

pytestmark = pytest.mark.usefixtures("quick_compilation")

GREEDY = Sampling(temperature=0)
T = 32


@pytest.fixture(scope="module")
def model() -> Model:
    """A random model whose weights are made larger, so that it is far from uniform."""
    found = open_model("L2-NH2-C16-V257-T32")
    return found._replace(weights=jax.tree.map(lambda w: 12 * w if w.ndim > 1 else w, found.weights))


def tokens_of(events: Iterator[Drawn | Dropped], sample: int = 0) -> list[int]:
    return [each.token for each in events if isinstance(each, Drawn) and each.sample == sample]


def test_a_prompt_longer_than_the_model_is_seen_as_if_it_had_been_generated(model: Model) -> None:
    events = list(generate(model, Request((1, 2), 70, sampling=GREEDY, ignore_end=True)))
    tokens, drops = tokens_of(iter(events)), [each for each in events if isinstance(each, Dropped)]
    for drawn in (31, 32, 45, 48, 49):  # 33, 34, 47, 50 and 51 tokens stand there
        again = list(generate(model, Request((1, 2, *tokens[:drawn]), 5, sampling=GREEDY, ignore_end=True)))
        before = [drop.position for drop in drops if drop.position <= drawn][-1]
        assert again[0] == Dropped(0, 16 + drawn - before)
        assert tokens_of(iter(again)) == tokens[drawn : drawn + 5]


@pytest.mark.parametrize("positions", [1, 2, 3, 4, 31, 32])
def test_what_is_seen_of_a_text_loses_its_oldest_half_whenever_it_is_too_long(model: Model, positions: int) -> None:
    config, seen = replace(model.config, max_seq_len=positions), []
    for length in range(1, 5 * positions + 3):
        seen.append(length)
        if len(seen) > positions:
            seen = seen[-kept_after_drop(config) :]
        assert list(engine.window(range(1, length + 1), config)) == seen


SAMPLING = Sampling(temperature=0.9, top_k=50, top_p=0.95, seed=5)


def test_going_on_with_a_text_is_the_longer_generation(model: Model) -> None:
    request = Request((1, 2), 20, sampling=Sampling(seed=9), ignore_end=True)
    both = tokens_of(generate(model, request))
    again = tokens_of(generate(model, request._replace(prompt=(1, 2, *both[:8]), tokens=12)))
    assert again == both[8:]


def test_what_was_drawn_is_what_the_model_thinks_of_the_text(model: Model) -> None:
    """Without a cache, in the same windows past the last position."""
    events = list(generate(model, Request((), 70, 2, Sampling(seed=4), ignore_end=True, candidates=2)))
    for sample in (0, 1):
        drawn = [each for each in events if isinstance(each, Drawn) and each.sample == sample]
        seen = look(model, [each.token for each in drawn], candidates=2)
        np.testing.assert_allclose([each.logprob for each in drawn], [each.logprob for each in seen], atol=1e-5)
        assert [[c[0] for c in each.candidates] for each in drawn] == [[c[0] for c in each.candidates] for each in seen]


def test_no_prompt_is_the_end_of_text_alone(model: Model) -> None:
    request = Request((), 5, sampling=GREEDY)
    assert list(generate(model, request)) == list(generate(model, request._replace(prompt=(256,))))


def steered(model: Model, monkeypatch: pytest.MonkeyPatch, texts: list[Any]) -> None:
    """Let the samples be these, whatever the model says."""
    real = engine.draw

    def draw(logits: Any, samples: Any, position: Any, *rest: Any) -> Any:
        tokens = [texts[sample][position - 1] if position <= len(texts[sample]) else 0 for sample in samples]
        return real(logits, samples, position, *rest)._replace(tokens=jnp.array(tokens, jnp.int32))

    monkeypatch.setattr(engine, "draw", draw)


def outcomes(events: Iterator[Drawn | Dropped]) -> dict[int, tuple[str, str]]:
    found: dict[int, tuple[str, str]] = {}
    for each in events:
        assert isinstance(each, Drawn)
        text, end = found.get(each.sample, ("", ""))
        assert end == ""  # nothing comes after an end
        found[each.sample] = text + each.text, each.end
    return found


def test_how_samples_end(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    steered(model, monkeypatch, [[*b"ab", 256, 0], b"one two three", "x€y".encode(), b"abc st"])
    found = outcomes(generate(model, Request((1,), 6, samples=4, stops=("two", "stop"))))
    assert found == {0: ("ab", "end of text"), 1: ("one tw", "length"), 2: ("x€y\0", "length"), 3: ("abc st", "length")}
    found = outcomes(generate(model, Request((1,), 8, samples=3, stops=("two", "stop", "€"), ignore_end=True)))
    assert found[0][0].startswith("ab<|endoftext|>")
    assert (found[1], found[2]) == (("one ", "stop"), ("x", "stop"))


def test_closing_it_stops_it_and_nothing_runs_before_it_is_asked(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    real = engine._decode
    monkeypatch.setattr(engine, "_decode", lambda *args: calls.append(1) or real(*args))
    events = generate(model, Request((1,), 100, sampling=GREEDY))
    assert not calls
    next(events)
    next(events)
    events.close()  # type: ignore[attr-defined]
    assert len(calls) == 2


def test_few_programs_are_compiled(model: Model) -> None:
    """One prefill for lengths of a bucket, one decode for all positions; other numbers compile nothing."""

    def sizes() -> tuple[int, int]:
        return engine._prefill._cache_size(), engine._decode._cache_size()

    run = partial(Request, tokens=8, samples=2, sampling=GREEDY, ignore_end=True)
    list(generate(model, run((1,) * 3)))
    before = sizes()
    for length in (1, 7, 16):
        list(generate(model, run((1,) * length, sampling=Sampling(temperature=0.5))))
    assert sizes() == before
    list(generate(model, run((1,) * 17)))
    assert sizes() == (before[0] + 1, before[1])


@pytest.mark.parametrize(
    ("change", "named"),
    [({"tokens": 0}, "--tokens"), ({"samples": 0}, "--samples"),
     ({"tokens": 10**400}, "--tokens"), ({"samples": 10**400}, "--samples"), ({"stops": ("a", "")}, "--stop"),
     ({"prompt": (1, 257)}, "257"), ({"prompt": (-1,)}, "-1"), ({"candidates": 258}, "258"),
     ({"sampling": Sampling(top_p=0)}, "--top-p")],
)  # fmt: skip
def test_what_cannot_be_asked_is_refused_at_once(model: Model, change: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=named):
        generate(model, Request((1,), 5)._replace(**change))


def test_a_drop_lets_go_of_the_old_cache_first(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    real, caches = engine._prefill, []

    def prefill(*args: Any) -> Any:
        caches.append(sum(array.shape == (3 * 2, T, 8) for array in jax.live_arrays()))
        return real(*args)

    monkeypatch.setattr(engine, "_prefill", prefill)
    list(generate(model, Request((1, 2), 40, samples=3, sampling=SAMPLING, ignore_end=True)))
    assert caches == [0, 0]


def test_a_model_that_diverged_is_named(model: Model) -> None:
    weights = model.weights._replace(lnfb=model.weights.lnfb * np.nan)
    for sampling in (GREEDY, Sampling()):
        with pytest.raises(InputError, match="not finite"):
            list(generate(model._replace(weights=weights), Request((1,), 5, sampling=sampling)))


def test_one_program_a_token_as_on_a_gpu_draws_the_same(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request((1, 2), 40, 2, SAMPLING, ignore_end=True)  # the oldest tokens are dropped meanwhile
    expected = list(generate(model, request))
    monkeypatch.setattr(engine, "first_device", lambda: SimpleNamespace(platform="gpu"))
    before = engine.in_one_program._cache_size()
    assert [each[:3] for each in generate(model, request)] == [each[:3] for each in expected]
    assert engine.in_one_program._cache_size() > before
