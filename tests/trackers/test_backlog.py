"""The bounded queue between a run's file and a tracker."""

import threading

from hypothesis import given
from hypothesis import strategies as st

from llmc_jax.trackers.backlog import Backlog
from llmc_jax.trackers.rows import Row

WAIT = 60.0  # seconds, which no test needs


def train(step: int) -> Row:
    return Row(step, 0.0, {"train/loss": 1.0}, may_drop=True)


def val(step: int) -> Row:
    return Row(step, 0.0, {"val/loss": 1.0})


@given(kinds=st.lists(st.booleans(), max_size=60), room=st.integers(1, 20))
def test_only_steps_are_dropped_and_each_is_counted(kinds: list[bool], room: int) -> None:
    most = room + kinds.count(False)  # more than must not be dropped, so that nothing waits
    backlog = Backlog(most)
    for step, is_train in enumerate(kinds):
        backlog.put(train(step) if is_train else val(step))
        assert backlog.left <= most
    backlog.close()
    kept = backlog.take(most, 0.0)
    assert backlog.over
    assert [row.step for row in kept if not row.may_drop] == [step for step, each in enumerate(kinds) if not each]
    assert [row.step for row in kept] == sorted(row.step for row in kept)
    assert len(kept) + backlog.dropped == len(kinds)


def test_a_full_queue_keeps_the_shape_of_a_curve() -> None:
    backlog = Backlog(100)
    for step in range(1000):
        backlog.put(train(step))
    steps = [row.step for row in backlog.take(100, 0.0)]
    assert steps[-1] == 999
    assert backlog.dropped == 1000 - len(steps)
    assert min(steps) < 990 - 100  # older ones are there too


def test_a_row_that_must_not_be_dropped_waits_for_room() -> None:
    backlog, done = Backlog(1), threading.Event()
    backlog.put(val(0))

    def add() -> None:
        backlog.put(val(1))
        done.set()

    threading.Thread(target=add, daemon=True).start()
    assert not done.wait(0.05)
    assert backlog.take(1, WAIT) == [val(0)]
    assert done.wait(WAIT)
    assert backlog.take(1, WAIT) == [val(1)]
    assert backlog.dropped == 0


def test_in_a_hurry_validations_come_first() -> None:
    backlog = Backlog()
    for row in (train(0), val(1), train(2), val(3)):
        backlog.put(row)
    backlog.hurry()
    assert [row.step for row in backlog.take(4, 0.0)] == [1, 3, 0, 2]


def test_what_comes_after_the_end_counts_as_dropped() -> None:
    backlog = Backlog()
    backlog.close()
    backlog.put(val(0))
    assert (backlog.over, backlog.dropped, backlog.take(1, 0.0)) == (True, 1, [])
