"""Run `python -m llmc_jax`; the command line is llmc_jax/cli/main.py."""

from llmc_jax.cli.main import program

if __name__ == "__main__":
    program()
