"""`python -m llmc_jax.checkpoint` is `llmc-jax checkpoint`."""

from llmc_jax.base.main import program

if __name__ == "__main__":
    program("checkpoint")
