"""Cards by any of their names, and the agreement of the tables."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc_jax.base.errors import InputError
from llmc_jax.machine.cards import CARDS, GIB, name_of, named
from llmc_jax.machine.gpus import GPUS, TARGETS, machine_of

# ----- the tables -----------------------------------------------------------------------------------------------------


def test_every_card_stands_in_every_table() -> None:
    """CUDA finds at most what is sold, and not much less; those whose chips are alike differ in the right place."""
    assert {target.device_kind for target in TARGETS.values()} == set(CARDS)
    for kind, card in CARDS.items():
        assert 0.9 < card.memory / (GPUS[kind].memory * GIB) < 1.01, kind
        assert machine_of(kind).target is not None
        assert 30e9 < card.link < 1e12, kind


def test_pcie_cards_are_slower_than_those_on_boards() -> None:
    for board, pcie in (("h100", "h100-pcie"), ("a100", "a100-pcie")):
        fast, slow = (CARDS[named(name).device_kind] for name in (board, pcie))
        assert fast.link > 5 * slow.link and fast.memory == slow.memory


# ----- names ----------------------------------------------------------------------------------------------------------


@given(st.sampled_from(list(TARGETS)), st.booleans(), st.sampled_from(["", " ", "-", "_"]))
def test_a_card_has_its_short_name_and_the_drivers_in_any_case(short: str, upper: bool, hyphen: str) -> None:
    for name in (short.replace("-", hyphen), TARGETS[short].device_kind):
        assert named(name.upper() if upper else name.lower()) is TARGETS[short]
    assert name_of(TARGETS[short].device_kind) == short


def test_an_unknown_name_is_answered_with_the_list() -> None:
    with pytest.raises(InputError, match=f"take one of {', '.join(TARGETS)}"):
        named("zzzzzzzzzz")
