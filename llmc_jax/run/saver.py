"""Saving checkpoints beside training: a snapshot, a thread that writes it, and what to do when that fails.

Leaves out how a checkpoint is stored (checkpoint/store.py) and what it holds (checkpoint/contents.py).

A step is given the state's buffers to overwrite. Whoever still holds one of them when the step begins makes JAX copy
it instead, without a word: the step then needs the memory of two states. So a save must let go of the state before the
next step, in one of two ways: it copies the state on the device, or it has written everything by then.

Several processes write a checkpoint together. Each brings its share of the state to its host, which lets go of the
state, and writes that beside the training; process 0 writes the rest, and says when the checkpoint counts.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from llmc_jax import cluster
from llmc_jax.base.errors import InputError
from llmc_jax.checkpoint import store
from llmc_jax.checkpoint.contents import Metadata
from llmc_jax.checkpoint.llmc import write_model
from llmc_jax.checkpoint.state import flat_buffers, named_arrays, small_arrays
from llmc_jax.cluster.agreement import of_all, of_first
from llmc_jax.config.model import ModelConfig
from llmc_jax.machine.device import full_memory
from llmc_jax.models.gpt2.tensors import num_parameters
from llmc_jax.training.parallel.placement import Placement
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


class Share(NamedTuple):
    """What one of several processes has of a state, on its host."""

    buffers: dict[str, tuple[int, str]]  # elements and dtype of each flat buffer
    blocks: dict[str, dict[int, np.ndarray]]  # of each, those that this process writes, by number
    small: dict[str, np.ndarray]  # all else
    model: np.ndarray | None  # weights (N,) that process 0 exports


def _exported(state: TrainState) -> jax.Array:
    """Return the buffer that a model of the state is exported from."""
    return state.weights if state.weights.dtype == jnp.bfloat16 else state.params


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


@dataclass
class Saver:
    """Writes one checkpoint at a time into a run's folder. Used by one thread; `finished` and `wait` tell of the ends,
    and raise what is a mistake in the program. `close` ends the thread that writes.
    """

    folder: Path
    model: ModelConfig
    keep: int  # the latest checkpoints that stay, 0: all
    major_every: int  # those of every so many steps stay too, 0: none
    _: KW_ONLY
    export: bool = False  # also write model_%08d.bin in llm.c's format
    sync: Callable[[], None] = lambda: None  # called before a checkpoint counts: brings the logs to the disk
    place: Placement | None = None  # of the state; None: on one device
    check: Callable[[], None] = lambda: None  # before a write or a removal: raises where the folder is another one

    def __post_init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="llmc_jax saver")
        self._under_way: Future[Saved] | None = None
        self._waited = 0.0  # seconds that the training stood still for it
        self._ended: list[Saved] = []
        self._good: set[int] = set()  # steps whose checkpoints this process has read back
        self._saves = 0  # that were begun: tells their exchanges apart
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
        self._saves += 1
        if cluster.here().size > 1:
            share = self._share(state)
            self._under_way = self._pool.submit(self._save_together, share, metadata, start, prune)
            self._waited = time.perf_counter() - start
            return
        if self._copies is None and not last:
            on_a_device = sum(leaf.addressable_data(0).nbytes for leaf in jax.tree.leaves(state))
            self._copies = room_for_copy(on_a_device, step_bytes, free)
        copy = self._copied(state) if self._copies and not last else None
        given, written = [state if copy is None else copy], threading.Event()
        self._under_way = self._pool.submit(self._save, given, metadata, start, prune, written)
        if copy is None:
            written.wait()
        self._waited = time.perf_counter() - start

    def _copied(self, state: TrainState) -> TrainState | None:
        """Return a copy; None where none fits."""
        try:
            return jax.block_until_ready(copied(state))
        except jax.errors.JaxRuntimeError as error:
            if full_memory(error) is None:
                raise
            self._copies = False
            return None

    def finished(self) -> list[Saved]:
        """Return the saves that have ended since this was last asked."""
        if self._under_way is not None and self._under_way.done():
            self._join()
        ended, self._ended = self._ended, []
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
            saved = under_way.result()
            self._ended.append(saved._replace(waited=min(self._waited, saved.seconds)))

    def _save(
        self, given: list[TrainState], metadata: Metadata, start: float, prune: bool, written: threading.Event
    ) -> Saved:
        """Write a checkpoint, in the thread. What goes wrong ends it, and harms nothing saved before.

        given: the state, in a list that gives it away; written: set once nothing refers to it any more.
        """

        def write(undo: ExitStack) -> None:
            writing, model = self._write(given.pop(), metadata, undo)
            written.set()
            self.check()
            self.sync()
            store.seal(writing, model)

        try:
            return self._ended_save(write, metadata.step, start, prune)
        finally:
            written.set()

    def _ended_save(self, write: Callable[[ExitStack], None], step: int, start: float, prune: bool) -> Saved:
        """Write a checkpoint and say how that ended. write: writes it; what it wrote is undone where it fails."""
        problem: str | None = None
        pruned: tuple[tuple[int, ...], str | None] = (), None
        try:
            with ExitStack() as undo:
                write(undo)
                undo.pop_all()
            self._good.add(step)
            if prune:
                pruned = self.prune(least=2)
        except (InputError, OSError, MemoryError) as error:
            place = f"{self.folder}: the checkpoint of step {step} cannot be written: "
            problem = place + (str(error) or type(error).__name__).replace(place, "")  # each process says it, too
        return Saved(step, store.state_folder(self.folder, step), problem, 0.0, time.perf_counter() - start, *pruned)

    # ----- of several processes -----

    def _share(self, state: TrainState) -> Share:
        """Return this process's share of the state, on its host. All processes call it at the same place."""
        assert self.place is not None
        numbers = store.own_blocks(cluster.here().rank, cluster.here().size)
        blocks = {name: self.place.blocks(buffer, numbers) for name, buffer in state.flat.items()}
        model = self.place.whole(_exported(state)) if self.export else None
        return Share(flat_buffers(state, self.model), blocks, small_arrays(state), model)

    def _save_together(self, share: Share, metadata: Metadata, start: float, prune: bool) -> Saved:
        """Write this process's share of a checkpoint, in the thread, and learn how the others' went."""
        step = metadata.step
        name = f"save {self._saves}"
        begun: list[tuple[store.Writing, Path | None]] = []

        def write(undo: ExitStack) -> None:
            def begin() -> str:
                begun.append(self._begin(share, metadata, undo))
                return begun[0][0].folder.name

            def written() -> dict[str, dict[int, str]]:
                return {buffer: store.write_blocks(folder, buffer, each) for buffer, each in share.blocks.items()}

            def seal() -> None:
                self.check()
                self.sync()
                writing, model = begun[0]
                store.seal(writing, model, digests)

            folder = self.folder / of_first(f"{name} begins", begin)
            digests = of_all(f"{name} is written", written)
            of_first(f"{name} ends", seal)

        return self._ended_save(write, step, start, prune)

    def _begin(self, share: Share, metadata: Metadata, undo: ExitStack) -> tuple[store.Writing, Path | None]:
        """Write what is process 0's of a checkpoint, and the model where it is exported; `_write` of one process."""
        self.check()
        stored = metadata.to_json()
        writing = store.begin_shared(self.folder, metadata.step, share.buffers, share.small, stored)
        undo.callback(store.abandon, writing)
        return writing, None if share.model is None else self._export(share.model, metadata.step, undo)

    # ----- of one process -----

    def _write(self, state: TrainState, metadata: Metadata, undo: ExitStack) -> tuple[store.Writing, Path | None]:
        """Write everything that needs the state's buffers: the arrays, and the model where it is exported.

        The model has a hidden name until the checkpoint counts; of bf16 weights it is of version 5, else of version 3.
        undo: removes on an error what is written.
        """
        self.check()
        stored = metadata.to_json()
        on_host = np.asarray if self.place is None else self.place.host
        writing = store.begin(self.folder, metadata.step, named_arrays(state, self.model, on_host), stored)
        undo.callback(store.abandon, writing)
        return writing, self._export(on_host(_exported(state)), metadata.step, undo) if self.export else None

    def _export(self, weights: np.ndarray, step: int, undo: ExitStack) -> Path:
        """Write weights (flat_size,) as a model in llm.c's format, of a hidden name."""
        path = store.hidden_model(self.folder, step)
        undo.callback(lambda: path.unlink(missing_ok=True))
        values = weights[: num_parameters(self.model)].astype(np.float32, copy=False)
        write_model(path, self.model, values, version=5 if weights.dtype.name == "bfloat16" else 3)
        return path

    def prune(self, least: int) -> tuple[tuple[int, ...], str | None]:
        """Delete what need not stay, down to `least`: one once the run is complete, after `wait`.

        Returns the steps; and why not, where something could not be deleted.
        """
        if self.keep == 0 or cluster.here().rank:
            return (), None
        try:
            self.check()
            steps = store.prune(
                self.folder, keep=self.keep, major_every=self.major_every, least=least, known_good=self._good
            )
        except InputError as error:
            return (), str(error)
        return tuple(steps), None
