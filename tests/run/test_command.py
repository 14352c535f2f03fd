"""The command line: parsing, its messages, `--help`, docs/flags.md, exit statuses."""

import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmc_jax.base.commands import typed
from llmc_jax.base.errors import ExitCode, FormatError, InputError
from llmc_jax.config.checks import validate
from llmc_jax.config.flags import Given, given_options, parse_args
from llmc_jax.config.presets import PRESETS
from llmc_jax.config.train import AUTO_BATCH, OPTIONS, TrainConfig
from llmc_jax.run.command import EXAMPLES, continued, flags_markdown, help_text, main

ROOT = Path(__file__).resolve().parents[2]


def parse(line: str) -> TrainConfig:
    return parse_args(shlex.split(line))


def options_of(line: str) -> Given:
    return given_options(shlex.split(line))


# --- going on -----------------------------------------------------------------------------------------------------


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """The folder of a run whose last start had these options, -x 100 and a preset among them."""
    before = parse(
        f"--preset llmc-cpu -x 100 -n 7 --export-llmc --no-save --strict-kernels -i 'a b.bin' -o {tmp_path / 'moved'}"
    )
    (tmp_path / "config.json").write_text(json.dumps({"options": before.to_json()}))
    return tmp_path


def test_going_on_takes_the_options_of_the_run(run_folder: Path) -> None:
    before = parse("--preset llmc-cpu -x 100 -n 7 --export-llmc -i 'a b.bin'")
    config, notes = continued(options_of(f"-y 1 -o {run_folder}"))
    assert config == replace(before, output_dir=str(run_folder), reuse=True)
    assert notes == [f"-y 1: options as in {run_folder / 'config.json'}"]


def test_flags_override_the_run_and_are_listed(run_folder: Path) -> None:
    config, notes = continued(options_of(f"-x 500 -n 7 --no-save --export-llmc=0 -o {run_folder} -y 1"))
    assert (config.max_steps, config.checkpoint_every, config.train_data) == (500, 7, "a b.bin")
    assert not config.save and not config.export_llmc
    assert len(notes) == 1 and ", changed by flags: " in notes[0] and "-x 100 -> 500" in notes[0]


def test_the_run_s_own_preset_resets_nothing_and_another_takes_nothing(run_folder: Path) -> None:
    """A preset holds what differs from llm.c's defaults, so two of them would mix."""
    config, _ = continued(options_of(f"--preset llmc-cpu -o {run_folder} -y 1"))
    assert (config.max_steps, config.checkpoint_every) == (100, 7)
    config, _ = continued(options_of(f"--preset llmc-cpu -x 41 -o {run_folder} -y 1"))
    assert config.max_steps == 41
    line = f"--preset demo -y 1 -o {run_folder}"
    config, notes = continued(options_of(line))
    assert config == parse(line) and len(notes) == 1


def test_a_bad_value_of_the_run_says_where_it_is_from(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(f"-d 300 -y 1 -o {run_folder}")) == 2
    said = capsys.readouterr().err
    assert "-d 300" in said and str(run_folder / "config.json") in said


def test_a_run_that_goes_on_keeps_what_auto_came_to(run_folder: Path) -> None:
    before, _ = continued(options_of(f"-o {run_folder} -y 1"))
    config, notes = continued(options_of(f"-b auto -o {run_folder} -y 1"))
    assert config == before and f"-y 1 -b auto: stays {before.batch_size}, as in {run_folder}/config.json" in notes
    config, _ = continued(options_of(f"-b auto -o {run_folder}/none -y 1"))
    assert config.batch_size == AUTO_BATCH


@pytest.mark.parametrize("line", ["-x 100", "-y 1", "-o {folder}", "-y 0 -o {folder}", "-y 1 -o {folder}/none"])
def test_without_a_run_to_go_on_with_defaults_hold(run_folder: Path, line: str) -> None:
    line = line.format(folder=run_folder)
    assert continued(options_of(line)) == (parse(line), [])


def test_the_same_command_again_says_nothing(tmp_path: Path) -> None:
    options = options_of(f"-e d12 -b 8 -x 5 -o {tmp_path} -y 1")
    (tmp_path / "config.json").write_text(json.dumps({"options": options.config.to_json()}))
    assert continued(options) == (options.config, [])


def test_a_config_of_another_version(run_folder: Path) -> None:
    path = run_folder / "config.json"
    path.write_text(json.dumps({"options": {"max_steps": 9, "of_the_future": 1}}))
    config, notes = continued(options_of(f"-y 1 -o {run_folder}"))
    assert config == TrainConfig(max_steps=9, output_dir=str(run_folder), reuse=True)
    assert len(notes) == 1 and "of_the_future" in notes[0]
    path.write_text(json.dumps({"options": {"max_steps": "nine"}}))
    with pytest.raises(InputError, match=r"config\.json: .*max_steps is 'nine'"):
        continued(options_of(f"-y 1 -o {run_folder}"))
    path.write_text(json.dumps({"options": None}))
    assert continued(options_of(f"-y 1 -o {run_folder}"))[1] == []
    for damaged in (b"", b"[]", b"\xff", b"[" * 100_000):
        path.write_bytes(damaged)
        with pytest.raises(FormatError, match=r"config\.json"):
            continued(options_of(f"-y 1 -o {run_folder}"))


