"""Run `python -m llmc_jax.checkpoint`; the command line is llmc_jax/cli/checkpoint.py."""

import sys

from llmc_jax.cli.checkpoint import main

if __name__ == "__main__":
    sys.exit(main())
