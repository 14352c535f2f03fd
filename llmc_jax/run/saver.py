"""Saving checkpoints beside training: a snapshot, a thread that writes it, and what to do when that fails.

Leaves out how a checkpoint is stored (checkpoint/store.py) and what it holds (checkpoint/contents.py).

A step is given the state's buffers to overwrite. Whoever still holds one of them when the step begins makes JAX copy
it instead, without a word: the step then needs the memory of two states. So a save must let go of the state before the
next step, in one of two ways: it copies the state on the device, or it has written everything by then.

Processes write a checkpoint together, and one process is a group of one. Of several each brings its blocks of the state
to its host, which lets go of the state, and writes them beside the training. Process 0 begins the checkpoint and seals
it.
"""

import threading
import time
from collections.abc import Callable, Mapping
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
from llmc_jax.checkpoint.llmc import FILES, write_model
from llmc_jax.checkpoint.source import gpt2_shape
from llmc_jax.cluster.agreement import of_all, of_first
from llmc_jax.config.model import ModelShape
from llmc_jax.machine.device import full_memory
from llmc_jax.models.layout import flat_size, num_parameters
from llmc_jax.models.tensors import BLOCKS
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


def small_arrays(state: TrainState) -> dict[str, np.ndarray]:
    """Return the arrays by name that are no flat buffers: `step`, `updates`, … Every device has them."""
    arrays = {"step": np.asarray(state.step), "updates": np.asarray(state.updates)}
    for group in ("loss_scale", "outliers"):
        if (values := getattr(state, group)) is not None:
            arrays |= {f"{group}/{name}": np.asarray(value) for name, value in values._asdict().items()}
    return arrays


class Given(NamedTuple):
    """What is saved of a state: this process's share."""

    buffers: dict[str, tuple[int, str]]  # elements and dtype of each flat buffer
    small: dict[str, np.ndarray]  # all else
    blocks: Callable[[str], Mapping[int, np.ndarray]]  # of a buffer, those that this process writes, by number
    model: Callable[[], np.ndarray | None]  # weights (N,) that process 0 exports


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
    model: ModelShape
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
        copy = None if last or cluster.here().size > 1 else self._copied(state, step_bytes, free)
        given = self._given(state if copy is None else copy)
        released = cluster.here().size > 1 or copy is not None
        written = threading.Event()
        self._under_way = self._pool.submit(self._save, [given], metadata, start, prune, written)
        del given
        if not released:
            written.wait()
        self._waited = time.perf_counter() - start

    def _copied(self, state: TrainState, step_bytes: int, free: int | None) -> TrainState | None:
        """Return a copy; None where none fits, or it would take too much memory."""
        if self._copies is None:
            on_a_device = sum(leaf.addressable_data(0).nbytes for leaf in jax.tree.leaves(state))
            self._copies = room_for_copy(on_a_device, step_bytes, free)
        try:
            return jax.block_until_ready(copied(state)) if self._copies else None
        except jax.errors.JaxRuntimeError as error:
            if full_memory(error) is None:
                raise
            self._copies = False
            return None

    def _given(self, state: TrainState) -> Given:
        """Return this process's share of the state. Of several processes each has it on its host now, at the same place
        of all; one alone brings each buffer there when it is written.
        """
        buffers = {name: (flat_size(self.model), buffer.dtype.name) for name, buffer in state.flat.items()}
        small, group, place = small_arrays(state), cluster.here(), self.place
        if group.size > 1:
            assert place is not None
            numbers = store.own_blocks(group.rank, group.size)
            shares = {name: place.blocks(buffer, numbers) for name, buffer in state.flat.items()}
            exported = place.whole(_exported(state)) if self.export else None
            return Given(buffers, small, shares.__getitem__, lambda: exported)
        on_host = np.asarray if place is None else place.host
        return Given(
            buffers, small,
            blocks=lambda name: dict(enumerate(np.split(on_host(state.flat[name]), BLOCKS))),
            model=lambda: on_host(_exported(state)) if self.export else None,
        )  # fmt: skip

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
        self, given: list[Given], metadata: Metadata, start: float, prune: bool, written: threading.Event
    ) -> Saved:
        """Write a checkpoint, in the thread, and say how that ended. What goes wrong harms nothing saved before.

        given: what is saved, in a list that gives it away; written: set once nothing refers to it any more.
        """
        step, problem = metadata.step, None
        pruned: tuple[tuple[int, ...], str | None] = (), None
        try:
            with ExitStack() as undo:
                self._write(given.pop(), metadata, written, undo)
                undo.pop_all()
            self._good.add(step)
            if prune:
                pruned = self.prune(least=2)
        except (InputError, OSError, MemoryError) as error:
            place = f"{self.folder}: the checkpoint of step {step} cannot be written: "
            problem = place + (str(error) or type(error).__name__).replace(place, "")  # each process says it, too
        finally:
            written.set()
        return Saved(step, store.state_folder(self.folder, step), problem, 0.0, time.perf_counter() - start, *pruned)

    def _write(self, given: Given, metadata: Metadata, written: threading.Event, undo: ExitStack) -> None:
        """Begin, write blocks, seal: with the other processes of the run. undo: removes on an error what is written."""
        name, parts = f"save {self._saves}", 1 if cluster.here().size == 1 else BLOCKS
        begun: list[tuple[store.Writing, Path | None]] = []
        buffers = given.buffers

        def begin() -> str:
            self.check()
            writing = store.begin(self.folder, metadata.step, given.small, metadata.to_json(), buffers, parts)
            undo.callback(store.abandon, writing)
            begun.append((writing, self._export(given.model(), metadata.step, undo)))
            return writing.folder.name

        def write() -> dict[str, dict[int, str]]:
            nonlocal given
            digests = {each: store.write_blocks(folder, each, given.blocks(each), parts) for each in buffers}
            del given
            written.set()
            for each, found in digests.items():
                store.read_back(folder, each, buffers[each], found, parts)
            return digests

        def seal() -> None:
            self.check()
            self.sync()
            store.seal(*begun[0], digests)

        folder = self.folder / of_first(f"{name} begins", begin)
        digests = of_all(f"{name} is written", write)
        of_first(f"{name} ends", seal)

    def _export(self, weights: np.ndarray | None, step: int, undo: ExitStack) -> Path | None:
        """Write weights (flat_size,) as a model in llm.c's format, of a hidden name until the checkpoint counts.

        Of bf16 weights it is of version 5, else of version 3.
        """
        if weights is None:
            return None
        path = store.hidden_model(self.folder, step)
        undo.callback(lambda: path.unlink(missing_ok=True))
        values = weights[: num_parameters(self.model)].astype(np.float32, copy=False)
        write_model(path, gpt2_shape(self.model, FILES), values, version=5 if weights.dtype.name == "bfloat16" else 3)
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
