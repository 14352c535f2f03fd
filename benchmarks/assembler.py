"""What NVIDIA's assembler says of the Mosaic kernels that a process compiles: registers and spills.

Leaves out compiling them (llmc_jax/machine/deviceless.py) and their instructions (sass.py).
"""

import ctypes
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class KernelResources(NamedTuple):
    """What the assembler reports of one kernel, per thread."""

    name: str
    registers: int  # of at most 255
    spilled: int  # bytes of registers that had to go to memory: stores and loads, whichever are more
    serialized: bool  # Hopper's matrix products wait for each other, which costs much of their speed


_FUNCTION = re.compile(r"Compiling entry function '(\w+?)(?:_mosaic_gpu_kernel)?' for")
_SPILLED = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads$")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SERIALIZED = re.compile(r"wgmma.* serialized .*function '(\w+?)(?:_mosaic_gpu_kernel)?'")


@contextmanager
def kernel_resources() -> Iterator[list[KernelResources]]:
    """Within the block, what the process prints is kept back; afterwards the list holds the Mosaic kernels compiled.

    One entry for each kernel, in the order of compilation. A kernel that this process has compiled before is not
    compiled again and has none. Where compiling fails, what was kept back goes to standard error.
    """
    kernels: list[KernelResources] = []
    before = os.environ.get("MOSAIC_GPU_DUMP_PTXAS")
    os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"
    log = ""
    try:
        with tempfile.TemporaryFile() as file:
            _flush()
            stdout = os.dup(1)
            os.dup2(file.fileno(), 1)  # it is the C++ side that prints
            try:
                yield kernels
            finally:
                _flush()
                os.dup2(stdout, 1)
                os.close(stdout)
                file.seek(0)
                log = file.read().decode(errors="replace")
    except BaseException:
        sys.stderr.write(log)
        raise
    finally:
        if before is None:
            del os.environ["MOSAIC_GPU_DUMP_PTXAS"]
        else:
            os.environ["MOSAIC_GPU_DUMP_PTXAS"] = before
    kernels.extend(parse_resources(log))


def _flush() -> None:
    sys.stdout.flush()
    ctypes.CDLL(None).fflush(None)


def parse_resources(log: str) -> list[KernelResources]:
    """Return the kernels in the words of `ptxas -v`."""
    kernels = []
    serialized = set(_SERIALIZED.findall(log))
    name, spilled = "", 0
    for line in log.splitlines():
        if match := _FUNCTION.search(line):
            name, spilled = match[1], 0
        elif (match := _SPILLED.search(line)) and "warning" not in line:
            spilled = max(int(match[1]), int(match[2]))
        elif (match := _REGISTERS.search(line)) and name:
            kernels.append(KernelResources(name, int(match[1]), spilled, name in serialized))
            name = ""
    return kernels
