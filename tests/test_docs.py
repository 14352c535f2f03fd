"""The documentation is true: examples run, calculations hold, links, excerpts and tables agree with the code.

What is checked in docs/*.md and docs/derivations/*.md (and the last two in README.md, CONTRIBUTING.md, CHANGELOG.md and
the READMEs of benchmarks/ and examples/models/):

    ```python blocks with >>>                   run, and print what stands there
    ```python blocks that begin with a path     are lines of that file
    `2 * (3 + 4) = 14` in inline code           is right to the digits shown (`x = 2 * 7 = 14`: x is a name)
    $formulas$                                  parse, and Markdown leaves them as they are
    [text](link), `some/path.py`                exist; [`name`](file.py) is defined in that file
    python train.py …, make …                   are commands that the programs take; --preset names one there is
"""

import ast
import doctest
import math
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc_jax.base.errors import InputError
from llmc_jax.config.presets import PRESETS
from llmc_jax.config.train import TrainConfig

ROOT = Path(__file__).resolve().parents[1]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
DERIVATIONS = [path for path in DOCS if path.parent.name == "derivations"]
FRONT_NAMES = "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md", "examples/models/README.md"
FRONT = [ROOT / name for name in FRONT_NAMES]
HAND_WRITTEN = [path for path in DOCS if path.name != "flags.md"]  # that one is made from the code, and tested so

PARTS = ["Cost and memory", "Numerical pitfalls", "In the code", "Worked example", "How it is tested", "Exercises"]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE_CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def prose(path: Path) -> str:
    """The text without its code blocks."""
    return FENCE.sub("", text_of(path))


every_page = pytest.mark.parametrize("path", [*DOCS, *FRONT], ids=name_of)
every_written_page = pytest.mark.parametrize("path", HAND_WRITTEN, ids=name_of)


# ----- examples and excerpts ----------------------------------------------------------------------------------------


QUICK_EXAMPLE = ROOT / "docs/derivations/layernorm.md"
EXAMPLES = [
    pytest.param(path, id=name_of(path), marks=[] if path == QUICK_EXAMPLE else pytest.mark.slow)
    for path in DOCS
    if ">>>" in text_of(path)
]


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("path", EXAMPLES)
def test_examples_print_what_stands_there(path: Path) -> None:
    without_fences = re.sub(r"^```.*$", "", text_of(path), flags=re.MULTILINE)  # they would count as output
    example = doctest.DocTestParser().get_doctest(without_fences, {}, name_of(path), str(path), 0)
    report: list[str] = []
    with np.printoptions():  # the examples set some
        result = doctest.DocTestRunner(verbose=False).run(example, out=report.append)
    assert result.attempted > 0
    assert not result.failed, "".join(report)


@every_written_page
def test_python_blocks_are_examples_or_lines_of_a_file(path: Path) -> None:
    for language, body in FENCE.findall(text_of(path)):
        if language != "python" or ">>>" in body:
            continue
        first, _, excerpt = body.partition("\n")
        assert first.startswith("# "), f"neither an example nor an excerpt with its file's name: {first}"
        source = ROOT / first.removeprefix("# ")
        assert excerpt in text_of(source), f"not in {name_of(source)}:\n{excerpt}"


@pytest.mark.parametrize("path", DERIVATIONS, ids=name_of)
def test_derivations_have_all_parts_and_an_example(path: Path) -> None:
    headings = re.findall(r"^## (.*)$", text_of(path), re.MULTILINE)
    assert headings[0] == "Forward"
    assert headings[-len(PARTS) :] == PARTS
    assert ">>>" in text_of(path)


# ----- calculations -------------------------------------------------------------------------------------------------

FUNCTIONS = {name: getattr(math, name) for name in ("exp", "log", "log2", "sqrt", "tanh", "pi")}
NUMBER = re.compile(r"-?[0-9][0-9,]*(\.([0-9]+))?")


def calculations(path: Path) -> list[list[str]]:
    """The parts of each `a = b = c` in inline code that ends in a number and is not a plain setting such as `x = 3`."""
    found = []
    for span in INLINE_CODE.findall(prose(path)):
        parts = span.split(" = ")
        if len(parts) < 2 or not NUMBER.fullmatch(parts[-1]):
            continue
        if len(parts) > 2:
            parts = parts[1:] if not re.search(r"\d", parts[0]) or parts[0].isidentifier() else parts
        if not parts[0].isidentifier():
            found.append(parts)
    return found


