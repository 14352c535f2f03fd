"""No thread of a warpgroup reads or overwrites what another one wrote, but after a `meet`; each `meet` is needed."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import pytest

from llmc_jax.kernels.functions import FILES
from llmc_jax.trials import problems
from pallas_kernels import adamw, classifier, embedding, gelu, layernorm, mosaic, softmax
from tests.comparisons import QUICK
from tests.pallas_kernels.within_warpgroup import ALL, Access, Log, race, races, recorded, threads_of


class Case(NamedTuple):
    """A kernel, at the smallest sizes at which it does all that it can do."""

    kernel: Callable[..., Any]
    sizes: list[int]  # llmc_jax/trials/problems.py
    needed: list[bool] = []  # noqa: RUF012  of a block's meetings, which of them keep accesses apart
    how: dict[str, Any] = {}  # noqa: RUF012


SUMS = [True, True, True, True, True, False]  # of three sums over rows: nothing follows the last
CASES = {
    "a row in shared memory": Case(classifier.classifier, [2, 250, 256], [True, True], {"form": "shared"}),
    "rows in registers": Case(layernorm.layernorm_backward, [5, 256], SUMS),
}
SLOW = {
    "rows read twice": Case(classifier.classifier, [2, 250, 256], [True, True], {"form": "sweeps"}),
    "two warpgroups": Case(classifier.classifier, [2, 8190, 8192], [], {"form": "sweeps"}),
    "with the residual": Case(layernorm.residual_layernorm_backward, [5, 256], SUMS),
    "rows streamed": Case(layernorm.layernorm_backward, [3, 4224]),
    "forward": Case(layernorm.layernorm_forward, [5, 1600]),
    "forward, streamed": Case(layernorm.residual_layernorm_forward, [2, 12288]),
    "gelu": Case(gelu.gelu_forward, [9, 256]),
    "gelu's backward": Case(gelu.gelu_backward, [9, 256], [True, False]),
    "softmax": Case(softmax.softmax_forward, [1, 2, 33]),
    "softmax's backward": Case(softmax.softmax_backward, [1, 2, 33]),
    "embedding": Case(embedding.embedding_backward, [2, 40, 128, 256]),
    "the update": Case(adamw.adamw_update, [2**16]),
    "the norm": Case(adamw.global_norm, [2**13]),
}  # fmt: skip


def log_of(case: Case) -> Log:
    """What a kernel does. It is traced anew: without its jit, which might know it already."""
    kernel: Any = case.kernel
    given = problems.problem(kernel.__name__, "bf16", case.sizes, seed=1)
    bound = given.bind(partial(kernel.__wrapped__, interpret=True, **case.how))
    with recorded() as log:
        jax.block_until_ready(jax.jit(bound, compiler_options=QUICK)(*given.arrays))
    return log


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [*CASES.values(), *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW.values())],
    ids=[*CASES, *SLOW],
)  # fmt: skip
def test_threads_meet_where_they_must(case: Case) -> None:
    logs = log_of(case).values()
    assert any(access is not None and access.writes for events in logs for access in events)
    assert not any(map(races, logs))
    for events in logs if case.needed else []:
        meetings = events.count(None)
        assert meetings and meetings % len(case.needed) == 0  # several blocks, one after the other
        found = [races(events, left_out) > 0 for left_out in range(meetings)]
        assert found == case.needed * (meetings // len(case.needed))


def test_every_kernel_without_automatic_barriers_is_looked_at() -> None:
    looked_at = {case.kernel.__name__ for case in [*CASES.values(), *SLOW.values()]}
    assert looked_at == {name for name, file in FILES.items() if file not in ("attention", "matmul")}


def test_whose_an_element_is() -> None:
    """An access beside another of the same layout is none of a race, at another place or in another layout it is."""
    flat, other = mosaic.flat_layout(1024, 8), mosaic.flat_layout(1024, 4)
    rows = mosaic.row_layout(256)
    assert threads_of(flat, (1024,)).tolist() == [element // 8 for element in range(1024)]
    assert (threads_of(rows, (4, 256)).reshape(-1) == threads_of(flat, (1024,))).all()
    assert (threads_of(rows.reduce(0), (256,)) == ALL).all() and threads_of(None, ()) == ALL

    def access(layout: Any, begin: int = 0, *, writes: bool = False, buffer: str = "a") -> Access:
        return Access(buffer, writes, (begin,), threads_of(layout, (1024,)))

    written = access(flat, writes=True)
    assert race(written, access(other)) and race(written, access(flat, 8)) and race(written, access(None))
    assert not race(written, access(flat)) and not race(written, access(flat, 1024))
    assert not race(written, access(other, buffer="b")) and not race(access(flat), access(other))
    assert races([written, access(other)]) == 1 == races([written, None, access(other)], left_out=0)
    assert races([written, None, access(other)]) == 0
