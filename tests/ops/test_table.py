"""What becomes of products that do two operations' work when a model has one of the two of its own."""

from typing import Any

import pytest

from llmc_jax.ops import gelu, head
from llmc_jax.ops.table import PARTS, XLA, Operations, without_replaced

FUSED: dict[str, Any] = {
    "head_weights": head.head_weights,
    "linear_gelu_forward": gelu.linear_gelu_forward,
    "linear_gelu_backward": gelu.linear_gelu_backward,
}
FULL = XLA._replace(**FUSED)
# Of each operation that a model replaces: the products that go. Of all others: none.
GONE = {
    "linear_forward": {"head_weights", "linear_gelu_forward"},
    "linear_backward": {"head_weights", "linear_gelu_backward"},
    "gelu_forward": {"linear_gelu_forward"},
    "gelu_backward": {"linear_gelu_backward"},
    "classifier": {"head_weights"},
    "classifier_forward": {"head_weights"},
}


def own(*_: Any) -> None:
    """An operation of a model's own."""


def absent(op: Operations) -> set[str]:
    return {name for name in FUSED if getattr(op, name) is None}


def test_the_products_are_the_optional_operations_and_their_parts_are_not() -> None:
    assert set(PARTS) == set(FUSED) == set(Operations._field_defaults) == absent(XLA)
    assert {part for parts in PARTS.values() for part in parts} == set(GONE)


@pytest.mark.parametrize("name", [name for name in Operations._fields if name not in FUSED])
def test_a_replaced_operation_takes_away_the_products_that_do_its_work(name: str) -> None:
    changed = FULL._replace(**{name: own})
    found = without_replaced(changed, FULL)
    assert absent(found) == GONE.get(name, set())
    gone: dict[str, Any] = dict.fromkeys(GONE.get(name, set()))
    assert found == changed._replace(**gone)  # nothing else has changed


def test_two_replaced_operations_take_away_both_s_products() -> None:
    found = without_replaced(FULL._replace(gelu_forward=own, classifier=own), FULL)
    assert absent(found) == {"linear_gelu_forward", "head_weights"}


def test_nothing_replaced_nothing_gone() -> None:
    assert without_replaced(FULL, FULL) == FULL
    assert without_replaced(XLA, XLA) == XLA


def test_a_product_of_the_model_s_own_stays() -> None:
    """Only where its parts are the program's."""
    changed = FULL._replace(head_weights=own, gelu_forward=own)
    assert without_replaced(changed, FULL) == changed._replace(linear_gelu_forward=None)


def test_products_that_were_never_there_stay_absent() -> None:
    assert absent(without_replaced(XLA._replace(linear_forward=own), XLA)) == set(FUSED)


def test_what_was_bound_anew_counts_as_another_function() -> None:
    """By identity: a wrapper of the same operation may do something else."""

    def wrapper(*args: Any) -> Any:
        return XLA.gelu_backward(*args)

    assert absent(without_replaced(FULL._replace(gelu_backward=wrapper), FULL)) == {"linear_gelu_backward"}
