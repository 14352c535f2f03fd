"""Who is to blame, from data alone: no process, no waiting."""

import signal
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc_jax.base.errors import ExitCode
from llmc_jax.cluster.judge import (
    HELD_BACK,
    LIMITS,
    MEETING,
    Meeting,
    Peer,
    end_of,
    judge,
    judge_hub,
    judge_start,
    line_of,
)
from llmc_jax.cluster.messages import Ended, Verdict

NOW, TIMEOUT = 10_000.0, 120.0
SIZE = 4


def peer(rank: int, **known: Any) -> Peer:
    """One that is well: it was heard of just now, and began its step just now."""
    usual = {"host": f"host{rank}", "pid": 100 + rank, "worker": 200 + rank, "step": 7, "phase": "step"}
    return Peer(rank, **{**usual, "heard": NOW, "beat": NOW, "since": NOW, **known})


def peers_with(victim: int, **known: Any) -> list[Peer]:
    return [peer(rank, **(known if rank == victim else {})) for rank in range(SIZE)]


def judged(peers: list[Peer], *meetings: Meeting, now: float = NOW) -> Verdict | None:
    return judge(peers, meetings, now, TIMEOUT)


VICTIMS = st.integers(0, SIZE - 1)
PRIMARY = {  # what is known of a victim, and what is said of it
    "killed": {"ended": Ended("killed", 9), "ended_at": NOW},
    "failed": {"ended": Ended("failed", 2, "no file"), "ended_at": NOW},
    "gone": {"gone": True},
    "unheard": {"heard": NOW - TIMEOUT - 1, "beat": NOW - TIMEOUT - 1},
    "silent": {"beat": NOW - TIMEOUT - 1},
    "hung": {"since": NOW - LIMITS["step"] * TIMEOUT - 1, "step": 6},
}
ages = st.floats(0, TIMEOUT - 1)
WELL = st.builds(
    lambda silence, age, phase, share, ahead: {
        "heard": NOW - min(silence, age), "beat": NOW - age, "phase": phase,
        "since": NOW - share * LIMITS[phase] * TIMEOUT, "step": 7 + ahead,
    },
    ages, ages, st.sampled_from(sorted(LIMITS)), st.floats(0, 0.99), st.integers(0, 3),
)  # fmt: skip


@given(st.lists(WELL, min_size=1, max_size=SIZE))
def test_nobody_is_blamed_while_each_is_within_its_limits(known: list[dict[str, Any]]) -> None:
    peers = [peer(rank, **one) for rank, one in enumerate(known)]
    meeting = Meeting("save", NOW - MEETING * TIMEOUT + 1, (0,))
    assert judged(peers) is judged(peers, meeting) is None


@given(VICTIMS, st.sampled_from(sorted(PRIMARY)), st.data())
def test_the_victim_is_named_and_not_who_felt_it_first(victim: int, cause: str, data: st.DataObject) -> None:
    """With its step and phase, however long ago the others have lost an exchange with it."""
    peers = peers_with(victim, **PRIMARY[cause])
    for other in set(range(SIZE)) - {victim}:
        if data.draw(st.booleans()):
            peers[other].ended, peers[other].ended_at = end_of(-signal.SIGABRT), NOW - data.draw(ages)
    verdict = judged(peers)
    assert verdict and (verdict.rank, verdict.host, verdict.cause) == (victim, f"host{victim}", cause)
    step = PRIMARY[cause].get("step", 7)
    assert (verdict.step, verdict.phase, verdict.status) == (step, "step", ExitCode.PEER_LOST)
    assert verdict.pid == (100 if cause in ("gone", "unheard") else 200) + victim


@given(VICTIMS, st.floats(0, 1000))
def test_a_consequence_waits_for_its_cause_but_not_for_ever(messenger: int, age: float) -> None:
    peers = peers_with(messenger, ended=Ended("broken", 75, "gloo: connection closed"), ended_at=NOW - age)
    verdict = judged(peers)
    assert (verdict is None) == (age < HELD_BACK)
    assert verdict is None or (verdict.rank, verdict.cause) == (messenger, "broken")


