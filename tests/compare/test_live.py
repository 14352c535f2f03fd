"""llm.c's trainers beside ours: scripts that print llm.c's lines stand in for them, and ours runs for real."""

import json
import os
import re
import signal
import stat
import struct
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from llmc_jax.base.errors import FormatError, InputError
from llmc_jax.checkpoint.llmc import write_model
from llmc_jax.compare import live, logs
from llmc_jax.compare.command import DIFFERS, main
from llmc_jax.config.model import parse_descriptor
from llmc_jax.logs.reading import Log, read_log
from llmc_jax.models.gpt2.init import random_parameters
from tests.compare.test_logs import curve, log_of
from tests.conftest import TokenPair


def program(path: Path, body: str) -> Path:
    """An executable script; `say(text)` prints."""
    head = f"#!{sys.executable}\nimport json, os, signal, sys\ndef say(text): print(text, flush=True)\n"
    path.write_text(head + textwrap.dedent(body))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small version 3 file with V=257 and room for T=64."""
    config = parse_descriptor("L1-NH2-C16-V257-T64")
    path = tmp_path_factory.mktemp("model") / "small.bin"
    write_model(path, config, random_parameters(config, 42), version=3)
    return path


def planned(executable: Path | str, words: list[str]) -> live.Comparison:
    return live.make_comparison(str(executable), None, words, [])


def files(model: Path, tokens: TokenPair) -> list[str]:
    return ["-e", str(model), "-i", str(tokens.train), "-j", str(tokens.val)]


# What llm.c's train_gpt2 prints, from a list of losses and validation losses by step.
PRINT_RUN = """
say("[GPT-2]")
for step, loss in enumerate(losses):
    if str(step) in vals:
        say("val loss %f" % vals[str(step)])
    say("step %d: train loss %f (took %f ms)" % (step, loss, 10.0 + step))
