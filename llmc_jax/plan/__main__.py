"""Run `python -m llmc_jax.plan`; the command line is llmc_jax/cli/plan.py."""

import sys

from llmc_jax.cli.plan import main

if __name__ == "__main__":
    sys.exit(main())
