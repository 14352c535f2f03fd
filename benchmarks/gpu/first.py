"""What matters most, in two calls of five minutes, the most important first; then the rest, as time allows.

Every leg takes items of plan.py that have no figures yet, so a call goes on where the last one stopped. The calls are
planned by the items' expected seconds. Of the small plan the first leg of each part takes the whole part.
"""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import NamedTuple

from benchmarks.gpu.plan import ATTENTION, D12_ELEMENTS, D12_NUMERICS, ROWS, VP, Item, V

MINUTES = 5.0  # of a call
CALL = 10.0  # seconds for JAX to find its devices, once a call
PLANNED, REST = ("call 1", "call 2"), "as time allows"


class Leg(NamedTuple):
    """Items that are measured one after another."""

    call: str  # of PLANNED, into one of which its legs must fit; or REST
    what: str
    part: str
    patterns: tuple[str, ...]  # of the items' names, in their order


LEGS = (
    Leg("call 1", "the ceilings", "machine", (
        "copy", "copy by a fusion", "read", f"product bf16 {ROWS}x768x3072", f"product bf16 {ROWS}x768x{VP}",
        f"product bf16 768x{ROWS}x3072", f"product fp8 {ROWS}x768x3072", "product fp8 16384x1600x6400",
    )),
    Leg("call 1", "is every kernel of the step right", "numerics", D12_NUMERICS),
    Leg("call 1", "the step", "step", ("d12 bf16 B=64",)),
    Leg("call 1", "the step on NVIDIA's products alone", "variants", ("--products xla",)),
    Leg("call 1", "our products", "kernels", (f"head_weights bf16 {ROWS}x*", f"linear_gelu_* bf16 {ROWS}x768x3072")),
    Leg("call 1", "llm.c's step", "llmc", ("d12 bf16 B=64",)),
    Leg("call 1", "PyTorch's step", "torch", ("d12 bf16 B=64",)),
    Leg("call 1", "attention", "kernels", tuple(
        f"attention bf16 64x1024x12x64 implementation={name}" for name in (*ATTENTION, "cudnn")
    )),
    Leg("call 1", "PyTorch's attention", "torch", ("attention bf16 64x1024x12x64 *",)),
    Leg("call 1", "where the step's time goes", "profile", ("*",)),
    Leg("call 1", "from the command to the first step", "start", ("*",)),
    Leg("call 2", "what a start finds out about the kernels", "check", ("*",)),
    Leg("call 2", "the other kernels", "kernels", (
        f"*layernorm_* bf16 {ROWS}x768", f"gelu_* bf16 {ROWS}x3072", f"classifier bf16 *x{V}x{VP} form=shared",
        f"embedding_backward bf16 64x1024x768x{VP}", f"adamw_update bf16 {D12_ELEMENTS}",
        f"global_norm bf16 {D12_ELEMENTS}",
    )),
    Leg("call 2", "the same bits", "repeat", ("first", "again")),
    Leg("call 2", "the same bits after a kill", "resume", ("killed with compile cache kept",)),
    Leg("call 2", "the largest model", "step", ("d48 bf16 B=16",)),
    Leg(REST, "other sizes", "step", ("d24 bf16 B=32", "d12 bf16 B=16", "d12 fp32 TF32 B=4")),
    Leg(REST, "PyTorch's step with cuDNN's attention, and in fp32 with TF32", "torch", (
        "d12 bf16 B=64 attention=cudnn", "d12 tf32 B=4",
    )),
    Leg(REST, "the step with one thing changed", "variants", ("--logit-rows 8192", "--attention cudnn")),
    Leg(REST, "a token of generated text", "generate", ("d12 *",)),
    Leg(REST, "the other numerics", "numerics", ("*",)),
)  # fmt: skip


def items_of(leg: Leg, plan: Iterable[Item], tiny: bool) -> list[Item]:
    """Return a leg's items, in the order of its patterns."""
    of_part = [item for item in plan if item.part == leg.part]
    if tiny:
        return of_part if leg == next(each for each in LEGS if each.part == leg.part) else []
    found = [item for pattern in leg.patterns for item in of_part if fnmatchcase(item.name, pattern)]
    return list({item.name: item for item in found}.values())


def calls(plan: Iterable[Item], tiny: bool = False) -> dict[str, list[Item]]:
    """Return what each call measures if nothing is known yet, without what an earlier one has measured."""
    of_item: dict[tuple[str, str], tuple[str, Item]] = {}
    for leg in LEGS:
        for item in items_of(leg, plan, tiny):
            of_item.setdefault((item.part, item.name), (leg.call, item))
    return {name: [item for call, item in of_item.values() if call == name] for name in (*PLANNED, REST)}
