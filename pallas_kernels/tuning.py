"""Tile sizes of the kernels, one table per GPU architecture, and where each number comes from.

Leaves out which implementation of an operation is the fastest (llmc_jax/kernels/choice.py).
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")


class Sizes(NamedTuple):
    """What a kernel's speed depends on and its result does not. Where it says unmeasured, no other number was timed."""

    sms: int  # multiprocessors of the largest common part: grids that go round in a loop have a multiple of it
    smem: int  # bytes of shared memory that one block may use
    adamw_vector: int = 4  # neighbouring elements per access: 16 bytes of float32; unmeasured
    embedding_rows: int = 32  # sorted tokens that one program sums; unmeasured
    classifier_rows: int = 2  # of logits that must fit into an SM for them to be kept there; unmeasured
    classifier_warpgroups: int = 2  # that go through one row; unmeasured
    # longest rows that one, two and four warps hold in registers: the fewest warps that do not spill, see
    # benchmarks/results/layernorm_ladder.md; unmeasured
    layernorm_forward: tuple[int, int, int] = (1600, 2048, 8192)
    layernorm_backward: tuple[int, int, int] = (1024, 2048, 4096)
    layernorm_blocks: int = 2  # of the backward's on a multiprocessor; unmeasured
    softmax_block: int = 512  # columns that a row is read by; a power of two; unmeasured
    gelu_block: int = 2048  # elements of a warpgroup at a time; a power of two from 1024 on; unmeasured
    gelu_blocks: int = 6  # of the backward's on a multiprocessor: what its registers leave room for; unmeasured
    # of attention's that last, for each multiprocessor, one after the other: where NCCL's blocks have taken some, or a
    # card has fewer, the last of one each would take as long again as all others; unmeasured
    attention_blocks: int = 3


SIZES = {
    "sm_80": Sizes(sms=108, smem=166_912),  # A100
    "sm_86": Sizes(sms=82, smem=101_376),  # RTX 3090
    "sm_89": Sizes(sms=128, smem=101_376),  # RTX 4090
    "sm_90": Sizes(sms=132, smem=232_448),  # H100, H200
    "sm_100": Sizes(sms=148, smem=232_448, gelu_blocks=5),  # B200
    "sm_120": Sizes(sms=170, smem=101_376),  # RTX 5090
}


class Tuned(NamedTuple):
    """An architecture whose row has other numbers: what a kernel's `target` may be, to try them."""

    architecture: str
    changes: tuple[tuple[str, Any], ...]  # fields of Sizes and their values; hashable


def sizes(target: str | Tuned) -> Sizes:
    """Return the table's row of an architecture. Raises ValueError where it has no kernels, and for unknown fields."""
    architecture, changes = target if isinstance(target, Tuned) else (target, ())
    if architecture not in SIZES:
        raise ValueError(f"no kernels for {architecture}: known are {', '.join(TARGETS)} (Ampere and later)")
    return SIZES[architecture]._replace(**dict(changes))


# ----- attention ----------------------------------------------------------------------------------------------------


class AttentionSizes(NamedTuple):
    """Of one target and head size; all unmeasured, chosen by registers and spills of the compiled kernels."""

    version: str  # of VERSIONS
    columns: dict[str, int]  # of a tile of scores, which has 64 rows, in each kernel
    # Slots for the tiles that a block walks over, a power of two: one in use for each warpgroup, the rest being filled.
    stages: int = 2
    warpgroups: int = 1  # of a block, each with 64 rows
    copied_apart: tuple[str, ...] = ()  # kernels in which one warpgroup more does nothing but start copies
    held: bool = False  # keys and values of dkv's own rows stay in registers
    # Kernels whose blocks go from one part of the work to the next, with one of the warpgroups copying ahead: how many
    # blocks at most, of which a multiprocessor holds one at a time.
    lasting: Mapping[str, int] = MappingProxyType({})


HEAD_SIZES = range(16, 129, 16)  # channels of a head, padded
DECODED_CHANNELS = range(32, 1601, 32)  # C of a model that decode.py knows: with more, registers would spill
VERSIONS = ("mma", "wgmma")


def architecture_of(target: str | Tuned) -> str:
    """Return the name of the architecture, such as sm_90."""
    return target.architecture if isinstance(target, Tuned) else target


def attention_sizes(target: str | Tuned, head_size: int, version: str | None) -> AttentionSizes:
    """Return the table's row of an architecture and a head size; version None leaves the choice to the table.

    wgmma exists on Hopper (sm_90) alone, later GPUs have dropped the instruction. Raises ValueError for what no kernel
    serves.
    """
    blocks = sizes(target).sms * sizes(target).attention_blocks
    target = architecture_of(target)
    if version is None:
        version = "wgmma" if target == "sm_90" else "mma"
    if version not in VERSIONS:
        raise ValueError(f"no version {version!r} of attention: known are {', '.join(VERSIONS)}")
    if version != "mma" and target != "sm_90":
        raise ValueError(f"attention by wgmma runs on sm_90 alone, not on {target}; take mma")
    if head_size not in HEAD_SIZES:
        raise ValueError(
            f"heads of {head_size} channels are more than the attention kernels' registers hold: at most "
            f"{HEAD_SIZES[-1]}; take more heads, or the jnp version"
        )
    if version == "wgmma":
        # Two warpgroups get each tile from the L2 cache once for both; two slots in use, as one may be a tile ahead.
        # One that only copies saves the others instructions, where an SM holds one block with it or without.
        apart = ("dkv",) + ("dq",) * (head_size > 64) + ("forward",) * (head_size > 80)
        columns = {"forward": 64, "dq": 64, "dkv": 64}
        # Beside sums of 2 x 96 columns, what lasts from part to part would not fit into dkv's registers.
        lasting = {name: blocks for name in apart if name != "dkv" or head_size <= 80}
        return AttentionSizes(version, columns, 4, 2, apart, held=head_size <= 64, lasting=lasting)
    # mma has its operands in registers: beside sums of more than 80 columns, tiles of 64 do not fit.
    backward = 32 if head_size > 80 else 64
    return AttentionSizes(version, {"forward": 64, "dq": backward, "dkv": backward})
