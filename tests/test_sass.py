"""benchmarks/sass.py: the loops in a disassembly, registers that products use, and how many blocks an SM holds."""

from collections import Counter

import pytest

from benchmarks.sass import Kernel, Loop, early, parse

TEXT = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/                   LDG.E.128 R4, desc[UR8][R42.64] ;
.L_x_1:
        /*0020*/                   MUFU.EX2 R4, R4 ;
        /*0030*/              @!P2 BRA `(.L_x_1) ;
        /*0040*/               @P0 BRA `(.L_x_0) ;
        /*0050*/                   BRA `(.L_x_2) ;
.L_x_2:
        /*0060*/                   EXIT ;
"""


def test_loops_end_with_a_branch_back() -> None:
    instructions, (inner, outer) = parse(TEXT)
    assert instructions == 7
    assert inner == Loop(2, Counter({"MUFU.EX2": 1, "BRA": 1}))
    assert outer.instructions == 4 and outer.count("MUFU", "LDG") == 2


def test_registers_shared_memory_and_threads_each_may_limit_the_blocks() -> None:
    def blocks(registers: int, shared_memory: int, threads: int) -> int:
        kernel = Kernel("k", registers, 0, False, shared_memory, threads, 0, ())
        return kernel.blocks(shared_memory=233_472, threads=2048)

    assert blocks(113, 104_448, 256) == 2  # 120 registers each are given out
    assert blocks(129, 0, 256) == 1
    assert blocks(32, 104_448, 128) == 2
    assert blocks(32, 0, 1024) == 2
    assert blocks(16, 0, 32) == 32


PRODUCTS = """
        /*0010*/                   HGMMA.64x64x16.F32.BF16 R56, gdesc[UR12], RZ, !UPT, gsb0 ;
        /*0020*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR56], R24, gsb0 ;
        /*0030*/                   {} ;
        /*0040*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0050*/                   {} ;
        /*0060*/                   HGMMA.64x64x16.F32.BF16 R88, R8, gdesc[UR8].tnspB, R88, gsb0 ;
        /*0070*/              @!P0 {} ;
        /*0080*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0090*/                   FADD R8, R24, R88 ;
"""


@pytest.mark.parametrize(
    ("instructions", "too_early"),
    [
        (("FMUL R1, R2, R3", "FMUL R8, R56, R87", "FMUL R12, R8, R57"), 0),
        (("FMUL R1, R56, R3", "FMUL R1, R2, R3", "FMUL R1, R2, R3"), 1),  # reads a sum of the first
        (("FMUL R1, R2, R3", "FADD R1, R24, R3", "FMUL R1, R2, R3"), 1),  # the second is still under way
        (("FMUL R1, R2, R3", "FMUL R1, R2, R3", "MOV R11, R2"), 1),  # writes the third's left operand
        (("FMUL R1, R2, R3", "FMUL R1, R2, R3", "LDS.64 R118, [R2]"), 1),  # writes its last sum and the next register
    ],
)
def test_registers_of_unfinished_products_are_left_alone(instructions: tuple[str, ...], too_early: int) -> None:
    assert len(early(PRODUCTS.format(*instructions))) == too_early
