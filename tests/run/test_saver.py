"""Saving beside training: what is stored, that steps still overwrite the state, and what happens when a save fails."""

import errno
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.gpu import resume
from llmc_jax.base.errors import InputError
from llmc_jax.checkpoint import store
from llmc_jax.checkpoint.contents import Counters, Identity, Metadata
from llmc_jax.checkpoint.llmc import open_model
from llmc_jax.checkpoint.sources import flat_parameters, open_source
from llmc_jax.config.model import parse_descriptor
from llmc_jax.models.gpt2.init import random_parameters
from llmc_jax.models.layout import num_parameters
from llmc_jax.run.folder import RunLog
from llmc_jax.run.saver import ALWAYS_ROOM, GPU_SHARE, SHARE, Saved, Saver, room_for_copy, small_arrays
from llmc_jax.training.state import TrainState, initial_state
from tests.run.test_resume import flip_a_bit
from tests.same_run import arrays, healthy
from tests.waiting import wait_until

MODEL = parse_descriptor("L1-NH1-C16-V257-T16")
ALL = 0, 0  # stay
ANY = 0, None  # memory of a CPU; a state as small as these has room beside any step


@pytest.fixture(params=["beside", "between"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether the state is copied on the device, or written before the next step."""
    if request.param == "between":
        monkeypatch.setattr("llmc_jax.run.saver.ALWAYS_ROOM", 0)
        monkeypatch.setattr("llmc_jax.run.saver.copied", lambda state: pytest.fail("the state was copied"))
    return str(request.param)


def new_state(dtype: Any = None, master_weights: bool = True, loss_scale: float | None = None) -> TrainState:
    params = jnp.array(random_parameters(MODEL, 42))
    start = jax.jit(initial_state, static_argnames=("dtype", "master_weights"))
    return start(params, dtype, master_weights=master_weights, loss_scale=loss_scale)


def metadata(step: int, val_loss: float | None = None) -> Metadata:
    return Metadata(step, Identity(MODEL, "fp32", True, "nearest"), 9, Counters(val_loss=val_loss))


@partial(jax.jit, donate_argnums=0)
def advanced(state: TrainState) -> TrainState:
    """A step of a kind: every number of the state becomes another."""
    return jax.tree.map(lambda leaf: leaf + jnp.ones((), leaf.dtype), state)


def pointers(state: TrainState) -> list[int]:
    """Addresses of its buffers. Those that somebody holds are copied by a step, which needs twice the memory then."""
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)][:3]


def save_well(saver: Saver, state: TrainState, step: int, *, last: bool = False) -> None:
    saver.save(state, metadata(step), *ANY, last=last)
    assert saver.wait()[0].problem is None


def bits(arrays: dict[str, np.ndarray]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {name: (array.dtype.name, array.shape, array.tobytes()) for name, array in arrays.items()}


def in_memory(state: TrainState) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """The bits of a state, from a copy of it, so that nothing holds its own buffers."""
    copy = jax.tree.map(jnp.copy, state)
    return bits({name: np.asarray(buffer) for name, buffer in copy.flat.items()} | small_arrays(copy))


def stored(run: Path, step: int) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """The bits of a checkpoint that is complete and good."""
    assert store.entry(run, step).problem is None
    return bits(arrays(run, step))


Gate = Callable[[str], threading.Event]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Gate:
    """gate("begin"): whoever enters store.begin waits there until the event is set. Set at the end in any case."""

    def close(name: str) -> threading.Event:
        real, event = getattr(store, name), threading.Event()

        def waiting(*arguments: Any) -> Any:
            assert event.wait(60)
            return real(*arguments)

        monkeypatch.setattr(store, name, waiting)
        request.addfinalizer(event.set)
        return event

    return close


LARGE = 2 * ALWAYS_ROOM


@pytest.mark.parametrize(
    ("state", "memory", "room"),
    [
        *((ALWAYS_ROOM + more, memory, not more) for memory in (ANY, (0, 0), (0, -1)) for more in (0, 1)),
        (LARGE, (0, int(LARGE / GPU_SHARE) + 1), True),  # on a GPU what fits has room
        (LARGE, (10**15, int(LARGE / GPU_SHARE) - 10), False),
        (LARGE, (int(LARGE / SHARE) + 1, None), True),  # on a CPU what adds little to what the step needs
        (LARGE, (int(LARGE / SHARE) - 10, None), False),
    ],
)
def test_room_for_a_copy(state: int, memory: tuple[int, int | None], room: bool) -> None:
    assert room_for_copy(state, *memory) == room
    assert GPU_SHARE <= 1 and SHARE <= 0.25  # the memory with a save is at most 1.25 times that without


@pytest.mark.parametrize(
    ("kind", "version"),
    [
        ({}, 3),
        ({"dtype": jnp.bfloat16}, 5),
        ({"dtype": jnp.bfloat16, "master_weights": False}, 5),
        ({"dtype": jnp.float16, "loss_scale": 128.0}, 3),
        ({"dtype": jnp.float16, "master_weights": False}, 3),
    ],
    ids=["fp32", "bf16", "bf16 alone", "fp16", "fp16 alone"],
)
def test_the_bits_are_those_of_the_time_of_the_save(
    tmp_path: Path, way: str, kind: dict[str, Any], version: int, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the checkpoint, and of the model, which is there before the checkpoint counts. Steps keep their buffers
    while the save is under way and after it.
    """
    state = new_state(**kind)
    expected = in_memory(state)
    weights = jnp.copy(state.weights if version == 5 else state.params)  # fp16 would lose the master weights
    in_model = np.asarray(weights.astype(jnp.float32))[: num_parameters(MODEL)].tobytes()
    path = tmp_path / "model_00000003.bin"
    before_done: list[bytes] = []
    complete_file = store.complete_file

    def written(name: Path) -> AbstractContextManager[Path]:
        assert name.name == "DONE_00000003"
        before_done.append(flat_parameters(open_source(path))[: num_parameters(MODEL)].tobytes())
        return complete_file(name)

    monkeypatch.setattr(store, "complete_file", written)
    done = gate("begin" if way == "beside" else "seal")
    saver = Saver(tmp_path, MODEL, *ALL, export=True)
    saver.save(state, metadata(3), *ANY)
    before = pointers(state)
    for _ in range(2):
        state = advanced(state)  # overwrites every buffer while the save is under way
        assert pointers(state) == before
    assert in_memory(state) != expected
    assert saver.finished() == [] and not path.exists()
    done.set()
    (saved,) = saver.wait()
    assert pointers(advanced(state)) == before
    assert (saved.step, saved.path, saved.problem) == (3, tmp_path / "state_00000003", None)
    assert 0 < saved.waited <= saved.seconds
    assert before_done == [in_model] and open_model(path).version == version
    assert stored(tmp_path, 3) == expected
    assert store.open_checkpoint(saved.path).stored == metadata(3).to_json()
    assert healthy(tmp_path) == [3]


def test_the_last_one_is_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmc_jax.run.saver.copied", lambda state: pytest.fail("the state was copied"))
    state = new_state()
    expected = in_memory(state)
    save_well(Saver(tmp_path, MODEL, *ALL), state, 3, last=True)
    assert stored(tmp_path, 3) == expected


@pytest.mark.slow
def test_one_save_at_a_time_in_order(tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    running, order = list[int](), list[int]()
    seal = store.seal

    def watched(writing: store.Writing, *rest: Any) -> Path:
        running.append(writing.step)
        assert len(running) == 1
        time.sleep(0.05)
        folder = seal(writing, *rest)
        order.append(running.pop())
        return folder

    monkeypatch.setattr(store, "seal", watched)
    saver = Saver(tmp_path, MODEL, *ALL)
    state, expected, ended = new_state(), {}, []
    for step in range(1, 5):
        expected[step] = in_memory(state)
        saver.save(state, metadata(step), *ANY)
        ended += saver.finished()
        state = advanced(state)
    ended += saver.wait()
    assert order == [1, 2, 3, 4] == [each.step for each in ended]
    assert saver.wait() == saver.finished() == []  # each is told once
    assert {step: stored(tmp_path, step) for step in healthy(tmp_path)} == expected


# ---- saves that fail


def full(*_: Any) -> NoReturn:
    raise OSError(errno.ENOSPC, "No space left on device")


def no_permission(*_: Any, **__: Any) -> NoReturn:
    raise InputError("state_00000002: Permission denied")


FAILURES = {
    "begin": ("llmc_jax.checkpoint.store.begin", no_permission, "Permission denied"),
    "begin, an OSError": ("llmc_jax.checkpoint.store.begin", full, "No space left"),
    "seal": ("llmc_jax.checkpoint.store.seal", no_permission, "Permission denied"),
    "sync": ("os.fsync", full, "No space left"),
    "the name": ("os.rename", full, "No space left"),
    "the model": ("llmc_jax.run.saver.write_model", no_permission, "Permission denied"),
}
QUICK = ("begin", "seal", "the name")


@pytest.mark.parametrize(
    "failure", [each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in FAILURES]
)
def test_a_failed_save_harms_nothing(tmp_path: Path, way: str, failure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, fail, words = FAILURES[failure]
    saver = Saver(tmp_path, MODEL, *ALL, export=True)
    state = new_state()
    expected = in_memory(state)
    save_well(saver, state, 1)
    state = advanced(state)
    with monkeypatch.context() as patch:
        patch.setattr(name, fail)
        saver.save(state, metadata(2), *ANY)
        (failed,) = saver.wait()
    assert failed.step == 2 and failed.problem is not None and words in failed.problem
    assert "\n" not in failed.problem and 0 < failed.waited <= failed.seconds
    assert healthy(tmp_path) == [1] and stored(tmp_path, 1) == expected
    assert sorted(os.listdir(tmp_path)) == ["DONE_00000001", "model_00000001.bin", "state_00000001"]

    before = pointers(state)
    state = advanced(state)
    assert pointers(state) == before  # what failed holds nothing either
    save_well(saver, state, 2)
    assert healthy(tmp_path) == [1, 2] and stored(tmp_path, 2) == in_memory(state)


def test_a_failed_save_of_the_same_step_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = Saver(tmp_path, MODEL, *ALL, export=True)
    state = new_state()
    expected = in_memory(state)
    save_well(saver, state, 1)
    with monkeypatch.context() as patch:
        patch.setattr(store, "seal", no_permission)
        saver.save(advanced(state), metadata(1), *ANY)
        assert saver.wait()[0].problem is not None
    assert healthy(tmp_path) == [1] and stored(tmp_path, 1) == expected
    assert (tmp_path / "model_00000001.bin").exists()


@pytest.mark.parametrize("name", ["begin", "seal"])
def test_our_mistake_is_raised_by_whoever_asks_next(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: Any) -> NoReturn:
        raise TypeError("a bug")

    saver = Saver(tmp_path, MODEL, *ALL)

    for ask in (saver.wait, lambda: wait_until(saver.finished), lambda: saver.save(new_state(), metadata(2), *ANY)):
        with monkeypatch.context() as patch, pytest.raises(TypeError, match="a bug"):
            patch.setattr(store, name, wrong)
            saver.save(new_state(), metadata(1), *ANY)
            ask()
        assert saver.wait() == []  # it is raised once


# ---- the model file and the logs


def test_logs_are_on_the_disk_before_the_checkpoint_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def watched(descriptor: int) -> None:
        assert not (tmp_path / "DONE_00000001").exists() or "main.log" in synced
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    with RunLog(tmp_path) as log:
        monkeypatch.setattr(os, "fsync", watched)
        saver = Saver(tmp_path, MODEL, *ALL, sync=log.sync)
        save_well(saver, new_state(), 1)
    assert {"main.log", "metrics.jsonl", "samples.txt"} <= set(synced)
    done = next(at for at, name in enumerate(synced) if name.startswith(".DONE_00000001."))
    assert done > max(synced.index(name) for name in ("main.log", "metrics.jsonl"))


def test_nothing_is_saved_or_removed_where_the_folder_is_another_one(tmp_path: Path) -> None:
    left = 0  # so many times the folder is still the run's

    def check() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise InputError("moved")

    saver = Saver(tmp_path, MODEL, 1, 0, check=check)
    for checks in (0, 1):  # before it is begun, before it counts
        left = checks
        saver.save(new_state(), metadata(1), *ANY)
        (ended,) = saver.wait()
        assert ended.problem is not None and ended.problem.endswith("moved")
        assert list(tmp_path.iterdir()) == []
    left = 6
    save_all(saver, {1: None, 2: None})
    left = 0
    assert saver.prune(least=1) == ((), "moved")
    assert sorted(path.name for path in tmp_path.glob("state_*")) == ["state_00000001", "state_00000002"]


# ---- which stay


def save_all(saver: Saver, losses: dict[int, float | None]) -> list[Saved]:
    state, ended = new_state(), []
    for step, loss in losses.items():
        saver.save(state, metadata(step, loss), *ANY)
        ended += saver.wait()
    return ended


@pytest.mark.slow
@pytest.mark.parametrize(
    ("retention", "losses", "removed", "at_the_end"),
    [
        # the latest two, every third and the best; the last ones have no loss
        ((2, 3), [2.0, 5.0, 4.0, None, None], [(), (), (), (2,), ()], ()),
        ((1, 0), [None] * 3, [(), (), (1,)], (2,)),  # never fewer than two before the end
        ((0, 2), [None] * 3, [()] * 3, ()),  # without a number all stay
    ],
)
def test_which_stay(
    tmp_path: Path, retention: tuple[int, int], losses: list[Any], removed: list[Any], at_the_end: tuple[int, ...]
) -> None:
    saver = Saver(tmp_path, MODEL, *retention, export=True)
    ended = save_all(saver, dict(enumerate(losses, start=1)))
    assert [each.removed for each in ended] == removed
    assert saver.prune(least=1) == (at_the_end, None)
    gone = {step for each in removed for step in each} | {*at_the_end}
    left = [step for step in range(1, len(losses) + 1) if step not in gone]
    assert healthy(tmp_path) == left
    assert sorted(path.name for path in tmp_path.glob("model_*")) == [f"model_{step:08d}.bin" for step in left]


def test_a_checkpoint_that_rotted_does_not_count(tmp_path: Path) -> None:
    """One that this process has read back is believed; those of another are read before others go because of them."""
    save_all(Saver(tmp_path, MODEL, *ALL), dict.fromkeys(range(1, 4)))
    flip_a_bit(tmp_path / "state_00000003")
    (ended,) = save_all(Saver(tmp_path, MODEL, 1, 0), {4: None})
    assert ended.removed == (1,)
    good = {entry.step: entry.problem is None for entry in store.entries(tmp_path)}
    assert good == {2: True, 3: False, 4: True}


def test_one_that_cannot_be_deleted_is_no_failed_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stuck(*_: Any) -> NoReturn:
        raise InputError("the checkpoint of step 1 cannot be removed: Operation not permitted")

    saver = Saver(tmp_path, MODEL, 2, 0)
    with monkeypatch.context() as patch:
        patch.setattr(store, "_remove_checkpoint", stuck)
        ended = save_all(saver, dict.fromkeys(range(1, 4)))
    assert [(each.problem, each.removed) for each in ended] == [(None, ())] * 3
    assert ended[2].unremoved is not None and "Operation not permitted" in ended[2].unremoved
    assert healthy(tmp_path) == [1, 2, 3]
    assert save_all(saver, {4: None})[0].removed == (1, 2)


@pytest.mark.slow
def test_the_benchmark_of_saves_runs() -> None:
    """It is meant for a GPU, where it must not fail for a reason that a CPU shows."""
    assert resume.saves("L1-NH1-C16-V257-T16", 2, 16, "fp32", steps=3, rounds=1)["save s"] > 0
