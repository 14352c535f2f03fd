"""A step's memory, compiled for GPUs that are not there, is what is computed."""

import pytest

from benchmarks import aot
from benchmarks.plan_memory import program_bytes
from llmc_jax.plan.compiled import plan_for
from llmc_jax.plan.memory import computed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(aot.problem()), reason=aot.problem()),
]

STEPS = (
    ("h100", "-e L4-NH12-C768 -b 16"),
    ("a100", "-e L4-NH12-C768 -b 16 -r 2 -d 65536"),
    ("h100", "-e L4-NH12-C768 -b 16 --devices 8 -z 2 -d 524288"),
)


@pytest.mark.parametrize(("gpu", "flags"), STEPS)
def test_computed_is_within_10_percent(gpu: str, flags: str) -> None:
    assert computed(plan_for(gpu, flags)).program == pytest.approx(program_bytes(gpu, flags), rel=0.1)
