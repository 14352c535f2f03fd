"""Weights, as sums lie in registers, are already the left operand of the next mma: what `relabelled` relies on.

Mosaic describes a layout by tilings; from that this test computes, without any GPU, which thread holds which element in
which register and at which place of it, for both layouts, and compares.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic

SHAPES = [(64, 16), (64, 32), (64, 64)]  # of tiles of scores


def elements(layout: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Logical index of what each register holds: (registers, warps, lanes..., vector, axes)."""
    tiled = layout.tiling.tile_shape(shape)
    warps = [d for d in layout.warp_dims if isinstance(d, int)]
    lanes = [d for d in layout.lane_dims if isinstance(d, int)]
    places = [*warps, *lanes, layout.vector_dim]
    sizes = [tiled[d] for d in places]
    found = []
    for register in np.ndindex(*layout.registers_shape(shape)):
        for place in np.ndindex(*sizes):
            index = list(register)
            for d, at in zip(places, place, strict=True):
                index[d] = at
            found.append(layout.tiling.untile_indices(tuple(index)))
    return np.array(found).reshape(-1, *sizes, len(shape))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_sums_are_a_left_operand(shape: tuple[int, int], dtype: Any) -> None:
    sums = plgpu.Layout.MMA_ACC(dtype).to_mgpu()
    operand = plgpu.Layout.MMA_LHS(dtype).to_mgpu()
    held, needed = elements(sums, shape), elements(operand, shape)
    assert np.prod(held.shape[:-1]) == np.prod(shape)  # each element once: nothing is replicated
    np.testing.assert_array_equal(held, needed)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_comparison_sees_another_layout(shape: tuple[int, int]) -> None:
    """The right operand's registers are others; so are those of wgmma's sums in the place of a transposed matrix."""
    sums = elements(plgpu.Layout.MMA_ACC(jnp.bfloat16).to_mgpu(), shape)
    other = elements(plgpu.Layout.WGMMA_TRANSPOSED.to_mgpu(), shape)
    assert sums.shape != other.shape or (sums != other).any()


def test_the_layout_is_the_one_that_kernels_use() -> None:
    assert mosaic.MmaProducts(jnp.bfloat16, False).layout == plgpu.Layout.MMA_ACC(jnp.bfloat16)
