"""What a run starts from: shapes of random weights, and other programs' checkpoints behind -e and --init-from."""

import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llmc_jax.base.errors import InputError
from llmc_jax.base.plain import to_json
from llmc_jax.checkpoint.source import slices
from llmc_jax.checkpoint.sources import open_source, stored_special
from llmc_jax.config.flags import parse_args
from llmc_jax.config.model import parse_descriptor
from llmc_jax.config.train import AUTO_BATCH, TrainConfig
from llmc_jax.kernels import Findings, Machine
from llmc_jax.machine.driver import Card
from llmc_jax.machine.gpus import AMX
from llmc_jax.models.layout import num_parameters
from llmc_jax.plan.plan import make_plan
from llmc_jax.run.inputs import Data, resolve_model
from llmc_jax.run.prepare import facts, prepare
from llmc_jax.run.resume import repeated
from llmc_jax.run.table import weights_text
from llmc_jax.trials.here import try_kernels

HUGGING_FACE = Path(__file__).resolve().parents[1] / "golden" / "hugging_face"
COMMON = "-x 0 -v 0 -s 0 -t 16 --no-save"


@pytest.mark.parametrize("flag", ["-e", "--init-from"])
@pytest.mark.parametrize("name", ["", "model.safetensors"])
def test_a_run_starts_from_hugging_faces_weights(flag: str, name: str) -> None:
    path = HUGGING_FACE / name
    source = open_source(path)
    expected = [source.read("params", piece.tensor, piece.layer).ravel() for piece in slices(source.config)]
    setup, state = prepare(parse_args([*shlex.split(COMMON), flag, str(path)]), [])
    found = np.asarray(state.params)[: num_parameters(source.config)]
    assert (setup.model, setup.weights, weights_text(setup)) == (source.config, path, str(path))
    assert found.tobytes() == np.concatenate(expected).tobytes()


@pytest.mark.parametrize("flag", ["-e", "--init-from"])
def test_the_ids_that_end_a_text_are_kept(flag: str, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    shutil.copytree(HUGGING_FACE, folder)
    settings = json.loads((folder / "config.json").read_text()) | {"bos_token_id": 3, "eos_token_id": [4, 5]}
    (folder / "config.json").write_text(json.dumps(settings))
    setup, _ = prepare(parse_args([*shlex.split(COMMON), flag, str(folder)]), [])
    assert setup.metadata.origin == {"kind": "llmc-jax", "special": {"bos": 3, "eos": [4, 5]}}
    assert stored_special(setup.metadata.origin) == open_source(folder).special
    random, _ = prepare(parse_args([*shlex.split(COMMON), "-e", "L1-NH1-C8-V16-T16"]), [])
    assert random.metadata.origin == {"kind": "llmc-jax"}


def test_a_shape_beside_init_from_must_be_that_of_the_weights() -> None:
    source = str(HUGGING_FACE)
    shape = open_source(HUGGING_FACE).config
    words = f"L{shape.num_layers}-NH{shape.num_heads}-C{shape.channels}-V{shape.vocab_size}-T{shape.max_seq_len}"
    assert resolve_model(TrainConfig(init_from=source, model=words)).config == shape == parse_descriptor(words)
    with pytest.raises(InputError, match=r"^-e d12: .*another shape"):
        resolve_model(TrainConfig(init_from=source, model="d12"))


# ----- the kernels ----------------------------------------------------------------------------------------------------

H200, A100 = (
    Card("NVIDIA H200", "0" * 32, "9.0", 141 << 30, "580", "0000:65:00.0"),
    Machine("gpu", "NVIDIA A100-SXM4-40GB", "8.0"),
)
SHAPE = parse_descriptor("L1-NH1-C64-V257-T64")


@pytest.mark.parametrize(
    ("made_on", "flag", "tried"),
    [
        (None, "", True),  # no earlier choice
        (H200.machine, "-y", False),  # a start that was killed before its first checkpoint
        (H200.machine, "--kernels-from", False),
        (A100, "-y", True),  # which cannot be repeated here
        (A100, "--kernels-from", True),
    ],
)
def test_nothing_is_measured_where_an_earlier_choice_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made_on: Machine | None, flag: str, tried: bool
) -> None:
    cases: list[Any] = []
    monkeypatch.setattr("llmc_jax.trials.here.seen_cards", lambda: [H200])
    monkeypatch.setattr("llmc_jax.trials.start.find_out", lambda case, here: cases.append(case) or Findings())
    plain = TrainConfig(batch_size=2, sequence_length=64)
    if made_on is not None:
        resolved = make_plan(plain, SHAPE, made_on).resolved
        (tmp_path / "kernels.json").write_text(json.dumps(to_json(resolved)))
    options = {"-y": {"output_dir": str(tmp_path), "reuse": True}, "--kernels-from": {"kernels_from": str(tmp_path)}}
    config = replace(plain, **options.get(flag, {}))
    try_kernels(config, SHAPE, repeated(config, None))
    assert len(cases) == tried


@pytest.mark.parametrize("resumes", [True, False])
def test_nothing_is_measured_where_a_checkpoint_is_resumed(resumes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[Any] = []
    monkeypatch.setattr("llmc_jax.trials.here.try_kernels", lambda *given: cases.append(given) or Findings())
    given: Any = SimpleNamespace(
        earlier=object() if resumes else None, before=None, config=TrainConfig(), model=SimpleNamespace(config=SHAPE),
        data=Data(None, None, None), tokenizer=SimpleNamespace(named=None),
    )  # fmt: skip
    facts(given, None)
    assert len(cases) == (not resumes)


def test_kernels_are_tried_with_what_auto_comes_to_by_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[Any] = []
    monkeypatch.setattr("llmc_jax.trials.start.find_out", lambda case, here: cases.append(case) or Findings())
    config = TrainConfig(batch_size=AUTO_BATCH, sequence_length=64, total_batch_size=96 * 64)
    for gibibytes in (141, 1, 0):
        monkeypatch.setattr(
            "llmc_jax.trials.here.seen_cards", lambda size=gibibytes: [H200._replace(memory=size << 30)]
        )
        try_kernels(replace(config, total_batch_size=96 * 64), parse_descriptor("L2-NH2-C128-V50257-T64"), None, 80)
    sizes = [case.batch_size for case in cases]
    assert sizes[0] == 48 and sizes[0] >= sizes[1] > sizes[2] == 1  # 96 is more than the data has rows
    assert all(96 % size == 0 for size in sizes)


@pytest.mark.parametrize(("flags", "capability", "said"), [
    ("", AMX, True), ("", "", False), ("--dtype fp32", AMX, False), ("--dtype bf16", AMX, False),
])  # fmt: skip
def test_a_large_model_hears_of_a_cpu_with_amx(
    flags: str, capability: str, said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmc_jax.machine.device.has_cpu_flag", lambda flag: flag == capability)
    monkeypatch.setattr("llmc_jax.run.prepare.LARGE_MODEL", 1000)
    setup, _ = prepare(parse_args(shlex.split(f"-i stdlib -j stdlib -e L1-NH1-C64-V257-T64 {COMMON} {flags}")), [])
    assert any(note.startswith("--dtype bf16") for note in setup.notes) == said
