"""A step over 8 GPUs that are not there: each one's memory, and what they send each other while they compute."""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from benchmarks import aot
from benchmarks.collectives import Case, Measured, measure_apart
from benchmarks.sent import Collective
from llmc_jax.config.model import parse_descriptor
from llmc_jax.models.layout import num_parameters
from llmc_jax.models.units import total_rows, units

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(aot.problem()), reason=aot.problem()),
]

GPUS, DEVICES, LAYERS = ("h200", "a100"), 8, 3
MODEL = f"L{LAYERS}-NH12-C768"  # as GPT-2 124M, with fewer layers
STEP, FOUR = f"-e {MODEL} -b 4 --devices {DEVICES}", "-d 131072"  # four micro-batches on each
STAGES = {stage: Case(f"{STEP} -z {stage}") for stage in (0, 1, 2)}
BARE = Case(STAGES[1].flags, overlap=False)
AT_END, IN_LOOP = Case(f"{STEP} -z 1 {FOUR}"), Case(f"{STEP} -z 2 {FOUR}")
FIXED = Case(f"{STEP} -z 1 {FOUR} --reduction fixed")
MUON = Case(f"{STEP} -z 1 --optimizer muon".replace("L3", "L9"))  # two rounds
CASES = {"h200": [*STAGES.values(), BARE, AT_END, IN_LOOP, FIXED, MUON], "a100": [*STAGES.values()]}

Found = dict[str, Future[list[Measured]]]
each_gpu = pytest.mark.parametrize("gpu", GPUS)
each_stage = pytest.mark.parametrize("stage", STAGES)


@pytest.fixture(scope="module")
def found() -> Iterator[Found]:
    """What the compiler says of the steps, a process for each GPU."""
    with ThreadPoolExecutor(len(GPUS)) as pool:
        yield {gpu: pool.submit(measure_apart, gpu, CASES[gpu]) for gpu in GPUS}


def of(found: Found, gpu: str, case: Case) -> Measured:
    return found[gpu].result()[CASES[gpu].index(case)]


def gradients(measured: Measured) -> list[Collective]:
    """What is summed over the devices, but for loss and norm, of 4 bytes each."""
    return [each for each in measured.collectives if each.kind != "all-gather" and each.bytes > 8]


@each_gpu
@each_stage
def test_each_device_has_its_part_of_the_state(gpu: str, stage: int, found: Found) -> None:
    """In bf16: weights of 2 bytes, masters, m and v of 4."""
    measured = of(found, gpu, STAGES[stage])
    expected = 14 / (DEVICES if stage else 1) * num_parameters(parse_descriptor(MODEL))
    assert measured.state == pytest.approx(expected, rel=0.03)
    assert 0 <= measured.memory.arguments - measured.state < 100_000  # the tokens, and a few numbers
    assert measured.memory.aliased >= measured.state
    assert measured.copies == ()


@each_gpu
@each_stage
def test_bytes_are_those_of_the_formula(gpu: str, stage: int, found: Found) -> None:
    assert_as_computed(of(found, gpu, STAGES[stage]))


@pytest.mark.parametrize("case", [AT_END, IN_LOOP], ids=["at the end", "in the loop"])
def test_bytes_of_several_micro_batches_are_those_of_the_formula(case: Case, found: Found) -> None:
    assert_as_computed(of(found, "h200", case))


def assert_as_computed(measured: Measured) -> None:
    compiled = Counter((each.kind, each.bytes, each.times) for each in measured.collectives)
    assert compiled == Counter((each.kind, each.bytes, each.times) for each in measured.sent)
    assert all(each.devices == DEVICES and each.arrays == 1 for each in measured.collectives)


@each_gpu
@each_stage
def test_a_layer_is_sent_while_the_layers_below_are_computed(gpu: str, stage: int, found: Found) -> None:
    assert_beside(gradients(of(found, gpu, STAGES[stage])), waits=stage == 2)


@each_gpu
def test_with_one_micro_batch_stages_1_and_2_send_the_same(gpu: str, found: Found) -> None:
    one, two = (of(found, gpu, STAGES[stage]).collectives for stage in (1, 2))
    assert Counter((each.kind, each.bytes) for each in one) == Counter((each.kind, each.bytes) for each in two)


