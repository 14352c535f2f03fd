"""A generated token on a GPU that is not there: one program, no loop, few arguments, the kernels that are planned."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from benchmarks import aot

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(aot.problem()), reason=aot.problem()),
]
# JAX 0.11 cannot lower its random numbers for a GPU that is not there, so no token is drawn by chance.
DRAWS = jax.version.__version_info__ >= (0, 12)


@pytest.mark.parametrize("made_by", ["xla", "pallas"])
def test_a_token_is_one_program_of_the_kernels_that_the_plan_counts(made_by: str, tmp_path: Path) -> None:
    words = ["--kernels", made_by, "--samples", "1", "--top-k", "50" if DRAWS else "0"]
    command = [sys.executable, "-m", "benchmarks.generate", *words, "--json", str(tmp_path / "found.json")]
    subprocess.run(command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, cwd=aot.ROOT, check=True)
    (found,) = json.loads((tmp_path / "found.json").read_text())
    assert found["loops"] == 0
    assert found["kernels"] == found["planned"] - (0 if DRAWS else 29)
    if made_by == "pallas":
        assert found["ours"] == 5 * 12 + 1 and found["arguments"] == 11
        assert found["new"] < 1 << 20  # neither the cache nor a tensor is copied
