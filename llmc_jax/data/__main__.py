"""`python -m llmc_jax.data` is `llmc-jax data`."""

from llmc_jax.base.main import program

if __name__ == "__main__":
    program("data")
