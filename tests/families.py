"""The models of users' files in this folder, and a process that has loaded none."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from llmc_jax.models import family

TOY, FROZEN, AUTOMATIC = (Path(__file__).with_name(f"{name}.py") for name in ("toy", "frozen", "automatic"))


def shape_of(descriptor: str, file: Path) -> Any:
    """The shape of a descriptor, of the family in a file."""
    return family.parsed(descriptor, family.load(file))


@contextmanager
def none_loaded() -> Iterator[None]:
    """Within the block no file of a model has been loaded, as in a new process; afterwards those of before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(family, "_families", {})
        patch.setattr(family, "_accepted", {})
        patch.setenv(family.VARIABLE, "")
        modules = {name: module for name, module in sys.modules.items() if name.startswith("llmc_jax_own_")}
        try:
            yield
        finally:
            sys.modules.update(modules)  # by which what was loaded before is pickled
