"""--model FILE.py: what a run keeps of the file and resumes with, and every command on what it leaves.

Most are of tests/toy.py, a family without layers, attention, backward, decoder and tables. Each start sees no file that
another one has loaded.
"""

import io
import json
import shutil
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from llmc_jax.base.errors import ExitCode
from llmc_jax.checkpoint import convert
from llmc_jax.compare import command as compare
from llmc_jax.evaluate import command as evaluate
from llmc_jax.generate import command as generate
from llmc_jax.models import family
from llmc_jax.plan import command as plan
from llmc_jax.plan import separate
from llmc_jax.plan.asked import asked_config
from llmc_jax.plan.efficiency import Roof
from llmc_jax.plan.memory import CPU
from llmc_jax.profile import command as profile
from llmc_jax.profile import measure
from llmc_jax.run import command as train
from tests.families import FROZEN, TOY, none_loaded, shape_of
from tests.run.test_resume import snapshot, stopped_after
from tests.same_run import Result, check_same, write_shards

pytestmark = pytest.mark.usefixtures("nothing_lasts", "quick_compilation")

SHAPE = ["-e", "toy-V61-C8-T16", "-b", "2", "-t", "16"]
FLAGS = [*SHAPE, "-l", "1e-2", "-c", "0.1", "-k", "constant", "-x", "6", "-s", "3", "-g", "6", "--tokenizer", "none"]


class Said(NamedTuple):
    """Exit status and words of a command."""

    code: int
    out: str
    err: str

    def refused(self, *words: str) -> None:
        """Fails unless it ended with one message that has these words."""
        assert (self.code, self.out, self.err.strip().count("\n")) == (ExitCode.BAD_INPUT, "", 0), self.err
        assert [word for word in words if word not in self.err] == [], self.err


def command(module: Any, *words: Any) -> Said:
    """Run a command as a process of its own would, which knows no family but GPT-2."""
    with none_loaded(), redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = int(module.main([str(word) for word in words]))
    return Said(code, out.getvalue(), err.getvalue())


class Runs(NamedTuple):
    """Runs of one module of tests, and their data. Read-only by agreement."""

    folder: Path

    @property
    def data(self) -> list[Any]:
        return ["-i", self.folder / "train_*.bin", "-j", self.folder / "val_*.bin"]

    def tokens(self, count: int) -> np.ndarray:
        """The first ids of the validation data, which stand behind a header of llm.c's."""
        return np.fromfile(self.folder / "val_0.bin", np.uint16, count, offset=1024)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, nothing_lasts: None, quick_compilation: None) -> Runs:
    """`whole`: a run of the toy. `stopped`: the same, which a signal has ended after three of the six steps."""
    found = Runs(tmp_path_factory.mktemp("models"))
    write_shards(found.folder, {"train": (1500, 1300), "val": (600,)}, vocab_size=61)
    for name, stop, code in (("whole", 0, ExitCode.DONE), ("stopped", 3, ExitCode.STOPPED)):
        with stopped_after(stop):
            said = command(train, *FLAGS, *found.data, "--model", TOY, "-o", found.folder / name)
        assert (said.code, said.err) == (code, ""), said.out + said.err
        (found.folder / f"{name}.out").write_text(said.out)
    return found


Resume = Callable[..., Said]


@pytest.fixture
def resume(runs: Runs, tmp_path: Path) -> Resume:
    """Goes on with a copy of the run that was stopped."""
    run = Path(shutil.copytree(runs.folder / "stopped", tmp_path / "run"))
    return lambda *words: command(train, "-y", "1", "-o", run, *words)


@pytest.fixture(scope="module")
def whole(runs: Runs) -> Result:
    return Result(0, runs.folder / "whole", (runs.folder / "whole.out").read_text(), "")


def copy_in(run: Path) -> Path:
    """The copy of the file that a run keeps, which is its only one."""
    (found,) = run.glob("model_*.py")
    return found


# ----- the copy, and resuming -----------------------------------------------------------------------------------------


def test_a_run_keeps_the_file_by_its_digest(whole: Result) -> None:
    copy, source = copy_in(whole.folder), shape_of("toy-V61-C8-T16", TOY).source
    assert copy.read_bytes() == TOY.read_bytes() and copy.name == f"model_{source[:12]}.py"
    assert whole.checkpoints == [6] and len(whole.losses) == 6


def test_a_run_resumes_from_its_copy_with_the_same_bits(
    runs: Runs, resume: Resume, whole: Result, tmp_path: Path
) -> None:
    stopped = (runs.folder / "stopped.out").read_text()
    assert f"-y 1 -o {runs.folder / 'stopped'} --model {TOY}" in stopped
    said, run = resume("--model", copy_in(runs.folder / "stopped")), whole._replace(folder=tmp_path / "run")
    assert (said.code, said.err, run.values("resume", "step")) == (0, "", [3])
    check_same(run.folder, whole.folder)


