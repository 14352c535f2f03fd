"""Run `python -m llmc_jax.data`; the command line is llmc_jax/cli/data.py."""

import sys

from llmc_jax.cli.data import program

if __name__ == "__main__":
    sys.exit(program())
