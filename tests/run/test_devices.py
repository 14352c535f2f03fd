"""Runs of the command line on several devices, which a CPU pretends to have: the same run, saved and continued.

All but one are made in one process (in_turn.py). Programs are compiled quickly; test_processes.py has runs of several
devices whose programs are compiled as a user's.
"""

import fcntl
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from llmc_jax.checkpoint.store import open_checkpoint
from llmc_jax.config.model import parse_descriptor
from llmc_jax.config.train import TrainConfig
from llmc_jax.data.loader import TokenLoader
from llmc_jax.run.inputs import check_tokens, open_data, validation_batches
from tests.questions import write_questions
from tests.run.in_turn import ROOT, Start, in_turn
from tests.same_run import Result, check_same, write_shards

pytestmark = pytest.mark.slow

FLAGS = (
    "-e L1-NH2-C16-V61-T16 -i data/train_*.bin -j data/val_*.bin -b 2 -t 16 -d 256 -x 6 -l 1e-2 -u 2 -q 0.1 -c 0.1 "
    "-v 3 -m 5 -s 3 -g 8 -n 3 --tokenizer none --print-every 1 "
    "-h 1 --hellaswag-file data/questions.bin"
)
FIXED = f"{FLAGS} --reduction fixed"


def start(words: str, folder: Path, **env: str) -> Result:
    """One start of train.py in the folder that holds the data, its run in the folder that -o names."""
    words = f"{words} -o run" if "-o " not in words else words
    place = os.environ | {"JAX_PLATFORMS": "cpu"} | env
    for name in ("NPROC", "XLA_FLAGS"):
        if name not in env:
            place.pop(name, None)
    command = [sys.executable, str(ROOT / "train.py"), *shlex.split(words)]
    done = subprocess.run(command, cwd=folder, env=place, capture_output=True, text=True, check=False)
    run = folder / shlex.split(words)[shlex.split(words).index("-o") + 1]
    return Result(done.returncode, run, done.stdout, done.stderr)


def result(runs: Path, name: str) -> Result:
    return Result(0, runs / name, (runs / f"{name}.out").read_text(), "")