def test_code_is_not_taken_from_a_run_by_itself(resume: Resume, tmp_path: Path) -> None:
    before = snapshot(tmp_path / "run")
    resume().refused(f"--model {copy_in(tmp_path / 'run')}")
    assert snapshot(tmp_path / "run") == before


def test_a_changed_file_is_refused_until_it_is_accepted(resume: Resume, whole: Result, tmp_path: Path) -> None:
    """The change makes no difference to a run that has begun, so the losses are those of before."""
    changed = tmp_path / "changed.py"
    changed.write_text(TOY.read_text().replace("normal(0.0, 0.1,", "normal(0.0, 0.2,"))
    assert changed.read_bytes() != TOY.read_bytes()
    resume("--model", changed).refused(f"--model {copy_in(tmp_path / 'run')}", "--model-changed")
    said, run = resume("--model", changed, "--model-changed"), whole._replace(folder=tmp_path / "run")
    assert (said.code, said.err) == (0, "") and f"results differ from here: {changed}" in said.out
    assert run.losses == whole.losses
    copies = {path.read_bytes() for path in run.folder.glob("model_*.py")}
    assert copies == {TOY.read_bytes(), changed.read_bytes()}
    resume("-x", 7, "--model", TOY).refused("--model-changed")


def test_weights_are_not_read_into_other_tensors(resume: Resume, tmp_path: Path) -> None:
    """The two of a toy are as large as each other, so its buffer would take either order."""
    changed, before = tmp_path / "changed.py", snapshot(tmp_path / "run")
    text = TOY.read_text().replace('Tensor("wte"', 'Tensor("x"').replace('Tensor("head"', 'Tensor("wte"')
    changed.write_text(text.replace('Tensor("x"', 'Tensor("head"'))
    resume("--model", changed, "--model-changed").refused("tensors", "[['wte', 61, 8], ['head', 61, 8]]")
    assert snapshot(tmp_path / "run") == before


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("return x + jnp", "return y + jnp", ["line 55: hidden: NameError"]),
        ("V C", "V D", ["wte", "D is none of"]),
        ('"normal"', '"nromal"', ["wte", "'nromal'"]),
    ],
)
def test_a_model_that_cannot_be_trained_begins_nothing(
    old: str, new: str, words: list[str], tmp_path: Path, runs: Runs
) -> None:
    file = tmp_path / "m.py"
    file.write_text(TOY.read_text().replace(old, new))
    command(train, *FLAGS, *runs.data, "--model", file, "-o", tmp_path / "run").refused(str(file), *words)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [("def f(:\n", ["line 1"]), ("1 / 0\n", ["line 1"]), ("x = 1\n", ["FAMILY"]), (None, ["cannot be read"])],
)
def test_a_file_that_cannot_be_loaded_begins_nothing(
    text: str | None, words: list[str], tmp_path: Path, runs: Runs
) -> None:
    file = tmp_path / "m.py"
    if text is not None:
        file.write_text(text)
    command(train, *FLAGS, *runs.data, "--model", file, "-o", tmp_path / "run").refused(f"--model {file}", *words)
    assert not (tmp_path / "run").exists()


# ----- on what a run leaves -------------------------------------------------------------------------------------------


def expected_logits(run: Result, tokens: np.ndarray) -> np.ndarray:
    """The logits (T, V) after each of some tokens (T,), by NumPy in float64."""
    family.load(TOY)  # this process may not have read any state of it yet
    wte, head = run.model(6).astype(np.float64).reshape(2, 61, 8)
    x = wte[tokens]
    return (x + np.cumsum(x, axis=0) / np.arange(1, len(x) + 1)[:, None]) @ head.T


def test_evaluate(runs: Runs, whole: Result) -> None:
    words = [whole.folder, "--data", runs.folder / "val_0.bin", "--limit", 1, "--json"]
    command(evaluate, *words).refused(f"--model {copy_in(whole.folder)}")
    said = command(evaluate, *words, "--model", TOY)
    tokens = runs.tokens(17)
    logits = expected_logits(whole, tokens[:-1])
    losses = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(16), tokens[1:]]
    (subject,) = json.loads(said.out)["subjects"]
    assert said.code == 0 and subject["results"][0]["loss"]["value"] == pytest.approx(losses.mean(), rel=1e-6)


def test_generate(whole: Result) -> None:
    """The likeliest tokens, computed anew each time; two more than the model has positions."""
    words = [whole.folder, "--prompt", "1 2", "-n", 16, "--temperature", 0, "--json"]
    said, tokens = command(generate, *words, "--model", TOY), [1, 2]
    for _ in range(14):
        tokens.append(int(np.argmax(expected_logits(whole, np.array(tokens))[-1])))
    assert said.code == 0 and json.loads(said.out)["samples"][0]["ids"][:14] == tokens[2:], said
    command(generate, *words[:3], "--attention", "x.png", "--model", TOY)  # has none
    command(generate, *words[:3], "--model", FROZEN).refused("toy", "--model")


