"""Looks into llm.c's model files and converts between their versions: python convert_checkpoint.py --help."""

import sys

from llmc_jax.checkpoint.convert import main

if __name__ == "__main__":
    sys.exit(main())
