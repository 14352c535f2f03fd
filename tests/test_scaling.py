"""benchmarks/scaling.py: the model of many GPUs does not contradict itself, nor the page that is committed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import scaling
from benchmarks.scaling import Compute, Network, collective_seconds, compute_of, efficiency, shape_on, step_of
from llmc_jax.config.model import parse_descriptor
from llmc_jax.models.gpt2.memory import estimated_step_bytes
from llmc_jax.training.parallel.stage import Parallel
from llmc_jax.training.parallel.traffic import Sent, of_update

D12 = parse_descriptor("d12")
COMPUTE = Compute(before=0.03, layers=(0.004,) * 12, end=0.001, update=0.002)
kinds = st.sampled_from(["all-reduce", "reduce-scatter", "all-gather"])
devices = st.sampled_from([1, 2, 4, 8, 16, 64, 512])
seconds = st.floats(0, 1)
computes = st.builds(
    Compute, seconds, st.lists(seconds, min_size=12, max_size=12).map(tuple), seconds, st.floats(0.001, 1)
)


@given(kinds, devices, st.integers(0, 10**10), st.integers(0, 10**10))
def test_more_bytes_are_not_faster(kind: str, devices: int, size: int, more: int) -> None:
    few, many = (collective_seconds(kind, each, devices, Network()) for each in (size, size + more))
    assert few <= many


@given(kinds, st.integers(0, 10**10))
def test_more_gpus_are_not_faster(kind: str, size: int) -> None:
    found = [collective_seconds(kind, size, n, Network()) for n in (1, 2, 4, 8, 16, 64, 512)]
    assert found == sorted(found) and found[0] == 0


@given(computes, st.sampled_from([1, 4]), st.sampled_from([0, 1, 2]))
def test_one_gpu_has_an_efficiency_of_1(compute: Compute, micro_batches: int, stage: int) -> None:
    alone = Parallel(1, stage)
    step = step_of(compute, of_update(D12, alone, micro_batches, 2), 1, micro_batches)
    one = micro_batches * compute.micro_batch + compute.update
    assert efficiency(one, step.alone) == pytest.approx(1) and efficiency(one, step.overlapped) == pytest.approx(1)


@given(computes, devices, st.sampled_from([1, 4]), st.sampled_from([0, 1, 2]))
def test_overlap_is_never_worse_and_never_hides_what_follows(
    compute: Compute, devices: int, micro_batches: int, stage: int
) -> None:
    sent = of_update(D12, Parallel(devices, stage if devices > 1 else 0), micro_batches, 2)
    step = step_of(compute, sent, devices, micro_batches)
    tail = sum(collective_seconds(each.kind, each.bytes, devices, Network())
               for each in sent if each.about in ("wte", "norm", "weights"))  # fmt: skip
    assert step.overlapped <= step.alone * (1 + 1e-9)
    assert step.overlapped >= (step.compute + tail) * (1 - 1e-9)
    assert step.alone == pytest.approx(step.compute + step.sending)


def test_a_layer_is_hidden_behind_those_below() -> None:
    """A layer takes 4 ms, and 2 ms to send: with one beside the other all but the first layer's is hidden."""
    network = Network(inside=1e9, reached=1.0, hop_inside=0, start=0)
    sent = [Sent("reduce-scatter", f"layer {layer}", 4_000_000) for layer in reversed(range(12))]
    step = step_of(COMPUTE._replace(end=0), sent, 2, network=network)
    assert step.sending == pytest.approx(12 * 0.002)
    assert step.left == pytest.approx(0.002)
    slow = step_of(COMPUTE._replace(end=0), sent, 2, network=network._replace(inside=0.25e9))
    assert slow.left == pytest.approx(12 * 0.008 - 11 * 0.004)  # the network never waits after the first


def test_between_nodes_each_gpu_sends_an_eighth() -> None:
    network = Network(reached=1.0, hop_inside=0, hop_between=0, start=0)
    inside, both = (collective_seconds("all-gather", 8 * 10**9, n, network) for n in (8, 16))
    assert inside == pytest.approx(7e9 / 450e9)
    assert both - inside == pytest.approx(0.5e9 / 50e9)
    assert collective_seconds("all-reduce", 8 * 10**9, 16, network) == pytest.approx(2 * both)


def test_compute_is_the_floor_of_the_step() -> None:
    from benchmarks import roofline
    from llmc_jax.models.gpt2.work import step_work

    for A in (1, 4):
        shape = shape_on(scaling.GPU, D12, 64, A)
        lines = roofline.lines(step_work(D12, shape), roofline.estimated(scaling.GPU, "bf16"), {})
        compute = compute_of(D12, shape, scaling.GPU, Parallel())
        assert A * compute.micro_batch + compute.update == pytest.approx(sum(line.floor for line in lines), rel=0.01)
        assert compute_of(D12, shape, scaling.GPU, Parallel(8, 1)).update == pytest.approx(compute.update / 8)


@pytest.mark.parametrize("name", scaling.BATCHES)
def test_the_table_s_batches_fit(name: str) -> None:
    shape = shape_on(scaling.GPU, parse_descriptor(name), scaling.BATCHES[name], 4)._replace(devices=8)
    assert estimated_step_bytes(parse_descriptor(name), shape) < 0.92 * 80e9


def test_the_page_is_what_the_model_says() -> None:
    assert scaling.RESULTS.read_text() == scaling.page()
