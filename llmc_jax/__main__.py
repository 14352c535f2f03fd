"""`python -m llmc_jax` is `llmc-jax`."""

from llmc_jax.base.main import program

if __name__ == "__main__":
    program()
