"""The demo, `python train.py` without any flag: it ends well, beats its baseline, and leaves what README.md says."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from llmc_jax.checkpoint import store
from llmc_jax.config.flags import parse_args
from llmc_jax.data.corpora import stdlib_corpus
from llmc_jax.data.tokenizers import sample_text
from llmc_jax.generate.llmc import generate
from llmc_jax.generate.model import open_model
from tests.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[1]
STEPS = parse_args(["--preset", "demo"]).max_steps


@pytest.mark.slow
def test_the_demo(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py")], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    (folder,) = (tmp_path / "runs").iterdir()

    events = read_metrics(folder / "metrics.jsonl")
    steps = [each for each in events if each["event"] == "train"]
    assert [each["step"] for each in steps] == list(range(STEPS))
    final = [each for each in events if each["event"] == "val"][-1]
    seconds = sum(each["ms"] for each in steps) / 1e3
    bigram = stdlib_corpus().bigram_nats
    print(f"demo: {seconds:.0f} s of steps; validation {final['loss']:.3f}, bigram baseline {bigram:.3f} nats")
    assert final["step"] == STEPS
    assert final["loss"] <= 0.85 * bigram

    # of random bytes two in five are printable ASCII, and hardly ever is one a line's end with two spaces after it
    samples = [each["text"] for each in events if each["event"] == "sample"]
    text = "".join(samples)
    assert sum(" " <= c <= "~" or c == "\n" for c in text) >= 0.99 * len(text)
    assert "\n  " in text, "Python without an indented line"
    written = (folder / "samples.txt").read_text(encoding="utf-8")
    assert all(text in written for text in samples)

    log = (folder / "main.log").read_text().splitlines()
    assert len(log) == len(steps) + sum(each["event"] == "val" for each in events)
    assert log[-1] == f"s:{STEPS} tel:{final['loss']:.4f}"
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG\r\n")
    (checkpoint,) = store.entries(folder)
    assert (checkpoint.step, checkpoint.problem, checkpoint.val_loss) == (STEPS, None, final["loss"])
    state = store.open_checkpoint(checkpoint.folder)
    assert {name.split("/")[0] for name in state.manifest.tensors} >= {"params", "m", "v", "step", "updates"}
    assert all(np.isfinite(state.read(name)).all() for name in state.manifest.tensors)

    # asked by itself, the model gives the sample again that the run ended with
    assert f"llmc-jax generate {folder.relative_to(tmp_path)} " in done.stdout
    model = open_model(folder)
    T, end = model.config.max_seq_len, model.end_of_text
    ids = generate(model.weights, model.config, T, end, ids=model.drawable)
    assert sample_text(model.tokenizer, ids) == samples[-1]