def test_who_a_process_is_is_never_taken_from_the_run(tmp_path: Path) -> None:
    before = options_of("-x 9 -pn 2 -pr 1 -pi tcp -ps node1 -pf /shared -pg 4 --peer-timeout 9").config
    (tmp_path / "config.json").write_text(json.dumps({"options": before.to_json()}))
    config, _ = continued(options_of(f"-y 1 -o {tmp_path}"))
    assert config == TrainConfig(max_steps=9, output_dir=str(tmp_path), reuse=True)
    config, notes = continued(options_of(f"-y 1 -o {tmp_path} -x 9 -pn 4 -pr 3 --peer-timeout 7"))
    assert (config.num_processes, config.process_rank, config.peer_timeout) == (4, 3, 7)
    assert all("changed by flags" not in note for note in notes)


# --- several processes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("-pn 2 -pr 5", "-pr 5: process rank must be below the number of processes (-pn 2); ranks count from 0"),
        ("-pn 2", "-pn 2: nothing says how the processes find each other; "),
        ("-pn 0.5", "-pn 0.5: num processes must be a whole number"),
        ("-ps node1:port", "-ps node1:port: server ip must be a host, and a port from 1 to 65535 if need be: "),
        ("--peer-timeout 0", "--peer-timeout 0: peer timeout must be at least 1"),
        ("-np 4", "-np: unknown flag; --help "),
    ],
)
def test_one_line_says_what_to_write(line: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(line)) == ExitCode.BAD_INPUT
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith(f"train.py: {words}") and captured.err.count("\n") == 1


def test_a_launcher_s_environment_counts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    assert main(["-pn", "2"]) == ExitCode.BAD_INPUT
    assert "-pn 2: mpirun says OMPI_COMM_WORLD_SIZE=4; leave -pn out" in capsys.readouterr().err


# --- help and documentation ------------------------------------------------------------------------------------------


def test_help_names_every_option_within_100_columns() -> None:
    text = help_text()
    assert max(map(len, text.splitlines())) <= 100
    assert text.isascii()
    flat = " ".join(text.split())
    for about in OPTIONS:
        assert f"\n  {', '.join(about.flags)}" in text
        assert " ".join(about.meaning.split()) in flat
    for name in PRESETS:
        assert f"\n  {name} " in text
    for code in (0, 1, 2, 3, 130):
        assert f"\n  {code} " in text
    assert "[sequences; default 4]" in flat and "[default 0.0003]" in flat and "[default 1e-08]" in flat


def test_help_ends_with_three_examples_that_work() -> None:
    assert len(EXAMPLES) == 3
    assert help_text().endswith(EXAMPLES[-1][1])
    for command, _ in EXAMPLES:
        program, script, *words = shlex.split(command)
        assert (program, script) == ("python", "train.py")
        validate(parse_args(words))


def test_the_page_of_flags_is_current() -> None:
    page = (ROOT / "docs" / "flags.md").read_text(encoding="utf-8")
    assert page == flags_markdown() + "\n", "renew it: python train.py --help-markdown > docs/flags.md"


# --- running ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stands where the trainer would be imported; its `run` can be replaced."""
    calls: list[tuple[TrainConfig, list[str]]] = []

    def run(config: TrainConfig, notes: list[str]) -> int:
        calls.append((config, notes))
        return ExitCode.DIVERGED

    fake = SimpleNamespace(run=run, calls=calls)
    monkeypatch.setitem(sys.modules, "llmc_jax.run.loop", fake)
    return fake


def test_main_hands_the_configuration_and_notes_over_and_returns_the_status(trainer: SimpleNamespace) -> None:
    assert main(["-b", "2", "--patience", "7"]) == 3
    ((config, notes),) = trainer.calls
    assert config == TrainConfig(batch_size=2, patience=7)
    assert notes == validate(config) and len(notes) == 1


@pytest.mark.parametrize(
    ("word", "text"),
    [("--help", f"usage: {typed('train')}"), ("--help-markdown", "# Flags of train.py"), ("--version", "llmc-jax ")],
)
def test_texts_are_printed_and_nothing_runs(
    word: str, text: str, trainer: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["-b", "0", word]) == 0
    assert not trainer.calls
    assert capsys.readouterr().out.startswith(text)


def test_the_command_s_name_is_in_messages(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/llmc-jax", "-b", "0"])
    assert main() == 2
    assert capsys.readouterr().err == "llmc-jax train: -b 0: batch size must be at least 1, or auto\n"


def test_help_imports_nothing_that_takes_long() -> None:
    code = (
        "import sys; from llmc_jax.base.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit(len({'jax', 'numpy', 'matplotlib', 'rich', 'hashlib', 'tempfile'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