@pytest.mark.parametrize("path", [path for path in HAND_WRITTEN if calculations(path)], ids=name_of)
def test_calculations_hold_to_the_digits_shown(path: Path) -> None:
    for *expressions, shown in calculations(path):
        match = NUMBER.fullmatch(shown)
        assert match
        half_a_digit = 0.5 * 10.0 ** -len(match[2] or "")
        for expression in expressions:
            plain = re.sub(r"(?<=\d),(?=\d{3})", "", expression)
            value = eval(plain, {"__builtins__": {}}, dict(FUNCTIONS))
            assert abs(value - float(shown.replace(",", ""))) <= half_a_digit * (1 + 1e-9), f"{expression} is {value}"


def test_calculations_are_found_and_wrong_ones_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("`1 + 1 = 2`, `y = 3 * 4 = 13`, `n = 3`, `vhat = v`, `12 * 1,000 = 12,000`")
    assert calculations(page) == [["1 + 1", "2"], ["3 * 4", "13"], ["12 * 1,000", "12,000"]]
    with pytest.raises(AssertionError, match="3 \\* 4 is 12"):
        test_calculations_hold_to_the_digits_shown(page)


# ----- formulas -----------------------------------------------------------------------------------------------------


def formulas(path: Path) -> list[str]:
    without_code = re.sub(r"^    .*$", "", INLINE_CODE.sub("", prose(path)), flags=re.MULTILINE)
    displayed = re.findall(r"^\$\$\n(.*?)\n\$\$$", without_code, re.MULTILINE | re.DOTALL)
    without_displayed = re.sub(r"^\$\$\n.*?\n\$\$$", "", without_code, flags=re.MULTILINE | re.DOTALL)
    return displayed + re.findall(r"\$([^$]+)\$", without_displayed)


def markdown_text(path: Path) -> str:
    """What is left of a page's text after Markdown has taken its own signs out of it."""
    from markdown_it import MarkdownIt  # comes with rich

    tokens = MarkdownIt("commonmark").enable("table").parse(text_of(path))
    children = [child for token in tokens for child in token.children or []]
    return " ".join("".join("\n" if child.type == "softbreak" else child.content for child in children).split())


with_formulas = pytest.mark.parametrize("path", [path for path in HAND_WRITTEN if formulas(path)], ids=name_of)


@with_formulas
def test_formulas_survive_markdown(path: Path) -> None:
    text = markdown_text(path)
    for formula in formulas(path):
        assert " ".join(formula.split()) in text, f"Markdown changes {formula}"
        assert formula.count("\n") == 0, f"write it on one line: {formula}"


@with_formulas
def test_formulas_parse(path: Path) -> None:
    from matplotlib.mathtext import MathTextParser

    parser = MathTextParser("path")
    for formula in formulas(path):
        assert "\\\\" not in formula
        plain = formula.replace(r"\lt", "<").replace(r"\gt", ">")  # MathJax knows both names, matplotlib the signs
        parser.parse(f"${plain}$")


@with_formulas
def test_dollar_signs_stand_where_github_takes_them_for_formulas(path: Path) -> None:
    text = re.sub(r"^\$\$$|^    .*$", "", INLINE_CODE.sub("`", prose(path)), flags=re.MULTILINE)
    for line in text.splitlines():
        assert line.count("$") % 2 == 0, line
        for before, formula, after in re.findall(r"(.|^)\$([^$]+)\$(.|$)", line):
            assert before in ("", " ", "(", "|"), line
            assert after in ("", " ", ",", ".", ";", ":", ")", "|", "?"), line
            assert formula.strip() == formula, line


# ----- links and names ----------------------------------------------------------------------------------------------


