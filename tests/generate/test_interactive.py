"""A text written in turns: what stands in it after each thing that can be typed."""

import io
import signal
from unittest.mock import Mock

import pytest

from llmc_jax.generate import answer
from llmc_jax.generate.answer import Answer, Sample, talk
from llmc_jax.generate.engine import Request, generate
from llmc_jax.generate.model import Model, open_model
from llmc_jax.generate.sampling import Sampling

REQUEST = Request((), 6, sampling=Sampling(top_k=60), ignore_end=True)


@pytest.fixture(scope="module")
def model() -> Model:
    return open_model("L2-NH2-C16-V257-T32")


def added(model: Model, prompt: list[int]) -> list[int]:
    return [each.token for each in generate(model, REQUEST._replace(prompt=tuple(prompt)))]  # type: ignore[union-attr]


def typed(*lines: str | type[BaseException]) -> Mock:
    """A reader that gives these lines, or raises, and then is at its end."""
    return Mock(side_effect=[*lines, EOFError])


def test_what_is_typed_and_what_comes_stays_in_the_text(model: Model) -> None:
    out, notes = io.StringIO(), list[str]()
    found = talk(model, REQUEST, out, notes.append, typed(KeyboardInterrupt, "a\\", "b", ""))
    first = [*b"a\nb", *added(model, [*b"a\nb"])]
    assert found == [*first, *added(model, first)]
    assert out.getvalue().startswith("a\nb") and notes == ["Ctrl-D ends"]


def test_a_stop_string_is_no_part_of_the_text(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = Answer([Sample(ids=[*b"c. E"], logprobs=[-1.0] * 4, text="c", end="stop")])
    monkeypatch.setattr(answer, "ask", lambda *_: drawn)
    assert talk(model, REQUEST, io.StringIO(), print, typed("ab")) == [*b"abc"]


def test_ctrl_c_stops_the_model_and_keeps_what_came(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []

    class Screen(answer.Screen):
        def add(self, drawn: object) -> None:
            super().add(drawn)  # type: ignore[arg-type]
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(answer, "Screen", Screen)
    found = talk(model, REQUEST, io.StringIO(), notes.append, typed("ab"))
    assert found == [*b"ab", added(model, [*b"ab"])[0]]
    assert notes == ["stopped"]
