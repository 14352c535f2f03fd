"""benchmarks/scaling.py: the table's models fit, one GPU is the plan's own, and the page is what the model says."""

import pytest

from benchmarks import scaling
from llmc_jax.models.gpt2.memory import estimated_step_bytes
from llmc_jax.plan.time import step_time


@pytest.mark.parametrize("name", scaling.BATCHES)
def test_the_table_s_batches_fit(name: str) -> None:
    plan = scaling.row_of(name, 4).plan
    assert estimated_step_bytes(plan.model, plan.shape._replace(devices=8)) < 0.92 * 80e9


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_one_gpu_takes_what_the_plan_says(micro_batches: int) -> None:
    row = scaling.row_of("d12", micro_batches)
    assert row.seconds == pytest.approx(row.computing) and row.sending == 0
    assert row.computing == pytest.approx(step_time(row.plan).seconds.typical)
    split = scaling.row_of("d12", micro_batches, 8, 1)
    assert split.compute.update == pytest.approx(row.compute.update / 8, abs=5e-5)  # its small kernels are not split
    assert split.compute.before == pytest.approx(row.compute.before)


def test_the_page_is_what_the_model_says() -> None:
    assert scaling.RESULTS.read_text() == scaling.page()
