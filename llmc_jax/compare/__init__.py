"""Beside llm.c: two logs, two checkpoints, a debug state and our gradients, two programs on the same work.

`llmc-jax compare`; each comparison is a file here. Leaves out what is compared.
"""
