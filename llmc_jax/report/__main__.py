"""`python -m llmc_jax.report` is `llmc-jax report`."""

from llmc_jax.base.main import program

if __name__ == "__main__":
    program("report")
