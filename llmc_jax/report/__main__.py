"""Run `python -m llmc_jax.report`; the command line is llmc_jax/cli/report.py."""

import sys

from llmc_jax.cli.report import main

if __name__ == "__main__":
    sys.exit(main())
