"""The time of a step on GPUs that are not there: beside the compiled programs' own table, and its own laws."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc_jax.base.numbers import Interval
from llmc_jax.machine import gpus
from llmc_jax.models.work import step_work
from llmc_jax.plan.compiled import plan_for
from llmc_jax.plan.efficiency import gpu
from llmc_jax.plan.network import Network, collective_seconds, network_of
from llmc_jax.plan.time import StepTime, step_time

TABLES = json.loads((Path(__file__).parents[2] / "benchmarks/results/step_table.json").read_text())


def time_of(name: str, words: str, **network: Any) -> StepTime:
    """Return what a step takes by estimated rates, whatever has been measured on such a card since."""
    plan = plan_for(name, words)
    hardware = gpu(plan.machine.kind, plan.product_precision)
    return step_time(plan, hardware, Network(**network) if network else None)


@pytest.mark.parametrize("table", TABLES, ids=[each["case"] for each in TABLES])
def test_kernels_and_products_are_the_compiled_program_s(table: dict[str, Any]) -> None:
    """Which has a quarter more small kernels on cards that are no Hopper."""
    step = time_of(*table["case"].split(" ", 1))
    assert 0.78 < step.launches / sum(group["kernels"] for group in table["groups"].values()) < 1.05
    products = sum(each.flops for each in step.operations if each.operation != "attention")
    compiled = sum(group["flops"] for name, group in table["groups"].items() if name.startswith("products"))
    assert products == pytest.approx(compiled, rel=0.01)


@pytest.mark.parametrize("words", ["-e d12 -b 64 -r 0", "-e d48 -b 16 -r 0"])
def test_an_h200_s_step_takes_what_its_compiled_kernels_do(words: str) -> None:
    (table,) = (each for each in TABLES if each["case"] == f"h200 {words}")
    compiled = sum(group["seconds"] for group in table["groups"].values())
    assert time_of("h200", words).seconds.typical == pytest.approx(compiled, rel=0.02)


@settings(max_examples=25)
@given(
    st.sampled_from(list(gpus.TARGETS)), st.sampled_from(["d12", "d24"]), st.integers(1, 64), st.sampled_from([0, 1, 2])
)
def test_laws(name: str, model: str, batch: int, recompute: int) -> None:
    words = f"-e {model} -b {batch} -r {recompute}"
    step = time_of(name, words)
    low, typical, high = step.seconds
    assert step.floor <= low < typical < high
    sums = [sum(each.seconds[at] for each in step.operations) + step.gaps[at] for at in range(3)]
    assert list(step.seconds) == pytest.approx(sums)
    assert step.tokens_per_second.low == pytest.approx(1024 * batch / high)
    plan = plan_for(name, words)
    work = step_work(plan.model, plan.shape)
    assert sum(each.flops for each in step.operations) == sum(each.flops for each in work)
    more = time_of(name, f"-e {model} -b {batch + 1} -r {recompute}")
    assert more.seconds.typical > 0.97 * typical  # nearly: a wave of tiles may be fuller


def test_operations_add_up_over_micro_batches() -> None:
    one, four = (time_of("h100", f"-e d12 -b 8 -d {8192 * count}") for count in (1, 4))
    update = sum(each.seconds.typical for each in one.operations if each.phase == "update")
    rest = one.seconds.typical - update
    assert four.seconds.typical == pytest.approx(4 * rest + update, rel=0.03)
    assert four.tokens == 4 * one.tokens == 4 * 8192


def test_what_bounds_a_step() -> None:
    assert time_of("h200", "-e d12 -b 64").bound == "products"
    assert time_of("h200", "-e L12-NH1-C32 -b 1 -t 64").bound == "launches"
    assert time_of("rtx4090", "-e d12 -b 1 -t 64").bound == "memory"  # the update
    assert time_of("h100", "-e d12 -b 1 --devices 8", inside=1e8).bound == "network"


def test_gelu_in_the_product_takes_no_time_of_its_own() -> None:
    def gelus(flags: str) -> set[str]:
        found = time_of("h200", f"-e d12 -b 64 {flags}").operations
        return {each.phase for each in found if each.operation == "gelu"}

    assert gelus("-r 0 --products xla") == {"forward", "backward"}
    assert gelus("-r 0 -ge 0") == {"forward", "backward"} and gelus("-r 0 -ge 1") == {"backward"}
    assert gelus("-r 0") == set() and gelus("-r 1") == {"backward"}  # computed again


def test_products_of_ours_save_their_passes() -> None:
    """The classifier's bytes are a sixth of what they were; the products take as long as their rate says."""
    ours, plain = (time_of("h200", f"-e d12 -b 64 -r 0 --products {by}") for by in ("pallas", "xla"))
    by_name = [{(each.phase, each.operation): each for each in step.operations} for step in (ours, plain)]
    classifier = [each["forward", "classifier"] for each in by_name]
    assert classifier[0].bytes < classifier[1].bytes / 6
    for place in (("forward", "head"), ("forward", "fc"), ("backward", "fcproj")):
        assert by_name[0][place].flops == by_name[1][place].flops
        assert by_name[0][place].seconds.high > by_name[1][place].seconds.high
    assert ours.seconds.typical < plain.seconds.typical and not ours.measured and plain.measured


