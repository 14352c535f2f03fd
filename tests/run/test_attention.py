"""Attention that is not GPT-2's, from the command line: a checkpoint says what it is, and no flag need say it again."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmc_jax.checkpoint import convert
from llmc_jax.config.model import RELU, Attention
from llmc_jax.evaluate import command as evaluate
from llmc_jax.generate import command as generate
from llmc_jax.generate.model import open_model
from llmc_jax.run import command
from tests.same_run import Result

pytestmark = pytest.mark.usefixtures("nothing_lasts", "quick_compilation")

Program = Callable[..., Result]


@pytest.fixture
def call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Program:
    """Calls a command in this process."""

    def run(program: Any, *words: Any) -> Result:
        code = program.main([str(word) for word in words])
        return Result(code, tmp_path, *capsys.readouterr())

    return run


@pytest.fixture
def train(tmp_path: Path, tokens: Any, call: Program) -> Program:
    """Trains a tiny model whose four heads read two of keys."""
    flags = ["-e", "L1-NH4-C16-KV2-V257-T16", "-i", tokens.train, "-j", tokens.val, "-b", 2, "-t", 16, "-k", "constant"]

    def run(*words: Any, folder: str = "run") -> Result:
        found = call(command, *flags, "-v", 0, "-s", 0, "-o", tmp_path / folder, *words)
        return found._replace(folder=tmp_path / folder)

    return run


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--attention-window", 8, "--documents"], Attention(window=8, documents=256, kv_heads=2)),
        pytest.param(["--attention", "relu"], RELU._replace(kv_heads=2), marks=pytest.mark.slow),
        pytest.param(
            ["--attention-bias", "alibi", "--attention-softcap", 3],
            Attention(bias="alibi", softcap=3.0, kv_heads=2),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_trained_resumed_and_asked(train: Program, call: Program, flags: list[Any], expected: Attention) -> None:
    whole, run = train(*flags, "-x", 4, folder="whole"), train(*flags, "-x", 2)
    assert (whole.code, run.code) == (0, 0) and expected.words in " ".join(run.out.replace("|", "").split())
    resumed = train("-y", 1, "-x", 4)
    assert (resumed.code, resumed.err) == (0, "") and resumed.bits(4) == whole.bits(4)

    assert open_model(run.folder).config.attention == expected
    text = call(generate, run.folder, "--prompt", "a", "-n", 24)  # beyond the window of T
    assert text.code == 0 and expected.words in text.err and len(text.out) > 4
    for to in ("llmc", "llmc-state", "hf"):
        refused = call(convert, "convert", run.folder, run.folder.parent / to, "--to", to)
        assert refused.code == 2 and f"this model has {expected.words};" in refused.err
    other = train("-y", 1, "-x", 5, "--attention-window", 4)
    changed = expected._replace(window=4)
    assert other.code == 2 and f"attention is {expected.words} there, {changed.words} here" in other.err
    assert "--export-llmc" in train(*flags, "-x", 1, "--export-llmc", folder="export").err


@pytest.mark.slow
def test_where_rows_see_their_targets_nothing_is_generated_or_judged(train: Program, call: Program) -> None:
    prefix = ["--attention-prefix", 4]
    assert "-s and -h must be 0" in train(*prefix, "-s", 2, "-g", 16).err
    run = train(*prefix, "-x", 2, "-v", 1)
    assert run.code == 0 and len(run.values("val", "loss")) == 3 and "generate:" not in run.out
    for program, words in ((generate, ("--prompt", "a")), (evaluate, ("--text", __file__))):
        refused = call(program, run.folder, *words)
        assert refused.code == 2 and "prefix 4" in refused.err


def test_a_document_begins_with_the_end_of_text_of_the_run_s_tokenizer(train: Program) -> None:
    """Bytes have 256; by the vocabulary's size alone it would be the last id. A resume keeps it."""
    words = ["-e", "L1-NH2-C8-V300-T16", "--tokenizer", "bytes", "--documents"]
    run = train(*words, "-x", 1)
    assert (run.code, open_model(run.folder).config.attention) == (0, Attention(documents=256))
    assert train(*words, "-y", 1, "-x", 2).code == 0