def test_inspect_and_convert(whole: Result, tmp_path: Path) -> None:
    """To orbax and back; the formats of GPT-2 are refused by name."""
    found = command(convert, "inspect", whole.folder, "--json", "--model", TOY)
    about = json.loads(found.out)
    shapes = {name: each["shape"] for name, each in about["tensors"]["params"].items()}
    assert shapes == {"wte": [61, 8], "head": [61, 8]}
    for out, to in (("model.bin", "llmc"), ("hf", "hf"), ("states", "llmc-state")):
        said = command(convert, "convert", whole.folder, tmp_path / out, "--to", to, "--model", TOY)
        assert said.code == ExitCode.BAD_INPUT and "toy" in said.err and not (tmp_path / out).exists()
    said = command(convert, "convert", whole.folder, tmp_path / "orbax", "--to", "orbax", "--model", TOY)
    assert said.code == 0 and about["digest"] in said.out, said
    command(convert, "inspect", tmp_path / "orbax").refused(f"{tmp_path / 'orbax'}: ", "toy", "--model")
    again = command(convert, "inspect", tmp_path / "orbax", "--json", "--model", TOY)
    assert json.loads(again.out)["digest"] == about["digest"]
    compared = command(compare, "checkpoints", whole.folder, tmp_path / "orbax", "--model", TOY)
    assert compared.code == 0 and compared.out.count("same bits") == 3


def test_compare_two_families(whole: Result) -> None:
    """What has one name in both is compared, if it has one shape."""
    other = command(compare, "checkpoints", whole.folder, "L1-NH1-C8-V61-T16", "--json", "--model", TOY)
    (row,) = json.loads(other.out)["tensors"]
    assert other.code == compare.DIFFERS and (row["name"], row["agrees"]) == ("wte", False)


# ----- without a run --------------------------------------------------------------------------------------------------


def test_plan_by_parameters_alone() -> None:
    """6 operations a parameter and token; nothing is computed again, so there is one way."""
    said = command(plan, *SHAPE, "--model", TOY, "--gpu", "h100", "--quick", "--json", "-", "-x", 9)
    found = json.loads(said.out)
    assert said.code == 0 and found["setting"]["parameters"] == 976, said
    assert sum(each["flops"] for each in found["step"]["operations"]) == 6 * 976 * 32
    assert found["step"]["seconds"]["typical"] > 0 and found["memory"]["kinds"]["optimizer"] == 2 * 4 * 65536
    assert [(row["recompute"], row["recompute_blocks"]) for row in found["largest"]] == [(0, 0)]
    assert any("toy" in words for words in found["not_known"])
    large = command(plan, *SHAPE, "-e", "toy-V61000-C8-T16", "--model", TOY, "--gpu", "h100", "--quick", "--json", "-")
    assert json.loads(large.out)["memory"]["kinds"]["logits"] == 2 * 32 * 61000


@pytest.mark.slow
def test_a_process_compiles_it_for_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMC_JAX_CACHE", str(tmp_path))
    config = asked_config([*SHAPE, "--model", str(TOY)])
    found = separate.compiled_apart(CPU, config, shape_of("toy-V61-C8-T16", TOY))
    assert found.source == "compiled" and found.program > 3 * 4 * 65536


def test_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "calibration", lambda *_: SimpleNamespace(roof=Roof(1e11, 1e10)))
    said = command(profile, *SHAPE, "--model", TOY, "--steps", 1, "--traced", 1, "--json", tmp_path / "p.json")
    assert said.code == 0, said
    found = json.loads((tmp_path / "p.json").read_text())
    assert (found["tokens"], found["products_flops"]) == (32, 6 * 976 * 32)
    assert {each["operation"] for each in found["operations"] if each["seconds"]} >= {"head", "classifier", "adamw"}


@pytest.mark.parametrize(
    ("words", "flag"), [(["-r", "2"], "-r 2"), (["--recompute-blocks", "1"], "--recompute-blocks")]
)
def test_jax_computes_nothing_again(words: list[str], flag: str, runs: Runs, tmp_path: Path) -> None:
    """-r 1 is the default, which `whole` has."""
    command(train, *FLAGS, *runs.data, "--model", TOY, "-o", tmp_path / "run", *words).refused(flag, "toy")
    assert not (tmp_path / "run").exists()


def test_llmcs_files_are_refused_before_a_run_begins(runs: Runs, tmp_path: Path) -> None:
    words = [*FLAGS, "-e", "L1-NH1-C16-V61-T16", *runs.data, "--model", FROZEN, "-o", tmp_path / "run"]
    command(train, *words, "--export-llmc").refused("--export-llmc", "frozen")
    assert not (tmp_path / "run").exists()