OWN_START = Start("four", f"{FIXED} --devices 4 -z 2")  # a process of its own, as a user starts it
IN_TURN = [
    Start("one", f"{FIXED} --devices 1"),
    Start("any", f"{FLAGS} --devices 4 -z 2"),
    Start("llmc", f"{FLAGS} --devices 2 --batch-order llmc --dtype bf16 -h 0 -s 0"),
    Start("llmc on one", "-y 1 --devices 1", of="llmc"),
    Start("four on one", "-y 1 --devices 1 -z 0", of="four"),
    Start("any on two", "-y 1 --devices 2 -z 1", of="any"),
    Start("muon", f"{FIXED} --devices 2 -z 2 --optimizer muon"),
    Start("muon on two", "-y 1", of="muon"),
    Start("muon on one", "-y 1 --devices 1 -z 0", of="muon"),
    Start("auto", f"{FLAGS} --devices 2 -z 1 -b auto -n 0 -x 0 -v 3 -m 1 -s 0 -h 0"),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of them, made once for all workers."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "devices"
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            shutil.rmtree(folder, ignore_errors=True)
            make(folder)
            (folder / "done").touch()
    return folder


def make(folder: Path) -> None:
    write_shards(folder / "data", {"train": (1500, 1300), "val": (600,)}, vocab_size=61)
    write_questions(folder / "data" / "questions.bin", vocab_size=61)
    own = start(f"{OWN_START.words} -o {OWN_START.name}", folder, JAX_DISABLE_MOST_OPTIMIZATIONS="1")
    said = [(own.code, own.out, own.err), *in_turn(IN_TURN, folder)]
    for each, (code, out, err) in zip([OWN_START, *IN_TURN], said, strict=True):
        assert (code, err) == (0, ""), err + out
        (folder / f"{each.name}.out").write_text(out)


def test_four_devices_make_the_run_of_one(runs: Path) -> None:
    check_same(runs / "four", runs / "one")
    run = result(runs, "four")
    assert run.checkpoints == [3, 6] and len(run.losses) == 6 and run.values("eval", "step") == [3, 6]
    start = next(each["config"] for each in run.events if each["event"] == "start")
    assert (start["device"]["used"], start["options"]["devices"], start["options"]["zero_stage"]) == (4, 4, 2)


def test_a_run_in_a_fixed_order_goes_on_with_the_same_bits(runs: Path) -> None:
    check_same(runs / "four on one", runs / "one")
    run = result(runs, "four on one")
    assert run.values("resume", "step") == [3]
    assert "devices 4 -> 1, ZeRO stage 2 -> 0: the same bits, by --reduction fixed" in run.out
    assert "not bit-exact" not in run.out


@pytest.mark.parametrize("name", ["muon on two", "muon on one"])
def test_a_run_with_muon_goes_on_with_the_same_bits(runs: Path, name: str) -> None:
    check_same(runs / name, runs / "muon")
    assert result(runs, name).values("resume", "step") == [3]
    assert open_checkpoint(runs / name / "state_00000006").metadata.identity.optimizer == "muon"


def test_a_run_in_any_order_says_that_it_goes_on_with_other_bits(runs: Path) -> None:
    run, whole = result(runs, "any on two"), result(runs, "any")
    assert "not bit-exact from here: devices 4 -> 2, ZeRO stage 2 -> 1" in run.out
    assert run.losses[:3] == whole.losses[:3]
    assert run.values("sample", "tokens") == whole.values("sample", "tokens")


@pytest.mark.parametrize(("name", "other"), [("any on two", "any"), ("any", "one")])
def test_in_any_order_a_run_is_the_same_but_for_rounding(runs: Path, name: str, other: str) -> None:
    ours, theirs = result(runs, name), result(runs, other)
    np.testing.assert_allclose(ours.losses, theirs.losses, rtol=1e-6)
    np.testing.assert_allclose(ours.values("val", "loss"), theirs.values("val", "loss"), rtol=1e-6)


def loader(folder: Path, rank: int | None, n: int) -> TokenLoader:
    """That of one of n processes of llm.c, or of all of them together."""
    return TokenLoader(
        sorted((folder / "data").glob("train_*.bin")), 2, 16, vocab_size=61, shuffle=True, flag="-i",
        process_rank=rank, num_processes=n,
    )  # fmt: skip


def test_tokens_of_as_many_processes_of_llmc(runs: Path) -> None:
    """The run reads what llm.c's processes read in turns, and its checkpoint keeps the place of each."""
    run = result(runs, "llmc")
    assert run.code == 0 and len(run.losses) == 6
    together = loader(runs, None, 2)
    check_tokens(together)
    inputs, targets = together.next_batch(8)
    for rank in range(2):
        theirs = loader(runs, rank, 2).next_batch(4)
        np.testing.assert_array_equal((inputs[rank::2], targets[rank::2]), theirs)
    together.next_batch(5 * 8)
    assert together.state() == open_checkpoint(run.folder / "state_00000006").stored["loader"]
    alone, _ = loader(runs, 0, 1).next_batch(8)
    assert not np.array_equal(alone, inputs)


@pytest.mark.parametrize(("name", "batches"), [("four", 5), ("llmc", 2 * 5), ("llmc on one", 2 * 5)])
def test_a_validation_counts_each_device_in_llmcs_order(runs: Path, name: str, batches: int) -> None:
    run = result(runs, name)
    assert run.values("val", "batches") == [batches] * 3
    assert f"| tokens per validation | {batches * 2 * 16:<50} |" in run.out


@pytest.mark.parametrize(("order", "batches", "count"), [
    ("global", 5, 5), ("llmc", 5, 10), ("global", -1, 600 // 32), ("llmc", -1, 2 * (600 // 64)),
])  # fmt: skip
def test_a_validations_tokens_are_those_of_llmcs_processes(runs: Path, order: str, batches: int, count: int) -> None:
    """On two devices: process r of llm.c takes the r-th half of each 64 tokens, first to last."""
    files = str(runs / "data" / "val_0.bin")
    config = TrainConfig(
        val_data=files, max_steps=0, batch_size=2, sequence_length=16, devices=2, batch_order=order, val_batches=batches
    )
    val = open_data(config, parse_descriptor("L1-NH2-C16-V61-T16")).val
    assert val is not None and validation_batches(config, val) == count
    ours, _ = val.next_batch(2 * 4)
    for rank in range(2):
        each = TokenLoader(files, 2, 16, vocab_size=61, shuffle=False, flag="-j", process_rank=rank, num_processes=2)
        np.testing.assert_array_equal(ours[rank::2], each.next_batch(4)[0])


def test_more_devices_than_there_are_are_refused(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "data").symlink_to(runs / "data")
    run = start(f"{FLAGS} --devices 4", tmp_path, XLA_FLAGS="--xla_force_host_platform_device_count=2")
    assert (run.code, run.out, run.err.count("\n")) == (2, "", 1)
    assert all(each in run.err for each in ("--devices 4: ", "XLA_FLAGS", "--devices 2")), run.err
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_auto_counts_the_rows_of_each_device(runs: Path) -> None:
    """An update of 256 tokens is 8 rows of 16 for each of two."""
    record = json.loads((runs / "auto" / "config.json").read_text())
    assert record["options"]["batch_size"] == record["batch_size"]["taken"] == 8
