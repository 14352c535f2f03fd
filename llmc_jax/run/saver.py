"""Saving checkpoints beside training: a snapshot, a thread that writes it, and what to do when that fails.

Leaves out how a checkpoint is stored (checkpoint/store.py) and what it holds (checkpoint/contents.py).

A step is given the state's buffers to overwrite. Whoever still holds one of them when the step begins makes JAX copy
it instead, without a word: the step then needs the memory of two states. So a save must let go of the state before the
next step, in one of two ways: it copies the state on the device, or it has written everything by then.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from llmc_jax.checkpoint import store
from llmc_jax.checkpoint.contents import Metadata
from llmc_jax.checkpoint.llmc import write_model
from llmc_jax.checkpoint.state import named_arrays
from llmc_jax.config.model import ModelConfig
from llmc_jax.errors import InputError
from llmc_jax.models.gpt2.tensors import num_parameters
from llmc_jax.training.state import TrainState

ALWAYS_ROOM = 64 << 20  # bytes: a copy of this size is nothing beside the program itself
GPU_SHARE = 0.9  # of a GPU's free memory, which is not all in one piece
SHARE = 0.2  # of the memory that a step needs, which a copy may add to it


def room_for_copy(state_bytes: int, step_bytes: int, free: int | None) -> bool:
    """Return whether a copy of the state may lie beside it: on a GPU where it fits, on a CPU where it adds little.

    step_bytes: what the step needs, state included; free: of the device, None on a CPU.
    """
    if state_bytes <= ALWAYS_ROOM:
        return True
    return state_bytes <= (SHARE * step_bytes if free is None else GPU_SHARE * free)


class Saved(NamedTuple):
    """How a save ended."""

    step: int
    path: Path
    problem: str | None  # None: the checkpoint is complete and has been read back
    waited: float  # seconds that the training stood still
    seconds: float  # in all
    removed: tuple[int, ...] = ()  # steps whose checkpoints were deleted afterwards
    unremoved: str | None = None  # why one that should have been deleted is still there


@jax.jit
def copied(state: TrainState) -> TrainState:
    """Return the state in new buffers."""
    return jax.tree.map(jnp.copy, state)


class Saver:
    """Writes one checkpoint at a time into a run's folder. Used by one thread; `finished` and `wait` tell of the ends,
    and raise what is a mistake in the program. `close` ends the thread that writes.

    keep: the latest checkpoints that stay, 0: all; major_every: those of every so many steps stay too, 0: none.
    export: also write model_%08d.bin in llm.c's format; sync: called before a checkpoint counts, to bring what it
    refers to (the logs) to the disk; check: called before anything is written or removed, raises InputError where the
    folder is another one.
    """

    def __init__(
        self,
        folder: Path,
        model: ModelConfig,
        keep: int,
        major_every: int,
        *,
        export: bool = False,
        sync: Callable[[], None] = lambda: None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._folder, self._model, self._keep, self._major_every = folder, model, keep, major_every
        self._export, self._sync, self._check = export, sync, check
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="llmc_jax saver")
        self._under_way: Future[None] | None = None
        self._ended: list[Saved] = []
        self._good: set[int] = set()  # steps whose checkpoints this process has read back
        self._copies: bool | None = None  # decided at the first save: afterwards the peak of memory includes the copy

    def save(
        self,
        state: TrainState,
        metadata: Metadata,
        step_bytes: int,
        free: int | None,
        *,
        last: bool = False,
        prune: bool = True,
    ) -> None:
        """Begin to save a state; return when the state's buffers may be overwritten.

        Waits for the save before it. step_bytes, free: as `room_for_copy` has them. last: no step follows, so nothing
        is copied. prune: delete what need not stay.
        """
        start = time.perf_counter()
        self._join()
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        work = _Work(metadata, start, prune)
        if self._copies is None and not last:
            self._copies = room_for_copy(size, step_bytes, free)
        snapshot = None if last or not self._copies else self._copied(state)
        if snapshot is None:
            self._guarded(work, self._write, state)
            if work.writing is None:
                return
            self._under_way = self._pool.submit(self._guarded, work, self._seal)
        else:
            self._under_way = self._pool.submit(self._guarded, work, self._write_and_seal, snapshot)
        work.waited = time.perf_counter() - start

    def _copied(self, state: TrainState) -> list[TrainState] | None:
        """Return a copy, in a list that gives it away: the thread then has the only reference. None where none fits."""
        try:
            return [jax.block_until_ready(copied(state))]
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            self._copies = False
            return None

    def finished(self) -> list[Saved]:
        """Return the saves that have ended since this was last asked."""
        if self._under_way is not None and self._under_way.done():
            self._join()
        ended = self._ended.copy()
        del self._ended[: len(ended)]  # the thread may have added another meanwhile
        return ended

    def wait(self) -> list[Saved]:
        """Wait for the save under way; return the saves that have ended since `finished` was last asked."""
        self._join()
        return self.finished()

    def close(self) -> None:
        """Wait for the save under way. Nothing can be saved any more."""
        self._pool.shutdown()

    def _join(self) -> None:
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def _guarded(self, work: "_Work", action: Callable[..., None], *rest: Any) -> None:
        """Do a part of a save, action(work, *rest); what goes wrong ends it, and harms nothing saved before."""
        try:
            action(work, *rest)
        except (InputError, OSError, MemoryError) as error:
            if work.writing is not None:
                store.abandon(work.writing)
                work.writing = None
            if work.model is not None:
                with suppress(OSError):
                    work.model.unlink(missing_ok=True)
            problem = f"{self._folder}: the checkpoint of step {work.step} cannot be written: "
            words = str(error) or type(error).__name__
            self._end(work, words if words.startswith(problem) else problem + words)

    def _write_and_seal(self, work: "_Work", snapshot: list[TrainState]) -> None:
        self._write(work, snapshot.pop())
        self._seal(work)

    def _write(self, work: "_Work", state: TrainState) -> None:
        """Write everything that needs the state's buffers."""
        self._check()
        arrays = named_arrays(state, self._model)
        work.writing = store.begin(self._folder, work.step, arrays, work.metadata.to_json())
        if self._export:
            self._write_model(work, state)

    def _write_model(self, work: "_Work", state: TrainState) -> None:
        """Write model_%08d.bin, under a hidden name until the checkpoint counts; of bf16 weights version 5, else 3."""
        bf16 = state.weights.dtype == jnp.bfloat16
        weights = state.weights if bf16 else state.params
        values = np.asarray(weights)[: num_parameters(self._model)].astype(np.float32, copy=False)
        work.model = store.hidden_model(self._folder, work.step)
        write_model(work.model, self._model, values, version=5 if bf16 else 3)

    def _seal(self, work: "_Work") -> None:
        assert work.writing is not None
        self._check()
        self._sync()
        store.seal(work.writing, work.model)
        work.writing = None
        self._good.add(work.step)
        self._end(work, None, *(self.prune(least=2) if work.prune else ((), None)))

    def prune(self, least: int) -> tuple[tuple[int, ...], str | None]:
        """Delete what need not stay, down to `least`: one once the run is complete, after `wait`.

        Returns the steps; and why not, where something could not be deleted.
        """
        if self._keep == 0:
            return (), None
        try:
            self._check()
            steps = store.prune(
                self._folder, keep=self._keep, major_every=self._major_every, least=least, known_good=self._good
            )
        except InputError as error:
            return (), str(error)
        return tuple(steps), None

    def _end(
        self, work: "_Work", problem: str | None, removed: tuple[int, ...] = (), unremoved: str | None = None
    ) -> None:
        path = store.state_folder(self._folder, work.step)
        seconds = time.perf_counter() - work.start
        self._ended.append(Saved(work.step, path, problem, work.waited or seconds, seconds, removed, unremoved))


class _Work:
    """One save under way."""

    def __init__(self, metadata: Metadata, start: float, prune: bool) -> None:
        self.step, self.metadata, self.start, self.prune = metadata.step, metadata, start, prune
        self.waited = 0.0
        self.model: Path | None = None  # where the exported model is
        self.writing: store.Writing | None = None
