"""Every command takes a tied model alike, in whichever way its folder keeps the token embedding and the output head."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmc_jax.checkpoint import conversion, convert
from llmc_jax.checkpoint.sources import open_source
from llmc_jax.evaluate import command as evaluate
from llmc_jax.generate import command as generate
from llmc_jax.run import command as train
from tests.metrics import read_metrics
from tests.tied_heads import Spelling, spelled

SPELLINGS = [
    Spelling("head"),
    Spelling("both", "fp16", shards=3),
    Spelling("head", "bf16", outer="_orig_mod.", shards=2),
]
PLAIN = [Spelling("wte", each.dtype) for each in SPELLINGS]

Run = Callable[..., str]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command's main function with words, in this process, and returns what it printed."""

    def run(main: Callable[[list[str]], int], *words: Any) -> str:
        assert main([str(word) for word in words]) == 0
        return capsys.readouterr().out

    return run


def inspect_(run: Run, folder: Path, out: Path, tokens: Any) -> Any:
    said = run(convert.main, "inspect", folder).replace(str(folder), "")
    assert re.search(r"^digest of the weights: [0-9a-f]{16}$", said, re.MULTILINE)
    return said


def convert_(run: Run, folder: Path, out: Path, tokens: Any) -> Any:
    run(convert.main, "convert", folder, out / "model.bin")
    run(convert.main, "convert", folder, out / "hf", "--to", "hf")
    return (out / "model.bin").read_bytes(), (out / "hf" / "model.safetensors").read_bytes()


def generate_(run: Run, folder: Path, out: Path, tokens: Any) -> Any:
    found = json.loads(run(generate.main, folder, "--prompt", "ab", "-n", 4, "--json"))
    assert len(found["samples"][0]["logprobs"]) == 4
    return found["samples"]


def evaluate_(run: Run, folder: Path, out: Path, tokens: Any) -> Any:
    found = json.loads(run(evaluate.main, folder, "--data", tokens.val, "--batches", 1, "-b", 2, "--json"))
    (result,) = found["subjects"][0]["results"]
    return result["loss"], result["tokens"]


def train_(run: Run, folder: Path, out: Path, tokens: Any) -> Any:
    words = ("-e", folder, "-i", tokens.train, "-j", tokens.val, "-b", 2, "-t", 16, "-x", 1, "-m", 1, "-s", 0)
    run(train.main, *words, "-o", out / "run")
    events = read_metrics(out / "run" / "metrics.jsonl")
    losses = [(each["event"], each["loss"]) for each in events if each["event"] in ("train", "val")]
    assert [event for event, _ in losses] == ["val", "train", "val"]
    return losses, conversion.passed(open_source(out / "run")).digest


@pytest.mark.usefixtures("nothing_lasts")
@pytest.mark.parametrize("command", [inspect_, convert_, generate_, evaluate_, train_])
def test_commands_take_every_spelling_alike(
    command: Callable[[Run, Path, Path, Any], Any], run: Run, tokens: Any, tmp_path: Path
) -> None:
    plain = tmp_path / "plain"
    conversion.to_hugging_face(open_source("L1-NH2-C16-V257-T16"), plain, "fp32", None)
    found = {}
    for number, spelling in enumerate([*PLAIN, *SPELLINGS]):
        out = tmp_path / str(number)
        out.mkdir()
        found[spelling] = command(run, spelled(plain, out / "folder", spelling), out, tokens)
    assert (
        found[PLAIN[0]] != found[PLAIN[1]] != found[PLAIN[2]] != found[PLAIN[0]]
    )  # rounding is seen: the test can see
    for plain_one, spelling in zip(PLAIN, SPELLINGS, strict=True):
        assert found[spelling] == found[plain_one], spelling
