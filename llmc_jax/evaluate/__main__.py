"""`python -m llmc_jax.evaluate` is `llmc-jax evaluate`."""

from llmc_jax.base.main import program

if __name__ == "__main__":
    program("evaluate")
