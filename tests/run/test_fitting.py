"""-b auto: which sizes are compiled, and that a run with it is the run with the number that it comes to."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc_jax.cli.train import main
from llmc_jax.cluster.worker import ALONE
from llmc_jax.config.checks import with_devices
from llmc_jax.config.flags import parse_args
from llmc_jax.config.model import parse_descriptor
from llmc_jax.config.train import AUTO_BATCH, TrainConfig
from llmc_jax.errors import InputError
from llmc_jax.kernels import Machine
from llmc_jax.plan.fits import DoesNotFit
from llmc_jax.plan.memory import computed
from llmc_jax.plan.plan import Plan, make_plan
from llmc_jax.run import fitting, prepare
from llmc_jax.run.fitting import Tried
from llmc_jax.run.folder import read_metrics
from tests.same_run import check_same

pytestmark = pytest.mark.usefixtures("nothing_lasts")
SMALL = "-e L2-NH2-C32-V257-T16 -t 16"


def plan_with(size: int, words: str = "") -> Plan:
    config = parse_args(f"{SMALL} -b {size} {words}".split())
    return make_plan(config, parse_descriptor(config.model), Machine("cpu", "cpu"))


# ----- the sizes ------------------------------------------------------------------------------------------------------


@given(
    rows=st.integers(1, 200), devices=st.sampled_from([1, 2, 3, 8]), most=st.integers(1, 300),
    fixed=st.booleans(), stage=st.integers(0, 2),
)  # fmt: skip
def test_sizes_are_those_that_leave_the_update_as_it_is(
    rows: int, devices: int, most: int, fixed: bool, stage: int
) -> None:
    config = TrainConfig(
        batch_size=AUTO_BATCH, sequence_length=16, total_batch_size=rows * devices * 16, devices=devices,
        reduction="fixed" if fixed else "auto", zero_stage=stage,
    )  # fmt: skip

    def goes(size: int) -> bool:
        try:
            return with_devices(replace(config, batch_size=size), devices, "gpu").grad_accumulation * size == rows
        except InputError:
            return False

    expected = [size for size in range(min(most, rows), 0, -1) if goes(size)]
    if expected:
        assert fitting.sizes_up_to(most, config) == expected
    else:
        with pytest.raises(InputError, match=r"^-b auto: "):
            fitting.sizes_up_to(most, config)


def test_without_a_total_sizes_are_round() -> None:
    assert fitting.sizes_up_to(25, TrainConfig(batch_size=AUTO_BATCH)) == [24, 16, 12, 8, 6, 4, 3, 2, 1]
    assert fitting.sizes_up_to(1, TrainConfig(batch_size=AUTO_BATCH)) == [1]


# ----- the search -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("compiled", "tried"),
    [
        ({8: 90}, [8]),
        ({8: 100}, [8]),
        ({8: 101, 4: 60}, [8, 4]),
        ({8: None, 4: 101, 2: 40}, [8, 4, 2]),  # the compiler had too little memory
    ],
)
def test_the_first_that_the_compiler_says_fits_is_taken(compiled: dict[int, int | None], tried: list[int]) -> None:
    found = fitting.largest([8, 4, 2], 100, plan_with, lambda plan: compiled[plan.config.batch_size])
    assert found.tried == tuple(Tried(size, compiled[size]) for size in tried)
    assert found.plan.config.batch_size == tried[-1]


@pytest.mark.parametrize("needed", [2**30, None])
def test_where_none_fits_it_says_what_would(needed: int | None) -> None:
    with pytest.raises(DoesNotFit, match=r"^-b auto: not even -b 1 fits"):
        fitting.largest([2, 1], 2**20, plan_with, lambda _: needed)


def test_what_is_far_too_large_by_estimate_is_not_compiled() -> None:
    sizes = [64, 32, 16, 8]
    bytes_of = {size: computed(plan_with(size)).program for size in sizes}
    assert fitting.worth_compiling(sizes, bytes_of[16], plan_with) == [16, 8]
    assert fitting.worth_compiling(sizes, int(0.95 * bytes_of[16]), plan_with) == [16, 8]  # estimates err
    assert fitting.worth_compiling(sizes, 0, plan_with) == [8]


# ----- runs -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def train(tmp_path: Path, tokens: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Runs the command line with as much main memory as it is told."""
    describe = prepare.describe_device

    def run(name: str, words: str, memory: int | None = None) -> Path:
        with monkeypatch.context() as patch:
            if memory is not None:
                patch.setattr(prepare, "describe_device", lambda: describe()._replace(memory_bytes=memory))
            folder = tmp_path / name
            files = ["-i", str(tokens.train), "-j", str(tokens.val), "-o", str(folder)]
            assert main([*f"{SMALL} -v 2 -m 2 -s 0 -x 3 -l 1e-2 --print-every 0 {words}".split(), *files]) == 0
        return folder

    return run


def record_of(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())


def enough_for(plan: Plan) -> int:
    """The main memory of which a plan's compiled step may take just what it takes."""
    needed = fitting.compiled_bytes(plan, ALONE)
    assert needed is not None
    return next(memory for memory in count(int(needed / 0.75)) if fitting.limit_of("cpu", memory) >= needed)


def test_a_run_with_auto_is_the_run_with_its_number_and_keeps_it(
    train: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = train("plain", "-b 8 -d 512")
    memory = enough_for(plan_with(8, "-d 512"))
    found = train("auto", "-b auto -d 512", memory)
    check_same(found, plain)
    record = record_of(found)
    assert record["options"]["batch_size"] == record["batch_size"]["taken"] == 8
    assert record["batch_size"]["compiled"][-1]["bytes"] == record["batch_size"]["limit_bytes"]
    assert read_metrics(found / "metrics.jsonl")[0]["config"] == record
    assert record_of(train("less", "-b auto -d 512 -x 0", memory - 2))["batch_size"]["taken"] == 4

    monkeypatch.setattr(fitting, "largest", None)  # nothing is looked for where a run goes on
    train("plain", "-b 8 -d 512 -x 4 -y 1")
    (found / "config.json").unlink()  # the checkpoint says it too
    train("auto", "-b auto -d 512 -x 4 -y 1", 2**40)
    check_same(found, plain)
    train("auto", "-b auto -d 512 -x 5 -y 1", 2**40)
    assert record_of(found)["options"]["batch_size"] == 8


def test_no_batch_is_larger_than_the_data(train: Callable[..., Path]) -> None:
    """The validation data holds 2,000 tokens: 124 rows of 16 and a last target."""
    assert record_of(train("run", "-b auto -x 0", 2**40))["batch_size"]["taken"] == 96


def test_too_little_memory_ends_the_run_before_anything_is_written(
    train: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(AssertionError):
        train("run", "-b auto", 2**20)
    err = capsys.readouterr().err
    assert err.startswith("train.py: -e: ") and "-b 1" in err and err.count("\n") == 1
    assert not (tmp_path / "run").exists()