"""


# ----- what is refused before anything runs -------------------------------------------------------------------------


def test_kinds_by_name(tmp_path: Path, model: Path, tokens: TokenPair) -> None:
    for kind in live.FLAGS:
        assert planned(program(tmp_path / kind, ""), files(model, tokens)).kind == kind
    odd = program(tmp_path / "train_gpt2cu_h100", "")
    with pytest.raises(InputError, match=r"cu_h100 is not a trainer .*--kind train_gpt2\|"):
        planned(odd, [])
    assert live.make_comparison(str(odd), live.CUDA, [], []).kind == live.CUDA
    (tmp_path / "source").write_text("int main() {}")
    for name in ("none", "", "source"):
        with pytest.raises(InputError, match="no program; give the path of a built trainer"):
            planned(tmp_path / name, [])


FLAGS = {
    "cpu": ("train_gpt2", "-b 8", "-b: train_gpt2 and ours share the flags -e -i -j; for ours alone there is --ours"),
    "only ours": ("train_gpt2cu", "--kernels xla", "--kernels: train_gpt2cu and ours share the flags -e"),
    "only ours, fp32": ("train_gpt2fp32cu", "-x 4", "-x: train_gpt2fp32cu and ours share the flags -e"),
    "glued": ("train_gpt2cu", "-b4 -t 64", "-b4: train_gpt2cu and ours share"),
    "no value": ("train_gpt2cu", "-b 4 -t", "-t: its value must follow"),
    "folder": ("train_gpt2cu", "-o x", "-o: train_gpt2cu and ours share"),
    "bad value": ("train_gpt2cu", "-b many", "-b many: "),
    "auto": ("train_gpt2cu", "-b auto", "-b auto: train_gpt2cu takes a number"),
    "contradiction": ("train_gpt2cu", "-b 4 -t 64 -d 100", "-d 100"),
    "not built": ("train_gpt2cu", "-z 3", "-z 3"),
}


@pytest.mark.parametrize("name", FLAGS)
def test_flags_that_are_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kind, words, expected = FLAGS[name]
    marker = tmp_path / "ran"
    executable = program(tmp_path / kind, f"open({str(marker)!r}, 'w')")
    assert main(["run", str(executable), "--", *words.split()]) == 2
    error = capsys.readouterr().err
    assert re.search(expected, error) and error.count("\n") == 1 and not marker.exists()


def test_words_for_us_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    executable = str(program(tmp_path / "train_gpt2cu", ""))
    comparison = live.make_comparison(executable, None, ["-b", "4"], ["--kernels", "xla"])
    assert live.our_words(comparison, Path("f"), "bf16") == [
        "--devices", "1", "-b", "4", "--dtype", "bf16", "--no-save", "-o", "f", "--kernels", "xla",
    ]  # fmt: skip
    with pytest.raises(InputError, match="--kernel: unknown flag"):
        live.make_comparison(executable, None, [], ["--kernel", "xla"])
    assert main(["run", executable, "--ours", "--eps '1"]) == 2
    assert "--ours --eps '1: No closing quotation" in capsys.readouterr().err


def test_files_of_the_cpu_trainer(tmp_path: Path, model: Path, tokens: TokenPair, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    executable = str(program(tmp_path / "train_gpt2", ""))
    words = files(model, tokens)
    with pytest.raises(InputError, match=r"gpt2_124M.bin: there is no such file; name it with -e"):
        planned(executable, words[2:])
    with pytest.raises(InputError, match=r"tiny_shakespeare_val.bin: there is no such file; name it with -j"):
        planned(executable, words[:4])
    cases = [
        ("L1-NH2-C16-V257-T64", 5, "version 5; train_gpt2 reads version 3 alone"),
        ("L1-NH2-C16-V257-T32", 3, "max_seq_len is below 64, the T that train_gpt2 trains with"),
    ]
    for descriptor, version, expected in cases:
        config = parse_descriptor(descriptor)
        other = tmp_path / "other.bin"
        write_model(other, config, random_parameters(config, 42), version=version)
        with pytest.raises(InputError, match=expected):
            planned(executable, ["-e", str(other), *words[2:]])
    with pytest.raises(FormatError):
        planned(executable, ["-e", str(tokens.train), *words[2:]])


# ----- running llm.c's ----------------------------------------------------------------------------------------------


def test_the_folder_of_the_cpu_trainer(tmp_path: Path, model: Path, tokens: TokenPair) -> None:
    """It finds its files under its names, and a tokenizer whose end-of-text its model has."""
    body = """
    names = ["gpt2_124M.bin", "dev/data/tinyshakespeare/tiny_shakespeare_train.bin",
             "dev/data/tinyshakespeare/tiny_shakespeare_val.bin"]
    found = {name: os.path.realpath(name) for name in names}
    found["table"] = list(open("gpt2_tokenizer.bin", "rb").read())
    found["words"] = sys.argv[1:]
    json.dump(found, open(os.environ["REPORT"], "w"))
    say("step 0: train loss 4.000000 (took 1.0 ms)")
    """
    executable = program(tmp_path / "train_gpt2", body)
    comparison = planned(executable, files(model, tokens))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REPORT", str(tmp_path / "report.json"))
        log = live.run_llmc(comparison, tmp_path)
    assert log.train.values.tolist() == [4.0]
    report = json.loads((tmp_path / "report.json").read_text())
    table = bytes(report.pop("table"))
    assert struct.unpack("<4I", table[:16]) == (20240328, 2, 257, 256)
    assert table[1024:] == b"\x01?" * 257
    assert report.pop("words") == []
    assert list(report.values()) == [str(model.resolve()), str(tokens.train.resolve()), str(tokens.val.resolve())]


def test_a_tokenizer_of_the_models_vocabulary_is_taken(tmp_path: Path, monkeypatch: Any) -> None:
    config = parse_descriptor("L1-NH1-C1-T64")
    write_model(tmp_path / "m.bin", config, random_parameters(config, 42), version=3)
    monkeypatch.chdir(tmp_path)
    (tmp_path / live.TOKENIZER_FILE).write_bytes(b"table")
    (tmp_path / "t.bin").touch()
    comparison = live.Comparison(
        live.CPU, tmp_path / "train_gpt2", dict.fromkeys(live.FILES, str(tmp_path / "t.bin")), []
    )
    live.lay_out(comparison._replace(flags=comparison.flags | {"-e": str(tmp_path / "m.bin")}), tmp_path / "work")
    assert (tmp_path / "work" / live.TOKENIZER_FILE).read_bytes() == b"table"


def test_flags_of_the_cuda_trainers(tmp_path: Path, model: Path, monkeypatch: Any) -> None:
    """train_gpt2cu gets all of them, where it was called; train_gpt2fp32cu its checkpoint by name, the rest in full."""
    body = 'say(json.dumps([os.getcwd(), sys.argv[1:]])); say("step    1/1: train loss 4.000000 (2.0 ms, 3 tok/s)")'
    monkeypatch.chdir(tmp_path)
    for kind in (live.CUDA, live.FP32):
        folder = tmp_path / f"{kind}-work"
        folder.mkdir()
        words = ["-e", os.path.relpath(model), "-i", "data/*.bin", "-b", "8", "-l", "1e-4"]
        comparison = planned(program(tmp_path / kind, body), words)
        live.run_llmc(comparison, folder)
        place, found = json.loads((folder / live.LLMC_OUTPUT).read_text().splitlines()[0])
        if kind == live.CUDA:
            assert (place, found) == (str(tmp_path), words)
        else:
            assert place == str(folder / "llmc")
            assert (folder / "llmc" / live.FILES["-e"]).resolve() == model.resolve()
            expected = ["-i", f"{tmp_path}/data/*.bin", "-j", f"{tmp_path}/{live.FILES['-j']}", "-b", "8", "-l", "1e-4"]
            assert found == expected


FAILURES = {
    "status": ("say('before'); say('Bad magic'); sys.exit(1)", "ended with status 1; last line: Bad m"),
    "silent": ("sys.exit(3)", "ended with status 3; last line: it printed nothing"),
    "signal": ("os.kill(os.getpid(), signal.SIGKILL)", f"ended with status -{int(signal.SIGKILL)}"),
    "long": ("say('y' * 10**6 + 'end'); sys.exit(1)", r"last line: y{400}$"),
    "binary": ("os.write(1, bytes(range(256)) * 99 + b'\\nend of it\\n'); sys.exit(1)", "last line: end of it"),
    "no loss": ("say('hello')", "no losses found"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_programs_that_fail(name: str, tmp_path: Path, model: Path, tokens: TokenPair, capfd: Any) -> None:
    body, expected = FAILURES[name]
    executable = program(tmp_path / "train_gpt2", body)
    with pytest.raises(InputError, match=expected) as error:
        live.run_llmc(planned(executable, files(model, tokens)), tmp_path)
    assert "\n" not in str(error.value)
    shown = capfd.readouterr().err
    assert shown.count("\n") <= live.LAST_LINES
    if name == "status":
        assert shown == "    before\n    Bad magic\n"
        executable.write_bytes(b"\x7fELF of another machine")
        comparison = planned(executable, files(model, tokens))
        (tmp_path / "again").mkdir()
        with pytest.raises(InputError, match="cannot be run"):
            live.run_llmc(comparison, tmp_path / "again")


def test_folders_to_keep(tmp_path: Path) -> None:
    with live.work_folder(None) as folder:
        assert folder.is_dir()
    assert not folder.exists()
    with live.work_folder(str(tmp_path / "a/b")) as folder:
        (folder / "x").touch()
    with pytest.raises(InputError, match="the folder is not empty"), live.work_folder(str(tmp_path / "a/b")):
        pass
    with pytest.raises(InputError, match="cannot be made"), live.work_folder(str(tmp_path / "a/b/x")):
        pass


@pytest.mark.parametrize(
    ("word", "dtype"), [("BF16", "bf16"), ("FP32", "fp32"), ("TF32", "fp32"), ("FP16", "fp16"), ("FP8", None)]
)
def test_precision_of_the_cuda_trainer(word: str, dtype: str | None, tmp_path: Path) -> None:
    (tmp_path / "out").write_text(f"| device                | NVIDIA H200 |\n| precision             | {word:<50} |\n")
    assert live.precision_of(tmp_path / "out") == dtype


# ----- the comparison -----------------------------------------------------------------------------------------------


def test_verdicts() -> None:
    theirs = log_of([4, 3, 2], curve([4.5]), ms=[900, 20, 20])
    mine = log_of([4, 3.001, 2], curve([4.5, 1], [0, 3]), ms=[900, 5, 5])

    def said(*both: Log, tolerance: float = 0.01) -> tuple[bool, float | None, list[str]]:
        found = logs.differences(both, tolerance, 1)
        return live.agree(found), live.time_ratio(both), live.verdict(both, found)

    agree, ratio, (train, val, time, verdict) = said(theirs, mine)
    assert (agree, ratio) == (True, 0.25)
    assert "together" in train and "0.001, at step 1" in train and "equal at step 0" in val
    assert "20.00 ms" in time and "5.00 ms" in time and "4.00 times as fast" in time
    assert "losses agree within 0.01" in verdict
    text = logs.steps_table((theirs, mine), [0, 1, 3], live.NAMES, with_times=True)
    rows = [line.split() for line in text.splitlines()]
    assert rows[3] == ["1", "3.000000", "3.001000", "+0.001", "20.00", "5.00"]
    assert rows[-1] == ["3", "1.000000"]
    agree, ratio, (_, _, time, verdict) = said(mine, theirs, tolerance=1e-4)
    assert (agree, ratio) == (False, 4)
    assert "4.00 times as long" in time and "do NOT agree within 0.0001" in verdict
    assert said(log_of([], curve([1.0], [5])), log_of([1.0], ms=[1.0]))[:2] == (False, None)
    assert not said(theirs, log_of([4, float("nan"), 2]))[0]


@pytest.mark.slow
def test_both_for_real(tmp_path: Path, model: Path, tokens: TokenPair, capsys: Any) -> None:
    """First a trainer that prints other losses, then one that prints what ours gave, with the digits that C prints."""
    wrong = f"losses, vals = {[5.5] * 41}, {{'0': 5.5}}\n" + PRINT_RUN
    executable = program(tmp_path / "train_gpt2", wrong)
    kept, result, picture = tmp_path / "kept", tmp_path / "r.json", tmp_path / "p.png"
    options = ["--keep", str(kept), "--json", str(result), "--picture", str(picture)]
    assert main(["run", str(executable), *options, "--", *files(model, tokens)]) == DIFFERS
    text = capsys.readouterr().out
    assert "1 of 2, llm.c: " in text and "2 of 2, ours:  train.py --preset llmc-cpu --dtype fp32 -s 0 -e " in text
    assert "training losses: they part at step" in text and "verdict: the losses do NOT agree" in text
    assert picture.read_bytes()[:4] == b"\x89PNG"
    mine = read_log(kept / live.OUR_FOLDER)
    assert mine.train.steps.tolist() == list(range(41))
    assert mine.val.steps.tolist() == [0, 10, 20, 30, 40, 41]
    assert mine.train.values[-1] < mine.train.values[0]
    assert not list((kept / live.OUR_FOLDER).glob("model_*"))
    found = json.loads(result.read_text())
    assert (found["comparison"], found["kind"], found["agree"]) == ("run", "train_gpt2", False)
    assert found["logs"][0]["median_ms"] == 30.5 and found["time_ratio"] == found["logs"][1]["median_ms"] / 30.5
    assert found["logs"][1]["curves"]["train.loss"]["values"] == mine.train.values.tolist()
    assert found["commands"]["llm.c"] == [str(executable)]

    vals = {str(step): loss for step, loss in zip(mine.val.steps.tolist(), mine.val.values.tolist(), strict=True)}
    program(executable, f"losses, vals = {mine.train.values.tolist()}, {vals}\n" + PRINT_RUN)
    comparison = planned(executable, files(model, tokens))
    both = live.run_llmc(comparison, tmp_path), mine
    same = logs.differences(both, 1e-6, 1)
    assert live.agree(same) and [each.parts for each in same] == [None, None]


@pytest.mark.slow
def test_ours_fails(tmp_path: Path, model: Path, tokens: TokenPair, capsys: Any) -> None:
    executable = program(tmp_path / "train_gpt2", "losses, vals = [4.0], {}\n" + PRINT_RUN)
    assert main(["run", str(executable), "--ours", "-e nothing.bin", "--", *files(model, tokens)]) == 2
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 2 and ": train.py --preset llmc-cpu" in error[1]
    assert "ended with status 2; last line: train.py: " in error[1] and "nothing.bin" in error[1]
