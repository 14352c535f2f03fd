"""Looks into llm.c's model files and converts between their versions: python convert_checkpoint.py --help."""

import sys

if sys.version_info < (3, 12):  # noqa: UP036  whoever types `python3 convert_checkpoint.py` may have any version
    print("convert_checkpoint.py: Python 3.12 or newer is needed; `make setup` finds one", file=sys.stderr)
    sys.exit(2)

from llmc_jax.machine.jax_setup import packages_for

if __name__ == "__main__":
    with packages_for("convert_checkpoint.py", "make setup"):
        from llmc_jax.cli.convert import main

        sys.exit(main())
