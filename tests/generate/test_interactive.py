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
    assert session.take("ab")
    first = [*b"ab", *added(model, [*b"ab"])]
    assert session.ids == first
    assert session.take("")
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


def test_a_setting_typed_as_a_command_is_shown_as_one(session: Session) -> None:
    with pytest.raises(InputError, match=r"^/temperature: .*did you mean /set temperature 0\.8\?"):
        session.take("/temperature 0.8")


def test_settings_are_checked_and_changed(session: Session) -> None:
    for words in (
        "/set top-k 5",
        "/set temperature 0",
        "/set --repetition_penalty 2",
        "/set tokens 3",
        "/set stop a b",
    ):
        assert session.take(words)
    sampling = session.request.sampling
    assert (sampling.top_k, sampling.temperature, sampling.repetition_penalty) == (5, 0.0, 2.0)
    assert (session.request.tokens, session.request.stops) == (3, ("a b",))
    session.take("/set stop none")
    session.take("/set ignore-end off")
    assert session.request.stops == () and session.request.ignore_end is False
    before = session.request
    for words in (
        "/set top-p 2",
        "/set tokens 0",
        "/set tokens x",
        "/set ignore-end 3",
        "/set nothing 1",
        "/no",
        "/undo",
    ):
        with pytest.raises(InputError):
            session.take(words)
    assert session.request == before
    assert not session.take("/quit")


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


def test_help_is_as_wide_as_the_screen(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr("llmc_jax.base.text.screen_width", lambda: 60)
    Session(model, REQUEST, out, print).take("/help")
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 60
    assert "repetition-penalty, seed, tokens" in " ".join(out.getvalue().split()) and "  /help, /quit" in lines


def test_talking_goes_on_after_mistakes_and_ctrl_c(model: Model, notes: list[str]) -> None:
    out = io.StringIO()
    lines = typed("/nonsense", KeyboardInterrupt, "a\\", "b", "/text", "/help", "/set", "/quit", "never")
    talk(model, REQUEST, out, notes.append, lines)
    assert out.getvalue().startswith("a\nb") and "never" not in out.getvalue()
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
