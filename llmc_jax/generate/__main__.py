"""`python -m llmc_jax.generate` is `llmc-jax generate`."""

from llmc_jax.base.main import program

if __name__ == "__main__":
    program("generate")