@cache
def anchors(path: Path) -> set[str]:
    """GitHub's names for a page's headings."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", text_of(path)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@cache
def defined_names(path: Path) -> set[str]:
    """What a Python file defines at its top level."""
    names: set[str] = set()
    for node in ast.parse(text_of(path)).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(target.id for target in targets if isinstance(target, ast.Name))
    return names


@every_page
def test_links_lead_somewhere(path: Path) -> None:
    for text, target in LINK.findall(prose(path)):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        assert there.exists(), f"[{text}]({target})"
        assert not anchor or anchor in anchors(there), f"[{text}]({target})"
        name = re.fullmatch(r"`(\w+)`", text)
        if name and there.suffix == ".py":
            assert name[1] in defined_names(there), f"{name[1]} is not defined in {name_of(there)}"


@every_page
def test_named_files_exist(path: Path) -> None:
    for span in INLINE_CODE.findall(prose(path)):
        for named in re.findall(r"(?<![\w./*])(?:[\w.-]+/)+[\w.-]+\.(?:py|md)\b", span):
            assert any((root / named).is_file() for root in (ROOT, ROOT / "llmc_jax")), named


@pytest.mark.parametrize("path", FRONT, ids=name_of)
def test_short_names_and_folders_exist(path: Path) -> None:
    ours = ("llmc_jax", "tests", "benchmarks", "scripts")
    files = {file.name for folder in ours for file in (ROOT / folder).rglob("*")} | {
        file.name for file in ROOT.iterdir()
    }
    for span in INLINE_CODE.findall(prose(path)):
        if re.fullmatch(r"\w+\.py", span):
            assert span in files, span
        if re.fullmatch(r"([\w.-]+/)+", span) and span.split("/")[0] in (*ours, "docs"):
            assert (ROOT / span).is_dir(), span


def test_index_names_every_page() -> None:
    """docs/README.md, or the README.md of a folder that has its own; and that one stands in the first."""
    indexes = {path for path in DOCS if path.name == "README.md"}
    for index in indexes:
        linked = {(index.parent / target).resolve() for _, target in LINK.findall(text_of(index))}
        below = {path for path in DOCS if path.is_relative_to(index.parent) and path != index}
        inner = {path for path in below for other in indexes - {index} if path.parent == other.parent}
        pages = (below - inner) | (below & indexes)
        assert pages <= linked, (name_of(index), pages - linked)


# ----- commands -----------------------------------------------------------------------------------------------------


def commands(path: Path) -> list[list[str]]:
    """The words of the commands in indented lines and inline code: without redirections, comments and synopses."""
    text = text_of(path).replace("\\\n", " ")
    lines = re.findall(r"^    (?:\$ )?(.*)$", text, re.MULTILINE) + INLINE_CODE.findall(text)
    starts = ("python ", "llmc-jax ", "make ")
    plain = [re.sub(r" > .*", "", line) for line in lines if line.startswith(starts) and not re.search(r"[\[|]", line)]
    return [shlex.split(line, comments=True) for line in plain]


def parsed(words: list[str]) -> Any:
    """A command's options, or None where it has none. Raises what the program does where it would refuse them."""
    from llmc_jax.base.commands import COMMANDS
    from llmc_jax.checkpoint import command as checkpoint
    from llmc_jax.checkpoint import convert
    from llmc_jax.compare import command as compare
    from llmc_jax.config import flags
    from llmc_jax.config.flags import parse_args, take_own
    from llmc_jax.data import command as data
    from llmc_jax.evaluate import command as evaluate_command
    from llmc_jax.generate import flags as generate_flags
    from llmc_jax.models import command as model
    from llmc_jax.plan.command import OWN as PLAN
    from llmc_jax.profile.command import OWN
    from llmc_jax.report import command as report
    from llmc_jax.trials import command as kernels
    from llmc_jax.watch import command as watch

    words = [word.removeprefix(".venv/bin/") for word in words[:1]] + words[1:]
    if words[0] == "llmc-jax" and (about := COMMANDS.get("".join(words[1:2]))) and about.script:
        words = ["python", about.script, *words[2:]]
    for start, parse in (
        (["python", "train.py"], flags.parse_args),
        (["llmc-jax", "data"], data.make_parser().parse_args),
        (["llmc-jax", "plan"], lambda words: parse_args(["-b", "4", *take_own(words, PLAN)[1]])),
        (["llmc-jax", "profile"], lambda words: take_own(words, OWN)),
        (["llmc-jax", "kernels"], lambda words: take_own(words, kernels.OWN)),
        (["llmc-jax", "checkpoint"], checkpoint.make_parser().parse_args),
        (["llmc-jax", "generate"], generate_flags.parse),
        (["llmc-jax", "evaluate"], evaluate_command.parse),
        (["llmc-jax", "compare"], compare.make_parser().parse_args),
        (["llmc-jax", "model"], model.make_parser().parse_args),
        (["llmc-jax", "report"], report.make_parser().parse_args),
        (["llmc-jax", "watch"], watch.make_parser().parse_args),
        (["python", "convert_checkpoint.py"], convert.make_parser().parse_args),
        (["llmc-jax"], flags.parse_args),
    ):
        rest = words[len(start) :]
        if words[: len(start)] == start:
            return parse(rest) if rest and rest[-1] not in [about.flags[0] for about in flags.SHOW_ALONE] else None
    if words[:2] == ["python", "-m"]:
        assert words[2] == "pytest", words
        assert all((ROOT / word).is_file() for word in words[3:] if word.endswith(".py")), words
    elif words[0] == "python":
        assert (ROOT / words[1]).is_file(), words
    else:
        targets = re.findall(r"^([a-z-]+):", text_of(ROOT / "Makefile"), re.MULTILINE)
        assert words[1] in targets, words
    return None


