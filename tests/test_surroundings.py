"""What surrounds a command, for each command: names of folders, `~`, encodings of texts and of the output.

The run and its data lie in folders whose names are patterns too, with others beside them that these would match.
"""

import argparse
import codecs
import io
import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from llmc_jax.base.commands import COMMANDS
from llmc_jax.base.errors import ExitCode
from llmc_jax.config.train import OPTIONS
from llmc_jax.data.documents import read_text
from llmc_jax.data.tokenfile import open_token_file
from llmc_jax.evaluate import command as evaluate_command
from llmc_jax.generate import flags as generate_flags
from llmc_jax.generate.flags import asking_parser
from llmc_jax.plan import command as plan
from llmc_jax.profile import command as profile_command
from llmc_jax.trials import command as kernels
from tests.metrics import read_metrics

pytestmark = pytest.mark.usefixtures("nothing_lasts", "quick_compilation")

DATA, RUN, DECOY = "d[12]*", "é[r]un?", "d1"  # of data, of the run; and what the first is a pattern of
SHAPE = ("-e", "L1-NH1-C16-V257-T16", "-t", 16, "-b", 1)
TEXT = "Grüße aus dem Café.\n"


class Done(NamedTuple):
    """What a command came to."""

    status: int
    out: str
    err: str


def module(name: str) -> ModuleType:
    """Return the module of one of the commands."""
    return import_module(f"llmc_jax.{COMMANDS[name].module}")


def command(name: str, *words: Any, stdin: bytes = b"", encoding: str = "utf-8") -> Done:
    """Run one of the commands, as if standard output had this encoding and no error handler of its own."""
    raw, err = io.BytesIO(), io.StringIO()
    out = io.TextIOWrapper(raw, encoding=encoding, errors="strict")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding=encoding))
        status = module(name).main([str(word) for word in words])
    out.flush()
    return Done(status, raw.getvalue().decode(encoding, "surrogateescape"), err.getvalue())


def good(name: str, *words: Any, **more: Any) -> str:
    """Run a command that must succeed; return what it prints."""
    done = command(name, *words, **more)
    assert done.status == ExitCode.DONE, done.err
    return done.out


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home folder with data, a run, and a decoy of the data of which there is more."""
    home = tmp_path_factory.mktemp("home")
    (home / "é.txt").write_text(TEXT * 30)
    for folder, times in ((DATA, 1), (DECOY, 2)):
        inputs = [home / "é.txt"] if times == 1 else [home / "é.txt", home / "b.txt"]
        (home / "b.txt").write_text("b" * 500)
        good("data", "prepare", *inputs, "--tokenizer", "bytes", "--out", home / folder, "--name", "x")
    files = ("-i", home / DATA / "x_train_*.bin", "-j", home / DATA / "x_val_*.bin")
    good("train", *SHAPE, *files, "-o", home / RUN, "-v", 0, "-s", 100, "-g", 8)
    return home


@pytest.fixture
def home(made: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The home folder, which is also the current one."""
    monkeypatch.setenv("HOME", str(made))
    monkeypatch.chdir(made)
    yield made


# ----- names --------------------------------------------------------------------------------------------------------

TOKENS = len((TEXT * 30).encode()) + 1  # of all the data, of which the first tenth is for validation


@pytest.mark.parametrize("beginning", ["", "~/", "./"])
def test_a_folder_that_exists_is_no_pattern(home: Path, beginning: str) -> None:
    train = TOKENS - TOKENS // 10
    pattern = f"{beginning}{DATA}/x_train_*.bin"
    assert f"tokens      {train:,}\n" in good("data", "inspect", pattern)
    found = json.loads(good("evaluate", f"{beginning}{RUN}", "--data", pattern, "--json"))
    assert found["subjects"][0]["results"][0]["tokens"] == train - 1
    planned = json.loads(good("plan", *SHAPE, "-i", pattern, "--gpu", "h100", "--quick", "--json", "-"))
    assert planned["course"]["length"]["steps"] == train // 16
    assert read_metrics(home / RUN / "metrics.jsonl")[0]["steps"] == train // 16


def test_a_pattern_with_no_such_folder_is_a_pattern(home: Path) -> None:
    assert good("data", "inspect", "d[1]/x_train_*.bin").startswith(f"{DECOY}/x_train_000001.bin\n")
    assert good("data", "inspect", "d*/x_val_*.bin").count("format ") == 2
    assert command("data", "inspect", f"{DATA}/y_*.bin").status == ExitCode.BAD_INPUT


