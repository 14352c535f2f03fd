"""The figures of a step: speed and utilization."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc_jax.run.figures import Average, utilization_text


@pytest.mark.parametrize(
    ("rate", "peak", "precision", "expected"),
    [
        (3.76e14, 9.894e14, "bf16", "38.0% bf16 MFU"),
        (3e13, 1.56e14, "tf32", "19.2% tf32 MFU"),
        (1.234e11, None, "fp32", "123.4 GFLOP/s"),
        (9.876e13, None, "bf16", "98.76 TFLOP/s"),
    ],
)
def test_utilization(rate: float, peak: float | None, precision: str, expected: str) -> None:
    assert utilization_text(rate, peak, precision) == expected


@given(st.lists(st.floats(1, 1e7), min_size=2, max_size=50))
def test_speed_is_llmcs_average(speeds: list[float]) -> None:
    """The loop of train_gpt2.cu: ema starts at 0, step 0 does not enter, bias correction with 0.95^step."""
    average, ema = Average().then(speeds[0]), 0.0
    assert average.mean is None
    for step, tokens_per_second in enumerate(speeds[1:], start=1):
        average = average.then(tokens_per_second)
        ema = 0.95 * ema + 0.05 * tokens_per_second
        assert average.mean == pytest.approx(ema / (1.0 - 0.95**step), rel=1e-12)