@every_page
def test_commands_are_understood(path: Path) -> None:
    for words in commands(path):
        try:
            parsed(words)
        except SystemExit:
            pytest.fail(f"refused: {shlex.join(words)}")


def test_commands_are_found_and_wrong_ones_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "text\n\n    python train.py -x \\\n      5 # why\n    $ make no\n\n`python train.py --no 1 > a` `make [x]`"
    )
    found = commands(page)
    assert found == [["python", "train.py", "-x", "5"], ["make", "no"], ["python", "train.py", "--no", "1"]]
    assert parsed(found[0]).max_steps == 5
    with pytest.raises(AssertionError):
        parsed(found[1])
    with pytest.raises(InputError):
        parsed(found[2])


def test_readme_trains_on_what_it_prepares() -> None:
    found = [parsed(words) for words in commands(ROOT / "README.md")]
    names = [each.name for each in found if getattr(each, "name", None)]
    assert names
    for name in names:
        files = (f"dev/data/{name}/{name}_train_*.bin", f"dev/data/{name}/{name}_val_*.bin")
        assert files in [(each.train_data, each.val_data) for each in found if isinstance(each, TrainConfig)]


def test_the_model_is_as_short_as_readme_says() -> None:
    said = re.search(r"written out in under ([\d,]+) lines", " ".join(text_of(ROOT / "README.md").split()))
    files = [*(ROOT / "llmc_jax/ops").glob("*.py"), ROOT / "llmc_jax/models/gpt2/model.py"]
    assert said and sum(text_of(path).count("\n") for path in files) < int(said[1].replace(",", ""))


@pytest.mark.parametrize("path", [*DOCS, *FRONT, ROOT / "Makefile"], ids=name_of)
def test_presets_exist(path: Path) -> None:
    assert set(re.findall(r"--preset[ =]([\w.-]+)", text_of(path))) <= set(PRESETS)


# ----- tables -------------------------------------------------------------------------------------------------------


def table_rows(path: Path, first_column: str) -> list[list[str]]:
    """The cells of the table whose first column has this heading, without its heading."""
    lines = iter(text_of(path).splitlines())
    rows: list[list[str]] = []
    for line in lines:
        if line.startswith(f"| {first_column} |"):
            next(lines)
            for row in lines:
                if not row.startswith("|"):
                    return rows
                rows.append([cell.strip() for cell in row.strip("|").split("|")])
    raise AssertionError(f"no table that begins with {first_column}")


def test_table_of_tensors_is_the_layout_of_d12() -> None:
    from llmc_jax.config.model import parse_descriptor
    from llmc_jax.models.gpt2.tensors import BY_NAME
    from llmc_jax.models.layout import tensor_specs

    config = parse_descriptor("d12")
    rows = table_rows(ROOT / "docs/derivations/whole_model.md", "tensor")
    letters = {
        "L": config.num_layers, "C": config.channels, "Vp": config.padded_vocab_size, "maxT": config.max_seq_len,
        "3C": 3 * config.channels, "4C": 4 * config.channels,
    }  # fmt: skip
    for spec, (name, shape, numbers, offset, size, decays) in zip(tensor_specs(config), rows, strict=True):
        assert name == f"`{spec.name}`"
        assert tuple(letters[word] for word in shape.strip("()").split(", ")) == spec.shape
        assert tuple(map(int, numbers.split(" × "))) == spec.shape
        assert (int(offset.replace(",", "")), int(size.replace(",", ""))) == (spec.offset, spec.size)
        assert decays == ("yes" if BY_NAME[spec.name].matrix else "no")
