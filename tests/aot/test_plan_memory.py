"""A step's memory, compiled for GPUs that are not there, is what is computed."""

from collections.abc import Iterator

import pytest

from benchmarks import aot
from llmc_jax.config.flags import parse_args
from llmc_jax.plan.asked import checked_model
from llmc_jax.plan.compiled import plan_for
from llmc_jax.plan.memory import Memory, computed
from llmc_jax.plan.separate import compiled_apart

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(aot.problem()), reason=aot.problem()),
]

STEPS = (
    ("h100", "-e L4-NH12-C768 -b 16"),
    ("a100", "-e L4-NH12-C768 -b 16 -r 2 -d 65536"),
    ("h100", "-e L4-NH12-C768 -b 16 --devices 8 -z 2 -d 524288"),
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Memory]]:
    """What the compiler says of the steps, each in a process of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLMC_JAX_CACHE", str(tmp_path_factory.mktemp("cache")))
        configs = [(gpu, parse_args(flags.split())) for gpu, flags in STEPS]
        yield [compiled_apart(gpu, config, checked_model(config)) for gpu, config in configs]


@pytest.mark.parametrize("at", range(len(STEPS)))
def test_computed_is_within_10_percent(at: int, found: list[Memory]) -> None:
    gpu, flags = STEPS[at]
    quick = computed(plan_for(gpu, flags))
    assert quick.program == pytest.approx(found[at].program, rel=0.1)
    assert quick.program + found[at].unexplained == found[at].program
