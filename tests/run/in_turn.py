"""Starts of train.py one after the other in one process, with four devices that a CPU pretends to have.

    python -m tests.run.in_turn < starts.json > results.json

What takes the time is to start a process and to bring JAX in. Each start is the folder of its run, its flags, and the
run that it goes on with from the first of its two checkpoints, "" for a new one; it answers with what it said.
"""

import contextlib
import io
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
DEVICES = 4


class Start(NamedTuple):
    """A start of train.py in the folder that holds the data."""

    name: str  # -o
    words: str
    of: str = ""


def in_turn(starts: Sequence[Start], folder: Path) -> list[tuple[int, str, str]]:
    """Make the starts in a process of their own, whose programs are compiled quickly; return status, out and err."""
    env = os.environ | {
        "JAX_PLATFORMS": "cpu", "NPROC": "8", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    env.pop("XLA_FLAGS", None)
    command = [sys.executable, "-m", "tests.run.in_turn"]
    done = subprocess.run(
        command, input=json.dumps(starts), cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [tuple(each) for each in json.loads(done.stdout)]


def forget(run: Path, *steps: int) -> None:
    """Take checkpoints away, as if the run had been killed before it made them."""
    for step in steps:
        (run / f"DONE_{step:08d}").unlink()
        shutil.rmtree(run / f"state_{step:08d}")


def main() -> None:
    import jax

    from llmc_jax.run.command import main as train

    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.devices()
    update = jax.config.update
    # JAX takes the number of devices once; a run takes the first of them.
    jax.config.update = lambda name, value: None if name == "jax_num_cpu_devices" else update(name, value)

    found = []
    for start in (Start(*each) for each in json.load(sys.stdin)):
        if start.of:
            shutil.copytree(start.of, start.name)
            forget(Path(start.name), 6)
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
            code = int(train([*shlex.split(start.words), "-o", start.name]))
        found.append((code, out.getvalue(), err.getvalue()))
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
