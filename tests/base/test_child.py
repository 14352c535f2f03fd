"""Child: which modules it runs, and what is heard of it."""

import os
from pathlib import Path

import pytest

from llmc_jax.base.child import Child


@pytest.mark.parametrize("there", [True, False], ids=["its folder", "the folder of the run"])
def test_the_modules_of_its_own_folder_alone_come_first(
    there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stand_in.py").write_text("print(1); print('{\"here\": 1}')")
    monkeypatch.chdir(tmp_path)
    child = Child("stand_in", environment=os.environ, folder=tmp_path if there else None)
    assert (child.status(60.0), child.said()) == ((0, {"here": 1}) if there else (1, {}))
    assert there or "stand_in" in child.last_words()
    child.close()
