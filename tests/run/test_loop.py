"""Whole runs of the command line on tiny models: what they compute, what they leave behind, and how they end."""

import io
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from llmc_jax.base.errors import InputError
from llmc_jax.checkpoint import store
from llmc_jax.checkpoint.llmc import open_model, write_model
from llmc_jax.config.model import ModelConfig, parse_descriptor
from llmc_jax.config.train import TrainConfig
from llmc_jax.data.corpora import Corpus
from llmc_jax.data.loader import TokenLoader
from llmc_jax.data.tokenfile import open_token_file, write_token_file
from llmc_jax.data.tokenizers import bytes_tokenizer, sample_text
from llmc_jax.generate import flags as generate_flags
from llmc_jax.generate.llmc import generate
from llmc_jax.machine import compiling
from llmc_jax.machine.device import describe_device
from llmc_jax.machine.nvml import GpuReading
from llmc_jax.models.gpt2.init import random_parameters
from llmc_jax.models.layout import num_parameters, padded
from llmc_jax.plan.plan import Plan
from llmc_jax.run import begin, due, inputs, loop
from llmc_jax.run.beside import Beside
from llmc_jax.run.command import main
from llmc_jax.run.state import Progress
from llmc_jax.training.step import Metrics, evaluate_loss
from llmc_jax.trials import here
from tests.drawing import drawing
from tests.same_run import Result
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("nothing_lasts", "quick_compilation")

ROOT = Path(__file__).resolve().parents[2]
TINY = "L1-NH1-C16-V257-T16"
STEP_TOKENS = 64  # 4 x 16


Train = Callable[..., Result]
Program = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def train(tmp_path: Path, tokens: Any, capsys: pytest.CaptureFixture[str]) -> Train:
    """Runs the command line in this process: a tiny model, quiet; flags given here count."""

    def run(*flags: Any, folder: str = "run") -> Result:
        output = tmp_path / folder
        code = main([str(word) for word in (*tiny_flags(tokens), "-o", output, *flags)])
        return Result(code, output, *capsys.readouterr())

    return run


def tiny_flags(tokens: Any) -> list[Any]:
    return [
        *("-e", TINY, "-i", tokens.train, "-j", tokens.val, "-b", 4, "-t", 16, "-l", "1e-2"),
        *("-v", 0, "-s", 0, "-x", 3),
    ]


def table_rows(out: str) -> dict[str, str]:
    """The start-up table; what goes on in a line of its own put together."""
    rows: dict[str, str] = {}
    name = ""
    for line in out.splitlines():
        if line[:2] == "| ":
            left, right = (cell.strip() for cell in line.split("|")[1:3])
            name = left or name
            rows[name] = right if left else f"{rows[name]} {right}"
    return rows


def generates(run: Result) -> list[str]:
    """The words of the command that generates text from a run, behind the program's name; none where there is none."""
    found = (line for line in run.out.splitlines() if line.startswith("generate:"))
    return [word for line in found for word in shlex.split(line)[3:]]


def initial() -> np.ndarray:
    model = parse_descriptor(TINY)
    return random_parameters(model)[: num_parameters(model)]


# ---- the run folder


FULL = [
    *("-x", 6, "-v", 2, "-m", 3, "-s", 3, "-g", 8, "-n", 3, "-k", "linear", "-u", 2, "-q", 0.1),
    *("--export-llmc", "--print-every", 4),
]


