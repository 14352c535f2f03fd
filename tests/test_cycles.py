"""benchmarks/cycles.py: small programs whose clocks can be counted by hand."""

import pytest

from benchmarks.cycles import Instruction, Machine, Paths, parse, path, simulate

MACHINE = Machine(launch=0, memory=500)


def instruction(text: str, waits: tuple[int, ...] = (), writes: int = 7, left: int = -1) -> Instruction:
    return Instruction(text, text.split(".")[0].split()[0], 1, writes, 7, waits, left)


def clocks(code: list[Instruction], warps: int = 1, machine: Machine = MACHINE) -> float:
    paths = [Paths([], [], code, [instruction("EXIT")])] * warps
    return simulate(paths, [[(1,) * warps]], 1, machine)


def test_a_scheduler_issues_an_instruction_a_clock() -> None:
    assert clocks([instruction("FADD")] * 10) == 10
    assert clocks([instruction("FADD")] * 10, warps=2) == 20 + 1  # and the other EXIT
    assert clocks([instruction("FADD")] * 10, machine=MACHINE._replace(issue=2)) == 20


def test_units_are_busy() -> None:
    assert clocks([instruction("MUFU.EX2")] * 4) == 3 * 8 + 1  # the last one's EXIT does not wait for it
    assert clocks([instruction("MUFU.EX2"), instruction("FADD")] * 4) == 3 * 8 + 2  # beneath them


def test_a_result_is_waited_for() -> None:
    assert clocks([instruction("LDS", writes=2), instruction("FADD", waits=(2,))]) == 30 + 1


def test_products_run_beside_their_warp_until_it_waits() -> None:
    products = [instruction("HGMMA.64x64x16 R0, gdesc")] * 3 + [instruction("HGMMA.64x64x16 R0, gdesc, gsb0")]
    wait = instruction("WARPGROUP.DEPBAR.LE gsb0, 0x0", left=0)
    assert clocks(products) == 4
    assert clocks([*products, wait]) == 4 + 4 * 32 + 30 + 1
    assert clocks([*products, *[instruction("FADD")] * 50, wait]) == 4 + 4 * 32 + 30 + 1
    assert clocks([*products, wait], machine=MACHINE._replace(chained=100)) == 4 + 4 * 100 + 30 + 1


def test_blocks_follow_each_other_where_there_is_no_room() -> None:
    paths, one = [Paths([], [], [instruction("FADD")] * 10, [instruction("EXIT")])], [(1,)]
    machine = MACHINE._replace(launch=100)
    assert simulate(paths, [one, one], 1, machine) == 2 * (100 + 10)
    assert simulate(paths, [one, one], 2, machine) == 100 + 20 + 1
    assert simulate(paths, [[(1,), (1,)]], 1, machine) == 100 + 10 + 1 + 10  # one that goes from part to part


SASS = """
        /*0000*/ FADD R0, R1, R2 ;  /* 0x0000000000000000 */
                                    /* 0x000fe40000000000 */
.L_x_1:
        /*0010*/ HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;  /* 0x0000000000000000 */
                                    /* 0x000fe20000000000 */
        /*0020*/ WARPGROUP.DEPBAR.LE gsb0, 0x1 ;  /* 0x0000000000000000 */
                                    /* 0x000fe20000000000 */
        /*0030*/ @P0 BRA `(.L_x_1) ;  /* 0x0000000000000000 */
                                    /* 0x001fe20000000000 */
        /*0040*/ EXIT ;  /* 0x0000000000000000 */
                                    /* 0x000fea0003800000 */
"""


def test_machine_code_is_read() -> None:
    code, labels = parse(SASS)
    assert [each.kind for each in code] == ["FADD", "HGMMA", "WARPGROUP", "BRA", "EXIT"] and labels == {".L_x_1": 1}
    assert [each.stall for each in code] == [2, 1, 1, 1, 5] and code[2].left == 1
    assert code[3].waits == (0,) and code[0].writes == code[0].reads == 7 and code[0].waits == ()
    ways = path(code, labels, True)
    assert [len(part) for part in ways] == [0, 1, 3, 1]


def test_other_code_is_refused() -> None:
    code, labels = parse(SASS.replace("HGMMA", "HMMA"))
    with pytest.raises(ValueError, match="no loop with matrix products"):
        path(code, labels, True)
