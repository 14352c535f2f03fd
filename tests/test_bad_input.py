"""Bad input through the command line: one clear line, exit status 2, no traceback, and nothing new on the disk.

What breaks before a run begins leaves no trace; what breaks while it runs leaves what was good.
"""

import errno
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import pytest

from llmc_jax.base.errors import InputError
from llmc_jax.checkpoint import store
from llmc_jax.checkpoint.llmc import write_model
from llmc_jax.config.model import parse_descriptor
from llmc_jax.data.tokenfile import write_token_file
from llmc_jax.data.tokenizers import bytes_tokenizer, write_tokenizer_bin
from llmc_jax.models.gpt2.init import random_parameters
from llmc_jax.run import begin, inputs
from llmc_jax.run.command import main
from tests.metrics import read_metrics
from tests.same_run import arrays

TINY = "L1-NH1-C16-V257-T16"


class Bench(NamedTuple):
    """A folder with sound files (train.bin, val.bin, model.bin, table.bin) in which the command line is run."""

    folder: Path
    run: Callable[..., "Done"]


class Done(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture(scope="module")
def model_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("model") / "model.bin"
    write_model(path, parse_descriptor(TINY), random_parameters(parse_descriptor(TINY)))
    return path.read_bytes()


@pytest.fixture
def bench(
    tmp_path: Path, tokens: Any, model_bytes: bytes, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Bench:
    monkeypatch.chdir(tmp_path)
    Path("train.bin").write_bytes(tokens.train.read_bytes())
    Path("val.bin").write_bytes(tokens.val.read_bytes())
    Path("model.bin").write_bytes(model_bytes)
    table = bytes_tokenizer()
    write_tokenizer_bin("table.bin", table.pieces, table.eot)
    sound = ["-e", TINY, "-i", "train.bin", "-j", "val.bin", "-b", 4, "-t", 16, "-x", 3, "-v", 2, "-m", 2, "-s", 0]

    def run(*flags: Any) -> Done:
        code = main([str(word) for word in (*sound, *flags)])
        return Done(code, *capsys.readouterr())

    return Bench(tmp_path, run)


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Everything in a folder, with sizes and times."""
    return {
        str(path.relative_to(folder)): (path.lstat().st_size, path.lstat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
    }


def refused(bench: Bench, *flags: Any, problems: int = 1) -> str:
    """Checks that a run with these flags is refused without a trace; returns the message."""
    before = listing(bench.folder)
    done = bench.run(*flags)
    assert done.code == 2
    assert done.out == ""
    assert listing(bench.folder) == before
    lines = done.err.splitlines()
    assert len(lines) == (1 if problems == 1 else problems + 1), done.err
    assert lines[0].startswith("train.py: ")
    assert "Traceback" not in done.err
    return done.err


def header(*ints: int) -> bytes:
    return struct.pack("<256i", *ints, *[0] * (256 - len(ints)))


# ---- files: one damage of each kind here; the tests of each format have the rest

TOKENS = np.arange(3000) % 256


@pytest.mark.parametrize("flag", ["-i", "-j"])
def test_token_files(bench: Bench, flag: str) -> None:
    truncated = header(20240520, 1, 3000) + TOKENS[:-1].astype("<u2").tobytes()
    llama_3 = header(20240801, 7, 300) + np.full(300, 100000, "<u4").tobytes()
    for content, words in ((truncated, "truncated"), (llama_3, "id 100000")):
        Path("bad.bin").write_bytes(content)
        message = refused(bench, flag, "bad.bin")
        assert message.startswith(f"train.py: {flag} bad.bin: ") and words in message


@pytest.mark.parametrize("flag", ["-i", "-j", "-e"])
def test_files_that_are_not_there(bench: Bench, flag: str) -> None:
    Path("folder").mkdir()
    os.mkfifo("pipe")  # must not wait for a writer
    folder = "without a checkpoint" if flag == "-e" else "is a folder"
    found = {"nowhere/bad.bin": "no such file", "./folder": folder, "./pipe": "not a regular file", "": ""}
    for name, words in found.items():
        message = refused(bench, flag, name)
        assert message.startswith(f"train.py: {flag} ") and name.removeprefix("./") in message and words in message


def test_overfitting_names_the_validation_data(bench: Bench) -> None:
    Path("bad.bin").write_bytes(b"")
    assert "bad.bin" in refused(bench, "-a", 1, "-j", "bad.bin", "-v", 0)


def test_checkpoints(bench: Bench, model_bytes: bytes) -> None:
    for content, words in ((model_bytes[:-4], "cut off"), (header(20240520, 1, 0), "a file of GPT-2 tokens")):
        Path("bad.bin").write_bytes(content)
        message = refused(bench, "-e", "bad.bin")
        assert message.startswith("train.py: -e bad.bin: ") and words in message
    Path("bare").mkdir()
    Path("bare/config.json").write_text("{}")
    assert "without a checkpoint" in refused(bench, "-e", "bare")


@pytest.mark.parametrize("tokenizer", ["./bad.bin", "large.bin", "nowhere.bin", "./folder", "byte"])
def test_tokenizers(bench: Bench, tokenizer: str) -> None:
    Path("bad.bin").write_bytes(Path("table.bin").read_bytes()[:-1])
    write_tokenizer_bin("large.bin", (*bytes_tokenizer().pieces, b"more"), 2)  # has more ids than the model
    Path("folder").mkdir()
    assert tokenizer.removeprefix("./") in refused(bench, "-s", 1, "-g", 4, "--tokenizer", tokenizer)


# ---- flags, shapes and sizes

FLAGS: dict[str, tuple[list[Any], str]] = {
    "an epoch of no update": (["-x", -1, "-d", 64 * 1000], "lower -d, give more data"),
    "unknown descriptor": (["-e", "d13"], "-e d13: no such model. Known: d6, d12"),
    "no heads": (["-e", "L1-NH0-C16"], "'NH0' is not understood"),
    "heads that do not divide": (["-e", "L1-NH3-C16"], "write NH4, or C18"),
    "no name on Hugging Face": (["-e", "hf:gpt2"], "-e hf:gpt2: expected hf:OWNER/NAME"),
    "the default model, which nobody asked for": (["-e", "gpt2_124M_bf16.bin"], "--preset demo"),
    "a run that is not there": (["-e", "gpt2_124M_bf16.bin", "-y", 1, "-o", "a"], "-y 1 -o a: there is no run"),
    "an incomplete shape": (["-e", "L1-C16"], "NH missing"),
    "too large for any memory": (["-e", "gpt3:c12288", "-b", 1, "-t", 1024], "needs at least 3,"),
    "a batch too large for any memory": (["-b", 10**9, "-x", 0, "-v", 0], "; lower -b or -t, or take "),
    "a file in the way": (["-o", "train.bin/below"], "-o train.bin/below: a file is in the way"),
    "unknown flag": (["--lerning-rate", "1"], "--learning-rate"),
}


@pytest.mark.parametrize("name", FLAGS)
def test_flags(bench: Bench, name: str) -> None:
    flags, words = FLAGS[name]
    assert words in refused(bench, *flags)


def test_all_problems_of_one_kind_come_at_once(bench: Bench) -> None:
    message = refused(bench, "-b", 0, "-l", -1, "--foo", 1, problems=3)
    assert message.startswith("train.py: 3 problems:\n")
    assert "-b 0" in message and "-l -1" in message and "--foo" in message
    assert "2 problems" in refused(bench, "-t", 17, "-s", 1, "-g", 17, problems=2)


# ---- the output


def test_output_that_cannot_be_written(bench: Bench) -> None:
    for name in ("file", "runs", "full/notes.txt"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("keep me")
    for flags in (["-o", "file"], ["-o", "file/below"], ["-o", "file/far/below"], []):
        assert f"-o {flags[-1] if flags else 'runs'}: a file is in the way" in refused(bench, *flags)
    assert "not empty" in refused(bench, "-o", "full")


def test_a_missing_file_is_found_before_the_folder_is_made(bench: Bench) -> None:
    Path("bad.bin").write_bytes(b"")
    for flags in ("-i bad.bin", "-j bad.bin", "-e ./bad.bin", "-s 1 --tokenizer ./bad.bin", "-s 1 -g 99", "-d 3"):
        refused(bench, *flags.split(), "-o", "new/below", "-y", 1)


# ---- what breaks while the run goes on


def broke(bench: Bench, *flags: Any) -> tuple[Done, list[dict[str, Any]]]:
    """Runs with -o run and checks that it ended with one line; returns its end and its events."""
    done = bench.run("-o", "run", "-v", 0, "--shuffle", "none", *flags)
    assert done.code == 2
    assert done.err.startswith("train.py: ") and done.err.count("\n") == 1
    assert [path.name for path in Path("run").iterdir() if path.name.startswith(".")] == []  # no half-written file
    return done, read_metrics(Path("run/metrics.jsonl"))


def kept_at(step: int) -> None:
    """The state that was saved at the end, which must be complete, good and finite."""
    assert [(entry.step, entry.problem) for entry in store.entries("run")] == [(step, None)]
    found = arrays(Path("run"), step)
    assert found["step"] == found["updates"] == step
    assert all(np.isfinite(array).all() for array in found.values())


def test_a_bad_id_in_the_validation_data(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "CHECKED_TOKENS", 0)  # stands for data of more than a million tokens
    ids = np.arange(3000) % 256
    ids[100] = 300
    write_token_file("later.bin", ids)
    done, events = broke(bench, "-j", "later.bin", "-v", 2, "-m", 4)
    assert "-j later.bin: token 100" in done.err
    assert [each["event"] for each in events] == ["start", "end"]


@pytest.mark.parametrize("words", ["-i \x1b[2J.bin", "-e \x1b[2J.bin", "-o train.bin/\x1b[2J", "--\x1b[2J"])
def test_what_a_terminal_cannot_show_is_refused_and_not_obeyed(bench: Bench, words: str) -> None:
    message = refused(bench, *words.split(" "))
    assert "\\x1b[2J" in message and message[:-1].isprintable()


@pytest.mark.parametrize("name", ["a\\b", "a\\..\\b", "gs:", "s3://b", os.fsdecode(b"\xff")])
def test_a_folder_of_any_name_takes_checkpoints(bench: Bench, name: str) -> None:
    assert bench.run("-o", name, "-x", 1).code == 0
    (entry,) = store.entries(name)
    assert entry.problem is None


def full(*_: Any, **__: Any) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_at_the_start_leaves_the_folder_as_it_was(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*_: Any) -> NoReturn:
        raise InputError("No space left on device")

    Path("new/run").mkdir(parents=True)
    Path("new/run/samples.txt").write_text("mine\n")
    before = sorted(bench.folder.rglob("*"))
    monkeypatch.setattr("llmc_jax.run.folder.complete_file", no_space)
    done = bench.run("-o", "new/run", "-y", 1)
    assert done.code == 2 and "No space left on device" in done.err
    assert sorted(bench.folder.rglob("*")) == before


def losses(folder: str, kind: str = "train") -> list[float]:
    return [each["loss"] for each in read_metrics(Path(folder, "metrics.jsonl")) if each["event"] == kind]


def test_a_data_file_that_is_shortened(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line and the state; once the file is whole again, the run goes on to the same bits."""
    flags = ("-v", 0, "-x", 14)
    assert bench.run("-o", "whole", "--shuffle", "none", *flags).code == 0
    whole = Path("train.bin").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(begin, "announce", lambda *_: os.truncate("train.bin", 1024 + 2 * 700))
        done, events = broke(bench, *flags)
    assert f"train.bin: was shortened while it was being read: it had {len(whole)} bytes and has 2424 now" in done.err
    assert "checkpoint:   run/state_00000010" in done.out.splitlines()  # 10 batches of 64
    assert {"event": "end", "step": 10, "outcome": "bad_input", "skipped": 0}.items() <= events[-1].items()
    kept_at(10)
    again = bench.run("-o", "run", "-y", 1, *flags)
    assert again.code == 2 and "train.bin: truncated" in again.err
    Path("train.bin").write_bytes(whole)
    assert bench.run("-o", "run", "-y", 1, "--shuffle", "none", *flags).code == 0
    assert losses("run") == losses("whole")
    found, expected = (arrays(Path(folder), 14) for folder in ("run", "whole"))
    assert all(found[name].tobytes() == array.tobytes() for name, array in expected.items())


def test_data_files_that_lose_their_names_are_read_on(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ("-v", 2, "-x", 6)
    assert bench.run("-o", "whole", *flags).code == 0

    def move(*_: object) -> None:
        os.remove("train.bin")
        write_token_file("val.bin", TOKENS[:200])

    monkeypatch.setattr(begin, "announce", move)
    done = bench.run("-o", "run", *flags)
    assert (done.code, done.err) == (0, "")
    for kind in ("train", "val"):
        assert losses("run", kind) == losses("whole", kind)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_a_full_disk_under_the_log(bench: Bench) -> None:
    Path("run").mkdir()
    Path("run/config.json").write_text("{}")  # else it would be another program's main.log
    Path("run/main.log").symlink_to("/dev/full")
    done, events = broke(bench, "-y", 1, "-x", 10)
    assert "main.log: cannot write to it: No space left on device" in done.err
    assert [each["event"] for each in events] == ["start", "checkpoint", "end"]
    kept_at(1)  # the step was made, only not logged


def test_saves_that_fail_are_told(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "seal", full)
    done, events = broke(bench, "-x", 4, "-n", 2)
    assert [each["step"] for each in events if each["event"] == "save_failed"] == [2, 4]
    assert "No space left on device; earlier checkpoints are unchanged" in done.out
