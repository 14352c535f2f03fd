"""Processes that train together: who they are, and what must be the same for all. Without JAX."""
