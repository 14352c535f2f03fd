"""`python -m llmc_jax.profile` is `llmc-jax profile`."""

from llmc_jax.base.main import program

if __name__ == "__main__":
    program("profile")
