"""Run `python -m llmc_jax.profile`; the command line is llmc_jax/cli/profile.py."""

import sys

from llmc_jax.cli.profile import program

if __name__ == "__main__":
    sys.exit(program())
