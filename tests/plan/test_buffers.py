"""XLA's buffer assignment: how it is read, the moment that needs most, and what lies there by kind."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc_jax.base.errors import FormatError
from llmc_jax.config.flags import parse_args
from llmc_jax.models.gpt2.tensors import flat_size
from llmc_jax.plan import buffers, compiled
from llmc_jax.plan.buffers import Account, Allocation, Value, peak

ASSIGNMENT = """BufferAssignment:
allocation 0: size 64, page 0, parameter 0, shape |f32[16]| at ShapeIndex {}, maybe-live-out:
 value: <3 state_params.1 @0> (size=64,offset=0): f32[16]{0}
 value: <9 fusion.2{0} @0> (size=64,offset=0): f32[16]{0}
allocation 1: size 96, page 0, preallocated-temp:
 value: <4 dot.1 @0> (size=32,offset=0): f32[8]{0}
 value: <5 fusion.2{} @0> (size=16,offset=64): (f32[16]{0}, s8[32]{0})
 value: <6 fusion.2{1} @0> (size=32,offset=32): s8[32]{0}
 value: <7 while{2} (phi) @0> (size=32,offset=32): f32[8]{0}

Total bytes used: 160
"""
LIVE = """HloLiveRange (max 4):
  InstructionSequence:
    0:state_params.1
    1:dot.1
    2:fusion.2
    3:while
  BufferLiveRange:
    state_params.1{}:0-4
    dot.1{}:1-2
    fusion.2{}:2-3
    fusion.2{0}:2-4
    fusion.2{1}:2-2
    while{2}:3-4
  Live ranges at 2 (peak):
    dot.1{}: 32 bytes (cumulative: 32 bytes)
"""


def test_what_xla_writes_is_read() -> None:
    found = buffers.parsed(ASSIGNMENT, LIVE)
    assert found.schedule == ("state_params.1", "dot.1", "fusion.2", "while")
    arguments, block = found.allocations
    assert (arguments.parameter, arguments.temporary, block.parameter, block.temporary) == (True, False, False, True)
    assert (arguments.size, block.size, found.total) == (64, 96, 160)
    assert block.values[0] == Value("dot.1", "", "f32[8]{0}", 32, 0, 1, 2)
    assert block.values[2] == Value("fusion.2", "1", "s8[32]{0}", 32, 32, 2, 2)
    assert block.values[3] == Value("while", "2", "f32[8]{0}", 32, 32, 3, 4)
    assert peak(block).at == 2 and peak(block).bytes == 80


@pytest.mark.parametrize("texts", [("", LIVE), (ASSIGNMENT, ""), ("another form", "altogether")])
def test_another_form_is_refused(texts: tuple[str, str]) -> None:
    with pytest.raises(FormatError):
        buffers.parsed(*texts)


def test_a_folder_that_xla_wrote_nothing_into_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError):
        buffers.read(tmp_path)


VALUES = st.lists(
    st.builds(
        lambda size, offset, first, length: Value("x", "", "f32[1]", size, offset, first, first + length),
        st.integers(1, 9), st.integers(0, 20), st.integers(0, 6), st.integers(0, 4),
    ),
    max_size=12,
)  # fmt: skip


@given(VALUES)
def test_the_peak_is_that_of_counting_byte_by_byte(values: list[Value]) -> None:
    def alive(at: int) -> int:
        return len({byte for v in values if v.first <= at <= v.last for byte in range(v.offset, v.offset + v.size)})

    most = max(map(alive, range(12)))
    found = peak(Allocation(99, "preallocated-temp", tuple(values)))
    assert found.bytes == most == (alive(found.at) if values else 0)


# ----- a real program -------------------------------------------------------------------------------------------------

PLAN = compiled.plan_here(parse_args(["-e", "L2-NH2-C16", "-b", "4", "-t", "32"]))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Account, int]:
    """The account of a small step, compiled for the processor at hand, and the bytes that JAX says it takes."""
    folder = tmp_path_factory.mktemp("dump")
    whole = compiled.compile_here(PLAN, buffers.options(folder)).memory.total
    return buffers.account(*buffers.read(folder), PLAN.model), whole


def test_the_kinds_add_up_to_the_program(found: tuple[Account, int]) -> None:
    account, whole = found
    rest = account.fragmentation + account.unknown
    assert sum(account.kinds.values()) + rest == pytest.approx(whole, rel=0.001)
    assert rest < 0.03 * whole


def test_kinds_of_a_small_step(found: tuple[Account, int]) -> None:
    """4 x 32 rows of 50,304 logits, and as much for their gradient; a model of 0.8 M parameters."""
    kinds, size, logits = found[0].kinds, flat_size(PLAN.model), 4 * 4 * 32 * 50304
    assert kinds["optimizer"] == 8 * size
    assert kinds["logits"] == 2 * logits
    assert 4 * size <= kinds["parameters"] <= 8 * size
    assert 0 < kinds["activations"] < 0.1 * logits
