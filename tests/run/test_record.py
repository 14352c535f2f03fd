"""Some steps of a loop are recorded; profile/trace.py reads them back."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from llmc_jax.base.errors import InputError
from llmc_jax.profile.trace import read_trace
from llmc_jax.run.record import slice_trace


@pytest.mark.parametrize(("stop", "recorded"), [(4, 2), (99, 4)])
def test_a_slice_of_a_loop_is_recorded(tmp_path: Path, stop: int, recorded: int) -> None:
    """Steps 2 and 3 of six; or all from 2 on, where the loop ends before the slice does."""
    run = jax.jit(lambda x: jnp.sin(x @ x))
    x = jnp.ones((64, 64))
    run(x).block_until_ready()
    written = []
    with slice_trace(tmp_path / "new" / "folder", 2, stop, lambda: written.append(1)) as tick:
        for step in range(6):
            tick(step)
            run(x).block_until_ready()
        assert len(written) == (stop == 4)
    assert len(written) == 1
    trace = read_trace(tmp_path / "new" / "folder", "jit__lambda")
    assert len(trace.steps) == recorded
    assert trace.spans


def test_a_loop_that_never_reaches_the_slice_writes_nothing(tmp_path: Path) -> None:
    with slice_trace(tmp_path, 5, 9) as tick:
        tick(0)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="a trace cannot be written there"), slice_trace(tmp_path / "file", 0, 1):
        pytest.fail("the loop began")
