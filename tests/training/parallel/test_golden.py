"""llm.c's golden run (../shared/golden) on several devices, within the tolerance of one."""

import re
from pathlib import Path

import numpy as np
import pytest

from tests.training.parallel.spread import answer

SPREADS = [(4, 0, False), (2, 1, False), (4, 2, False), (4, 2, True)]


@pytest.fixture(scope="module")
def found(shared: Path) -> dict[tuple[int, int, bool], list[float]]:
    folder = shared / "golden"
    if not folder.is_dir():
        pytest.skip("../shared/golden is not here")
    return dict(zip(SPREADS, answer("golden", SPREADS, str(folder)), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("spread", SPREADS)
def test_the_golden_run(
    found: dict[tuple[int, int, bool], list[float]], spread: tuple[int, int, bool], shared: Path
) -> None:
    log = (shared / "golden" / "losses.log").read_text()
    expected = [float(loss) for loss in re.findall(r"^s:\d+ trl:(\S+)", log, re.M)]
    assert len(expected) == 41
    assert abs(found[spread][0] - expected[0]) <= 5e-6
    np.testing.assert_allclose(found[spread], expected, rtol=0, atol=3e-5)
