"""Who is to blame when a run of several processes cannot continue: a verdict from what is known of all, or none.

Leaves out how it becomes known (hub.py, parent.py) and what follows (parent.py). Nothing here waits or asks the time.

Each process is a parent and its worker. The worker's thread beats while its main thread may hang, so each phase of a
run has its limit besides. Where one process fails, the exchanges of all others break: JAX's runtime then ends them with
SIGABRT, or an error of theirs is raised. That is a consequence mostly, and is named only where no cause is found.
"""

import signal
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from llmc_jax.base.errors import ExitCode
from llmc_jax.base.files import quoted
from llmc_jax.cluster.messages import CAUSES, Ended, Verdict

LIMITS = {  # x --peer-timeout
    "start": 10, "compile": 30, "step": 5, "validate": 15, "evaluate": 15, "sample": 5, "save": 15, "end": 5,
}  # fmt: skip
MEETING = 15  # likewise: how long the others wait for one that does not arrive at a meeting
HELD_BACK = 5.0  # seconds for which a consequence waits for its cause


def end_of(code: int) -> Ended:
    """Return how a worker has ended that exits without a word; code: minus the signal if one has killed it."""
    if code == -signal.SIGABRT:
        return Ended("broken", 128 - code, "its worker ended by SIGABRT, as JAX's runtime does")
    if code < 0:
        return Ended("killed", -code)
    if code == ExitCode.STOPPED:  # run/stopping.py
        return Ended("failed", code, "a second signal made it exit at once")
    return Ended("failed" if code else "end", code)


@dataclass
class Peer:
    """What is known of one process. Times are seconds of one clock, that of whoever judges."""

    rank: int
    host: str
    pid: int  # of the parent
    worker: int = 0  # pid of the worker; 0 before it started
    heard: float = 0.0  # when the parent was heard of
    beat: float = 0.0  # when the worker was heard of
    step: int = 0
    phase: str = "start"
    since: float = 0.0  # when the phase began
    gone: bool = False  # the connection broke without a goodbye
    ended: Ended | None = None
    ended_at: float = 0.0


class Meeting(NamedTuple):
    """A meeting for which not all have come."""

    name: str
    since: float  # when the first one came
    missing: tuple[int, ...]


def beat_interval(timeout: float) -> float:
    """Return the seconds between two beats."""
    return min(1.0, timeout / 10)


def judge(peers: Sequence[Peer], meetings: Iterable[Meeting], now: float, timeout: float) -> Verdict | None:
    """Return who is to blame that the run cannot continue, None while it can, or while that may still become known.

    timeout: seconds of --peer-timeout. Causes come before consequences, and what is certain before what is not.
    """
    verdict = _ended(peers, ("killed", "failed")) or _unheard(peers, now, timeout) or _silent(peers, now, timeout)
    verdict = verdict or _absent(peers, meetings, now, timeout) or _hung(peers, now, timeout)
    return verdict or _broken(peers, now, timeout)


def judge_hub(peer: Peer, now: float, timeout: float) -> Verdict | None:
    """Return what the others say of rank 0, over which all messages go: that it has gone or is silent."""
    return _unheard([peer], now, timeout)


def judge_start(come: Collection[Peer], size: int, waited: float, timeout: float) -> Verdict | None:
    """Return who has not arrived at the start in time, or has come and left again."""
    there = sorted(come, key=lambda peer: peer.rank)
    missing = sorted(set(range(size)) - {peer.rank for peer in there})
    if not missing or waited < timeout:
        return None
    who = ", ".join(f"rank {peer.rank} ({peer.host}, process {peer.pid})" for peer in there) or "nobody"
    words = f"within {timeout:g} s (--peer-timeout), but {who} did"
    return Verdict(missing[0], "", 0, "missing", words=words, also=tuple(missing[1:]))


def _verdict(peers: Sequence[Peer], cause: str, words: str = "", parent: bool = False) -> Verdict | None:
    """Return the verdict on the first of some processes, of which the others are likewise; None on none."""
    if not peers:
        return None
    peer, *others = peers
    pid, also = peer.pid if parent else peer.worker or peer.pid, tuple(other.rank for other in others)
    return Verdict(peer.rank, peer.host, pid, cause, peer.step, peer.phase, words, also)


def _ended(peers: Iterable[Peer], kinds: Collection[str]) -> Verdict | None:
    ends = [(peer.ended_at, peer.rank, peer, peer.ended) for peer in peers if peer.ended and peer.ended.kind in kinds]
    if not ends:
        return None
    _, _, peer, ended = min(ends)
    return _verdict([peer], ended.kind, _end_words(ended))