def test_recomputed_blocks_are_forwards_again() -> None:
    """As fast as the first time: their products and attention have the forward's shapes."""
    plain, again = (time_of("h200", f"-e d12 -b 64 -r 0 --recompute-blocks {blocks}") for blocks in (0, 12))
    forward = sum(
        each.seconds.typical
        for each in plain.operations
        if each.phase == "forward" and each.operation not in ("embedding", "weights", "lnf", "head", "classifier")
    )
    assert again.seconds.typical - plain.seconds.typical == pytest.approx(forward, rel=0.1)


@pytest.mark.parametrize(("name", "words", "card"), [
    ("h200", "-e d12 -b 64 --products xla", "NVIDIA H200"), ("h100", "-e d12 -b 64 --products xla", "NVIDIA H200"),
    ("h200", "-e d12 -b 64", None), ("a100", "-e d12 -b 64", None),
    ("h200", "-e d12 -b 4 --dtype fp32", None), ("h200", "-e d12 -b 64 --attention naive", None),
])  # fmt: skip
def test_whose_rates_they_are(name: str, words: str, card: str | None) -> None:
    """One card's of this kind or of one like it; none's where some are estimates."""
    step = time_of(name, words)
    assert step.rates_of == card and step.measured == (name == "h200" and card is not None)
    assert not time_of(name, f"{words} -d 524288 --devices 2").measured  # nobody has measured what goes between them


def test_mfu_is_of_the_card_s_peak() -> None:
    step = time_of("h200", "-e d12 -b 64")
    palm, llmc = step.mfu(), step.mfu("llm.c")
    assert palm and llmc and palm.typical > llmc.typical
    assert palm.typical == pytest.approx(step.flops["palm"] / step.seconds.typical / 989.4e12)


# ----- several devices ------------------------------------------------------------------------------------------------


def test_several_devices_take_as_long_as_one_and_what_sending_adds() -> None:
    one, eight = (time_of("h100", f"-e d12 -b 64 --devices {count}") for count in (1, 8))
    assert eight.tokens == 8 * one.tokens and one.exchanges == () and one.network == Interval(0, 0, 0)
    assert eight.seconds.typical - one.seconds.typical == pytest.approx(eight.network.typical, rel=1e-6)
    network = network_of("NVIDIA H100 80GB HBM3")
    sent = {each.about: each.times * collective_seconds(each.kind, each.bytes, 8, network) for each in eight.exchanges}
    assert 0 < sent["wte"] < eight.network.typical < sum(sent.values())  # layers are hidden; the embedding is not
    assert eight.mfu() and eight.mfu().typical < one.mfu().typical  # type: ignore[union-attr]


@pytest.mark.parametrize(("name", "words"), [
    ("h100", "-e d6 -b 1 --devices 16 -z 0"), ("a100", "-e d12 -b 1 --devices 64 -z 0"),
])  # fmt: skip
def test_what_sending_adds_is_an_interval(name: str, words: str) -> None:
    """Here the fastest computing hides so little that sending adds more than it typically does."""
    low, typical, high = time_of(name, words).network
    assert 0 < low <= typical <= high


def test_a_split_update_is_a_device_s_part() -> None:
    whole, split = (time_of("h100", f"-e d12 -b 64 --devices 8 -z {stage}") for stage in (0, 1))
    adamw = [next(each.bytes for each in step.operations if each.operation == "adamw") for step in (whole, split)]
    assert adamw[1] == pytest.approx(adamw[0] / 8, rel=1e-6)
    assert {each.kind for each in split.exchanges} == {"all-reduce", "reduce-scatter", "all-gather"}
