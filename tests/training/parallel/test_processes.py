"""Devices of several processes make the runs of one: the same bits in a fixed order, else within rounding.

processes.py starts them, on this machine, each layout once.
"""

from pathlib import Path

import numpy as np
import pytest

from llmc_jax.models.tensors import BLOCKS
from tests.training.parallel.processes import Found, Layout, digest, runs_of
from tests.training.parallel.spread import Case
from tests.training.parallel.test_spread import LOSSES, NORMS

SHAPE = "L1-NH2-C48-V97-T32"  # test_spread.py has two layers
ANY = Case(steps=3, shape=SHAPE)
FIXED = ANY._replace(fixed=True)
# Every process compiles each of its runs: so every stage is here in both orders, but not in each layout.
CASES = {
    Layout(2, 1): [FIXED.on(2, 0), ANY.on(2, 0)],
    Layout(2, 2): [FIXED.on(4, 2), ANY.on(4, 1)],
    Layout(4, 1): [FIXED.on(4, 1), ANY.on(4, 2)],
}
ONE = Layout(1, 4)
EACH = [(layout, case) for layout, cases in CASES.items() for case in cases]


def of_one(case: Case) -> Case:
    """What one process makes beside it. In a fixed order one run is that of any stage and number of devices."""
    return FIXED.on(4, 1) if case.fixed else case


pytestmark = pytest.mark.slow

Runs = dict[tuple[Layout, Case], Found]


@pytest.fixture(scope="module")
def runs(together: Path) -> Runs:
    alone = {ONE: sorted({of_one(case) for _, case in EACH}, key=lambda case: not case.fixed)}
    return runs_of(CASES | alone, together / "processes")


@pytest.mark.parametrize(("layout", "case"), EACH)
def test_several_processes_make_the_run_of_one(runs: Runs, layout: Layout, case: Case) -> None:
    found, expected = runs[layout, case], runs[ONE, of_one(case)]
    (alone,) = expected.told
    assert all(alone.applied) and len(alone.losses) == 3
    for told in found.told:
        assert (told.applied, told.replicas) == (alone.applied, 1)
        np.testing.assert_allclose(told.losses, alone.losses, rtol=0 if case.fixed else LOSSES["fp32"])
        np.testing.assert_allclose(told.norms, alone.norms, rtol=0 if case.fixed else NORMS["fp32"])
        # what decides is the same everywhere
        assert (told.losses, told.norms, told.rest) == (found.told[0].losses, found.told[0].norms, found.told[0].rest)
        assert told.rest == alone.rest or not case.fixed


@pytest.mark.parametrize(("layout", "case"), EACH)
def test_their_blocks_are_those_of_one(runs: Runs, layout: Layout, case: Case) -> None:
    """Each process has its own ones, and process 0 may have the whole."""
    found, expected = runs[layout, case], runs[ONE, of_one(case)]
    assert found.blocks.keys() == expected.blocks.keys() == {"params", "m", "v"}
    for name, blocks in found.blocks.items():
        assert len(blocks) == BLOCKS
        ours, theirs = np.concatenate(blocks), np.concatenate(expected.blocks[name])
        assert [told.whole[name] for told in found.told] == [digest(ours), *[None] * (layout.processes - 1)]
        if case.fixed:
            np.testing.assert_array_equal(ours, theirs)
        else:
            assert np.linalg.norm(ours - theirs) <= NORMS["fp32"] * np.linalg.norm(theirs)


@pytest.mark.parametrize("layout", CASES)
def test_each_process_learns_the_losses_of_all_batches(runs: Runs, layout: Layout) -> None:
    first = CASES[layout][0]
    (alone,) = runs[ONE, of_one(first)].told
    for told in runs[layout, first].told:
        assert len(told.validated) == first.devices and told.validated == alone.validated[: first.devices]


def test_one_process_has_them_too(runs: Runs) -> None:
    for (layout, _), found in runs.items():
        if layout == ONE:
            (told,) = found.told
            assert told.whole == {name: digest(np.concatenate(blocks)) for name, blocks in found.blocks.items()}
            assert told.votes == [0, 10]


@pytest.mark.parametrize("layout", CASES)
def test_a_vote_is_the_largest(runs: Runs, layout: Layout) -> None:
    for case in CASES[layout]:
        assert [told.votes for told in runs[layout, case].told] == [[layout.processes - 1, 10]] * layout.processes