def _end_words(ended: Ended) -> str:
    if ended.kind != "killed":
        return f"{ended.words or 'its own output says why'} (status {ended.status})"
    try:
        name = signal.Signals(ended.status).name
    except ValueError:
        name = f"signal {ended.status}"
    return f"{name}{', perhaps because memory ran out' if ended.status == signal.SIGKILL else ''}"


def _unheard(peers: Sequence[Peer], now: float, timeout: float) -> Verdict | None:
    gone = [peer for peer in peers if peer.gone]
    silent = sorted((peer for peer in peers if now - peer.heard > timeout), key=lambda peer: peer.heard)
    return _verdict(gone[:1], "gone", parent=True) or _verdict(silent, "unheard", f"{timeout:g} s", parent=True)


def _silent(peers: Iterable[Peer], now: float, timeout: float) -> Verdict | None:
    fresh = 3 * beat_interval(timeout)  # of a parent that is silent too, nobody knows the worker
    silent = [peer for peer in peers if not peer.ended and now - peer.beat > timeout and now - peer.heard <= fresh]
    return _verdict(sorted(silent, key=lambda peer: peer.beat), "silent", f"{timeout:g} s")


def _absent(peers: Sequence[Peer], meetings: Iterable[Meeting], now: float, timeout: float) -> Verdict | None:
    by_rank = {peer.rank: peer for peer in peers}
    for name, since, ranks in meetings:
        missing = [by_rank[rank] for rank in ranks]
        if left := [peer for peer in missing if peer.ended and peer.ended.kind == "end"]:
            return _verdict(left[:1], "left", name)
        limit = timeout * max(MEETING, *(_limit(peer) for peer in missing))
        going = [peer for peer in missing if not peer.ended]
        if going and now - since > limit:
            going.sort(key=lambda peer: (peer.step, peer.since))
            return _verdict(going, "absent", f"{name} for {limit:g} s")
    return None


def _limit(peer: Peer) -> float:
    return LIMITS.get(peer.phase, max(LIMITS.values()))


def _hung(peers: Iterable[Peer], now: float, timeout: float) -> Verdict | None:
    """Return who is beyond its phase's limit, of those furthest behind, for whom the others wait.

    Of those in one step, whoever still has time may be the one for whom the others wait: it may be in a phase with a
    longer limit, or get on with one by itself. Once nobody has, the one who began its phase first is named, and the
    others beside it.
    """
    going = [peer for peer in peers if not peer.ended]
    last = [peer for peer in going if peer.step == min(peer.step for peer in going)]
    if not last or any(now - peer.since <= _limit(peer) * timeout for peer in last):
        return None
    last.sort(key=lambda peer: peer.since)
    words = f"phase {last[0].phase} may take {_limit(last[0]) * timeout:g} s; a longer --peer-timeout raises it"
    return _verdict(last, "hung", words)


def _broken(peers: Sequence[Peer], now: float, timeout: float) -> Verdict | None:
    broken = [peer for peer in peers if peer.ended and peer.ended.kind == "broken"]
    if not broken or now - min(peer.ended_at for peer in broken) < min(HELD_BACK, timeout):
        return None
    late = 3 * beat_interval(timeout)
    if any(now - (peer.heard if peer.ended else min(peer.heard, peer.beat)) > late for peer in peers):
        return None  # somebody is silent: its timeout decides
    return _ended(broken, ("broken",))


def line_of(verdict: Verdict, folder: str = "") -> str:
    """Return a verdict as a sentence; folder: the run's, where it is known."""
    who = f"rank {verdict.rank}"
    place = [f"on {verdict.host}"] * bool(verdict.host) + [f"(process {verdict.pid})"] * bool(verdict.pid)
    parts = [" ".join([who, *place, CAUSES[verdict.cause].format(words=verdict.words)])]
    if verdict.also:
        parts.append(f"likewise rank{'s' * (len(verdict.also) > 1)} {', '.join(map(str, verdict.also))}")
    if verdict.cause not in ("missing", "refused"):
        parts.append(f"last known in step {verdict.step}, phase {verdict.phase}")
    parts.append("all processes end")
    if folder and "-y 1 -o " not in verdict.words:  # which knows better, of a folder that was moved
        parts.append(f"-y 1 -o {quoted(folder)} resumes from the last checkpoint")
    return "; ".join(parts)
