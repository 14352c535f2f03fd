"""`python -m llmc_jax.watch` is `llmc-jax watch`."""

from llmc_jax.base.main import program

if __name__ == "__main__":
    program("watch")
