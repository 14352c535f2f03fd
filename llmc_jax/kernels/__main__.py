"""Run `python -m llmc_jax.kernels`; the command line is llmc_jax/cli/kernels.py."""

import sys

from llmc_jax.cli.kernels import main

if __name__ == "__main__":
    sys.exit(main())
