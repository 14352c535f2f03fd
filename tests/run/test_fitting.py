"""-b auto: which sizes are compiled, and that a run with it is the run with the number that it comes to."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc_jax import cluster
from llmc_jax.base.errors import InputError
from llmc_jax.cluster.worker import Group
from llmc_jax.config.checks import with_devices
from llmc_jax.config.flags import parse_args
from llmc_jax.config.model import parse_descriptor
from llmc_jax.config.train import AUTO_BATCH, TrainConfig
from llmc_jax.kernels import Machine
from llmc_jax.plan.fits import DoesNotFit
from llmc_jax.plan.plan import Plan, make_plan
from llmc_jax.plan.search import MOST_ROWS, limit_of
from llmc_jax.run import fitting, inputs
from llmc_jax.run.command import main
from llmc_jax.trials import here
from tests.metrics import read_metrics
from tests.same_run import check_same

pytestmark = pytest.mark.usefixtures("nothing_lasts", "quick_compilation")
SMALL = "-e L1-NH1-C16-V257-T16 -t 16"


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
    assert fitting.sizes_up_to(10**6, TrainConfig(batch_size=AUTO_BATCH))[:2] == [MOST_ROWS, 3 * MOST_ROWS // 4]


# ----- the search -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("compiled", "tried"),
    [
        ({8: 100}, [8]),
        ({8: 101, 4: 60}, [8, 4]),
        ({8: None, 4: 101, 2: 40}, [8, 4, 2]),  # the compiler had too little memory
        ({8: 200, 4: 120, 2: 101, 1: None}, [8, 4, 2, 1]),
    ],
)
def test_sizes_are_compiled_until_one_fits(
    compiled: dict[int, int | None], tried: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 is estimated at far more than there is, 8 at a little more."""
    estimated, seen = {16: 180, 8: 109, 4: 50, 2: 30, 1: 20}, list[int]()

    def compiled_bytes(plan: Plan) -> int | None:
        seen.append(plan.config.batch_size)
        return compiled[seen[-1]]

    monkeypatch.setattr(fitting, "sizes_up_to", lambda *_: list(estimated))
    monkeypatch.setattr(fitting, "check_fits", lambda plan: None)
    monkeypatch.setattr(fitting, "computed", lambda plan: SimpleNamespace(program=estimated[plan.config.batch_size]))
    monkeypatch.setattr(fitting, "compiled_bytes", compiled_bytes)
    if tried[-1] == 1:
        with pytest.raises(DoesNotFit, match=r"^-b auto: not even -b 1 fits"):
            fitting.fitted(TrainConfig(), 16, 100, plan_with)
    else:
        result = fitting.fitted(TrainConfig(), 16, 100, plan_with)
        assert (result.plan.config.batch_size, result.bytes) == (tried[-1], compiled[tried[-1]])
    assert seen == tried


@pytest.mark.parametrize(("other", "all_of_them"), [(1, 100), (2**40, 2**40), (None, None)])
def test_of_several_processes_the_one_that_needs_most_counts(
    other: int | None, all_of_them: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OfTwo(Group):
        size = 2

        def meet(self, name: str, value: Any = None) -> list[Any]:
            return [value, other]

    monkeypatch.setattr(fitting.compiling, "compiled", lambda *_: None)
    monkeypatch.setattr(fitting, "step_bytes", lambda _: 100)
    monkeypatch.setattr(cluster, "_here", OfTwo())
    assert fitting.compiled_bytes(plan_with(1)) == all_of_them


def test_a_compiler_without_memory_says_that_it_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise jax.errors.JaxRuntimeError(words)

    monkeypatch.setattr(fitting.compiling, "compiled", full)
    words = "RESOURCE_EXHAUSTED: no room to time a product"
    assert fitting.compiled_bytes(plan_with(1)) is None
    words = "INTERNAL: another mistake"
    with pytest.raises(jax.errors.JaxRuntimeError):
        fitting.compiled_bytes(plan_with(1))


# ----- runs -----------------------------------------------------------------------------------------------------------


Train = Callable[..., Path]


@pytest.fixture
def train(tmp_path: Path, tokens: Any, monkeypatch: pytest.MonkeyPatch) -> Train:
    """Runs the command line with as much main memory as it is told."""
    describe = here.describe_device

    def run(name: str, words: str, memory: int | None = None) -> Path:
        with monkeypatch.context() as patch:
            if memory is not None:
                patch.setattr(here, "describe_device", lambda: describe()._replace(memory_bytes=memory))
            folder = tmp_path / name
            files = ["-i", str(tokens.train), "-j", str(tokens.val), "-o", str(folder)]
            assert main([*f"{SMALL} -v 2 -m 2 -s 0 -x 3 -l 1e-2 --print-every 0 {words}".split(), *files]) == 0
        return folder

    return run


@pytest.mark.slow
def test_a_run_with_auto_is_the_run_with_its_number_and_keeps_it(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = train("plain", "-b 8 -d 512")
    needed = fitting.compiled_bytes(plan_with(8, "-d 512"))
    assert needed is not None
    enough = next(memory for memory in count(int(needed / 0.75)) if limit_of("cpu", memory) >= needed)
    auto = train("auto", "-b auto -d 512", enough)
    check_same(auto, plain)
    record = json.loads((auto / "config.json").read_text())
    assert record["options"]["batch_size"] == record["batch_size"]["taken"] == 8
    assert record["batch_size"]["bytes"] == record["batch_size"]["limit_bytes"]
    assert read_metrics(auto / "metrics.jsonl")[0]["config"] == record

    monkeypatch.setattr(fitting, "fitted", None)  # nothing is looked for where a run goes on
    train("plain", "-b 8 -d 512 -x 4 -y 1")
    (auto / "config.json").unlink()  # the checkpoint says it too
    train("auto", "-b auto -d 512 -x 4 -y 1", 2**40)
    check_same(auto, plain)


@pytest.mark.parametrize(("words", "rows"), [("", 124), ("-v 0", 1249), ("-x 0", 124)])
def test_no_batch_is_larger_than_the_data(words: str, rows: int, tokens: Any) -> None:
    """It holds 20,000 tokens to train on and 2,000 to validate on: rows of 16, and a last target."""
    config = parse_args([*f"{SMALL} -b 1 {words}".split(), "-i", str(tokens.train), "-j", str(tokens.val)])
    assert inputs.most_rows(inputs.open_data(config, parse_descriptor(config.model))) == rows


def test_too_little_memory_ends_the_run_before_anything_is_written(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(AssertionError):
        train("run", "-b auto", 2**20)
    err = capsys.readouterr().err
    assert err.startswith("train.py: -e: ") and "-b 1" in err and err.count("\n") == 1
    assert not (tmp_path / "run").exists()
