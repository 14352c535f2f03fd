"""Answers in parts are the answers; errors of a whole are those of its parts together."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmc_jax.ops import attention
from llmc_jax.trials import problems, reference


def test_attention_by_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a few rows at a time: values and gradients in float64 as with the whole matrix."""
    monkeypatch.setattr(problems, "SCORES", 2 * 2 * 12 * 3)  # three rows at a time
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        qkv, dout = (jnp.asarray(rng.standard_normal((2, 12, width))) for width in (48, 16))
        out, att = attention.attention_forward(qkv, 2)
        wanted = [out, *attention.attention_backward(dout, qkv, out, att, 2)]
        out, _ = problems.by_blocks_forward(qkv, 2)
        found = [out, *problems.by_blocks_backward(dout, qkv, out, None, 2)]
        assert "length=4" in str(jax.make_jaxpr(problems.by_blocks_forward, static_argnums=1)(qkv, 2))
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


SIZES: dict[str, list[int]] = {
    "layernorm_forward": [10, 16], "layernorm_backward": [10, 16], "residual_layernorm_forward": [10, 16],
    "residual_layernorm_backward": [10, 16], "gelu_forward": [10, 16], "gelu_backward": [10, 16],
    "classifier": [10, 20, 24], "attention": [3, 8, 2, 4], "relu_attention": [3, 8, 2, 4],
    "softmax_forward": [3, 2, 8], "softmax_backward": [3, 2, 8],
}  # fmt: skip


QUICK = ("layernorm_forward", "layernorm_backward")  # rows, and sums over them; the others take seconds together


@pytest.mark.parametrize(
    "function", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in SIZES]
)
def test_parts_give_the_whole(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The errors of something wrong, with one part and with several; every output is compared."""
    given = problems.problem(function, "bf16", SIZES[function], 1)
    with jax.enable_x64(True):
        right = problems.expected(given)
    found = [output.astype(jnp.float32) + 0.01 * (k + 1) for k, output in enumerate(right)]
    whole = reference.errors(found, given, jnp.float64)
    assert all(error > 1e-3 and worst > 1e-3 for error, worst in whole)
    monkeypatch.setattr(reference, "PART", max(array.size for array in given.arrays) // 3)
    with jax.enable_x64(True):
        assert len(list(reference.parts(given, jnp.float64))) >= 3
    rows = reference.errors(found, given, jnp.float64)
    np.testing.assert_allclose(np.array(rows), np.array(whole), rtol=1e-6)


def test_what_is_not_a_number_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it is, in the first part or the last."""
    given = problems.problem("gelu_forward", "bf16", [10, 16], 1)
    monkeypatch.setattr(reference, "PART", 40)
    with jax.enable_x64(True):
        right: Any = problems.expected(given)[0].astype(jnp.float32)
    for row in (0, 9):
        ((error, worst),) = reference.errors([right.at[row, 3].set(jnp.nan)], given, jnp.float64)
        assert np.isnan(error) and np.isnan(worst)
