"""Commands, each in a process of its own that has JAX already, but no device: as a user starts them, without the wait.

    python -m tests.base.each_alone < commands.json > results.json

What takes the time is to bring JAX in, which reads the environment; so that is done once, and each command forks.
"""

import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Said(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


def each_alone(commands: Sequence[Sequence[str]], folder: Path, environment: Mapping[str, str]) -> list[Said]:
    """Run the commands of `llmc-jax` in a folder. Their programs are compiled quickly, for a CPU by default."""
    env = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "NPROC")} | {
        "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "LLMC_JAX_NO_RESTART": "1", "PYTHONPATH": str(ROOT), **environment,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "tests.base.each_alone"], input=json.dumps(commands), cwd=folder, env=env,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return [Said(*each) for each in json.loads(done.stdout)]


def alone(words: list[str]) -> Said:
    """Run a command in a fork of this process."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        if not (child := os.fork()):
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            os._exit(status(words))
        _, ended = os.waitpid(child, 0)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    return Said(os.waitstatus_to_exitcode(ended), *texts)


def status(words: list[str]) -> int:
    """Run a command and return its exit status; 1, with a traceback, for what it raises."""
    from llmc_jax.base.main import main

    sys.argv = ["llmc-jax", *words]
    try:
        code = main()
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def main() -> None:
    from llmc_jax.generate import model  # noqa: F401
    from llmc_jax.profile import command as profile  # noqa: F401
    from llmc_jax.run import loop  # noqa: F401

    json.dump([alone(words) for words in json.load(sys.stdin)], sys.stdout)


if __name__ == "__main__":
    main()
