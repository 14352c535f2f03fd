"""benchmarks/turns.py: in what order programs are measured, and what a ratio is of."""

import sys

from benchmarks.turns import Peer, Spread, blocks_in_turns, ratios, turns

ECHO = """
import json, sys
print("{}", flush=True)
for line in sys.stdin:
    print(json.dumps({"ms": [99, 1, 2, 3][:int(line)]}), flush=True)
"""


def test_rounds_go_forwards_and_backwards() -> None:
    assert list(turns(3, 3)) == [[0, 1, 2], [2, 1, 0], [0, 1, 2]]


def test_a_machine_that_slows_down_decides_no_ratio() -> None:
    """One program takes 2 units of time and the other 3, while the unit grows from round to round."""
    unit = iter([1, 1, 2, 2, 8, 8])
    times = blocks_in_turns({"ours": lambda: 2 * next(unit), "theirs": lambda: 3 * next(unit)}, 3)
    assert times == {"ours": [2, 4, 16], "theirs": [3, 6, 24]}
    assert ratios(times["theirs"], times["ours"]) == Spread(1.5, 1.5, 1.5)


def test_a_block_leaves_out_its_first_step() -> None:
    peer = Peer([sys.executable, "-c", ECHO]).wait_ready()
    try:
        assert peer.block(3) == 2
    finally:
        peer.close()
