"""XLA's own word on a file of algorithms, when it compiles for a GPU; in a process each, because it reads one alone."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import aot
from benchmarks.gpu import algorithms as item

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(aot.problem()), reason=aot.problem()),
]
TIMED = "algorithms (0 -|- 0)$"  # of a product, and of one whose matrix is a part of an array: XLA looks for none
GONE = "gone"  # from where it was kept
PROGRAM = """
import sys, jax, jax.numpy as jnp
from benchmarks.gpu.algorithms import algorithms_of
from llmc_jax.base.errors import InputError
from llmc_jax.machine import algorithms, compiling, deviceless
x = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
flat = jax.ShapeDtypeStruct((2**18,), jnp.bfloat16)
def products(x, y, flat):
    return x @ y, y @ flat[2**16:2**17].reshape(256, 256)
name = sys.argv[2] if sys.argv[1] != compiling.PINNED else algorithms.kept(sys.argv[2])
algorithms.path_of(name).unlink() if open(sys.argv[2]).read() == "gone" else None
try:
    options = ((compiling.TRITON_GEMM, False), (sys.argv[1], name))
    program = deviceless.compile_for(jax.jit(products), (x, x, flat), "h200", compiler_options=options)
    print("algorithms", algorithms_of(program.hlo))
except InputError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("option", "text", "words"),
    [
        (item.LOAD, "version: 3\n", TIMED),
        (item.LOAD, GONE, "--algorithms: XLA does not read .*does not exist"),
        (item.LOAD, "hello {", "--algorithms: XLA does not read .*Failed to parse"),
        (item.LOAD, "version: 99\n", "--algorithms: XLA does not read .*Version mismatch"),
        (item.DUMP, "", TIMED),
    ],
)
def test_this_xla_takes_the_options(option: str, text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "file.txt").write_text(text)
    command = [sys.executable, "-c", PROGRAM, option, str(tmp_path / "file.txt")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=aot.ROOT)
    assert done.stdout.count("\n") == 1 and re.match(words, done.stdout), done.stdout