def test_what_is_printed_can_be_typed(home: Path) -> None:
    printed = good("data", "prepare", "b.txt", "--tokenizer", "bytes", "--out", "a b[1]", "--name", "x")
    words = shlex.split(printed.partition("Next: ")[2])
    assert good("data", "inspect", words[words.index("-i") + 1]).startswith("a b[1]/x_train_000001.bin\n")


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """What a parser and those of its commands take."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from parsers(each)
        else:
            yield action


# How values are called that are paths.
PATHS = {"PATH", "PATTERN", "FILE", "FOLDER", "DIR", "SPEC", "CHECKPOINT", "RUN", "STATE", "INPUT", "IN", "OUT"}
PATHS |= {"LOG", "EXECUTABLE", "MODEL", "A", "B"}


def test_all_flags_of_paths_take_a_home_folder() -> None:
    names = ("checkpoint", "compare", "convert", "data", "report", "watch")
    made = [module(name).make_parser() for name in names]
    made += [evaluate_command.make_parser(), asking_parser("generate", "", "", (), generate_flags.GROUPS)]
    taken = [action for parser in made for action in parsers(parser)]
    paths = [action for action in taken if action.metavar in PATHS and action.type is not int]
    assert len(paths) > 45
    assert [action.metavar for action in paths if action.type not in (Path, "path")] == []
    own = [*plan.OWN, *profile_command.OWN, *kernels.OWN]
    options = [about for about in (*OPTIONS, *own) if about.value in PATHS or about.name in ("model", "tokenizer")]
    assert len(options) > 10
    assert [about.name for about in options if not about.is_path] == []


def test_a_home_folder_is_kept_as_it_is(home: Path) -> None:
    files = ("-i", f"~/{DATA}/x_train_*.bin", "-j", f"~/{DATA}/x_val_*.bin")
    good("train", *SHAPE, *files, "-x", 1, "-v", 0, "-s", 0, "--no-save", "-o", "~/other")
    options = json.loads((home / "other/config.json").read_text())["options"]
    assert options["train_data"] == str(home / DATA / "x_train_*.bin")
    assert options["output_dir"] == str(home / "other")
    printed = good("data", "prepare", "b.txt", "--tokenizer", "bytes", "--out", "./~/b", "--name", "x")
    assert (home / "~/b/x_train_000001.bin").is_file()
    words = shlex.split(printed.partition("Next: ")[2])
    assert words[words.index("-i") + 1] == "./~/b/x_train_*.bin"
    assert "tokens " in good("data", "inspect", "./~/b/x_*.bin")


# ----- texts --------------------------------------------------------------------------------------------------------


def ids_of(printed: str) -> Any:
    """What a command says of the ids of a text, in JSON."""
    found = json.loads(printed)
    return found["prompt"]["ids"] if "prompt" in found else found["subjects"][0]["results"]


# The words of a command that reads a text, of FILE or of standard input.
READ_TEXT = {
    "--prompt-file": ("generate", RUN, "--prompt-file", "FILE", "-n", 1, "--json"),
    "standard input": ("generate", RUN, "-n", 1, "--json"),
    "--text": ("evaluate", RUN, "--text", "FILE", "--json"),
}


@pytest.fixture(params=READ_TEXT)
def reads(request: pytest.FixtureRequest, home: Path) -> Callable[[bytes], Done]:
    """A command that reads a text."""

    def read(data: bytes) -> Done:
        (home / "text.txt").write_bytes(data)
        words = ["text.txt" if word == "FILE" else word for word in READ_TEXT[request.param]]
        return command(*words, stdin=data)

    return read


def test_a_byte_order_mark_is_dropped(reads: Callable[[bytes], Done]) -> None:
    with_mark, without = reads(codecs.BOM_UTF8 + TEXT.encode()), reads(TEXT.encode())
    assert with_mark.status == without.status == ExitCode.DONE
    assert ids_of(with_mark.out) == ids_of(without.out)


def test_utf_16_is_refused(reads: Callable[[bytes], Done], home: Path) -> None:
    found = reads("Some words, один, Ā.".encode("utf-16"))
    assert (found.status, found.out) == (ExitCode.BAD_INPUT, "")
    assert "iconv -f UTF-16LE -t UTF-8" in found.err and len(found.err.splitlines()) == 1
    (home / "t.jsonl").write_bytes('{"text": "Some words."}\n'.encode("utf-16"))
    found = command("data", "prepare", "t.jsonl", "--tokenizer", "bytes", "--out", "nothing")
    assert found.status == ExitCode.BAD_INPUT and not (home / "nothing").exists()


@pytest.mark.parametrize("text", ["a\0b", "\0", "né\0\0", "a" * 100 + "\0b\0", "𝄞\0", "./a\0./b\0./c\0"])
def test_a_text_with_a_nul_is_a_text(text: str) -> None:
    assert read_text(io.BytesIO(text.encode()), "it") == text.encode()


@pytest.mark.parametrize(
    ("words", "text", "expected"),
    [
        (["blank-line"], "one\r\n\r\ntwo\r\n\r\nthree\r\n", ["one\r\n\r\n", "two\r\n\r\n", "three\r\n"]),
        (["<|endoftext|>", "--drop-separator"], "a\n<|endoftext|>b<|endoftext|>\n", ["a\n", "b"]),
    ],
)
def test_documents(home: Path, tmp_path: Path, words: list[str], text: str, expected: list[str]) -> None:
    (home / "cut.txt").write_bytes(text.encode())
    good(
        "data", "prepare", "cut.txt", "--tokenizer", "bytes", "--out", tmp_path, "--val-tokens", 0, "--split-on", *words
    )
    with open_token_file(tmp_path / "cut_train_000001.bin") as file:
        found = file.read().tolist()
    assert found == [token for document in expected for token in (256, *document.encode())]


# ----- output -------------------------------------------------------------------------------------------------------

# Words of commands whose output has names of files, text or signs that ASCII lacks.
SAID = {
    "prepare": ("data", "prepare", "é.txt", "--tokenizer", "bytes", "--out", "é", "--name", "x", "--force"),
    "inspect": ("data", "inspect", f"{DATA}/x_train_*.bin"),
    "list": ("data", "list"),
    "train": ("train", *SHAPE, "-i", f"{DATA}/x_train_*.bin", "-v", 0, "-s", 1, "-g", 8, "-x", 1, "-o", "é[2]"),
    "generate": ("generate", RUN, "--prompt", TEXT[:12], "-n", 8),
    "probabilities": ("generate", RUN, "--prompt", TEXT[:12], "-n", 1, "--probs", 2),
    "evaluate": ("evaluate", RUN, "--text", "é.txt"),
    "convert": ("convert", "convert", RUN, "é.bin", "--force"),
    "convert inspect": ("convert", "inspect", RUN),
    "checkpoint": ("checkpoint", "verify", RUN),
    "compare": ("compare", "logs", RUN, RUN),
    "compare checkpoints": ("compare", "checkpoints", RUN, RUN),
    "report": ("report", RUN, "-o", "é.html"),
    "watch": ("watch", RUN, "--once"),
    "plan": ("plan", *SHAPE, "--gpu", "h100", "--quick"),
    "kernels": ("kernels",),
}


# Those whose output has an é, of a name or of the text.
NAMED = {"prepare", "inspect", "train", "evaluate", "convert", "convert inspect", "compare"}
NAMED |= {"compare checkpoints", "watch", "report"}


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize("case", SAID)
def test_an_output_of_few_characters_gets_escapes(home: Path, case: str, encoding: str) -> None:
    name, *words = SAID[case]
    shutil.rmtree(home / "é[2]", ignore_errors=True)
    printed = good(name, *words, encoding=encoding)
    assert printed
    assert ((r"\xe9" if encoding == "ascii" else "é") in printed) == (case in NAMED)
    written = {"prepare": "é", "train": "é[2]", "convert": "é.bin", "report": "é.html"}
    assert case not in written or (home / written[case]).exists()


def test_a_name_that_is_no_text_keeps_its_bytes(home: Path) -> None:
    name = os.fsencode(home) + b"/\xff.txt"
    Path(os.fsdecode(name)).write_bytes(b"some words" * 10)
    words = ("prepare", os.fsdecode(name), "--tokenizer", "bytes", "--out", os.fsdecode(name + b".d"), "--name", "x")
    assert os.fsencode(good("data", *words)).count(name + b".d/x_val_000000.bin") == 1
