"""What one process finds all learn, and where one fails all fail with the same words."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc_jax import cluster
from llmc_jax.base.errors import FormatError, InputError
from llmc_jax.cluster.agreement import Agreed, alike, of_all, of_first
from llmc_jax.cluster.worker import Group
from llmc_jax.run.begin import check_shared
from llmc_jax.run.folder import locked

SECONDS = 60


class Thread(Group):
    """One of several processes, which are threads here."""

    def __init__(self, rank: int, hosts: tuple[str, ...], board: dict[str, list[Any]], barrier: threading.Barrier):
        self.rank, self.size, self.hosts = rank, len(hosts), hosts
        self._board, self._barrier = board, barrier

    def meet(self, name: str, value: Any = None) -> list[Any]:
        self._board.setdefault(name, [None] * self.size)[self.rank] = value
        self._barrier.wait(SECONDS)
        found = list(self._board[name])
        self._barrier.wait(SECONDS)
        return found


def together(size: int, work: Callable[[Group], Any]) -> list[Any]:
    """What each process's work gives, or the error that it raises."""
    board: dict[str, list[Any]] = {}
    barrier = threading.Barrier(size)
    hosts = tuple(f"host{rank}" for rank in range(size))

    own = threading.local()

    def tried(rank: int) -> Any:
        own.group = Thread(rank, hosts, board, barrier)
        try:
            return work(own.group)
        except InputError as error:
            return type(error), str(error)

    with ThreadPoolExecutor(size) as pool, pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster, "here", lambda: own.group)
        return list(pool.map(tried, range(size)))


def found_by(problem: str | None) -> Callable[[], str]:
    def action() -> str:
        if problem is not None:
            raise InputError(problem)
        return "found"

    return action


@given(problems=st.lists(st.sampled_from([None, "no such file", "too small"]), min_size=2, max_size=5))
def test_all_go_the_same_way(problems: list[str | None]) -> None:
    def work(group: Group) -> Any:
        return of_all("x", found_by(problems[group.rank]))

    def block(group: Group) -> Any:
        with alike("x"):
            return found_by(problems[group.rank])()

    ends = together(len(problems), work)
    if not any(problems):
        assert ends == [["found"] * len(problems)] * len(problems)
        return
    (kind, words) = ends[0]
    assert ends == together(len(problems), block) == [(Agreed, words)] * len(problems) and kind is Agreed
    if len(set(problems)) == 1:  # once, and of nobody
        assert words == problems[0]
    else:
        named = [rank for rank in range(len(problems)) if f"rank {rank} (host{rank}): {problems[rank]}" in words]
        assert named == [rank for rank, problem in enumerate(problems) if problem]


@pytest.mark.parametrize("answer", [{}, None, 3, [], {"value": 1, "problem": "x"}, {"other": 1}])
@pytest.mark.parametrize("of", [of_all, of_first])
def test_an_answer_that_is_none_is_named(of: Callable[..., Any], answer: Any) -> None:
    def work(group: Group) -> Any:
        return group.meet("x", answer) and None if group.rank == 0 else of("x", found_by(None))

    _, (kind, words) = together(2, work)
    assert kind is Agreed and "rank 0 (host0)" in words


def test_a_problem_of_another_type_is_told() -> None:
    def work(group: Group) -> Any:
        if group.rank == 0:
            return group.meet("x", [3]) and None
        with alike("x"):
            pass

    assert together(2, work)[1] == (Agreed, "rank 0 (host0): [3]")


@given(problem=st.sampled_from([None, "no such file"]), size=st.integers(2, 4))
def test_what_the_first_one_finds_all_have(problem: str | None, size: int) -> None:
    ends = together(size, lambda group: of_first("x", found_by(problem if group.rank == 0 else "never asked")))
    assert ends == [(Agreed, problem) if problem else "found"] * size


def test_one_alone_raises_what_it_raises() -> None:
    def broken() -> None:
        raise FormatError("torn")

    for way in (of_first, of_all):
        with pytest.raises(FormatError, match="torn"):
            way("x", broken)
    with pytest.raises(FormatError, match="torn"), alike("x"):
        broken()


@pytest.mark.parametrize("shared", [True, False])
def test_a_run_folder_that_hosts_do_not_share_is_found_at_the_start(shared: bool, tmp_path: Path) -> None:
    """Two folders stand for that of one path on two hosts."""
    folders = [tmp_path / "a", tmp_path / ("a" if shared else "b")]
    for folder in folders:
        folder.mkdir(exist_ok=True)

    def work(group: Group) -> Any:
        if group.rank:
            return check_shared(folders[1], None, [])
        with locked(folders[0]) as held:
            return check_shared(folders[0], held, [folders[0]])

    ends = together(2, work)
    if shared:
        assert ends == [None, None] and list(folders[0].iterdir()) == []
    else:
        assert ends[0] == ends[1] and ends[0][0] is Agreed and "rank 1 (host1): -o" in ends[0][1]
        assert not folders[0].exists(), "what was made for the run is taken away"
