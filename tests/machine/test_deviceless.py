"""Lowering and compiling for GPUs that are not there: the facts, the messages, and every kernel lowered for two GPUs.

What compiles is tested in tests/aot (make test-aot).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from benchmarks import assembler
from benchmarks.hlo import copied_arrays
from llmc_jax.base.errors import InputError
from llmc_jax.machine import deviceless, gpus
from llmc_jax.machine.deviceless import MemoryUse
from pallas_kernels import tuning
from tests.aot import cases

ROOT = Path(__file__).resolve().parents[2]


# ----- what is known ------------------------------------------------------------------------------------------------


def test_targets_agree_with_the_other_tables() -> None:
    """Memory and bandwidth stand in the same file; tile sizes for the same architectures are in tuning.py."""
    for name, target in gpus.TARGETS.items():
        assert target.device_kind in gpus.GPUS, name
        assert tuning.sizes(target.architecture).smem == target.shared_memory, name
        cores, clock = target.multiprocessors * target.cores_per_multiprocessor, target.clock
        # fp32 peak: a multiplication and an addition per core and clock. The clocks are rounded, NVIDIA's peaks too.
        assert 2e-3 * cores * clock == pytest.approx(target.gpu.fp32, rel=0.02), name
    first = {target.architecture: target for target in reversed(gpus.TARGETS.values())}  # which sizes are chosen for
    assert {name: target.multiprocessors for name, target in first.items()} == {
        name: sizes.sms for name, sizes in tuning.SIZES.items()
    }


def test_an_unknown_gpu_is_answered_with_the_list() -> None:
    with pytest.raises(InputError, match="'v100' is not known here: take one of h200, h100, a100, rtx3090"):
        deviceless.lower_for(jnp.sin, [jnp.ones(3)], "v100")
    with pytest.raises(InputError, match="'v100'"):
        deviceless.gpu_mesh("v100")


@pytest.mark.skipif(deviceless.plugin_installed(), reason="the CUDA plugin is installed")
def test_without_the_plugin_the_message_says_what_to_install() -> None:
    with pytest.raises(InputError, match=rf"pip install --no-deps jax-cuda13-plugin=={jax.__version__} ") as error:
        deviceless.compile_for(jnp.sin, [jnp.ones(3)], "h200")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("plugin", "version"), deviceless.PLUGINS.items())
def test_a_target_names_the_driver_of_the_plugin(plugin: str, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deviceless.importlib.util, "find_spec", lambda name: name in ("jax_plugins", plugin) or None)
    lines = [line.strip() for line in deviceless._target_config(gpus.TARGETS["h200"]).splitlines()]
    assert f'driver_version: "{version}"' in lines
    assert f"runtime_version {{ major: {version[:2]} minor: {version[3]} patch: 0 }}" in lines


def test_memory_total_counts_donated_memory_once() -> None:
    assert MemoryUse(arguments=100, outputs=60, aliased=50, temporaries=7, code=3).total == 120


# ----- reading what the compiler says -------------------------------------------------------------------------------

PTXAS = """ptxas warning : Registers are spilled to local memory in function 'b_mosaic_gpu_kernel', 8 bytes spill \
stores, 12 bytes spill loads
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'a_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for a_mosaic_gpu_kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 167 registers, used 2 barriers
ptxas info    : Compile time = 38.466 ms

ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to insufficient \
register resources for the wgmma pipeline in the function 'b_mosaic_gpu_kernel'
ptxas info    : Compiling entry function 'b_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for b_mosaic_gpu_kernel
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 255 registers, used 2 barriers, 16 bytes cumulative stack size
"""


def test_registers_spills_and_serialized_products_are_read() -> None:
    assert assembler.parse_resources(PTXAS) == [("a", 167, 0, False), ("b", 255, 12, True)]


HLO = """
  %copy.3 = f32[124518400]{0} copy(%p), metadata={op_name="x"}
  ROOT %copy.4 = bf16[4,1024,768]{2,1,0:T(8,128)} copy(%q)
  %copy-start.1 = (s32[4]{0}, s32[4]{0}, u32[]) copy-start(%r)
  %fusion.1 = f32[124518400]{0} fusion(%p), kind=kLoop, calls=%copy_fusion
  %scalar = f32[] copy(%s)
"""


def test_copies_are_found() -> None:
    assert copied_arrays(HLO) == [
        ("f32[124518400]", 498_073_600), ("bf16[4,1024,768]", 6_291_456), ("s32[4]", 16), ("f32[]", 4),
    ]  # fmt: skip


# ----- lowering -----------------------------------------------------------------------------------------------------


def test_lowering_makes_a_program_for_a_gpu() -> None:
    """Static and donated arguments are the function's own."""

    def scaled(x: jax.Array, factor: int) -> jax.Array:
        return factor * x

    x = jax.ShapeDtypeStruct((8,), jnp.float32)
    lowered = deviceless.lower_for(jax.jit(scaled, static_argnums=1, donate_argnums=0), (x, 3), "a100")
    text = lowered.as_text()
    assert "tensor<8xf32>" in text and "tf.aliasing_output" in text and "dense<3.0" in text


LOWERED_FOR = ("a100", "h200")  # sm_80 and sm_90: each kind of products


@pytest.fixture(scope="module", params=LOWERED_FOR)
def lowered(request: pytest.FixtureRequest) -> dict[str, str]:
    """{case: error, or empty} of one GPU."""
    command = [sys.executable, str(ROOT / "tests/aot/lower.py"), request.param]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout)


@pytest.mark.slow
def test_every_kernel_and_the_step_lower(lowered: dict[str, str]) -> None:
    assert lowered
    assert {name: error for name, error in lowered.items() if error} == {}


def test_every_public_kernel_is_lowered_and_compiled() -> None:
    """Those made of Hopper's instructions for Hopper alone."""
    for gpu in LOWERED_FOR:
        hopper = gpus.known_target(gpu).architecture == "sm_90"
        kernels = {name for name in cases.public_kernels() if hopper or not name.startswith("matmul.")}
        assert kernels == {case.function for case in cases.cases(gpu)}
