"""Run `python -m llmc_jax.watch`; the command line is llmc_jax/cli/watch.py."""

import sys

from llmc_jax.cli.watch import main

if __name__ == "__main__":
    sys.exit(main())
