"""Run `python -m llmc_jax.compare`; the command line is llmc_jax/cli/compare.py."""

import sys

from llmc_jax.cli.compare import main

if __name__ == "__main__":
    sys.exit(main())
