"""What sending takes, and how much of it is hidden, does not contradict itself."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc_jax.base.errors import InputError
from llmc_jax.config.model import parse_descriptor
from llmc_jax.machine.cards import CARDS
from llmc_jax.machine.gpus import GPUS
from llmc_jax.plan.network import Compute, Network, collective_seconds, network_of, step_of
from llmc_jax.training.parallel.stage import Parallel
from llmc_jax.training.parallel.traffic import Sent, of_update

D12 = parse_descriptor("d12")
COMPUTE = Compute(before=0.03, forward=(0.002,) * 12, layers=(0.004,) * 12, end=0.001, update=0.002)
kinds = st.sampled_from(["all-reduce", "reduce-scatter", "all-gather"])
devices = st.sampled_from([1, 2, 4, 8, 16, 64, 512])
seconds = st.floats(0, 1)
of_layers = st.lists(seconds, min_size=12, max_size=12).map(tuple)
computes = st.builds(
    lambda head, forward, *rest: Compute(head + sum(forward), forward, *rest),
    seconds, of_layers, of_layers, seconds, st.floats(0.001, 1),
)  # fmt: skip


def computing(compute: Compute, micro_batches: int = 1) -> float:
    """Return how long one GPU computes in an update."""
    return micro_batches * (compute.before + sum(compute.layers) + compute.end) + compute.update


@given(kinds, devices, st.integers(0, 10**10), st.integers(0, 10**10))
def test_more_bytes_are_not_faster(kind: str, devices: int, size: int, more: int) -> None:
    few, many = (collective_seconds(kind, each, devices, Network()) for each in (size, size + more))
    assert few <= many


@given(kinds, st.integers(0, 10**10))
def test_more_gpus_are_not_faster(kind: str, size: int) -> None:
    found = [collective_seconds(kind, size, n, Network()) for n in (1, 2, 4, 8, 16, 64, 512)]
    assert found == sorted(found) and found[0] == 0


@given(computes, st.sampled_from([1, 4]), st.sampled_from([0, 1, 2]))
def test_one_gpu_sends_nothing(compute: Compute, micro_batches: int, stage: int) -> None:
    alone = Parallel(1, stage)
    step = step_of(compute, of_update(D12, alone, micro_batches, 2), 1, micro_batches)
    assert computing(compute, micro_batches) == pytest.approx(step)


@given(computes, devices, st.sampled_from([1, 4]), st.sampled_from([0, 1, 2]))
def test_overlap_is_never_worse_and_never_hides_what_follows(
    compute: Compute, devices: int, micro_batches: int, stage: int
) -> None:
    sent = of_update(D12, Parallel(devices, stage if devices > 1 else 0), micro_batches, 2)
    step = step_of(compute, sent, devices, micro_batches)
    tail = sum(collective_seconds(each.kind, each.bytes, devices, Network())
               for each in sent if each.about in ("wte", "norm", "weights of wte", "weights of ends"))  # fmt: skip
    sending = sum(each.times * collective_seconds(each.kind, each.bytes, devices, Network()) for each in sent)
    assert step <= (computing(compute, micro_batches) + sending) * (1 + 1e-9)
    assert step >= (computing(compute, micro_batches) + tail) * (1 - 1e-9)


def test_a_layer_is_hidden_behind_those_below() -> None:
    """A layer takes 4 ms, and 2 ms to send: with one beside the other all but the first layer's is hidden."""
    network = Network(inside=1e9, reached=1.0, hop_inside=0, start=0)
    sent = [Sent("reduce-scatter", f"layer {layer}", 4_000_000, beside="backward") for layer in reversed(range(12))]
    compute = COMPUTE._replace(end=0)
    step = step_of(compute, sent, 2, network=network)
    assert sum(collective_seconds(each.kind, each.bytes, 2, network) for each in sent) == pytest.approx(12 * 0.002)
    assert step - computing(compute) == pytest.approx(0.002)
    slow = step_of(compute, sent, 2, network=network._replace(inside=0.25e9))
    left = slow - computing(compute)
    assert left == pytest.approx(12 * 0.008 - 11 * 0.004)  # the network never waits after the first


def test_a_layer_s_weights_are_hidden_behind_those_above() -> None:
    """A layer takes 2 ms, and 1 ms to gather: the forward waits for the first one's alone."""
    network = Network(inside=1e9, reached=1.0, hop_inside=0, start=0)
    sent = [Sent("all-gather", f"weights of layer {layer}", 2_000_000, beside="forward") for layer in range(12)]
    assert step_of(COMPUTE, sent, 2, network=network) - computing(COMPUTE) == pytest.approx(0.001)
    slow = step_of(COMPUTE, sent, 2, network=network._replace(inside=0.25e9))
    assert slow - computing(COMPUTE) == pytest.approx(12 * 0.004 - 11 * 0.002)  # the network never waits
    alone = [each._replace(beside="") for each in sent]
    assert step_of(COMPUTE, alone, 2, network=network) - computing(COMPUTE) == pytest.approx(0.012)


def test_between_nodes_each_gpu_sends_an_eighth() -> None:
    network = Network(reached=1.0, reached_between=1.0, hop_inside=0, hop_between=0, start=0)
    inside, both = (collective_seconds("all-gather", 8 * 10**9, n, network) for n in (8, 16))
    assert inside == pytest.approx(7e9 / 450e9)
    assert both - inside == pytest.approx(0.5e9 / 50e9)
    assert collective_seconds("all-reduce", 8 * 10**9, 16, network) == pytest.approx(2 * both)


@pytest.mark.parametrize("gbit", [0, -5, math.nan, math.inf])
def test_a_speed_that_cannot_be_is_refused(gbit: float) -> None:
    with pytest.raises(InputError, match="--network"):
        network_of("NVIDIA H100 80GB HBM3", gbit)


@pytest.mark.parametrize("kind", GPUS)
def test_every_gpu_has_a_network(kind: str) -> None:
    network = network_of(kind)
    fast, usual, slow = (collective_seconds("all-reduce", 10**9, 2 * network.node, each) for each in network.ends())
    assert fast < usual < slow
    if kind in CARDS:
        assert network.inside == CARDS[kind].link
    assert network_of(kind, 100).between == 12.5e9
