"""Looks into llm.c's model files and converts between their versions: python convert_checkpoint.py --help."""

import sys

from llmc_jax.base.entrance import enter

if __name__ == "__main__":
    enter()
    from llmc_jax.checkpoint.convert import main  # here, because it takes time, packages and a new Python

    sys.exit(main())
