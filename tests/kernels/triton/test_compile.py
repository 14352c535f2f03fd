"""Every Triton kernel compiled to machine code for GPUs that are not there: memory, registers, accesses, rounding."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmc_jax.kernels.triton import availability
from llmc_jax.machine import deviceless

SCRIPT = Path(__file__).with_name("compile_kernels.py")


@pytest.fixture(scope="module", params=["a100", "rtx3090", "rtx4090", "h200", "b200", "rtx5090"])
def lines(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What compile_kernels.py prints for a GPU, in a process whose Triton compiles."""
    problem = availability()
    if problem:
        pytest.skip(f"the Triton kernels: {problem}, or make test-triton")
    if not deviceless.plugin_installed():
        pytest.skip("compiling for a GPU needs JAX's CUDA plugin: make test-triton")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, SCRIPT, request.param], capture_output=True, text=True, env={**env, "JAX_PLATFORMS": "cpu"}
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_all_compile(lines: list[dict[str, Any]]) -> None:
    """Each is one kernel, whatever the size; those that work in place make no copy and take no other memory."""
    assert len(lines) == 15 + 3 * 7
    for line in lines:
        assert line["calls"] == 1, line
        assert line["copies"] == 0, line
        assert line["aliased"] == line["donated"], line
        in_place = line["donated"] > 0
        assert not in_place or line["temporaries"] == 0, line


def test_rows_stay_in_registers(lines: list[dict[str, Any]]) -> None:
    for line in lines:
        assert line["spilled"] == 0, line


def test_memory_is_read_in_16_bytes(lines: list[dict[str, Any]]) -> None:
    """But for numbers of which a row has one: mean and rstd; target, its logit, dloss and loss."""
    alone = {"layernorm": 2, "residual": 2, "softmax": 0, "classifier": 4}
    for line in lines:
        if not line["kernel"].endswith("odd"):
            assert line["narrow"] <= alone[line["kernel"].partition("_")[0].partition(" ")[0]], line
            assert line["wide"] >= 2, line


def test_bf16_is_rounded_to_nearest(lines: list[dict[str, Any]]) -> None:
    """Unlike in the interpreter, which cuts off."""
    for line in lines:
        assert all(".rn." in conversion for conversion in line["conversions"]), line
    assert any(line["conversions"] for line in lines)
