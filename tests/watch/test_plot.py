"""Curves of characters: where the dots and marks stand, read back."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from llmc_jax.logs.curves import Curve, LossRange
from llmc_jax.watch.plot import BLANK, DOTS, Plot, plot

EMPTY = Curve(np.zeros(0, np.int64), np.zeros(0))


def curve(*values: float) -> Curve:
    return Curve(np.arange(len(values)), np.array(values, np.float64))


def dots(drawn: Plot) -> np.ndarray:
    """The dots of a plot without marks, (4 height, 2 width)."""
    codes = np.array([[ord(c) - BLANK if c != " " else 0 for c in row] for row in drawn.rows])
    height, width = codes.shape
    return ((codes[:, None, :, None] & DOTS[:, :][None, :, None, :]) > 0).reshape(4 * height, 2 * width)


def test_a_falling_line_goes_from_the_upper_left_to_the_lower_right() -> None:
    drawn = dots(plot(curve(*np.linspace(8, 0, 20).tolist()), EMPTY, LossRange(0, 8, log=False), 10, 5))
    assert drawn[np.arange(20), np.arange(20)].all() and drawn.sum() == 20


def test_a_jump_is_joined() -> None:
    drawn = dots(plot(curve(*[8.0] * 5, *[0.0] * 5), EMPTY, LossRange(0, 8, log=False), 5, 4))
    assert drawn[0, :5].all() and drawn[15, 5:].all() and drawn[1:15, 5].all()
    assert not drawn[1:, :5].any() and not drawn[:15, 6:].any()


def test_a_logarithmic_axis_gives_each_factor_the_same_room() -> None:
    drawn = dots(plot(curve(1.0, 10.0, 100.0), EMPTY, LossRange(1, 100, log=True), 10, 6))
    rows = drawn.argmax(0)
    assert (rows[0], rows[-1]) == (23, 0) and abs(int(rows[10]) - 12) <= 2


def test_marks_stand_at_their_steps_over_the_line() -> None:
    marks = Curve(np.array([0, 9]), np.array([1.0, 3.0]))
    drawn = plot(curve(*[2.0] * 10), marks, LossRange(1, 3, log=False), 10, 3)
    assert np.argwhere(drawn.marked).tolist() == [[0, 9], [2, 0]]
    assert drawn.rows[0][9] == "●" and drawn.rows[2][0] == "●"


@given(
    st.lists(st.floats(allow_nan=True), max_size=30), st.lists(st.floats(), max_size=5),
    st.integers(1, 40), st.integers(1, 12), st.booleans(), st.booleans(),
)  # fmt: skip
def test_any_values_fit_the_room(
    values: list[float], marks: list[float], width: int, height: int, log: bool, ascii_only: bool
) -> None:
    drawn = plot(curve(*values), curve(*marks), LossRange(0.5, 7.0, log), width, height, ascii_only)
    assert [len(row) for row in drawn.rows] == [width] * height == [width] * len(drawn.labels)
    assert len(drawn.axis) <= width and drawn.axis.startswith("0")
    assert not ascii_only or "".join(drawn.rows).isascii()
    assert bool(drawn.marked.any()) == bool(np.isfinite(marks).any())
