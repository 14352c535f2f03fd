"""The initial parameters against numbers that llm.c's rand.h printed for d12, and against the order of the draws."""

import numpy as np
import pytest

from llmc_jax.base.rng import Mt19937
from llmc_jax.config.model import ModelConfig, parse_descriptor
from llmc_jax.models.gpt2.init import random_parameters
from llmc_jax.models.gpt2.tensors import TENSORS, Params
from llmc_jax.models.layout import flat_size, views

# d12, seed 42, printed by llm.c's llmc/rand.h in the order of gpt2_build_from_descriptor (f1e2ace, gcc, glibc 2.36),
# before the rounding to bfloat16: of each tensor the first four values, the last one, sum, sum of squares.
D12 = {
    "wte": ([0.0385382995, 0.0297456831, 0.0180143435, -0.0421104282], 0.00170378527, 95.6227084, 15435.852639),
    "wpe": ([-0.00916235521, -0.018614769, -0.0294702277, -0.00321658584], 0.016040463, -20.8053324, 314.729292826),
    "qkvw": ([-0.0045566773, 0.00723999506, 0.0163001623, -0.0109933], 0.0179533828, 90.0957849, 8494.20162452),
    "attprojw": ([0.00113274355, 0.00542639615, 0.00018079413, 0.00136883021], 0.00288270414, 13.7989056, 118.00210783),
    "fcw": ([-0.0111787794, 0.0200366024, 0.0382305384, 0.0188154224], -0.0147094708, 8.62745326, 11326.8957719),
    "fcprojw": (
        [0.00437752157, -0.00717385672, -0.00581803452, -0.00102986814], -0.00280294404, -24.0442801, 471.869152799,
    ),
}  # fmt: skip
SMALL = ModelConfig(
    max_seq_len=24, vocab_size=257, padded_vocab_size=384, num_layers=3, num_heads=2, channels=10
)  # tensors that are not a multiple of 16


@pytest.fixture(scope="module")
def d12() -> Params:
    config = parse_descriptor("d12")
    flat = random_parameters(config)
    assert flat.dtype == np.float32 and flat.shape == (flat_size(config),)
    return views(flat, config)


@pytest.mark.parametrize("name", D12)
def test_d12_is_llmc_s(d12: Params, name: str) -> None:
    first, last, total, squares = D12[name]
    tensor = (d12.wte[:50257] if name == "wte" else getattr(d12, name)).ravel()
    np.testing.assert_allclose([*tensor[:4], tensor[-1]], [*first, last], rtol=0, atol=1e-6)
    # NumPy's float32 cosine errs by up to 1e-9 at values of 0.02, with a mean of 6e-12 that sums do not average out;
    # another stream of the 38.6 million numbers of wte would be off by 0.02 * sqrt(n) = 124, where this allows 0.004
    assert tensor.sum(dtype=np.float64) == pytest.approx(total, abs=1e-10 * tensor.size)
    assert np.einsum("i,i->", tensor, tensor, dtype=np.float64) == pytest.approx(squares, rel=1e-8)


def test_layernorms_biases_and_padding(d12: Params) -> None:
    for name in ("ln1w", "ln2w", "lnfw"):
        assert (getattr(d12, name) == 1).all()
    for name in {tensor.name for tensor in TENSORS if not tensor.matrix} - {"ln1w", "ln2w", "lnfw"}:
        assert (getattr(d12, name) == 0).all()
    assert (d12.wte[50257:] == 0).all()
    assert (d12.wte[:50257] != 0).any(axis=1).all()


@pytest.mark.parametrize("seed", [42, 7])
def test_the_order_of_the_draws(seed: int) -> None:
    """Another model and seed, tensor by tensor from the generator in llm.c's order."""
    params = views(random_parameters(SMALL, seed), SMALL)
    rng = Mt19937(seed)
    small = 0.02 / np.sqrt(6)
    np.testing.assert_array_equal(params.wte[:257].ravel(), rng.normal_(np.empty(2570, np.float32), 0.0, 0.02))
    np.testing.assert_array_equal(params.wpe.ravel(), rng.normal_(np.empty(240, np.float32), 0.0, 0.02))
    for layer in range(3):
        np.testing.assert_array_equal(params.qkvw[layer].ravel(), rng.normal_(np.empty(300, np.float32), 0.0, 0.02))
        np.testing.assert_allclose(
            params.attprojw[layer].ravel(), rng.normal_(np.empty(100, np.float32), 0.0, small), rtol=1e-6
        )
        np.testing.assert_array_equal(params.fcw[layer].ravel(), rng.normal_(np.empty(400, np.float32), 0.0, 0.02))
        np.testing.assert_allclose(
            params.fcprojw[layer].ravel(), rng.normal_(np.empty(400, np.float32), 0.0, small), rtol=1e-6
        )


def test_a_model_smaller_than_a_block() -> None:
    """C=1: tensors under 16 values take the stream of doubles; the result must be finite and drawn for every value."""
    tiny = ModelConfig(max_seq_len=3, vocab_size=5, padded_vocab_size=128, num_layers=2, num_heads=1, channels=1)
    params = views(random_parameters(tiny), tiny)
    rng = Mt19937(42)
    np.testing.assert_array_equal(params.wte[:5].ravel(), rng.normal_(np.empty(5, np.float32), 0.0, 0.02))
    np.testing.assert_array_equal(params.wpe.ravel(), rng.normal_(np.empty(3, np.float32), 0.0, 0.02))
    np.testing.assert_array_equal(params.qkvw[0].ravel(), rng.normal_(np.empty(3, np.float32), 0.0, 0.02))
