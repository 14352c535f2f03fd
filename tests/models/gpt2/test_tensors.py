"""The flat buffer: llm.c's order, shapes and counts, the padding, and views that are the buffer itself."""

import jax.numpy as jnp
import numpy as np
import pytest

from llmc_jax.config.model import ModelConfig, parse_descriptor
from llmc_jax.models.gpt2.tensors import TENSORS, Params
from llmc_jax.models.layout import flat_size, num_parameters, padded, tensor_specs, views
from llmc_jax.models.tensors import FLAT_MULTIPLE
from tests import plain_model

SMALL = ModelConfig(max_seq_len=9, vocab_size=11, padded_vocab_size=16, num_layers=2, num_heads=2, channels=6)

D12_LAYOUT = {  # name: (size, offset) in GPT-2 124M's checkpoint, in floats
    "wte": (38633472, 0), "wpe": (786432, 38633472),
    "ln1w": (9216, 39419904), "ln1b": (9216, 39429120),
    "qkvw": (21233664, 39438336), "qkvb": (27648, 60672000),
    "attprojw": (7077888, 60699648), "attprojb": (9216, 67777536),
    "ln2w": (9216, 67786752), "ln2b": (9216, 67795968),
    "fcw": (28311552, 67805184), "fcb": (36864, 96116736),
    "fcprojw": (28311552, 96153600), "fcprojb": (9216, 124465152),
    "lnfw": (768, 124474368), "lnfb": (768, 124475136),
}  # fmt: skip
COUNTS = {  # llm.c's num_parameters, padded vocabulary rows included
    "d6": 30_357_504, "d12": 124_475_904, "d24": 354_871_296, "d36": 774_090_240, "d48": 1_557_686_400,
    "d60": 2_754_259_200, "d72": 7_316_887_680, "d84": 12_220_657_920,
    "gpt3:c384": 30_750_720, "gpt3:c768": 125_262_336,
}  # fmt: skip


def test_the_layout_of_124m_is_llm_c_s() -> None:
    found = {spec.name: (spec.size, spec.offset) for spec in tensor_specs(parse_descriptor("d12"))}
    assert found == D12_LAYOUT
    assert list(found) == list(D12_LAYOUT) == list(Params._fields)


@pytest.mark.parametrize("descriptor", COUNTS)
def test_counts_are_llm_c_s(descriptor: str) -> None:
    config = parse_descriptor(descriptor)
    assert num_parameters(config) == COUNTS[descriptor]
    assert 0 <= flat_size(config) - num_parameters(config) < FLAT_MULTIPLE
    assert flat_size(config) % FLAT_MULTIPLE == 0


def test_a_count_that_is_a_multiple_already_is_not_padded() -> None:
    config = ModelConfig(FLAT_MULTIPLE - 23, 4, 4, 1, 1, 1)  # N = maxT + Vp + 19 + ... with C = L = 1
    short = FLAT_MULTIPLE - num_parameters(config) % FLAT_MULTIPLE
    exact = ModelConfig(config.max_seq_len + short, 4, 4, 1, 1, 1)
    assert flat_size(exact) == num_parameters(exact)
    assert flat_size(ModelConfig(exact.max_seq_len + 1, 4, 4, 1, 1, 1)) == num_parameters(exact) + FLAT_MULTIPLE


def test_shapes_are_those_of_the_plain_model_and_leave_no_gap() -> None:
    specs = tensor_specs(SMALL)
    assert {spec.name: spec.shape for spec in specs} == plain_model.shapes(SMALL)
    end = 0
    for spec in specs:
        assert spec.offset == end and spec.size == np.prod(spec.shape)
        end += spec.size
    assert end == num_parameters(SMALL)
    assert tuple(tensor.name for tensor in TENSORS) == Params._fields


@pytest.mark.parametrize("library", [np, jnp])
def test_views_cut_the_buffer_into_the_16_tensors(library: object) -> None:
    flat = np.arange(flat_size(SMALL), dtype=np.float32)
    tensors = views(library.asarray(flat), SMALL)  # type: ignore[attr-defined]
    for name, expected in plain_model.unflatten(flat, SMALL).items():
        np.testing.assert_array_equal(getattr(tensors, name), expected)
    joined = np.concatenate([np.ravel(tensor) for tensor in tensors])
    np.testing.assert_array_equal(joined, flat[: num_parameters(SMALL)])


def test_views_of_numpy_share_its_memory() -> None:
    flat = np.zeros(num_parameters(SMALL), np.float32)  # as a file holds it, without the padding
    views(flat, SMALL).qkvb[1, 2] = 5
    offset = next(spec.offset for spec in tensor_specs(SMALL) if spec.name == "qkvb")
    assert flat.sum() == flat[offset + 18 + 2] == 5


def test_padded_adds_zeros_at_the_end() -> None:
    values = np.arange(1, num_parameters(SMALL) + 1, dtype=np.float32)
    buffer = padded(values, SMALL)
    assert buffer.dtype == np.float32 and buffer.shape == (flat_size(SMALL),)
    np.testing.assert_array_equal(buffer[: values.size], values)
    assert not buffer[values.size :].any()
