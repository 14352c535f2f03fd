"""The first thirty minutes with a card: what to measure in three calls of nine minutes, the most important first.

Every leg takes items of plan.py that have no figures yet, so a call goes on where the last one stopped. Of the small
plan the first leg of each part takes the whole part.
"""

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import NamedTuple

from benchmarks.gpu.plan import ATTENTION, D12_ELEMENTS, D12_NUMERICS, ROWS, VP, Item, V
from benchmarks.gpu.results import Results

MINUTES = 9.0  # of a call


class Leg(NamedTuple):
    """Items that are measured one after another."""

    call: int  # 1, 2 or 3: with which it should fit into a call
    what: str
    part: str
    patterns: tuple[str, ...]  # of the items' names, in their order
    needed: Callable[[Results], bool] = lambda _: True


def _bits_moved(results: Results) -> bool:
    return bool(results.moved())


LEGS = (
    Leg(1, "the ceilings", "machine", (
        "copy", "copy by a fusion", "read", f"product bf16 {ROWS}x768x3072", f"product bf16 {ROWS}x768x{VP}",
        f"product bf16 768x{ROWS}x3072",
    )),
    Leg(1, "is every kernel of the step right", "numerics", D12_NUMERICS),
    Leg(1, "bits moved: is it a race", "races", ("*",), _bits_moved),
    Leg(1, "the step", "step", ("d12 bf16 B=64",)),
    Leg(1, "PyTorch's step", "torch", ("d12 bf16 B=64",)),
    Leg(1, "attention", "kernels", tuple(
        f"attention bf16 64x1024x12x64 implementation={name}" for name in (*ATTENTION, "cudnn")
    )),
    Leg(1, "PyTorch's attention", "torch", ("attention bf16 64x1024x12x64 *",)),
    # Last, since XLA times each of its products first, for minutes; where the default is on, off is the other one.
    Leg(1, "the step with Triton's products and without", "step", ("d12 bf16 --triton-gemm *",)),
    Leg(2, "where the step's time goes", "profile", ("*",)),
    Leg(2, "the other kernels", "kernels", (
        f"*layernorm_* bf16 {ROWS}x768", f"gelu_* bf16 {ROWS}x3072", f"classifier bf16 *x{V}x{VP} form=shared",
        f"embedding_backward bf16 64x1024x768x{VP}", f"adamw_update bf16 {D12_ELEMENTS}",
        f"global_norm bf16 {D12_ELEMENTS}",
    )),
    Leg(2, "tile sizes", "tiles", (f"*bf16 {ROWS}x768 layernorm_blocks=*", "adamw_update *")),
    Leg(2, "the step with one thing changed", "variants", ("--logit-rows 8192", "--attention cudnn", "-ge 1")),
    Leg(2, "a token of generated text", "generate", ("d12 *",)),
    Leg(3, "the other numerics", "numerics", ("*",)),
    Leg(3, "the same bits", "repeat", ("first", "again", "--kernels xla --attention cudnn*")),
    Leg(3, "the same bits after a kill", "resume", ("killed with compile cache kept",)),
    Leg(3, "larger models", "step", ("d48 bf16 B=16", "d24 bf16 B=64")),
)  # fmt: skip


def items_of(leg: Leg, plan: Iterable[Item], tiny: bool) -> list[Item]:
    """Return a leg's items, in the order of its patterns."""
    of_part = [item for item in plan if item.part == leg.part]
    if tiny:
        return of_part if leg == next(each for each in LEGS if each.part == leg.part) else []
    found = [item for pattern in leg.patterns for item in of_part if fnmatchcase(item.name, pattern)]
    return list({item.name: item for item in found}.values())


def progress(results: Results, plan: list[Item], tiny: bool = False) -> str:
    """Return which of the calls are done, in one line."""
    said = []
    for call in sorted({leg.call for leg in LEGS}):
        legs = [leg for leg in LEGS if leg.call == call and leg.needed(results)]
        keys = {(item.part, item.name) for leg in legs for item in items_of(leg, plan, tiny)}
        tried = len(keys & results.records.keys())
        said.append(f"{call}: {'done' if tried == len(keys) else f'{tried} of {len(keys)} items'}")
    return f"The first calls: {'; '.join(said)}."
