"""What the threads of one warpgroup do to memory in an interpreted kernel, and which of it is a race between them.

Interpret mode runs a warpgroup as one thread, so a thread that reads what another of its warpgroup wrote is no race to
it. Here the accesses are recorded with the layouts of mosaic's loads and stores, which say whose each element is. Only
for kernels without automatic barriers: where there are some, no access waits for `meet`.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, shared_memory

from pallas_kernels import adamw, classifier, decode, embedding, gelu, layernorm, mosaic, softmax
from tests.pallas_kernels.test_attention_layout import elements

MODULES = (mosaic, adamw, classifier, decode, embedding, gelu, layernorm, softmax)
ALL = -1  # every thread, or it is not known which


class Access(NamedTuple):
    """A load or a store."""

    buffer: Any
    writes: bool
    begin: tuple[int, ...]  # in the buffer, of each of its axes
    threads: np.ndarray  # of each element of this part of the buffer, from `begin` on


Log = dict[Any, list[Access | None]]  # of each kernel and warpgroup, in order; None: all its threads have met


@cache
def threads_of(layout: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Return which thread holds each element, ALL where several do. layout: None for a scalar, or an unknown one."""
    found = np.full(shape, ALL)
    described = layout.to_mgpu() if layout is not None and shape else None
    if hasattr(described, "vec_size") and not hasattr(described, "tiling"):  # WG_STRIDED
        found[...] = (np.arange(found.size) // described.vec_size % mosaic.THREADS).reshape(shape)
    elif described is not None and all(isinstance(d, int) for d in (*described.warp_dims, *described.lane_dims)):
        held = elements(described, shape)  # (registers, warps…, lanes…, vector, axes)
        held = held.reshape(len(held), mosaic.THREADS, -1, len(shape))
        found[tuple(np.moveaxis(held, -1, 0))] = np.arange(mosaic.THREADS)[:, None]
    return found


@contextmanager
def recorded() -> Iterator[Log]:
    """Record what kernels do that are traced and run meanwhile."""
    log: Log = {}
    kernels: list[None] = []  # that have begun
    layouts: list[Any] = [None]  # by their numbers, which the names of equations carry
    of_shape: dict[tuple[int, ...], set[Any]] = {}  # layouts of the arrays of the kernel that is being traced

    def known(values: jax.Array, layout: Any) -> jax.Array:
        of_shape.setdefault(values.shape, set()).add(layout)
        return values

    def named(layout: Any, do: Callable[[], Any]) -> Any:
        layouts.append(layout)
        with jax.named_scope(f"layout{len(layouts) - 1}"):
            return do()

    def load(ref: Any, layout: Any, dtype: Any = None) -> jax.Array:
        return known(named(layout, lambda: real["load"](ref, layout, dtype)), layout)

    def store(ref: Any, values: jax.Array) -> None:
        candidates = of_shape.get(values.shape, set())  # one layout for a shape: what is computed has its operands'
        named(next(iter(candidates)) if len(candidates) == 1 else None, lambda: real["store"](ref, values))

    def made(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        """Note the layout of `zeros`, `full` and `iota`, which have two arguments before it, or one."""
        place = 1 if function is mosaic.zeros else 2
        return lambda *given, **more: known(function(*given, **more), given[place])

    def kernel(body: Callable[..., None], *, auto_barriers: bool = True, **how: Any) -> Any:
        assert not auto_barriers

        @wraps(body, assigned=())
        def noting(*refs: Any) -> None:
            of_shape.clear()
            body(*refs)

        return real["kernel"](noting, auto_barriers=False, **how)

    names = ("load", "store", "zeros", "full", "iota", "kernel")
    real = {name: getattr(mosaic, name) for name in names}
    stand_ins = {"load": load, "store": store, "kernel": kernel}
    stand_ins |= {name: made(real[name]) for name in ("zeros", "full", "iota")}

    class Races:
        """The interpreter's own, which sees warpgroups alone; called with each access."""

        def __init__(self, within: Any) -> None:
            self.within = within

        def __getattr__(self, name: str) -> Any:
            return getattr(self.within, name)

        def check_read(self, thread: Any, *given: Any, **more: Any) -> None:
            self.within.check_read(thread, *given, **more)
            note(False, thread, *given, **more)

        def check_write(self, thread: Any, *given: Any, **more: Any) -> None:
            self.within.check_write(thread, *given, **more)
            note(True, thread, *given, **more)

    def note(writes: bool, thread: Any, _clock: Any, buffer: Any, place: Any, source_info: Any) -> None:
        places = getattr(place, "range", place)  # of jax 0.12; before it, the range itself
        numbers = re.findall(r"layout(\d+)", str(source_info.name_stack))
        shape = tuple(at.stop - at.start for at in places if isinstance(at, slice))
        threads = threads_of(layouts[int(numbers[-1])] if numbers else None, shape)
        whole = [at if isinstance(at, slice) else slice(at, at + 1) for at in places]
        threads = threads.reshape([at.stop - at.start for at in whole])
        add(thread, Access(buffer, writes, tuple(at.start for at in whole), threads))

    def add(thread: Any, event: Access | None) -> None:
        log.setdefault((len(kernels), thread), []).append(event)

    def wait(barrier: Any, thread: Any, *given: Any, **more: Any) -> Any:
        found = real_wait(barrier, thread, *given, **more)
        add(thread, None)
        return found

    def initialize(*given: Any, **more: Any) -> Any:
        kernels.append(None)
        return real_initialize(*given, **more)

    races, real_wait = gpu_callbacks.get_races, shared_memory.Barrier.wait
    real_initialize = gpu_callbacks._initialize_shared_memory
    with pytest.MonkeyPatch.context() as patch:
        for module in MODULES:
            for name in names:
                if getattr(module, name, None) is real[name]:
                    patch.setattr(module, name, stand_ins[name])
        patch.setattr(gpu_callbacks, "get_races", lambda: Races(races()))
        patch.setattr(gpu_callbacks, "_initialize_shared_memory", initialize)
        patch.setattr(shared_memory.Barrier, "wait", wait)
        yield log


def race(one: Access, other: Access) -> bool:
    """Return whether two threads may meet in an element that one of them writes."""
    if one.buffer != other.buffer or not (one.writes or other.writes):
        return False
    begin = np.maximum(one.begin, other.begin)
    end = np.minimum(*(np.add(each.begin, each.threads.shape) for each in (one, other)))
    if (begin >= end).any():
        return False
    of_both = [
        each.threads[tuple(slice(b - at, e - at) for b, e, at in zip(begin, end, each.begin, strict=True))]
        for each in (one, other)
    ]
    return bool((of_both[0] != of_both[1]).any() or (of_both[0] == ALL).any())


def races(events: Sequence[Access | None], left_out: int | None = None) -> int:
    """Return how many pairs of a warpgroup's accesses race. left_out: the number of a meeting that does not count."""
    found, meetings, since = 0, 0, list[Access]()
    for event in events:
        if event is None:
            since = since if meetings == left_out else []
            meetings += 1
        else:
            found += sum(race(event, before) for before in since)
            since.append(event)
    return found
