"""A text written in turns: what stands in it after each thing that can be typed."""

import io
import signal
from collections.abc import Callable, Iterator

import pytest

from llmc_jax.base.errors import InputError
from llmc_jax.generate import interactive
from llmc_jax.generate.answer import Answer, Sample
from llmc_jax.generate.engine import Request, generate
from llmc_jax.generate.interactive import Session, talk
from llmc_jax.generate.model import Model, open_model
from llmc_jax.generate.sampling import Sampling

REQUEST = Request((), 6, sampling=Sampling(top_k=60), ignore_end=True)


@pytest.fixture(scope="module")
def model() -> Model:
    return open_model("L2-NH2-C16-V257-T32")


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def session(model: Model, notes: list[str]) -> Session:
    return Session(model, REQUEST, io.StringIO(), notes.append)


def added(model: Model, prompt: list[int], seed: int = 1337) -> list[int]:
    request = REQUEST._replace(prompt=tuple(prompt), sampling=REQUEST.sampling._replace(seed=seed))
    return [each.token for each in generate(model, request)]  # type: ignore[union-attr]


def test_what_is_typed_and_what_comes_stays_in_the_text(model: Model, session: Session) -> None:
    session.take("ab")
    first = [*b"ab", *added(model, [*b"ab"])]
    assert session.ids == first
    session.take("")
    second = [*first, *added(model, first)]
    assert session.ids == second
    session.take("/again")
    third = [*first, *added(model, first, seed=1338)]
    assert session.ids == third != second
    session.take("/undo")
    assert session.ids == first
    session.take("//x")
    assert session.ids[: len(first) + 2] == [*first, *b"/x"]
    session.take("/reset")
    assert session.ids == []
    for words in ("/no", "/undo"):
        with pytest.raises(InputError):
            session.take(words)


def test_a_stop_string_is_no_part_of_the_text(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = Answer([Sample(ids=[*b"c. E"], logprobs=[-1.0] * 4, text="c", end="stop")])
    monkeypatch.setattr(interactive, "ask", lambda *_: drawn)
    session.take("ab")
    assert session.ids == [*b"abc"]


def typed(*lines: str | type[BaseException]) -> Callable[[str], str]:
    """A reader that gives these lines, or raises, and then is at its end."""
    waiting: Iterator[str | type[BaseException]] = iter(lines)

    def read(mark: str) -> str:
        line = next(waiting, EOFError)
        if isinstance(line, str):
            return line
        raise line

    return read


def test_talking_goes_on_after_mistakes_and_ctrl_c(model: Model, notes: list[str]) -> None:
    out = io.StringIO()
    lines = typed("/nonsense", KeyboardInterrupt, "a\\", "b")
    talk(model, REQUEST, out, notes.append, lines)
    assert out.getvalue().startswith("a\nb")
    assert len(notes) == 2


def test_ctrl_c_stops_the_model_and_keeps_what_came(
    model: Model, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Screen(interactive.Screen):
        def add(self, drawn: object) -> None:
            super().add(drawn)  # type: ignore[arg-type]
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(interactive, "Screen", Screen)
    session = Session(model, REQUEST, io.StringIO(), notes.append)
    session.take("ab")
    assert session.ids == [*b"ab", added(model, [*b"ab"])[0]]
    assert notes == ["stopped"]
