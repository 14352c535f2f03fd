"""Run `python -m llmc_jax.generate`; the command line is llmc_jax/cli/generate.py."""

from llmc_jax.cli.generate import program

if __name__ == "__main__":
    program()
