"""Compiles every Triton kernel for GPUs that are not there and prints a line of JSON for each.

    JAX_PLATFORMS=cpu python tests/kernels/triton/compile_kernels.py h200 a100

Needs the packages of `make test-triton`: jax-triton, Triton, whose assembler reports the registers, and JAX's CUDA
plugin. `--table` prints the table of docs/kernels/triton.md instead.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

DUMP = tempfile.TemporaryDirectory()
os.environ["JAX_TRITON_DUMP_DIR"] = DUMP.name  # read when jax-triton is imported
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import triton  # noqa: E402

from llmc_jax.kernels.triton import classifier, layernorm, softmax  # noqa: E402
from llmc_jax.machine import deviceless, gpus  # noqa: E402

ODD = ", odd"  # sizes that divide by nothing


class Case(NamedTuple):
    """A call of one kernel."""

    name: str
    function: Callable[..., Any]
    arguments: list[jax.ShapeDtypeStruct]
    donated: tuple[int, ...] = ()


def cases() -> Iterator[Case]:
    """Every kernel at GPT-2's sizes, and at sizes that divide by nothing."""
    for C in (768, 1024, 1600):
        yield from layernorms((8, 1024), C, jnp.bfloat16)
    yield from softmaxes((8, 12), 1024, jnp.bfloat16)
    yield classifiers(8192, 50257, 50304, jnp.bfloat16)
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
        yield from layernorms((13,), 7, dtype, ODD)
        yield from softmaxes((3,), 63, dtype, ODD)
        yield classifiers(5, 9001, 9003, dtype, ODD)


def layernorms(rows: tuple[int, ...], C: int, dtype: Any, mark: str = "") -> Iterator[Case]:
    x, w, statistics = (
        jax.ShapeDtypeStruct(*each) for each in (((*rows, C), dtype), ((C,), jnp.float32), (rows, jnp.float32))
    )
    gradients = [x, x, w, statistics, statistics]
    yield Case(f"layernorm_forward C={C}{mark}", layernorm.layernorm_forward, [x, w, w])
    yield Case(f"residual_layernorm_forward C={C}{mark}", layernorm.residual_layernorm_forward, [x, x, w, w])
    yield Case(f"layernorm_backward C={C}{mark}", layernorm.layernorm_backward, gradients)
    yield Case(f"residual_layernorm_backward C={C}{mark}", layernorm.residual_layernorm_backward, [x, *gradients])


def softmaxes(leading: tuple[int, ...], T: int, dtype: Any, mark: str = "") -> Iterator[Case]:
    att = jax.ShapeDtypeStruct((*leading, T, T), dtype)
    yield Case(f"softmax_forward T={T}{mark}", partial(softmax.softmax_forward, scale=0.125), [att], (0,))
    yield Case(f"softmax_backward T={T}{mark}", partial(softmax.softmax_backward, scale=0.125), [att, att], (0,))


def classifiers(rows: int, V: int, Vp: int, dtype: Any, mark: str = "") -> Case:
    shapes = [((rows, Vp), dtype), ((rows,), jnp.int32), ((rows,), jnp.float32)]
    arguments = [jax.ShapeDtypeStruct(*each) for each in shapes]
    return Case(f"classifier V={V}{mark}", partial(classifier.classifier, vocab_size=V), arguments, (0,))


def compiled(case: Case, gpu: str) -> dict[str, Any]:
    """What came out: memory of the program, copies in it, registers and memory accesses of the kernel."""
    target = gpus.known_target(gpu).architecture
    before = set(Path(DUMP.name).glob("*/*.ptx"))
    function = jax.jit(partial(case.function, target=target), donate_argnums=case.donated)
    program = deviceless.compile_for(function, case.arguments, gpu)
    (ptx,) = set(Path(DUMP.name).glob("*/*.ptx")) - before
    text = ptx.read_text()
    accesses = re.findall(r"\b(?:ld|st)\.global\.(?:v(\d)\.)?b(\d+)", text)
    return {
        "gpu": gpu,
        "kernel": case.name,
        "donated": sum(case.arguments[index].size * case.arguments[index].dtype.itemsize for index in case.donated),
        "aliased": program.memory.aliased,
        "temporaries": program.memory.temporaries,
        "copies": len(re.findall(r" copy(?:-start)?\(", program.hlo)),
        "calls": program.hlo.count('custom_call_target="triton_kernel_call'),
        "narrow": sum(int(count or 1) * int(bits) < 128 for count, bits in accesses),
        "wide": sum(int(count or 1) * int(bits) == 128 for count, bits in accesses),
        "conversions": sorted(set(re.findall(r"cvt\.\w+\.bf16x?2?\.f32", text))),
        **resources(ptx),
    }


def resources(ptx: Path) -> dict[str, int]:
    """Registers of a thread and bytes of them that had to go to memory, as Triton's own ptxas reports."""
    assembler = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    architecture = re.search(r"^\.target (\w+)", ptx.read_text(), re.MULTILINE)
    assert architecture
    command = [assembler, "-v", f"-arch={architecture[1]}", ptx, "-o", os.devnull]
    log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.search(r"(\d+) bytes spill stores", log)
    assert registers and spills
    return {"registers": int(registers[1]), "spilled": int(spills[1])}


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Markdown: a row for each kernel, a column of registers (and bytes spilled, if any) for each GPU."""
    names = list(dict.fromkeys(line["gpu"] for line in lines))
    rows = [f"| kernel, bf16 | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for kernel in dict.fromkeys(line["kernel"] for line in lines):
        cells = [line for line in lines if line["kernel"] == kernel]
        texts = [str(c["registers"]) + (f" ({c['spilled']} B spilled)" if c["spilled"] else "") for c in cells]
        rows.append(f"| `{kernel.partition(' ')[0]}` {kernel.partition(' ')[2]} | {' | '.join(texts)} |")
    return "\n".join(rows)


def main(arguments: Sequence[str]) -> None:
    one_of_each = {target.architecture: name for name, target in reversed(gpus.TARGETS.items())}
    names = [argument for argument in arguments if argument != "--table"] or list(one_of_each.values())
    lines = [compiled(case, gpu) for gpu in names for case in cases()]
    if "--table" in arguments:
        print(table([line for line in lines if not line["kernel"].endswith(ODD)]))
    else:
        print("\n".join(map(json.dumps, lines)))


if __name__ == "__main__":
    main(sys.argv[1:])
