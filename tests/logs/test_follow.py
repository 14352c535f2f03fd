"""A metrics.jsonl read while it grows, is cut back, is replaced, or is damaged."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc_jax.base.errors import InputError
from llmc_jax.logs import follow
from llmc_jax.logs.follow import Follower, recent


def line(step: int, **more: object) -> bytes:
    return json.dumps({"event": "train", "step": step, "loss": 1.0 / (step + 1), **more}).encode() + b"\n"


def steps(follower: Follower) -> list[int]:
    return [event["step"] for event in follower.new()]


def all_steps(follower: Follower) -> Iterator[int]:
    """The steps of all readings up to the file's end."""
    yield from steps(follower)
    while follower.behind:
        yield from steps(follower)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_each_event_comes_once_and_a_torn_line_waits_for_its_end(path: Path) -> None:
    follower = Follower(path)
    assert steps(follower) == []  # no file yet
    path.write_bytes(line(0) + line(1)[:9])
    assert [steps(follower), steps(follower)] == [[0], []]
    with path.open("ab") as file:
        file.write(line(1)[9:] + line(2))
    assert [steps(follower), steps(follower), follower.begun] == [[1, 2], [], 1]


@given(st.lists(st.integers(0, 10**6), max_size=30), st.lists(st.integers(1, 200)), st.integers(100, 400))
def test_however_it_grows_the_events_are_those_of_the_whole_file(
    tmp_path_factory: pytest.TempPathFactory, values: list[int], pieces: list[int], at_once: int
) -> None:
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    data, follower, found = b"".join(map(line, values)), Follower(path), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(follow, "AT_ONCE", at_once)
        while data:
            size = pieces.pop() if pieces else len(data)
            with path.open("ab") as file:
                file.write(data[:size])
            data = data[size:]
            found += list(all_steps(follower))
    assert found == values and (follower.damaged, follower.begun) == (0, 1)


@pytest.mark.parametrize("in_place", [True, False])
def test_a_file_that_was_cut_back_is_read_from_its_first_line(path: Path, in_place: bool) -> None:
    follower = Follower(path)
    path.write_bytes(b"".join(map(line, range(10))))
    assert steps(follower) == list(range(10))
    cut = b"".join(map(line, range(5))) + line(5, loss="nan") + b"".join(map(line, range(6, 20)))
    if in_place:
        path.write_bytes(cut)
    else:
        other = path.with_name("other")
        other.write_bytes(cut)
        other.replace(path)
    assert steps(follower) == list(range(20)) and follower.begun == 2  # though it is longer than what was read
    path.write_bytes(line(0))
    assert steps(follower) == [0] and follower.begun == 3


def test_another_file_with_the_same_beginning_goes_on(path: Path) -> None:
    follower = Follower(path)
    path.write_bytes(line(0) + line(1))
    assert steps(follower) == [0, 1]
    other = path.with_name("other")
    other.write_bytes(line(0) + line(1) + line(2))
    other.replace(path)  # a resume that had nothing to cut off
    assert steps(follower) == [2] and follower.begun == 1


def test_a_start_passes_over_what_was_there(path: Path) -> None:
    path.write_bytes(line(0) + line(1))
    assert steps(Follower(path, start=len(line(0)))) == [1]
    assert steps(Follower(path, start=10**6)) == [0, 1]  # the file is shorter: it is another one


def test_damage_is_counted_and_left_out(path: Path) -> None:
    damage = [b"no JSON", b"[1]", b"{}", b'{"event": 1}', b"\0" * 50, b"\xff", b'{"event": "train"', b""]
    path.write_bytes(line(0) + b"".join(each + b"\n" for each in damage) + line(1))
    follower = Follower(path)
    assert steps(follower) == [0, 1] and follower.damaged == len(damage)


def test_a_line_longer_than_any_is_passed_over_in_bounded_memory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "AT_ONCE", 100)
    monkeypatch.setattr(follow, "LONGEST", 400)
    path.write_bytes(line(0) + line(1, text="x" * 1000) + line(2, text="x" * 200))
    follower = Follower(path)
    assert list(all_steps(follower)) == [0, 2] and follower.damaged == 1


@given(st.binary(max_size=300), st.integers(1, 300))
def test_any_bytes_are_read_to_their_last_whole_line(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, at_once: int
) -> None:
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    path.write_bytes(data)
    follower = Follower(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(follow, "AT_ONCE", at_once)
        follower.new()
        for _ in range(len(data)):
            follower.new()
    assert follower.place >= data.rfind(b"\n") + 1 and follower.begun == 1
    assert follower.damaged <= data.count(b"\n") + 1


def test_what_cannot_be_read_is_bad_input_and_nothing_is_waited_for(path: Path) -> None:
    path.mkdir()
    with pytest.raises(InputError, match=r"metrics\.jsonl: cannot read"):
        Follower(path).new()
    path.rmdir()
    os.mkfifo(path)
    with pytest.raises(InputError, match=r"metrics\.jsonl: cannot read"):
        Follower(path).new()


# ---- the newest events


def start(kind: str = "start", step: int = 0) -> bytes:
    return json.dumps({"event": kind, "step": step}).encode() + b"\n"


def shown(found: list[dict[str, Any]]) -> list[tuple[str, int]]:
    return [(event["event"], event["step"]) for event in found]


def test_the_newest_events_begin_with_the_last_start(path: Path) -> None:
    assert recent(path) == []
    path.write_bytes(start() + line(0) + line(1) + start("resume", 2) + line(2) + line(3)[:5])
    assert shown(recent(path)) == [("resume", 2), ("train", 2)]


def test_of_a_long_file_the_end_and_some_kinds_are_found(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "TAIL", 300)
    val = line(0).replace(b"train", b"val")
    path.write_bytes(start() + val + line(0) + val.replace(b"0", b"7") + b"".join(map(line, range(1, 90))))
    found = shown(recent(path, ["val", "sample"]))
    assert found[:3] == [("start", 0), ("val", 0), ("val", 7)]
    assert found[3:] == [("train", n) for n in range(90 - len(found) + 3, 90)]
    assert len(found) < 20


def test_a_last_line_that_is_longer_than_the_tail(path: Path) -> None:
    long = json.dumps({"event": "sample", "step": 3, "text": "x" * (follow.TAIL + 9)}).encode() + b"\n"
    path.write_bytes(start() + line(0) + long)
    assert shown(recent(path)) == [("start", 0), ("sample", 3)]


@given(st.lists(st.sampled_from([b"", b"x" * 40, line(5), start(), start("resume")])), st.binary(max_size=20))
def test_the_newest_events_are_those_after_the_last_start_that_trained(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], rest: bytes
) -> None:
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    path.write_bytes(b"".join(each if each.endswith(b"\n") else each + b"\n" for each in lines) + rest)
    events, found = Follower(path).new(), recent(path)
    kinds = [event["event"] for event in events]
    first = max((at for at, kind in enumerate(kinds) if kind in follow.STARTS and "train" in kinds[at:]), default=0)
    assert found == events[first:]
