"""Whether runs in the process of a test start the process that draws their picture (llmc_jax/run/beside.py)."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from llmc_jax.run.beside import Beside

BEGUN = Beside._begun  # before conftest.py replaces it


@contextmanager
def drawing() -> Iterator[None]:
    """Within the block they do, as those that a user starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Beside, "_begun", BEGUN)
        yield
