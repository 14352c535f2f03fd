"""Units: every row of the flat buffer is in one of them, and on one device, wherever it is looked up."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc_jax.config.model import ModelConfig, parse_descriptor
from llmc_jax.models.gpt2.model import BlockParams
from llmc_jax.models.gpt2.tensors import BY_NAME
from llmc_jax.models.gradients import Gradients, flatten_gradients, pieces_of
from llmc_jax.models.layout import flat_size, num_parameters, separate, tensor_specs, tensors_of, views
from llmc_jax.models.units import (
    as_rows,
    flat_of,
    joined_on_host,
    own_rows,
    split_on_host,
    split_rows,
    split_size,
    tensors_in,
    total_rows,
    units,
)
from tests.comparisons import QUICK

DEVICES = (1, 2, 3, 4, 5, 8)


@st.composite
def shapes(draw: st.DrawFn) -> ModelConfig:
    """Small models: any number of layers, heads and channels, and of rows that few numbers divide."""
    heads = draw(st.integers(1, 3))
    vocab = draw(st.integers(1, 40))
    return ModelConfig(
        max_seq_len=draw(st.integers(1, 17)), vocab_size=vocab, padded_vocab_size=vocab + draw(st.integers(0, 9)),
        num_layers=draw(st.integers(1, 4)), num_heads=heads, channels=heads * draw(st.integers(1, 5)),
    )  # fmt: skip


def compiled(function: Any) -> Any:
    """A function as one program: operation by operation each would be one for each shape."""
    return jax.jit(function, compiler_options=QUICK)


def numbered(config: ModelConfig, dtype: Any = np.float32) -> np.ndarray:
    """A flat buffer (flat_size,) whose elements are all different, from 1; zeros behind them."""
    flat = np.zeros(flat_size(config), dtype)
    flat[: num_parameters(config)] = np.arange(1, num_parameters(config) + 1)
    return flat


def rows_of(config: ModelConfig, devices: int) -> np.ndarray:
    """What `own_rows` says on each device, (n, r)."""
    call = jax.vmap(lambda device: own_rows(config, devices, device))
    return np.asarray(compiled(call)(np.arange(devices, dtype=np.int32)))


@given(shapes())
@settings(max_examples=50)
def test_every_row_is_in_one_unit(config: ModelConfig) -> None:
    """Tensors, and each layer's slices of them, are whole rows; the units are what the docstring lists."""
    C, found = config.channels, units(config)
    assert [unit.name for unit in found] == ["wte", "ends", *(f"layer {i}" for i in range(config.num_layers))]
    assert [unit.rows for unit in found] == [
        config.padded_vocab_size, config.max_seq_len + 2, *[12 * C + 13] * config.num_layers,
    ]  # fmt: skip
    rows = [row for unit in found for first, count in unit.pieces for row in range(first, first + count)]
    assert sorted(rows) == list(range(total_rows(config)))
    assert total_rows(config) * C == num_parameters(config)
    for spec in tensor_specs(config):
        layers = config.num_layers if BY_NAME[spec.name].layered else 1
        assert spec.offset % C == 0 and spec.size % (layers * C) == 0, spec.name
    for unit in found:
        assert unit.starts == [sum(count for _, count in unit.pieces[:i]) for i in range(len(unit.pieces))]


@pytest.mark.slow
@given(shapes(), st.sampled_from(DEVICES))
@settings(max_examples=12)
def test_every_row_is_on_one_device(config: ModelConfig, devices: int) -> None:
    """Each device has its n-th of each unit, one unit after the other; what fills up is R."""
    found, R = rows_of(config, devices), total_rows(config)
    assert found.shape == (devices, split_rows(config, devices)) and found.dtype == np.int32
    assert sorted(found[found < R]) == list(range(R))
    assert found.max() <= R
    start = 0
    for unit in units(config):
        rows = [row for first, count in unit.pieces for row in range(first, first + count)]
        share = unit.share(devices)
        rows += [R] * (share * devices - len(rows))
        np.testing.assert_array_equal(found[:, start : start + share].reshape(-1), rows)
        start += share
    assert start == split_rows(config, devices)


