"""Flags as rows: how words become values, and which flags are refused beside each other."""

from pathlib import Path

import pytest

from llmc_jax.base.errors import InputError
from llmc_jax.base.options import SCREEN, own, problems_together
from llmc_jax.base.parsers import Parser
from llmc_jax.config.flags import take_own
from llmc_jax.evaluate import command as evaluate
from llmc_jax.generate import flags as generate

OPTIONS = (
    own("runs", "RUN...", None, "argument"),
    own("-n --number", "N", 7, "a whole number"),
    own("--rate", "X", None, "a number", 0.5),
    own("--file", "FILE...", [], "files", excludes="word"),
    own("--word", "TEXT", [], "words", excludes="file"),
    own("--kind", "a|b", "a", "one of two", needs="file word"),
    own("--quiet", "", False, "a switch"),
    own("--out", "[FILE]", None, "a file to be written, or the screen", alone=SCREEN, writes="- .png .svg"),
    own("--page", "FILE", None, "a file to be written", writes=".html .htm .xhtml"),
)


def parsed(*words: str) -> dict[str, object]:
    parser = Parser(prog="me")
    parser.add(OPTIONS)
    return vars(parser.parse_args(words))


def test_values_have_their_types_and_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    defaults: dict[str, object] = {"number": 7, "rate": None, "file": [], "word": [], "kind": "a", "quiet": False}
    defaults |= {"out": None, "page": None}
    assert parsed("x", "~/y") == {**defaults, "runs": [Path("x"), Path("/home/me/y")], "given": {"runs"}}
    found = parsed("x", "--file", "~/a", "b", "--file", "c", "--rate=1", "-n9", "--quiet", "--kind", "b")
    assert (found["file"], found["rate"], found["number"]) == (["/home/me/a", "b", "c"], 1.0, 9)
    assert (found["quiet"], found["kind"], parsed("x", "--word", "y", "--word", "z")["word"]) == (True, "b", ["y", "z"])


def test_a_file_to_be_written_may_be_the_screen(tmp_path: Path) -> None:
    assert [parsed("x", *words)["out"] for words in ([], ["--out"], ["--out", "-"])] == [None, SCREEN, SCREEN]
    assert parsed("x", "--out", f"{tmp_path}/a.SVG")["out"] == f"{tmp_path}/a.SVG"
    (tmp_path / "b.png").mkdir()
    with pytest.raises(InputError, match=r"b\.png: cannot be written: it is a folder"):
        parsed("x", "--out", f"{tmp_path}/b.png")


@pytest.mark.parametrize(
    ("words", "begin"),
    [
        (["--number", "0"], "--number 0: "),
        (["-n", "1e3"], "--number 1e3: number must be a whole number"),
        (["--rate", "0.1"], "--rate 0.1: "),
        (["--rate", "nan"], "--rate nan: "),
        (["--kind", "c"], "--kind c: "),
        (["--kind", "b"], "--kind needs --file or --word"),
        (["--word", "y", "--file", "z"], "--file and --word "),
        (["--out", "a.log"], "--out a.log: the name must end in .png or .svg; for the screen put --out last"),
        (["--page", "-"], "--page -: the name must end in .html, .htm or .xhtml"),
        (["--out", "none/a.png"], "--out none/a.png: there is no folder none to write it into"),
        (["--wort", "y", "--kind", "b"], "--wort: unknown flag; --help lists all"),
    ],
)
def test_what_cannot_be_names_the_flag(words: list[str], begin: str) -> None:
    with pytest.raises(InputError) as error:
        parsed("x", *words)
    assert str(error.value).startswith(begin)
    if begin.startswith("--kind needs"):  # read by hand, beside train.py's
        with pytest.raises(InputError, match=begin):
            take_own(words, OPTIONS[1:])


@pytest.mark.parametrize("options", [generate.OPTIONS, evaluate.OPTIONS])
def test_flags_that_exclude_or_need_each_other_are_named(options: tuple) -> None:
    flags = {about.name: about.long_flag for about in options}
    assert len(flags) == len(options)
    for about in options:
        for other in set(about.excludes.split()) - {about.name}:
            problems = problems_together(options, {about.name, other})
            assert any({about.long_flag, flags[other]} <= set(problem.split()) for problem in problems)
        if about.needs:
            (problem,) = problems_together(options, {about.name})
            assert problem.startswith(about.long_flag) and all(flags[name] in problem for name in about.needs.split())
