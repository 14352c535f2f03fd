"""Words of the command line to values: what is read, and what each mistake is called."""

import shlex
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc_jax.base.errors import InputError
from llmc_jax.base.options import Option
from llmc_jax.config.flags import parse_args, step_config, take_own
from llmc_jax.config.train import AUTO_BATCH, OPTIONS, TrainConfig
from llmc_jax.profile.command import OWN
from tests.config.test_train import valid_values

DEMO = parse_args(["--preset", "demo"])
FLAGS = [flag for about in OPTIONS for flag in about.flags]


def parse(line: str) -> TrainConfig:
    return parse_args(shlex.split(line))


def problems_of(action: Callable[[], object]) -> list[str]:
    """The problems that the action's InputError lists."""
    with pytest.raises(InputError) as caught:
        action()
    lines = str(caught.value).split("\n")
    if len(lines) > 1:
        head, *lines = lines
        assert head == f"{len(lines)} problems:"
    return [line.strip() for line in lines]


# --- parsing ---------------------------------------------------------------------------------------------------------


def test_no_words_are_the_demo_and_any_flag_means_llmcs_defaults() -> None:
    assert parse_args([]) == DEMO
    assert parse("-b 4") == TrainConfig()


@pytest.mark.parametrize("line", ["--preset llmc-cpu -x 7 -t 1024", "-x 7 --preset llmc-cpu -t 1024"])
def test_flags_have_the_last_word_over_a_preset(line: str) -> None:
    config = parse(line)
    assert (config.max_steps, config.sequence_length) == (7, 1024)  # the latter is the default without a preset
    assert (config.beta2, config.preset) == (0.999, "llmc-cpu")


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("-ge -1", "gelu_fusion", -1),
        ("-nk 3", "keep_checkpoints", 3),
        ("-l 6E-4", "learning_rate", 6e-4),
        ("-l .5", "learning_rate", 0.5),
        ("-l 1.", "learning_rate", 1.0),
        ("-l +1", "learning_rate", 1.0),
        ("-x 007", "max_steps", 7),
        ("-x=5", "max_steps", 5),
        ("-b 2 --batch-size 3", "batch_size", 3),
        ("-b auto", "batch_size", AUTO_BATCH),
        ("-o -odd-name", "output_dir", "-odd-name"),
        ("-o=-n", "output_dir", "-n"),
        ("-o 'a b=c'", "output_dir", "a b=c"),
        ("-o ''", "output_dir", ""),
        ("-o --", "output_dir", "--"),
        ("--no-save", "save", False),
        ("--no-save=1", "save", False),
        ("--no-save=0", "save", True),
        ("--export-llmc --export-llmc=0", "export_llmc", False),
        ("-h 1", "hellaswag", True),
    ],
)
def test_values(line: str, name: str, value: object) -> None:
    found = getattr(parse(line), name)
    assert found == value and type(found) is type(value)


def values(about: Option) -> st.SearchStrategy[str]:
    """Words that the option takes as values."""
    words = valid_values(about).map(lambda value: str(int(value) if isinstance(value, bool) else value))
    return words if about.auto is None else words | st.just("auto")


@st.composite
def command_lines(draw: st.DrawFn) -> list[tuple[Option, str, str]]:
    """(option, spelling, value) of some options, each at most once."""
    chosen = draw(st.lists(st.sampled_from([about for about in OPTIONS if about.name != "preset" and not about.switch]),
                           unique=True, min_size=1))  # fmt: skip
    return [(about, draw(st.sampled_from(about.flags)), draw(values(about))) for about in chosen]


@given(command_lines(), st.booleans())
def test_any_flags_with_valid_values_are_read_back(line: list[tuple[Option, str, str]], joined: bool) -> None:
    words: list[str] = []
    for _, flag, value in line:
        words += [f"{flag}={value}"] if joined or value in FLAGS else [flag, value]
    config = parse_args(words)
    expected = {about.name: value for about, _, value in line}
    for about in OPTIONS:
        found = getattr(config, about.name)
        if about.name not in expected:
            assert found == about.default
        elif about.type is str:
            assert found == expected[about.name]
        elif expected[about.name] == "auto":
            assert found == about.auto is not None
        else:
            assert found == float(expected[about.name]) and type(found) is about.type


@given(st.lists(st.sampled_from(FLAGS) | st.text() | st.sampled_from(["-1", "0", "1", "1e-4", "nan", "-", "--", "="])))
def test_any_words_give_a_configuration_or_an_input_error(words: list[str]) -> None:
    with suppress(InputError):
        assert isinstance(parse_args(words), TrainConfig)


