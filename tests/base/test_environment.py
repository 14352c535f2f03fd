"""What the environment tells JAX and XLA, command by command: set aside and said, obeyed, or refused in one line."""

import shlex
import struct
from pathlib import Path

import numpy as np
import pytest

from llmc_jax.checkpoint.llmc import write_model
from llmc_jax.config.model import ModelConfig
from llmc_jax.models.layout import num_parameters
from tests.base.each_alone import Said, each_alone
from tests.families import TOY
from tests.same_run import write_shards

CONFIG = ModelConfig(max_seq_len=8, vocab_size=13, padded_vocab_size=128, num_layers=1, num_heads=2, channels=8)
SHAPE = "L1-NH2-C8-V13-T8"
COMMANDS = {
    "train": f"-e {SHAPE} -i 'data/train_*.bin' -j 'data/val_*.bin' -b 2 -t 8 -x 2 -u 1 -v 2 -m 1 -s 2 -g 2 "
    "--tokenizer none -o run",
    "profile": f"-e {SHAPE} -b 2 -t 8 --vs r=1",
    "generate": f"{SHAPE} --tokenizer none --prompt '1 2' -n 2",
    "evaluate": f"{SHAPE} --tokenizer none --data 'data/val_*.bin' --limit 2",
    "plan": f"-e {SHAPE} -b 2 -t 8 --gpu h100 --quick",
    "compare": "debug-state model.bin state.bin",
    "model": f"check {TOY} -e toy-V61-C8-T16",
    "kernels": f"--measure -e {SHAPE} -b 2 -t 8",
}
STATUS = dict.fromkeys(COMMANDS, 0) | {"compare": 4, "kernels": 2}  # they differ; there is no GPU
SET_ASIDE = (
    "JAX_ENABLE_X64=1 JAX_NUMPY_DTYPE_PROMOTION=strict JAX_NUMPY_RANK_PROMOTION=raise "
    "XLA_FLAGS=--xla_cpu_enable_fast_math=false"
)
STEPS = {"train", "profile", "kernels"}
UNKNOWN = "--xla_cpu_enable_fast_math=false --xla_no_such=1 --xla_nor_such"
# Of each environment, which commands it is refused by, and what the line names.
REFUSED: dict[str, tuple[set[str], str]] = {
    SET_ASIDE: (set(), ""),
    "JAX_DEBUG_NANS=1 JAX_ENABLE_X64=0 JAX_NUMPY_DTYPE_PROMOTION=standard": (STEPS, "--max-nonfinite 1"),
    "JAX_DISABLE_JIT=True": (STEPS, "compiled"),
    **{f"JAX_PLATFORMS={name}": (set(COMMANDS) - {"kernels"}, "cpu") for name in
        ("cuda", "bogus")},
    f"XLA_FLAGS='{UNKNOWN}'": (set(COMMANDS), "--xla_no_such=1 --xla_nor_such"),
    "XLA_FLAGS=no_such_file": (set(COMMANDS), "no_such_file"),
    "XLA_FLAGS=--xla_force_host_platform_device_count=x": (set(COMMANDS), "value x"),
}  # fmt: skip


FIRST = ("JAX_PLATFORMS=cuda",)  # refused before anything is compiled


@pytest.fixture(scope="module", params=[each if each in FIRST else pytest.param(each, marks=pytest.mark.slow)
                                        for each in REFUSED])  # fmt: skip
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Said], Path]:
    """An environment, how each command ended in it, and the folder."""
    folder, environment = tmp_path_factory.mktemp("place"), request.param
    write_shards(folder / "data", {"train": (200,), "val": (80,)}, vocab_size=13)
    count = num_parameters(CONFIG)
    write_model(folder / "model.bin", CONFIG, np.full(count, 0.01, np.float32))
    header = struct.pack("<256i", 20240327, 2, 1, 4, *[0] * 252)
    (folder / "state.bin").write_bytes(header + bytes(4 * (2 * 4 + 4 * 13 + 1 + count)))
    commands = [[name, *shlex.split(words)] for name, words in COMMANDS.items()]
    if "PLATFORMS" in environment:  # of the device at hand
        commands = [[word for word in words if word not in ("--gpu", "h100")] for words in commands]
    pairs = dict(word.split("=", 1) for word in shlex.split(environment))
    return environment, dict(zip(COMMANDS, each_alone(commands, folder, pairs), strict=True)), folder


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_in_each_environment(case: tuple[str, dict[str, Said], Path], command: str) -> None:
    environment, said, folder = case
    (code, out, err), (refusing, names) = said[command], REFUSED[environment]
    if command in refusing:
        (line,) = err.splitlines()
        assert code == 2 and out == ""
        assert line.startswith(f"llmc-jax {command}") and environment.partition("=")[0] in line and names in line
        assert command != "train" or not (folder / "run").exists()
        return
    assert code == STATUS[command], err
    assert "Traceback" not in err
    for name in shlex.split(SET_ASIDE)[:3]:
        assert (out + err).count(name) == (environment == SET_ASIDE)
    assert environment == SET_ASIDE or "JAX_" not in out + err