@given(VICTIMS, VICTIMS, st.floats(4, TIMEOUT - 1), st.booleans())
def test_a_consequence_waits_as_long_as_somebody_is_silent(
    messenger: int, silent: int, age: float, its_parent_too: bool
) -> None:
    peers = peers_with(messenger, ended=Ended("broken", 75), ended_at=NOW - TIMEOUT)
    if messenger == silent:
        return
    peers[silent] = peer(silent, beat=NOW - age, heard=NOW - age if its_parent_too else NOW)
    assert judged(peers) is None
    later = NOW + TIMEOUT
    verdict = judged(
        [replace(one, heard=later, beat=later, since=later) if one.rank != silent
         else replace(one, heard=one.heard if its_parent_too else later) for one in peers], now=later,
    )  # fmt: skip
    assert verdict and (verdict.rank, verdict.cause) == (silent, "unheard" if its_parent_too else "silent")


@given(VICTIMS, st.sampled_from(sorted(LIMITS)), st.integers(0, 5), st.floats(0, 2))
def test_who_is_furthest_behind_is_named_once_its_phase_is_over(
    victim: int, phase: str, ahead: int, share: float
) -> None:
    """The others wait for it in a later step, as long as need be."""
    peers = [peer(rank, step=8 + ahead, since=NOW - 1e6) for rank in range(SIZE)]
    peers[victim] = peer(victim, phase=phase, since=NOW - share * LIMITS[phase] * TIMEOUT)
    verdict = judged(peers)
    assert (verdict is None) == (NOW - peers[victim].since <= LIMITS[phase] * TIMEOUT)
    assert verdict is None or (verdict.rank, verdict.cause, verdict.phase) == (victim, "hung", phase)


def test_in_one_step_the_longer_phase_is_waited_for_and_the_earlier_one_named() -> None:
    step, validate = LIMITS["step"] * TIMEOUT, LIMITS["validate"] * TIMEOUT
    waits = peer(0, since=NOW - step - 1)
    assert judged([waits, peer(1, phase="validate", since=NOW - step - 2)]) is None
    verdict = judged([waits, peer(1, phase="validate", since=NOW - validate - 1)])
    assert verdict and (verdict.rank, verdict.also) == (1, (0,))


@given(VICTIMS, st.floats(0, 100))
def test_who_does_not_come_to_a_meeting_is_named(victim: int, share: float) -> None:
    peers = [peer(rank) for rank in range(SIZE)]
    verdict = judged(peers, Meeting("save 7", NOW - share * TIMEOUT, (victim,)))
    assert (verdict is None) == (share <= MEETING)
    assert verdict is None or (verdict.rank, verdict.cause) == (victim, "absent")


@given(VICTIMS)
def test_who_has_ended_is_not_waited_for(victim: int) -> None:
    peers = peers_with(victim, ended=Ended("end", 0), beat=0.0, since=0.0)
    assert judged(peers) is None
    verdict = judged(peers, Meeting("save 7", NOW, (victim,)))
    assert verdict and (verdict.rank, verdict.cause) == (victim, "left")


@pytest.mark.parametrize(
    "code, ended",
    [(0, ("end", 0)), (2, ("failed", 2)), (1, ("failed", 1)), (-9, ("killed", 9)), (-6, ("broken", 134))],
)  # fmt: skip
def test_how_a_worker_ended_without_a_word(code: int, ended: tuple[str, int]) -> None:
    assert end_of(code)[:2] == ended


def test_rank_0_is_named_by_the_others() -> None:
    assert judge_hub(peer(0, beat=0.0, since=0.0), NOW, TIMEOUT) is None  # which it says itself
    for known, cause in (({"heard": NOW - TIMEOUT - 1}, "unheard"), ({"gone": True}, "gone")):
        verdict = judge_hub(peer(0, **known), NOW, TIMEOUT)
        assert verdict and (verdict.rank, verdict.cause, verdict.pid, verdict.step) == (0, cause, 100, 7)


@given(st.sets(VICTIMS), st.floats(0, 2 * TIMEOUT))
def test_who_has_not_come_is_named(come: set[int], waited: float) -> None:
    verdict = judge_start([peer(rank) for rank in come], SIZE, waited, TIMEOUT)
    missing = sorted(set(range(SIZE)) - come)
    assert (verdict is None) == (waited < TIMEOUT or not missing)
    if verdict:
        assert [verdict.rank, *verdict.also] == missing
        assert all(f"host{rank}" in verdict.words for rank in come)


def test_a_verdict_as_a_line() -> None:
    verdict = judged(peers_with(1, **PRIMARY["killed"]))
    assert verdict
    line = line_of(verdict, "my runs/a")
    for part in ("rank 1 on host1", "201", "SIGKILL", "step 7", "phase step", "-y 1 -o 'my runs/a'"):
        assert part in line
    assert "-y 1" not in line_of(verdict)
