"""Looks into llm.c's model files and converts between their versions: python convert_checkpoint.py --help."""

from llmc_jax.base.entrance import enter

if __name__ == "__main__":
    enter()
    from llmc_jax.base.main import program  # here, because it takes packages and a new Python

    program("convert")