@each_gpu
@pytest.mark.parametrize("stage", [1, 2])
def test_a_layer_s_weights_are_gathered_while_those_above_it_are_computed_with(
    gpu: str, stage: int, found: Found
) -> None:
    """They start in the order of the forward, once what the embedding waits for is there."""
    gathers = [each for each in of(found, gpu, STAGES[stage]).collectives if each.kind == "all-gather"]
    *first, sizes = [unit.rows for unit in units(parse_descriptor(MODEL))][: -LAYERS + 1]
    assert sorted(each.bytes // (2 * 768 * DEVICES) for each in gathers[:2]) == sorted(-(-n // DEVICES) for n in first)
    for layer, each in enumerate(gathers[2:]):
        assert each.arrays == 1 and each.bytes == 2 * 768 * DEVICES * -(-sizes // DEVICES)
        beside = " ".join(operation.scope for operation in each.between)
        assert [other for other in range(LAYERS) if f"forward/layer_{other:02d}" in beside] == [*range(layer)]
        assert layer == 0 or (each.asynchronous and each.products >= 4 * layer)  # the products of a layer's forward
    assert len(gathers) == LAYERS + 2


def test_with_several_micro_batches_they_are_gathered_once(found: Found) -> None:
    for case in (AT_END, IN_LOOP):
        gathers = [each for each in of(found, "h200", case).collectives if each.kind == "all-gather"]
        assert [each.times for each in gathers] == [1] * (LAYERS + 2)


def test_so_it_is_in_a_loop_over_micro_batches(found: Found) -> None:
    sent = gradients(of(found, "h200", IN_LOOP))
    assert_beside(sent, waits=True)
    assert {each.times for each in sent} == {4}


def assert_beside(sent: list[Collective], waits: bool) -> None:
    """Nothing is joined, and each layer's gradients have the layers below beside them; the embedding has the last's.

    waits: only the next layer: when it is done, so is the exchange, and the whole gradient is gone.
    """
    assert [each.arrays for each in sent] == [1] * (LAYERS + 2)  # and two of the ends
    for layer in range(LAYERS):
        (each,) = (each for each in sent if f"layer_{layer:02d}" in each.scopes[0])
        assert each.asynchronous
        beside = " ".join(operation.scope for operation in each.between)
        below = [*range(layer)][-1:] if waits else [*range(layer)]
        assert [other for other in range(LAYERS) if f"layer_{other:02d}" in beside] == below
        assert ("embedding" in beside) == (not waits or layer == 0)
        assert each.products >= 8 * len(below)  # the products of a layer's backward


def test_without_the_options_all_is_sent_at_the_end(found: Found) -> None:
    """What the tests above would find if the options were left out."""
    (joined,) = gradients(of(found, "h200", BARE))
    assert joined.arrays == LAYERS + 2 and joined.products == 0


def test_a_gradient_that_is_split_at_once_takes_less_memory(found: Found) -> None:
    whole, split = (of(found, "h200", case).memory.temporaries for case in (AT_END, IN_LOOP))
    of_layers = sum(unit.rows for unit in units(parse_descriptor(MODEL))[1:]) * 768
    assert whole - split > 0.8 * 4 * of_layers * (DEVICES - 1) / DEVICES


def test_a_fixed_order_exchanges_instead_of_summing(found: Found) -> None:
    measured = of(found, "h200", FIXED)
    kinds = Counter(each.kind for each in measured.collectives)
    assert kinds == {"all-to-all": LAYERS + 2, "all-gather": LAYERS + 3, "all-reduce": 1}  # gathered: losses, weights
    (summed,) = (each for each in measured.collectives if each.kind == "all-reduce")  # the norm's squares, and zeros
    assert summed.bytes == 4 * total_rows(parse_descriptor(MODEL))
    assert measured.memory.aliased >= measured.state


def test_a_round_of_matrices_is_sent_while_another_is_computed(found: Found) -> None:
    measured = of(found, "h200", MUON)
    assert_as_computed(measured)
    sent = [each for each in measured.collectives if each.kind == "all-to-all"]
    assert len(sent) == 4
    assert sum(each.asynchronous and each.products >= 40 for each in sent) >= 2  # of 60 that a round takes


@each_gpu
def test_what_is_surely_needed_is_no_more_than_what_the_compiler_takes(gpu: str, found: Found) -> None:
    for case, measured in zip(CASES[gpu], found[gpu].result(), strict=True):
        assert measured.needed <= measured.memory.arguments + measured.memory.temporaries, case
