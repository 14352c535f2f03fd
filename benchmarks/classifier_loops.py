"""What the assembler makes of the classifier's kernel for a GPU that is not there: instructions for each logit.

    python benchmarks/classifier_loops.py [--target h200] [--dtype bf16] [--variants]

Needs a Python with JAX's CUDA plugin (`make test-aot` makes them) and nvdisasm, on PATH or by --nvdisasm. Nothing runs
on a GPU: the figures are the assembler's. --variants: other numbers of warpgroups to a row and of slabs to a round
instead of the table's own. Each kernel is compiled for GPT-2's row, 50,304 columns of which 50,257 are real.

    blocks, warps    that an SM holds at once, by registers, shared memory and threads
    bytes on the way that an SM's threads load before they use the first
    loops, whole row instructions that a thread issues for each of its logits: in both loops, and with all that stands
                     outside of them. An SM has 128 of them in a clock, and at 4.3 TB/s 4.7 logits on an H200
"""

import argparse
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.sass import Kernel, assembled  # noqa: E402

ROWS, V, Vp = 8192, 50257, 50304
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
VARIANTS = [(1, 7), (2, 5), (2, 7), (2, 8), (4, 4), (4, 6)]  # warpgroups, slabs of a round at most
COLUMNS = (
    "GPU", "dtype", "kernel", "warpgroups", "slabs", "registers", "spilled", "shared memory", "blocks", "warps",
    "bytes on the way", "loops", "whole row",
)  # fmt: skip
HEAD = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|"


def compiled(target: str, dtype: str, warpgroups: int, group: int, nvdisasm: str) -> Kernel:
    """The kernel as it would be with so many warpgroups to a row and at most so many slabs to a round."""
    import jax
    import jax.numpy as jnp

    from llmc_jax.machine import deviceless, gpus
    from llmc_jax.training.state import DTYPES
    from pallas_kernels import classifier, tuning

    architecture = gpus.known_target(target).architecture
    tuning.SIZES[architecture] = tuning.sizes(architecture)._replace(classifier_warpgroups=warpgroups)
    classifier.GROUP = group
    kind = DTYPES[dtype]
    given = [((ROWS, Vp), kind), ((ROWS,), jnp.int32), ((ROWS,), jnp.float32)]

    def function(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        return classifier.classifier.__wrapped__(*arrays, V, target=architecture)

    shapes = [jax.ShapeDtypeStruct(shape, each) for shape, each in given]
    jitted = jax.jit(function, donate_argnums=0)
    [kernel] = assembled(lambda: deviceless.compile_for(jitted, shapes, target), nvdisasm)
    return kernel


def row(kernel: Kernel, target: str, dtype: str, warpgroups: int) -> str:
    """The table's line of a kernel."""
    from llmc_jax.machine import gpus
    from pallas_kernels import classifier

    gpu = gpus.known_target(target)
    plan = classifier._plan(Vp, V, 16 // BYTES[dtype], warpgroups)
    blocks = kernel.blocks(gpu.shared_memory_per_multiprocessor, gpu.threads_per_multiprocessor)
    loops = sum(loop.instructions for loop in kernel.loops if loop.count("MUFU"))
    whole = kernel.instructions + loops * (plan.rounds - 1)
    logits = plan.group * plan.slab.vector  # of a thread in a round
    cells = [
        target, dtype, kernel.name, warpgroups, plan.group, kernel.registers, kernel.spilled, kernel.shared_memory,
        blocks, blocks * kernel.threads // 32, blocks * kernel.threads * 16 * plan.group,
        f"{loops / logits:.1f}", f"{whole * kernel.threads / Vp:.1f}",
    ]  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="h200")
    parser.add_argument("--dtype", choices=tuple(BYTES), default="bf16")
    parser.add_argument("--variants", action="store_true")
    parser.add_argument("--nvdisasm", default=shutil.which("nvdisasm"))
    given = parser.parse_args()
    if not given.nvdisasm:
        parser.error("nvdisasm is not on PATH; name it with --nvdisasm (package nvidia-cuda-nvdisasm has one)")
    from llmc_jax.machine import gpus
    from pallas_kernels import classifier, tuning

    used = tuning.sizes(gpus.known_target(given.target).architecture).classifier_warpgroups, classifier.GROUP
    print(HEAD)
    for warpgroups, group in VARIANTS if given.variants else [used]:
        kernel = compiled(given.target, given.dtype, warpgroups, group, given.nvdisasm)
        print(row(kernel, given.target, given.dtype, warpgroups), flush=True)


if __name__ == "__main__":
    main()
