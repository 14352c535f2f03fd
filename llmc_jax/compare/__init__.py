"""Beside llm.c: two logs, two checkpoints, a debug state and our gradients.

`llmc-jax compare`; each comparison is a file here. Leaves out what is compared.
"""