@pytest.fixture(scope="module")
def full_run(tokens: Any, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A run in which everything happens: validation, samples, checkpoints, a picture. Many tests look at it."""
    folder = tmp_path_factory.mktemp("full") / "new" / "run"
    argv = [str(word) for word in (*tiny_flags(tokens), *FULL, "-o", folder)]
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as out, drawing():
        patch.setattr(sys, "argv", ["train.py", *argv])
        done = main(argv)
    return Result(done, folder, out.getvalue(), "")


def test_the_folder_holds_everything_and_nothing_else(full_run: Result) -> None:
    assert full_run.code == 0
    assert sorted(path.name for path in full_run.folder.iterdir()) == [
        *("DONE_00000003", "DONE_00000006", "config.json", "curves.png", "kernels.json", "main.log", "metrics.jsonl"),
        *("model_00000003.bin", "model_00000006.bin", "samples.txt", "state_00000003", "state_00000006"),
        "tokenizer.bin",
    ]
    assert full_run.checkpoints == full_run.values("checkpoint", "step") == [3, 6]  # the last one not twice


def test_metrics_are_complete(full_run: Result) -> None:
    order = [(each["event"], each["step"]) for each in full_run.events]
    saved = order.index(("checkpoint", 3))  # it is told when it is complete, while training goes on
    assert order.index(("train", 2)) < saved < order.index(("checkpoint", 6))
    assert order[:saved] + order[saved + 1 :] == [
        ("start", 0),
        *(("val", 0), ("train", 0), ("train", 1)),
        *(("val", 2), ("train", 2)),
        *(("sample", 3), ("train", 3)),
        *(("val", 4), ("train", 4), ("train", 5)),
        *(("val", 6), ("sample", 6)),
        *(("checkpoint", 6), ("end", 6)),
    ]
    waited, whole = full_run.values("checkpoint", "waited_ms"), full_run.values("checkpoint", "ms")
    assert all(0 < part <= all_of_it for part, all_of_it in zip(waited, whole, strict=True))
    for each in (each for each in full_run.events if each["event"] == "train"):
        assert each["tokens"] == (each["step"] + 1) * STEP_TOKENS
        assert each["ms"] > 0 and math.isclose(each["tokens_per_second"], STEP_TOKENS / each["ms"] * 1e3)
        assert each["norm"] > 0 and each["skipped"] is False
    assert full_run.values("val", "batches") == [3, 3, 3, 3]
    assert abs(full_run.values("val", "loss")[0] - math.log(257)) < 0.1  # nothing learned yet
    assert {"event": "end", "step": 6, "outcome": "done", "skipped": 0}.items() <= full_run.events[-1].items()


def test_the_schedule_is_that_of_the_flags(full_run: Result) -> None:
    # llm.c's linear schedule: peak 0.01, 2 steps of warm-up, 6 steps in all, down to a tenth
    expected = [0.005, 0.01, *(0.01 - done / 4 * 0.009 for done in range(4))]
    np.testing.assert_allclose(full_run.values("train", "lr"), expected, rtol=1e-6)


def test_samples_and_models_are_those_of_their_step(full_run: Result) -> None:
    assert full_run.values("sample", "tokens") == [7, 7]  # -g counts the end-of-text token too
    text = (full_run.folder / "samples.txt").read_text()
    assert text == "".join(
        f"step {each['step']}, 7 tokens\n---\n{each['text']}\n---\n"
        for each in full_run.events
        if each["event"] == "sample"
    )
    assert full_run.values("checkpoint", "path") == ["state_00000003", "state_00000006"]
    params = jax.numpy.array(padded(full_run.model(6), parse_descriptor(TINY)))
    ids = list(generate(params, parse_descriptor(TINY), 8, 256))
    assert full_run.values("sample", "text")[-1] == sample_text(bytes_tokenizer(), ids)
    three, six = full_run.model(3), full_run.model(6)
    assert (three.tobytes(), six.tobytes()) == (full_run.exported(3).tobytes(), full_run.exported(6).tobytes())
    assert [int(full_run.state(step)["step"]) for step in (3, 6)] == [3, 6]
    _, at_2, _, at_6 = full_run.values("val", "loss")
    opened = [store.open_checkpoint(full_run.folder / f"state_{step:08d}") for step in (3, 6)]
    assert [each.metadata.counters.val_loss for each in opened if each.metadata.counters] == [at_2, at_6]
    assert np.isfinite(six).all()
    assert 0 < np.linalg.norm(six - three) < np.linalg.norm(six - initial())
    assert open_model(full_run.folder / "model_00000006.bin").config == parse_descriptor(TINY)


def test_configuration_and_picture(full_run: Result, tokens: Any) -> None:
    record = json.loads((full_run.folder / "config.json").read_text())
    assert full_run.values("start", "config") == [record]
    config = TrainConfig.from_json(record["options"])
    assert (config.train_data, config.schedule, config.max_steps) == (str(tokens.train), "linear", 6)
    assert ModelConfig(**record["model"]) == parse_descriptor(TINY)
    assert record["versions"]["jax"] == jax.__version__
    assert "train.py" in record["command_line"] and "linear" in record["command_line"]
    picture = (full_run.folder / "curves.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n") and picture.endswith(b"IEND\xaeB\x60\x82")


def test_the_screen_shows_table_steps_and_where_everything_is(full_run: Result) -> None:
    lines, rows = full_run.out.splitlines(), table_rows(full_run.out)
    assert (rows["train_num_batches"], rows["num_parameters"]) == ("6", str(initial().size))
    shown = [line for line in lines if line.startswith("step ")]
    assert [line.split("|")[0].strip() for line in shown] == [f"step{n:5d}/6" for n in (1, 4, 6)]
    pattern = r" loss \d\.\d{6} \| norm \d+\.\d{4} \| lr \d\.\d\de-0\d \| \d+\.\d\d ms \| .*FLOP/s \| \d+ tok/s"
    assert all(re.fullmatch(pattern, line.split("|", 1)[1]) for line in shown)
    assert {f"val loss {loss:.6f}" for loss in full_run.values("val", "loss")} | {"generating:"} <= {*lines}
    for name, path in (("run folder:", ""), ("picture:", "curves.png"), ("checkpoint:", "state_00000006")):
        assert f"{name:<13} {full_run.folder / path}" in lines
    assert generates(full_run) == [str(full_run.folder), "--interactive"]
    assert generate_flags.parse(generates(full_run)).interactive
    mean = next(line for line in lines if line.startswith("total average iteration time: "))
    assert math.isclose(float(mean.split()[-2]), np.mean(full_run.values("train", "ms")[1:]), abs_tol=1e-5)


# ---- what the flags mean


def test_off_means_off(train: Train, tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere.bin"
    run = train("-v", 0, "-s", 0, "-n", 0, "--no-save", "-j", nowhere)  # what is not used need not be there
    assert (run.code, run.models, run.checkpoints) == (0, [], [])
    assert [each["event"] for each in run.events] == ["start", "train", "train", "train", "end"]
    assert "checkpoint:" not in run.out and not generates(run)
    assert (run.folder / "samples.txt").read_text() == ""


def test_what_happens_on_the_way_changes_nothing(train: Train, full_run: Result) -> None:
    """And the same seed gives the same bits."""
    steps = ("-x", 6, "-k", "linear", "-u", 2, "-q", 0.1)
    plain = train(*steps)
    assert plain.losses == full_run.losses and plain.bits(6) == full_run.bits(6)
    assert full_run.bits(3)["params"] != full_run.bits(6)["params"]
    assert train(*steps, "--seed", 6, folder="other").losses != full_run.losses


@pytest.mark.parametrize(
    ("flags", "events", "models"),
    [
        ("-v 5 -m -1 -s 5 -g 4 -i nowhere.bin", ["val", "sample"], []),
        ("--export-llmc", ["checkpoint"], ["model_00000000.bin"]),
        ("-n 5", ["checkpoint"], []),
        ("-n 5 --no-save", [], []),
    ],
)
def test_zero_steps_do_what_is_asked_for(train: Train, flags: str, events: list[str], models: list[str]) -> None:
    run = train("-x", 0, *flags.split())
    assert run.code == 0 and [each["event"] for each in run.events] == ["start", *events, "end"]
    assert run.models == models and run.checkpoints == [0] * events.count("checkpoint")
    if models:
        np.testing.assert_array_equal(run.exported(0), initial())


def test_a_run_goes_on_from_a_state_of_step_0(train: Train, full_run: Result) -> None:
    assert train(*FULL, "-x", 0).checkpoints == [0]
    assert train(*FULL, "-y", 1).bits(6) == full_run.bits(6)


def test_one_epoch_is_the_default(train: Train, tokens: Any) -> None:
    run = train("-x", -1, "-i", tokens.val)
    assert len(run.losses) == 2000 // STEP_TOKENS
    assert run.losses[-1] < 3.2 < run.losses[0]  # ln 257 is 5.5, the ten letters and the space have 2.4


def test_validation_goes_round_as_llmc_does(train: Train, tokens: Any, tmp_path: Path) -> None:
    """Of 128 tokens B * T = 64 make one whole batch, for which -1 stands twice: the last token is only a target."""
    ids = open_token_file(tokens.val).read(0, 128)
    write_token_file(tmp_path / "two.bin", ids)
    losses = {}
    for asked, expected in ((1, 1), (-1, 2), (5, 5)):
        run = train("-x", 0, "-v", 1, "-m", asked, "-j", tmp_path / "two.bin", folder=f"{asked}")
        assert run.values("val", "batches") == [expected]
        losses[asked] = run.values("val", "loss")[0]
    assert losses[-1] == losses[1] and losses[5] == pytest.approx(losses[1], abs=1e-15)


def test_validation_is_the_mean_over_the_first_batches(full_run: Result, tokens: Any) -> None:
    model = parse_descriptor(TINY)
    params = jax.numpy.array(padded(initial(), model))
    ids = open_token_file(tokens.val).read().astype(np.int32)
    batches = [ids[start : start + STEP_TOKENS + 1] for start in range(0, 3 * STEP_TOKENS, STEP_TOKENS)]
    each = [evaluate_loss(params, x[:-1].reshape(4, 16), x[1:].reshape(4, 16), model) for x in batches]
    assert abs(full_run.values("val", "loss")[0] - np.mean(each)) <= 1e-6


@pytest.mark.slow
def test_overfitting_one_batch(train: Train) -> None:
    run = train("-a", 1, "-x", 250, "-l", 3e-2, "-q", 0.1, "-v", 1, "-m", 1)
    # the batch trained on is the first of the validation: its loss before each step is the step's own
    np.testing.assert_allclose(run.values("val", "loss")[:-1], run.losses, rtol=1e-5)
    assert run.losses[-1] < 0.05


def test_the_order_of_the_data_is_the_loaders(train: Train, full_run: Result, tokens: Any) -> None:
    assert train("-x", 1, "--shuffle", "none").losses[0] != full_run.losses[0]
    loader = TokenLoader(tokens.train, 4, 16, vocab_size=257, shuffle=True, flag="-i")
    position = loader.state()
    inputs.check_tokens(loader)
    assert loader.state() == position


def test_samples_without_a_tokenizer_are_ids(train: Train) -> None:
    run = train("-e", "L1-NH1-C16-V300-T16", "-x", 0, "-s", 1, "-g", 5)
    assert "warning: samples are printed as token ids: no tokenizer is known for V=300" in run.out
    ids = run.values("sample", "text")[0].split()
    assert len(ids) == 4 and all(0 <= int(token) < 300 for token in ids)


def test_the_table_has_the_optimizers_numbers_and_what_runs(train: Train, full_run: Result) -> None:
    flags = ("-k", "step", "--step-every", 9, "--beta2", 0.75, "--seed", 7, "--shuffle", "none")
    rows = table_rows(train("-x", 0, *flags, "--kernels", "pallas", "--attention", "flash").out)
    expected = {"decay": "matrices", "beta1": "0.9", "beta2": "0.75", "eps": "1.000000e-08", "seed": "7"}
    expected |= {"shuffle": "none", "step_every": "9", "step_factor": "0.1", "precision": "fp32"}
    expected |= {"attention": "naive, xla (not flash: there is no GPU)"}
    assert expected.items() <= rows.items()
    plain = table_rows(full_run.out)
    assert "step_every" not in plain and "kernels" not in rows and plain["kernels"] == "xla (on a CPU)"


def test_several_gpus_are_named_and_one_is_used_if_asked_for(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    device = describe_device()._replace(platform="gpu", kind="Some GPU", num_devices=8, memory_bytes=None)
    monkeypatch.setattr(here, "describe_device", lambda: device)
    run = train("-x", 0, "--devices", 1)
    assert "1 of 8 x Some GPU" in run.out
    (start,) = run.values("start", "config")
    assert (start["device"]["num_devices"], start["device"]["used"], start["options"]["devices"]) == (8, 1, 1)


@pytest.mark.parametrize("vocab", [257, pytest.param(50257, marks=pytest.mark.slow)])
@pytest.mark.parametrize("val", ["stdlib", "file"])
def test_the_built_in_corpus_with_any_model_and_validation(
    train: Train, tokens: Any, monkeypatch: pytest.MonkeyPatch, vocab: int, val: str
) -> None:
    corpus = Corpus(Path(tokens.train), Path(tokens.val), 257, "f00d", "the corpus")
    monkeypatch.setattr(inputs, "stdlib_corpus", lambda: corpus)
    monkeypatch.setattr("llmc_jax.base.text.screen_width", lambda: 20)  # wrapped between words
    flags = ["-e", f"L1-NH1-C16-V{vocab}-T16", "-i", "stdlib", "-j", "stdlib" if val == "stdlib" else tokens.val]
    run = train(*flags, "-x", 1, "-v", 1, "-m", 1, "-s", 1, "-g", 3)
    assert run.code == 0, run.err
    assert (f"bigram baseline: {corpus.bigram_nats:.3f} nats" in run.out) == (val == "stdlib")
    assert "the corpus;\n    fingerprint f00d\n" in run.out
    assert "def read" in generates(run)
    assert ("in bytes (257 of V=50257 ids)" in run.out) == (vocab != 257)


# ---- the folder again


def test_resuming_over_models_without_a_state_is_refused(train: Train, full_run: Result, tmp_path: Path) -> None:
    folder = shutil.copytree(full_run.folder, tmp_path / "run", ignore=shutil.ignore_patterns("state_*", "DONE_*"))
    before = {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.iterdir()}
    refused = train("-y", 1)
    assert refused.code == 2
    assert f"-e {folder / 'model_00000006.bin'}" in refused.err
    assert {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.iterdir()} == before


def test_a_reused_folder_without_a_checkpoint_begins_its_logs_anew(train: Train) -> None:
    everything = ("-v", 1, "-m", 1, "-s", 1, "-g", 4)
    train("-x", 2, "--no-save", *everything)
    run = train("-x", 1, "-y", 1, *everything)
    assert run.code == 0
    assert f"-y 1: there is no checkpoint in {run.folder}, so a new run starts" in run.out.splitlines()
    lines = (run.folder / "main.log").read_text().splitlines()
    assert [" ".join(line.split(":")[:2]) for line in lines] == ["s 0 tel", "s 0 trl", "s 1 tel"]
    assert [(each["event"], each["step"]) for each in run.events] == [
        *(("start", 0), ("val", 0), ("train", 0), ("val", 1), ("sample", 1), ("checkpoint", 1), ("end", 1)),
    ]
    assert (run.folder / "samples.txt").read_text().count("---\n") == 2  # of one sample
    assert not list(run.folder.glob("config-*"))


def test_the_picture_has_the_name_of_the_model(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(Beside, "_begun", lambda beside, request: asked.append(json.loads(request)))
    run = train()
    assert run.code == 0 and "picture:" not in run.out
    assert asked == [[str(run.folder), TINY, {}, 0.0]]


# ---- stopping


@pytest.fixture
def program(tokens: Any, tmp_path: Path, request: pytest.FixtureRequest) -> Program:
    """Starts train.py on the tiny model in a process of its own; whatever still runs is killed at the end."""

    def start(*flags: Any) -> subprocess.Popen[str]:
        words = [str(word) for word in (*tiny_flags(tokens), "-o", tmp_path / "run", *flags)]
        pipe = subprocess.PIPE
        command = [sys.executable, str(ROOT / "train.py"), *words]
        quickly = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # its programs are there already
        process = subprocess.Popen(command, cwd=tmp_path, env=quickly, stdout=pipe, stderr=pipe, text=True)
        request.addfinalizer(process.communicate)
        request.addfinalizer(process.kill)  # comes first
        return process

    return start


def check_stopped(folder: Path) -> int:
    """Everything a stopped run must leave; returns the steps it made."""
    run = Result(130, folder, "", "")
    steps = len(run.losses)
    assert {"event": "end", "step": steps, "outcome": "stopped", "skipped": 0}.items() <= run.events[-1].items()
    assert run.checkpoints == run.values("checkpoint", "step") == [steps]
    metadata = store.open_checkpoint(folder / f"state_{steps:08d}").metadata
    assert metadata.identity.model == parse_descriptor(TINY)
    assert metadata.step == run.state(steps)["step"] == steps
    assert len((folder / "main.log").read_text().splitlines()) == steps
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    return steps


def test_ctrl_c_ends_the_run_after_a_whole_step(program: Program, tmp_path: Path) -> None:
    process = program("-x", 10**9, "--print-every", 10**6)
    metrics = tmp_path / "run" / "metrics.jsonl"
    begun = '"event": "train", "step": 5,'
    wait_until(lambda: metrics.exists() and begun in metrics.read_text(), lambda: process.poll() is None)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (130, "")
    steps = check_stopped(tmp_path / "run")
    assert "stopping after this step; a second signal exits at once" in out
    assert f"stopped:      after {steps} of 1000000000 steps" in out
    (advice,) = (line for line in out.splitlines() if line.startswith("resume with: "))
    assert shlex.split(advice)[-4:] == ["-y", "1", "-o", str(tmp_path / "run")]


def test_the_folder_alone_goes_on_with_the_run(
    train: Train, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = train("-x", 3, "-s", 2, "-g", 4, "-b", 2)

    def go_on(*flags: str) -> Result:
        code = main(["-y", "1", "-o", str(first.folder), *flags])
        return Result(code, first.folder, *capsys.readouterr())

    def options() -> Any:
        return json.loads((first.folder / "config.json").read_text())["options"]

    before, events = options(), first.events
    run = go_on("-x", "5")
    assert run.code == 0 and run.checkpoints == [3, 5]
    assert run.events[: len(events)] == events
    assert [(each["event"], each["step"]) for each in run.events[len(events) :]] == [
        *(("resume", 3), ("train", 3), ("sample", 4), ("train", 4), ("sample", 5), ("checkpoint", 5), ("end", 5)),
    ]
    configs = run.values("start", "config") + run.values("resume", "config")
    assert [each["options"]["max_steps"] for each in configs] == [3, 5]
    assert configs[1] == json.loads((run.folder / "config.json").read_text())
    log = (run.folder / "main.log").read_text().splitlines()
    assert [line.split()[0] for line in log] == [f"s:{step}" for step in range(5)]
    after = options()
    assert after == before | {"max_steps": 5, "reuse": True}
    assert re.search(r"^-y 1: options as in .*: -x 3 -> 5$", run.out, re.MULTILINE)
    assert "resume with:" not in run.out
    # An evaluation, and a start that fails, leave the options that the next one takes as they are, and the kernels.
    kernels = (run.folder / "kernels.json").read_bytes()
    assert go_on("-x", "0", "--logit-rows", "5").code == 0

    def fails(*_: object) -> None:
        raise InputError("main.log: cannot be written")

    monkeypatch.setattr(begin, "cut_logs", fails)
    assert go_on("-x", "9", "--logit-rows", "5").code == 2
    assert options() == after and (run.folder / "kernels.json").read_bytes() == kernels


@pytest.mark.slow
def test_a_reader_that_goes_away_ends_the_run_cleanly(program: Program, tmp_path: Path) -> None:
    process = program("-x", 10**9)  # after the first three steps the next line is due in a minute
    assert process.stdout is not None and process.stderr is not None
    while not process.stdout.readline().startswith("step    3/"):
        assert process.poll() is None
    process.stdout.close()  # as `train.py | head` does
    assert process.wait(timeout=120) == 130
    assert process.stderr.read() == "train.py: stopped, because nothing reads the output any more\n"
    assert check_stopped(tmp_path / "run") >= 3


@pytest.mark.slow
def test_a_reader_of_both_streams_that_goes_away(tokens: Any, tmp_path: Path) -> None:
    words = shlex.join(map(str, [sys.executable, ROOT / "train.py", *tiny_flags(tokens), "-x", 10**9, "-o", "run"]))
    command = f"({words} 2>&1; echo $? > status) | head -3"
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.stdout.count("\n"), done.stderr) == (3, "")
    assert (tmp_path / "status").read_text() == "130\n"


@pytest.mark.slow
def test_every_program_of_a_run_is_compiled_with_its_options(
    train: Train, full_run: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's option, which the CPU's compiler knows too and has no use for."""
    real, compiled = compiling.compiled, []

    def compile_with(lowered: Any, options: compiling.Options) -> Any:
        compiled.append((re.findall(r"module @(\w+)", lowered.as_text())[0], options))
        return real(lowered, options)

    options = ((compiling.TRITON_GEMM, False),)
    monkeypatch.setattr(compiling, "triton_gemm", lambda *_: options)
    monkeypatch.setattr(compiling, "compiled", compile_with)
    run = train(*FULL)
    assert run.code == 0
    names = ("decoded_logits", "evaluate_loss", "separate", "step_fn")
    assert sorted(compiled) == [(f"jit_{name}", options) for name in names]
    for kind, name in (("train", "loss"), ("train", "norm"), ("val", "loss"), ("sample", "text")):
        assert run.values(kind, name) == full_run.values(kind, name)
    assert "triton_gemm" in table_rows(run.out) and "triton_gemm" not in table_rows(full_run.out)


def test_an_option_that_xla_does_not_know_is_one_line(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "triton_gemm", lambda *_: (("xla_no_such_option", True),))
    run = train("-x", 2)
    assert run.code == 2 and "Traceback" not in run.err
    assert run.err.count("\n") == 1 and "xla_no_such_option" in run.err


def test_a_signal_during_validation_ends_it(train: Train, main_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = due.evaluate_loss, []

    def evaluate(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 5 + 3:  # the third batch of the second validation
            os.kill(os.getpid(), signal.SIGINT)
        return real(*arguments)

    monkeypatch.setattr(due, "evaluate_loss", evaluate)
    run = train("-v", 2, "-m", 5, "-s", 2, "-g", 4, "-n", 2, "-x", 10)
    assert (run.code, len(calls)) == (130, 5 + 3)
    assert run.values("val", "step") == [0]  # no half validation is logged
    assert [each["event"] for each in run.events] == ["start", "val", "train", "train", "checkpoint", "end"]
    assert run.checkpoints == [2]
    counters = store.open_checkpoint(run.folder / "state_00000002").metadata.counters
    assert (counters.validated, counters.sampled) == (0, -1)  # so both are done when it goes on


def test_a_signal_while_sampling_ends_it(train: Train, main_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []

    def generate(*_: Any) -> Iterator[int]:
        for token in range(100):
            if token == 3:
                os.kill(os.getpid(), signal.SIGINT)
            drawn.append(token)
            yield token

    monkeypatch.setattr(due, "generate", generate)
    run = train("-s", 2, "-g", 16, "-x", 10)
    assert (run.code, drawn) == (130, [0, 1, 2, 3])
    assert (run.values("sample", "text"), run.checkpoints) == ([], [2])


def test_a_signal_before_the_first_step_leaves_no_checkpoint(
    train: Train, main_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(begin, "announce", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    run = train("-v", 1)
    assert (run.code, run.checkpoints) == (130, [])
    assert [each["event"] for each in run.events] == ["start", "end"]


# ---- divergence


def broken_checkpoint(folder: Path) -> Path:
    path = folder / "broken.bin"
    flat = initial()
    flat[-1] = np.nan  # lnfb: reaches every logit
    write_model(path, parse_descriptor(TINY), flat)
    return path


def test_steps_that_are_not_finite_change_nothing_and_end_the_run(train: Train, tmp_path: Path) -> None:
    checkpoint = broken_checkpoint(tmp_path)
    run = train("-e", checkpoint, "--max-nonfinite", 3, "-x", 10, "-v", 5, "-m", 1, "--export-llmc")
    assert run.code == 3
    assert f"warning: -e {checkpoint}: lnfb: 1 of 16 values are NaN or infinite" in run.out
    assert run.values("train", "skipped") == [True] * 3
    assert all(math.isnan(loss) for loss in run.losses)
    assert run.out.count("| skipped") == 3
    assert "3 times in a row" in run.out
    assert {"event": "end", "step": 3, "outcome": "diverged", "skipped": 3}.items() <= run.events[-1].items()
    assert (run.folder / "model_00000003.bin").read_bytes() == checkpoint.read_bytes()
    state = run.state(3)
    assert (state["step"], state["updates"]) == (3, 0)
    assert not state["m"].any() and not state["v"].any()
    progress = store.open_checkpoint(run.folder / "state_00000003").stored["progress"]
    assert (progress["skipped"], progress["skipped_in_a_row"]) == (3, 3)


def test_an_absurd_learning_rate_keeps_what_the_last_finite_step_left(train: Train) -> None:
    run = train("-l", 1e25, "--grad-clip", 0, "--max-nonfinite", 4, "-x", 100, folder="diverged")
    assert run.code == 3
    assert "a lower -l (it was 1e+25)" in run.out and not generates(run)
    skipped = run.values("train", "skipped")
    finite = skipped.index(True)
    assert finite > 0 and skipped == [False] * finite + [True] * 4
    until_then = train("-l", 1e25, "--grad-clip", 0, "-x", finite, folder="finite")
    assert until_then.code == 0
    after, before = run.bits(finite + 4), until_then.bits(finite)
    assert {name for name in after if after[name] != before[name]} == {"step"}


def test_a_loss_scale_that_stays_does_not_hide_a_divergence() -> None:
    overflow = loop.Result(metrics(finite=False, applied=False)._replace(loss_scale=np.float32(1024)), 1.0)  # type: ignore[arg-type]
    for factor, in_a_row in ((1, 1), (2, 0)):
        progress = loop.counted(TrainConfig(loss_scale_factor=factor), Progress(0), overflow)  # type: ignore[arg-type]
        assert progress.counters.skipped_in_a_row == in_a_row


def test_zero_never_stops(train: Train, tmp_path: Path) -> None:
    run = train("-e", broken_checkpoint(tmp_path), "--max-nonfinite", 0, "-x", 15)
    assert run.code == 0
    assert run.values("train", "skipped") == [True] * 15
    assert "skipped:      15 steps" in run.out


def metrics(*, finite: bool = True, applied: bool = True) -> Metrics:
    """What a step reports, on the host."""
    nan = np.float32("nan")
    numbers = {"loss": 1, "norm": 2, "learning_rate": 3, "loss_scale": 1, "z_loss": nan, "z_norm": nan}
    made = {name: np.float32(value) for name, value in numbers.items()}
    return Metrics(**made, finite=np.bool_(finite), applied=np.bool_(applied))  # type: ignore[arg-type]


def test_only_steps_in_a_row_count() -> None:
    pattern = [(True, True), (False, False), (False, False), (True, True), (False, False), (True, False)]  # an outlier
    progress, counts = Progress(0), []  # type: ignore[arg-type]
    for finite, applied in pattern:
        result = loop.Result(metrics(finite=finite, applied=applied), 1.0)
        progress = loop.counted(TrainConfig(), progress, result)
        counts.append((progress.counters.skipped, progress.counters.skipped_in_a_row))
    assert counts == [(0, 0), (1, 1), (2, 2), (2, 0), (3, 1), (4, 0)]
    assert progress.read == len(pattern)


def test_waiting_for_data_is_part_of_a_step() -> None:
    def slow() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        time.sleep(0.05)
        yield np.zeros(1), np.zeros(1)

    pipeline = loop.Pipeline()
    batch = due.Batches(slow(), lambda: None)
    pipeline.submit(lambda state, *_: (state, metrics()), 0, batch)  # type: ignore[arg-type]
    assert list(pipeline.results(pending=1)) == []
    (result,) = pipeline.results(pending=0)
    later = loop.counted(TrainConfig(), Progress(0, step=1, read=1), result)  # type: ignore[arg-type]
    assert later.seconds == result.seconds >= 0.05
    first = loop.counted(TrainConfig(), Progress(0, step=8, begun_at=7, read=7), result)  # type: ignore[arg-type]
    assert first.seconds == 0  # the first step of a process is left out of the mean, as llm.c does


# ---- precision, kernels, and a loop that runs ahead


@pytest.mark.slow
def test_a_bf16_run_writes_what_a_run_can_start_from(train: Train) -> None:
    run = train("--dtype", "bf16", "-v", 3, "-m", 4, "-s", 3, "-g", 4, "--export-llmc")
    assert (run.code, run.err) == (0, "")
    assert run.losses[-1] < run.losses[0] and run.values("train", "loss_scale", None) == [None] * 3
    path = run.folder / "model_00000003.bin"
    assert open_model(path).version == 5
    assert path.stat().st_size == 1024 + 2 * initial().size
    values, state = run.exported(3), run.state(3)
    assert not (values.view(np.uint32) & 0xFFFF).any()  # all of them bf16 numbers
    assert not np.array_equal(values, initial())
    copy = state["copy"][: initial().size]
    assert copy.dtype.name == "bfloat16" and copy.astype(np.float32).tobytes() == values.tobytes()
    masters = run.model(3)
    assert masters.dtype == np.float32 and masters.astype(copy.dtype).tobytes() == copy.tobytes()
    assert not np.array_equal(masters, values)

    again = train("-e", path, "--dtype", "bf16", "-v", 1, "-m", 4, "-x", 0, folder="again")
    assert again.code == 0
    assert again.values("val", "loss") == run.values("val", "loss")[-1:]  # the very weights that were validated
    in_fp32 = train("-e", path, "--dtype", "fp32", "-v", 1, "-m", 4, "-x", 0, folder="fp32")
    assert in_fp32.values("val", "loss") == pytest.approx(again.values("val", "loss"), rel=2e-3)


@pytest.mark.slow
def test_an_fp16_run_logs_its_loss_scale(train: Train) -> None:
    run = train("--dtype", "fp16", "--loss-scale", 64, "--loss-scale-steps", 2, "-x", 5, "--export-llmc")
    assert run.code == 0 and run.values("train", "loss_scale") == [64, 64, 128, 128, 256]
    assert run.values("train", "skipped") == [False] * 5
    assert open_model(run.folder / "model_00000005.bin").version == 3  # the master weights
    state = run.state(5)
    assert run.exported(5).tobytes() == run.model(5).tobytes()
    assert (state["loss_scale/scale"], state["loss_scale/clean"]) == (256, 1)
    assert state["copy"].dtype == np.float16


def test_a_loss_scale_that_is_too_large_gives_way_and_is_no_divergence(train: Train) -> None:
    run = train("--dtype", "fp16", "--loss-scale", 2.0**30, "--max-nonfinite", 2, "-x", 20)
    assert run.code == 0
    skipped, scales = run.values("train", "skipped"), run.values("train", "loss_scale")
    overflows = skipped.index(False)
    assert 2 < overflows < 20 and skipped == [True] * overflows + [False] * (20 - overflows)
    assert scales == [2.0 ** (30 - min(step, overflows)) for step in range(20)]
    assert all(math.isfinite(loss) for loss in run.losses)
    assert run.losses[-1] < run.losses[0]


@pytest.mark.slow
def test_relu_attention_is_another_model_that_learns(train: Train, full_run: Result) -> None:
    relu = train("--attention", "relu", "-x", 10, "--no-save")
    assert relu.losses[-1] < relu.losses[0] - 0.5
    assert relu.losses[0] != full_run.losses[0]
    assert table_rows(relu.out)["attention"].startswith("naive, xla (")


@pytest.fixture
def run_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop as it runs on a GPU: a step is begun before the one before it has been read."""
    monkeypatch.setattr(Plan, "runs_ahead", True)


def test_running_ahead_changes_nothing_but_the_time(train: Train, full_run: Result, run_ahead: None) -> None:
    def without_times(run: Result) -> list[dict[str, Any]]:
        times = ("ms", "tokens_per_second", "time", "waited_ms", "memory", "config")  # the last names the folder
        events = [{k: v for k, v in each.items() if k not in times} for each in run.events]
        # when a save on the way has ended is a matter of time too
        return sorted(events, key=lambda each: each["event"] == "checkpoint")

    ahead = train(*FULL)
    assert (ahead.code, ahead.checkpoints) == (0, [3, 6])
    assert without_times(ahead) == without_times(full_run)
    assert (ahead.folder / "samples.txt").read_bytes() == (full_run.folder / "samples.txt").read_bytes()
    assert all(ahead.bits(step) == full_run.bits(step) for step in ahead.checkpoints)
    steps = [line.split("|")[:3] for run in (full_run, ahead) for line in run.out.splitlines() if line[:5] == "step "]
    assert steps[:3] == steps[3:]


@pytest.mark.usefixtures("run_ahead")
def test_running_ahead_a_divergence_ends_the_run(train: Train, tmp_path: Path) -> None:
    """One step later: it was in flight already when the last one was read. No step changes anything."""
    checkpoint = broken_checkpoint(tmp_path)
    run = train("-e", checkpoint, "--max-nonfinite", 3, "-x", 10, "--export-llmc")
    assert run.code == 3
    assert run.values("train", "skipped") == [True] * 4
    assert {"event": "end", "step": 4, "outcome": "diverged", "skipped": 4}.items() <= run.events[-1].items()
    assert (run.folder / "model_00000004.bin").read_bytes() == checkpoint.read_bytes()


@pytest.mark.slow
def test_profile_records_the_steps_that_were_named(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are made by a program of their own, on a GPU one without CUDA graphs; the losses stay."""
    options: list[Any] = []
    compile_step = compiling.compiled
    monkeypatch.setattr(compiling, "compiled", lambda given, more: options.append(more) or compile_step(given, more))
    monkeypatch.setattr(compiling, "without_graphs", lambda *_: (("xla_cpu_enable_fast_min_max", True),))
    losses = train("-x", 4, folder="plain").losses
    run = train("-x", 4, "--profile", "1:3")
    assert run.code == 0 and run.losses == losses and len(losses) == 4
    assert options == [(), (), (("xla_cpu_enable_fast_min_max", True),)]
    assert f"profile:      {run.folder / 'profile'}" in run.out
    assert list((run.folder / "profile").rglob("*.xplane.pb"))


def test_a_second_run_compiles_nothing_and_nothing_is_left_behind(train: Train, full_run: Result) -> None:
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: compiled.append(event))
    threads = threading.active_count()
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    for seed in (3, 4):  # the first run of a process brings in what adds to the settings by which JAX keeps programs
        compiled.clear()
        train(*FULL, "-l", 5e-3, "-x", 4, "--seed", seed, folder=str(seed))
    assert not [event for event in compiled if "backend_compile" in event]
    assert threading.active_count() == threads
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


# ---- small functions


def test_a_descriptor_is_not_mistaken_for_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("d12").mkdir()  # as `-o d12` leaves it
    Path(TINY).write_text("")
    assert inputs.resolve_model(TrainConfig(model="d12")).config == parse_descriptor("d12")
    assert inputs.resolve_model(TrainConfig(model=TINY)).path is None
    write_model("weights", parse_descriptor(TINY), initial())
    model = inputs.resolve_model(TrainConfig(model="weights"))
    assert (model.config, model.path) == (parse_descriptor(TINY), Path("weights"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_a_full_disk_under_the_screen_is_one_line(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w", encoding="utf-8") as screen:
        monkeypatch.setattr(sys, "stdout", screen)
        run = train()
        words = "train.py: standard output: cannot be written (No space left on device); the run was stopped\n"
        assert (run.code, run.err) == (2, words)


def test_memory_that_is_not_enough_is_one_line(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 123 bytes.\nmore")

    monkeypatch.setattr(loop, "compile_step", full)
    run = train()
    assert run.code == 2 and run.err.count("\n") == 1
    assert "Out of memory allocating 123 bytes; lower -b or -t, or" in run.err


@pytest.mark.slow
def test_a_step_that_the_compiler_says_is_too_large_is_refused(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "step_bytes", lambda _: 2**50)
    run = train("-b", 64)
    assert run.code == 2 and run.err.startswith("train.py: -b 64: ") and run.err.count("\n") == 1
    assert run.checkpoints == []


def test_the_gpu_s_figures_are_shown_and_kept(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, closed = GpuReading(*[None] * 5, 1755, 1980, 612.0, 700.0, 54, 87, "no"), list[bool]()
    readings = iter([reading, None, reading])
    monitor = SimpleNamespace(
        read=lambda warn: next(readings) or warn("-lg: gone"), close=lambda: closed.append(True)
    )  # fmt: skip
    monkeypatch.setattr("llmc_jax.run.prepare.open_monitor", lambda: monitor)
    run = train("-lg", 2, "-x", 7)
    assert run.code == 0 and closed == [True]
    assert run.values("gpu", "step") == [1, 5]  # after steps 2, 4 and 6, of which the second reading failed
    assert run.values("gpu", "temperature_celsius") == [54, 54]
    assert run.out.count("1755 of 1980 MHz") == 2 and run.out.count("-lg: gone") == 1
