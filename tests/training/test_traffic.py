"""What an update sends, by the formula. tests/aot/test_several.py holds it against compiled programs."""

import pytest

from llmc_jax.config.model import ModelConfig, parse_descriptor
from llmc_jax.models.layout import num_parameters
from llmc_jax.models.units import row_size, split_size, units
from llmc_jax.training.parallel.stage import Parallel
from llmc_jax.training.parallel.traffic import Sent, of_update

D12 = parse_descriptor("d12")
SMALL = ModelConfig(max_seq_len=64, vocab_size=257, padded_vocab_size=384, num_layers=3, num_heads=4, channels=32)


def gradients(found: list[Sent]) -> list[Sent]:
    return [each for each in found if each.about not in ("loss", "norm") and each.kind != "all-gather"]


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_one_device_sends_nothing(micro_batches: int) -> None:
    assert of_update(D12, Parallel(), micro_batches, 2) == []


@pytest.mark.parametrize(("micro_batches", "width"), [(1, 2), (4, 4)])
def test_stage_0_sums_every_gradient_once(micro_batches: int, width: int) -> None:
    """In the weights' dtype, or of several micro-batches in float32."""
    found = gradients(of_update(D12, Parallel(8), micro_batches, 2))
    assert {(each.kind, each.times) for each in found} == {("all-reduce", 1)}
    assert sum(each.bytes for each in found) == width * num_parameters(D12)


@pytest.mark.parametrize("devices", [2, 3, 8])
@pytest.mark.parametrize("stage", [1, 2])
def test_what_is_split_is_scattered_and_the_weights_gathered(devices: int, stage: int) -> None:
    found = of_update(SMALL, Parallel(devices, stage), 1, 2)
    assert {each.kind for each in gradients(found)} == {"reduce-scatter"}
    assert sum(each.bytes for each in gradients(found)) == 2 * split_size(SMALL, devices)
    weights = [each for each in found if each.kind == "all-gather"]
    assert sum(each.bytes for each in weights) == 2 * split_size(SMALL, devices)
    assert {each.about: each.beside for each in weights} == {
        "weights of wte": "", "weights of ends": "", **{f"weights of layer {i}": "forward" for i in range(3)}
    }  # fmt: skip
    assert all(each.bytes % devices == 0 for each in gradients(found))


@pytest.mark.parametrize("devices", [2, 3, 8])
def test_whole_matrices_go_there_and_back_in_rounds_of_as_many_layers(devices: int) -> None:
    found = [each for each in of_update(SMALL, Parallel(devices, 1), 1, 2, True) if each.about == "matrices"]
    rows = devices * units(SMALL)[-1].share(devices)
    assert found == 2 * -(-3 // devices) * [Sent("all-to-all", "matrices", 2 * row_size(SMALL) * rows)]
    assert "matrices" not in {each.about for each in of_update(SMALL, Parallel(devices, 0), 1, 2, True)}


def test_stage_2_sends_each_micro_batch_s() -> None:
    one, two = (gradients(of_update(SMALL, Parallel(8, stage), 4, 2)) for stage in (1, 2))
    assert {each.times for each in one} == {1} and {each.times for each in two} == {4}
    assert sum(each.bytes for each in one) == 2 * sum(each.bytes for each in two)


def test_layers_come_from_the_last_to_the_first_and_wte_at_the_end() -> None:
    names = [each.about for each in of_update(SMALL, Parallel(8, 1), 1, 2) if each.kind != "all-gather"]
    assert names == ["loss", "layer 2", "layer 1", "layer 0", "ends", "wte", "norm"]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_of_several_micro_batches_only_stage_2_sends_beside_something(stage: int) -> None:
    found = of_update(SMALL, Parallel(8, stage), 4, 2)
    assert {each.beside for each in found if each.times == 1} == {""}
    assert {each.beside for each in found if each.times == 4} == ({"backward"} if stage == 2 else set())
