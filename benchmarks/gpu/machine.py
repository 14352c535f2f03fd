"""What the machine reaches at most: bandwidth of a copy and of a sum, and the rate of matrix products."""

import math
import platform
import subprocess
from collections.abc import Callable
from importlib import metadata
from typing import Any

from benchmarks.gpu.clock import Timing, queued, timing
from llmc_jax.machine.device import first_device
from llmc_jax.machine.driver import seen_cards
from llmc_jax.trials.children import Figures

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8": "float8_e4m3fn"}
LIBRARY_FP8 = "__cublas$lt$matmul$f8"  # in the text of a program that calls cuBLASLt


def describe() -> dict[str, str]:
    """The device and where it sits (`pci`), its driver, and the versions of what runs on it."""
    device = first_device()
    found = {
        "device": device.device_kind if device.platform == "gpu" else "CPU",
        "capability": str(getattr(device, "compute_capability", "")) if device.platform == "gpu" else "",
        "python": platform.python_version(),
    }
    if device.platform == "gpu" and device.local_hardware_id < len(cards := seen_cards()):
        found["pci"] = cards[device.local_hardware_id].pci
    for package in ("jax", "jaxlib", "numpy", "torch", "triton", "jax-triton"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    fields = ("driver_version", "memory.total", "power.limit", "clocks.max.sm", "clocks.max.memory", "compute_mode")
    this = ["-i", found["pci"]] if "pci" in found else []
    command = ["nvidia-smi", *this, f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return found
    return found | dict(zip(fields, (part.strip() for part in text.split(",")), strict=False))


def measure(what: str, sizes: list[int] | None = None, dtype: str = "bf16") -> Figures:
    """what: 'copy', 'fusion' (XLA's kernel that reads and writes as much) or 'read' of so many elements, or a 'product'
    of (rows, inputs) and (outputs, inputs).
    """
    import jax
    import jax.numpy as jnp

    from llmc_jax.machine import compiling

    kind, sizes = jnp.dtype(DTYPES[dtype]), sizes or []
    key = jax.random.key(0)

    def time_of(run: Callable[[], Any]) -> Timing:
        return timing(queued(run)) if math.prod(sizes) > 2**24 else timing(queued(run), least=0.0, rounds=1)

    if what == "product":
        rows, inputs, outputs = sizes
        made = jnp.bfloat16 if dtype == "fp8" else kind  # the result, and what random numbers there are
        x = jax.random.normal(key, (rows, inputs), made).astype(kind)
        w = jax.random.normal(jax.random.key(1), (outputs, inputs), made).astype(kind)
        lowered = jax.jit(lambda x, w: jnp.einsum("ni,oi->no", x, w, preferred_element_type=made)).lower(x, w)
        # else XLA may make the product itself, in Triton: of fp8 it is the library's that a step would have
        by_library = dtype == "fp8" and first_device().platform == "gpu"
        multiply = compiling.compiled(lowered, ((compiling.TRITON_GEMM, False),) if by_library else ())
        found = time_of(lambda: multiply(x, w))
        rate = 2 * rows * inputs * outputs / found.seconds / 1e12
        runs = {"runs": "cuBLASLt" if LIBRARY_FP8 in multiply.as_text() else "XLA"} if dtype == "fp8" else {}
        return {"TFLOP/s": rate, "us": 1e6 * found.seconds, "spread": found.spread} | runs
    x = jax.random.normal(key, (sizes[0],), kind)
    one = jnp.ones((), kind)
    programs = {"copy": jnp.copy, "fusion": lambda x: x + one, "read": lambda x: jnp.sum(x, dtype=jnp.float32)}
    run = jax.jit(programs[what])
    found = time_of(lambda: run(x))
    moved = (1 if what == "read" else 2) * x.nbytes
    return {"GB/s": moved / found.seconds / 1e9, "us": 1e6 * found.seconds, "spread": found.spread}