@pytest.mark.slow
@given(shapes(), st.sampled_from(DEVICES), st.sampled_from([np.float32, np.float16, jnp.bfloat16]))
@settings(max_examples=12)
def test_the_host_splits_as_the_devices_do_and_joins_again(config: ModelConfig, devices: int, dtype: Any) -> None:
    flat = numbered(config, dtype)
    split = split_on_host(flat, config, devices)
    assert split.shape == (split_size(config, devices),) and split.dtype == dtype
    rows, parts = rows_of(config, devices), split.reshape(devices, -1)
    table = np.append(
        flat[: num_parameters(config)].reshape(-1, config.channels), np.zeros((1, config.channels), dtype), 0
    )
    assert table[rows].tobytes() == parts.tobytes()
    for part, numbers in zip(parts, rows, strict=True):
        filling = part.reshape(-1, config.channels)[numbers == total_rows(config)]
        assert not filling.astype(np.float32).any()
    for own in (range(devices // 2), range(devices // 2, devices)):
        some = parts[own.start : own.stop].reshape(-1)
        np.testing.assert_array_equal(split_on_host(flat, config, devices, own), some)
    joined = joined_on_host(np.split(split, devices), config)
    assert joined.dtype == dtype and joined.tobytes() == flat.tobytes()


@pytest.mark.parametrize("devices", DEVICES)
def test_the_buffer_of_a_real_shape(devices: int) -> None:
    config = parse_descriptor("L3-NH2-C48-V97-T32")
    flat = np.random.default_rng(0).normal(size=flat_size(config)).astype(np.float32)
    flat[num_parameters(config) :] = 0
    assert joined_on_host(np.split(split_on_host(flat, config, devices), devices), config).tobytes() == flat.tobytes()


def test_of_one_device_the_units_stand_one_after_the_other() -> None:
    config = ModelConfig(3, 4, 5, 2, 1, 2)
    flat = numbered(config)
    tensors = views(flat, config)
    of_layers = [[tensor[i] for name, tensor in tensors._asdict().items() if BY_NAME[name].layered] for i in range(2)]
    expected = [tensors.wte, tensors.wpe, tensors.lnfw, tensors.lnfb, *of_layers[0], *of_layers[1]]
    found = split_on_host(flat, config, 1)
    np.testing.assert_array_equal(found, np.concatenate([each.reshape(-1) for each in expected]))


@given(shapes(), st.integers(0, 3))
@settings(max_examples=10)
def test_units_have_the_tensors_of_the_flat_buffer(config: ModelConfig, filled: int) -> None:
    """Those with a layer axis one by one; rows that fill a unit up are left out."""
    flat = numbered(config)
    rows = flat[: num_parameters(config)].reshape(-1, config.channels)
    found = [
        np.concatenate([*(rows[first : first + count] for first, count in unit.pieces),
                        np.full((filled, config.channels), np.nan, np.float32)]) for unit in units(config)
    ]  # fmt: skip
    expected = separate(flat, config)
    jax.tree.map(np.testing.assert_array_equal, tensors_in(found, config), expected)
    assert tensors_of(expected, config) is expected


@given(shapes(), st.integers(0, 3), st.data())
@settings(max_examples=10)
def test_units_of_a_gradient_become_the_flat_one(config: ModelConfig, filled: int, data: st.DataObject) -> None:
    """Of a batch that reaches only some positions; rows that fill a unit up are left out."""
    flat = numbered(config)
    tensors = views(flat, config)
    positions = data.draw(st.integers(1, config.max_seq_len))
    tensors.wpe[positions:] = 0
    layers = [BlockParams(*(getattr(tensors, name)[i] for name in BlockParams._fields))
              for i in range(config.num_layers)]  # fmt: skip
    own = {name: getattr(tensors, name) for name in ("wte", "lnfw", "lnfb")}
    gradients = Gradients({**own, "wpe": tensors.wpe[:positions]}, tuple(layers))
    whole = next(spec for spec in tensor_specs(config) if spec.name == "wpe")

    def both(gradients: Gradients) -> tuple[jax.Array, jax.Array]:
        own = gradients.own
        ends = (*pieces_of(own["wpe"], whole), own["lnfw"], own["lnfb"])
        found = [as_rows(each, config.channels) for each in (own["wte"], ends, *gradients.blocks)]
        assert [len(rows) for rows in found] == [unit.rows for unit in units(config)]
        found = [jnp.pad(rows, ((0, filled), (0, 0)), constant_values=jnp.nan) for rows in found]
        return flat_of(found, config), flatten_gradients(gradients, config, jnp.float32)

    ours, expected = compiled(both)(gradients)
    assert np.asarray(ours).tobytes() == np.asarray(expected).tobytes() == flat.tobytes()
