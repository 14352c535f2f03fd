"""`python -m llmc_jax.plan` is `llmc-jax plan`."""

from llmc_jax.base.main import program

if __name__ == "__main__":
    program("plan")
