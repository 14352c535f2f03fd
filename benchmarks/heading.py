"""The line above a page's tables that says what they were measured on."""

import os
import platform

from llmc_jax.machine.device import cpu_name, versions


def machine_line() -> str:
    """Return the processor, its cores, and the versions of Python and JAX."""
    return f"{cpu_name()}, {os.cpu_count()} cores; Python {platform.python_version()}, jax {versions()['jax']}"
