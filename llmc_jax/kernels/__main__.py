"""`python -m llmc_jax.kernels` is `llmc-jax kernels`."""

from llmc_jax.base.main import program

if __name__ == "__main__":
    program("kernels")
