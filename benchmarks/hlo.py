"""What measurements read from a compiled program's text beside `llmc_jax/machine/hlo.py`: bytes, and whole copies."""

import math
import re

from llmc_jax.machine.hlo import arrays

_COPY = re.compile(r"= \(?([a-z]+\d+\w*\[[\d,]*\])[^=]* copy(?:-start)?\(")


def num_bytes(shape: str) -> int:
    """Return the bytes of an array, or of all arrays of a tuple."""
    return sum(math.prod(sizes) * _bits(dtype) // 8 for dtype, sizes in arrays(shape))


def _bits(dtype: str) -> int:
    named = {"pred": 8, "token": 0}
    return named[dtype] if dtype in named else int(re.findall(r"\d+", dtype)[0])  # bf16, f8e4m3fn, s32


def copied_arrays(hlo: str, least: int = 0) -> list[tuple[str, int]]:
    """Return shape and bytes of every array of at least so many bytes that a program's text copies whole.

    Booleans (`pred`) are left out.
    """
    found = [(shape, num_bytes(shape)) for shape in _COPY.findall(hlo)]
    return [(shape, size) for shape, size in found if size >= least]
