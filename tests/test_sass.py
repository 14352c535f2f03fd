"""benchmarks/sass.py: the loops in a disassembly, and how many blocks an SM holds."""

from collections import Counter

from benchmarks.sass import Kernel, Loop, parse

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
