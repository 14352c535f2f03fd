"""docs/processes.md says what the program says: the lines of each failure, and the limits of phases."""

from pathlib import Path

import pytest

from llmc_jax.base.errors import EXIT_MEANINGS
from llmc_jax.cluster.hub import misfit
from llmc_jax.cluster.judge import LIMITS, MEETING, Ended, Peer, Verdict, judge, judge_start, line_of
from llmc_jax.cluster.messages import Hello
from llmc_jax.config.train import BY_NAME

PAGE = Path(__file__).resolve().parents[2] / "docs/processes.md"
TIMEOUT = int(BY_NAME["peer_timeout"].default)
NOW = 1e6
RUN = "runs/124M"


def peers(**of_rank_1: object) -> list[Peer]:
    """Two processes in the same step, of which something holds for the second."""
    found = [Peer(rank, f"node{rank + 1}", 8039 + rank, 8045 + rank, NOW, NOW, 60, "step", NOW) for rank in range(2)]
    for name, value in of_rank_1.items():
        setattr(found[1], name, value)
    return found


END = "; all processes end"
LATER = f"; last known in step 60, phase step{END}; -y 1 -o {RUN} resumes from the last checkpoint"


def said(verdict: Verdict | None, end: str = LATER) -> str:
    """The line, without its end, which is the same for many."""
    assert verdict
    line = line_of(verdict, RUN if end == LATER else "")
    assert line.endswith(end)
    return line.removesuffix(end)


def refused(rank: int, size: int) -> str:
    """What is said of a process that belongs to two others, or believes so."""
    hello = Hello(rank, size, "", "", "node2", 8041)
    words = misfit(hello, 2, [Peer(1, "node2", 8040)])
    return said(Verdict(rank, "node2", 8041, "refused", words=words), END)


def lines() -> dict[str, str]:
    late = NOW - TIMEOUT - 1
    hung = peers(since=NOW - LIMITS["step"] * TIMEOUT - 2)
    hung[0].since += 1 + (hung[1].since - NOW)
    return {
        "killed": said(judge(peers(ended=Ended("killed", 9), ended_at=NOW), [], NOW, TIMEOUT)),
        "silent": said(judge(peers(beat=late), [], NOW, TIMEOUT)),
        "gone": said(judge(peers(gone=True), [], NOW, TIMEOUT)),
        "unheard": said(judge(peers(heard=late, beat=late), [], NOW, TIMEOUT)),
        "missing": said(judge_start(peers()[:1], 2, TIMEOUT, TIMEOUT), END),
        "twice": refused(1, 2),
        "size": refused(1, 3),
        "hung": said(judge(hung, [], NOW, TIMEOUT)),
        "failed": said(judge(peers(ended=Ended("failed", 2, "data/b.bin: damaged"), ended_at=NOW), [], NOW, TIMEOUT)),
    }


@pytest.mark.parametrize("cause", lines())
def test_the_line_of_a_failure_stands_there(cause: str) -> None:
    assert f"`{lines()[cause]}`" in PAGE.read_text()


def test_how_the_lines_end_the_limits_and_the_statuses_stand_there() -> None:
    text = PAGE.read_text()
    assert all(f"`{words}`" in " ".join(text.split()) for words in (LATER, END))
    for name, limit in [*LIMITS.items(), ("a meeting of all, until the last comes", MEETING)]:
        assert f"| {name} | {limit} | {limit * TIMEOUT // 60} min |" in text
    for status in EXIT_MEANINGS:
        assert f"\n| {int(status)} | " in text
