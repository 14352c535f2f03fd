"""`python -m llmc_jax.compare` is `llmc-jax compare`."""

from llmc_jax.base.main import program

if __name__ == "__main__":
    program("compare")
