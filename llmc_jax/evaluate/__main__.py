"""Run `python -m llmc_jax.evaluate`; the command line is llmc_jax/cli/evaluate.py."""

from llmc_jax.cli.evaluate import program

if __name__ == "__main__":
    program()
