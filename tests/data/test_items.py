"""Whether items fit a number of positions, and what is left of those that are cropped."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc_jax.base.errors import InputError
from llmc_jax.data.items import Item, check_fit, cropped

SHORT = Item("short", (1, 2), ((3,), (4, 5)), 0)  # 4 tokens: 3 positions
LONG = Item("long", (1, 2, 3, 4), ((5,), (6, 7, 8)), 1)  # 7 tokens: 6 positions


def test_what_fits() -> None:
    check_fit([SHORT, LONG], 6, "a.bin")
    check_fit([], 1, "a.bin")
    with pytest.raises(InputError, match=r"^a\.bin: item long has 7 tokens and 1 of 2 .* T=5 takes 6"):
        check_fit([SHORT, LONG], 5, "a.bin")


def test_cropped() -> None:
    assert cropped(LONG, 6) == LONG
    assert cropped(SHORT, 4) == SHORT
    assert cropped(LONG, 4) == LONG._replace(context=(3, 4))
    assert cropped(LONG, 3) == LONG._replace(context=(4,))
    with pytest.raises(InputError, match=r"item long: .* 3 tokens.* T=2;"):
        cropped(LONG, 2)


ids = st.lists(st.integers(0, 9), min_size=1, max_size=6).map(tuple)


@given(st.lists(st.builds(Item, st.just("x"), ids, st.lists(ids, min_size=1, max_size=3).map(tuple), st.just(0))))
def test_cropped_items_fit(items: list[Item]) -> None:
    for positions in range(6, 13):
        after = [cropped(item, positions) for item in items]
        check_fit(after, positions, "")
        for old, new in zip(items, after, strict=True):
            assert new.completions == old.completions
            assert old.context[-len(new.context) :] == new.context
            assert new.context == old.context or new.longest - 1 == positions
