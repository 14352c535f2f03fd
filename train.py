"""Trains a GPT-2 from llm.c's files, with llm.c's flags: python train.py --help."""

import sys

if sys.version_info < (3, 12):  # noqa: UP036  whoever types `python3 train.py` may have any version
    print("train.py: Python 3.12 or newer is needed; `make train` finds one", file=sys.stderr)
    sys.exit(2)

from llmc_jax.cli.train import program
from llmc_jax.machine.jax_setup import packages_for

if __name__ == "__main__":
    with packages_for("train.py", "make train"):
        program()