# --- messages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "near"),
    [("--batch_size", "--batch-size"), ("--dtpye", "--dtype"), ("-help", "--help"), ("-ix", ""), ("-", ""), ("--", "")],
)
def test_unknown_flags_are_errors_that_name_the_nearest(word: str, near: str) -> None:
    (problem,) = problems_of(lambda: parse_args([word, "8"]))
    assert problem.startswith(f"{word}: ") and near in problem and "--help" in problem
    assert problems_of(lambda: parse_args([f"{word}=8"])) == [problem]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("-b 0", "-b 0: batch size must be at least 1, or auto"),
        ("--batch-size 0", "--batch-size 0: batch size must be at least 1, or auto"),
        ("-b most", "-b most: batch size must be a whole number or auto"),
        ("-t auto", "-t auto: sequence length must be a whole number"),
        ("-t 1e3", "-t 1e3: sequence length must be a whole number"),
        ("-t 1_000", "-t 1_000: sequence length must be a whole number"),
        ("-t ''", "-t '': sequence length must be a whole number"),
        ("-x 4294967296", "-x 4294967296: max steps must be at most 2147483647"),
        ("-x 99999999999999999999999", "-x 99999999999999999999999: max steps must be a whole number"),
        ("-l nan", "-l nan: learning rate must be a number"),
        ("-l 1e999", "-l 1e999: learning rate must be finite"),
        ("-k cosin", "-k cosin: schedule must be one of cosine, linear, constant, wsd, step"),
        ("-b -t 64", "-b: its value must follow, but -t does; write -b N|auto"),
        ("-h", "-h: its value must follow, but nothing does; write -h 0|1, or --help for help"),
        ("-b 4 8", "8: a value without a flag; write every value after its flag, as in -b 4"),
        ("--resume runs/a", "--resume runs/a: resume must be 0 or 1"),
        (
            "-i a_1.bin a_2.bin a_3.bin -b 4",
            "a_2.bin: a value without a flag; write every value after its flag, as in -b 4; quote a pattern, as in "
            "-i 'train_*.bin'",
        ),
        ("--no-save=2", "--no-save 2: takes no value but 0 and 1; write --no-save alone"),
    ],
)
def test_one_clear_line_for_each_mistake(line: str, problem: str) -> None:
    assert problems_of(lambda: parse(line)) == [problem]


def test_all_mistakes_of_a_line_are_reported_together() -> None:
    problems = problems_of(lambda: parse("-ix foo -b 0 -t x --preset dem -x -1 8"))
    assert [problem.split(":")[0] for problem in problems] == ["-ix", "-b 0", "-t x", "8", "--preset dem"]


# --- programs with flags of their own -----------------------------------------------------------------------------


def test_its_own_flags_and_train_pys() -> None:
    own, rest = take_own(["-b", "2", "--trace", "x", "--vs", "r=0", "--steps=3", "--vs=dtype=bf16", "-r", "0"], OWN)
    assert rest == ["-b", "2", "-r", "0"]
    assert own.trace == "x" and own.steps == 3 and own.vs == ["r=0", "dtype=bf16"] and own.json is None
    config = step_config(rest)
    assert (config.model, config.batch_size, config.recompute) == ("d12", 2, 0)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], {"model": "d12", "batch_size": 4, "recompute": 1}),
        (["--preset", "demo"], {"model": DEMO.model, "total_batch_size": 2048, "recompute": 0}),
        (["--preset", "demo", "-d", "512"], {"model": DEMO.model, "total_batch_size": 512}),
        (["-e", "d24", "--preset=demo"], {"model": "d24", "total_batch_size": 2048}),
        (["--preset=gpt2-350M"], {"model": "d24", "batch_size": 64}),
        (["--preset", "llmc-cpu"], {"model": "d12", "sequence_length": 64}),  # gpt2_124M.bin is not here
    ],
)
def test_a_preset_shapes_the_step_and_flags_override_it(
    words: list[str], expected: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = step_config(words)
    assert {name: getattr(config, name) for name in expected} == expected


def test_a_profile_takes_a_number_of_rows() -> None:
    with pytest.raises(InputError, match=r"^-b auto: "):
        step_config(["-b", "auto"])


def test_the_weights_that_a_preset_names_are_read_for_their_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2_124M.bin").touch()
    assert step_config(["--preset", "llmc-cpu"]).model == "gpt2_124M.bin"
