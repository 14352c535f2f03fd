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


def test_speed_is_llmcs_average() -> None:
    # the loop of train_gpt2.cu, transcribed: ema starts at 0, step 0 does not enter, bias correction with 0.95^step
    speeds = [100.0, 900.0, 1000.0, 1100.0, 500.0]
    expected, ema = [], 0.0
    for step, tokens_per_second in enumerate(speeds):
        shown = tokens_per_second
        if step > 0:
            ema = 0.95 * ema + 0.05 * tokens_per_second
            shown = ema / (1.0 - 0.95**step)
        expected.append(shown)
    average, got = Average(), []
    for tokens_per_second in speeds:
        average = average.then(tokens_per_second)
        got.append(average.mean or tokens_per_second)
    assert got == pytest.approx(expected, rel=1e-12)
    assert got[1] == pytest.approx(900.0)


@given(st.lists(st.floats(1, 1e7), min_size=2, max_size=50))
def test_speed_lies_between_the_speeds_seen(speeds: list[float]) -> None:
    average = Average()
    for tokens_per_second in speeds:
        average = average.then(tokens_per_second)
    assert average.mean is not None
    assert min(speeds[1:]) * 0.999999 <= average.mean <= max(speeds[1:]) * 1.000001
