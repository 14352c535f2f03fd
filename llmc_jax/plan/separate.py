"""Steps compiled in processes of their own, for what they take of memory, and kept: the next time costs no compiler.

A process can compile kernels for one kind of GPU only, and a compiler may end it: so each step has a process
(`python -m llmc_jax.plan.separate`), which reads what is asked from its standard input. For a GPU it needs a Python
with JAX's CUDA plugin: this one, or the one beside the source that `make plan-tools` makes. Answers are kept by
content: what was asked, the versions, and the sources that shape the program. Imports no JAX. Leaves out what is said
of a program (memory.py).
"""

import dataclasses
import hashlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from llmc_jax.base import own_file
from llmc_jax.base.child import Failed, answer_of
from llmc_jax.base.commands import ROOT
from llmc_jax.base.errors import InputError
from llmc_jax.base.files import cache_folder, digest_of_files, write_bytes
from llmc_jax.base.plain import from_json, to_json
from llmc_jax.config.model import ModelShape
from llmc_jax.config.train import OPTIMIZERS, OPTIONS, TrainConfig
from llmc_jax.machine import gpus
from llmc_jax.machine.device import installed
from llmc_jax.machine.driver import PLUGINS
from llmc_jax.machine.jax_setup import child_environment
from llmc_jax.models.family import chosen, shape_from_json, shape_to_json
from llmc_jax.plan.memory import CPU, Memory

Say = Callable[[str], None]
PATIENCE = 1200  # seconds that one may take
FORMAT = 3
SOURCES = (*(f"llmc_jax/{name}" for name in ("models", "ops", "training", "kernels", "machine")), "pallas_kernels")
FILES = ("plan", "compiled", "memory", "moments")  # of this room: what shapes a program and says what it takes
PACKAGES = ("jax", "jaxlib")
NOT_READ = dict.fromkeys(("model", "init_from", "model_file"), "")  # options that the model itself stands for


def compiled_apart(gpu: str, config: TrainConfig, model: ModelShape, say: Say = lambda words: None) -> Memory:
    """Return the memory of a step, as compiled before or by a process of its own.

    gpu: a key of gpus.TARGETS; or CPU. say: is told before it begins. What is free is left to the caller. Raises
    InputError, in one line, where the step cannot be compiled.
    """
    path = cache_folder() / "plan" / f"{digest(gpu, config, model)}.json"
    found: Memory = kept(path, Memory, lambda: _compiled(gpu, config, model, say))
    return found


def kept(path: Path, kind: Any, make: Callable[[], Any], again: bool = False) -> Any:
    """Return the record that a file keeps; where it is not there, or damaged, it is made and kept for the next time.

    again: it is made in any case.
    """
    with suppress(OSError, ValueError, RecursionError):
        if not again:
            return from_json(kind, json.loads(path.read_text()))
    found = make()
    with suppress(OSError):  # without a place for it, or room, it is made every time
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, json.dumps(to_json(found)).encode())
    return found


def python_that_compiles() -> str:
    """Return the Python that can compile for GPUs, with the same version of JAX: this one, or the one beside it.

    Raises InputError with the command that brings what is missing.
    """
    if any(importlib.util.find_spec(name) for name in PLUGINS):
        return sys.executable
    beside = ROOT / f".venv-aot-{installed('jax').get('jax')}/bin/python"
    if beside.exists():
        return str(beside)
    how = "make plan-tools" if (ROOT / "Makefile").exists() else "pip install 'llmc-jax[plan]'"
    raise InputError(
        f"compiling for a GPU that is not there needs JAX's CUDA plugin and NVIDIA's assembler, on Linux: {how}"
    )


def digest(gpu: str, config: TrainConfig, model: ModelShape) -> str:
    """Return what tells programs apart: of what is asked, the versions and the sources."""
    shaping = {about.name: getattr(config, about.name) for about in OPTIONS if "program" in about.reaches}
    target = None if gpu == CPU else gpus.known_target(gpu)
    sources = [path for name in SOURCES for path in (ROOT / name).rglob("*.py")]
    facts = {  # whether there is weight decay shapes the program; no earlier choice of kernels is read here
        "format": FORMAT,
        "gpu": (gpu, target, target and target.gpu),
        "config": shaping | {"weight_decay": bool(shaping["weight_decay"]), "kernels_from": "", **NOT_READ},
        "optimizer": config.optimizer in OPTIMIZERS or own_file.read("--optimizer", config.optimizer, "your own")[2],
        "model": shape_to_json(model),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "versions": installed(*PACKAGES),
        "sources": digest_of_files([*sources, *(Path(__file__).with_name(f"{name}.py") for name in FILES)]),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:24]


# ----- the process ----------------------------------------------------------------------------------------------------


def _compiled(gpu: str, config: TrainConfig, model: ModelShape, say: Say) -> Memory:
    python = sys.executable if gpu == CPU else python_that_compiles()
    environment = child_environment() | {
        "JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "0", "TF_CPP_MIN_LOG_LEVEL": "3",
        "JAX_TRACEBACK_FILTERING": "off",  # else the last line of an error is about its traceback
    }  # fmt: skip
    say(f"compiling the step with -b {config.batch_size}, which is kept; --quick compiles nothing")
    asked = json.dumps({"gpu": gpu, "config": dataclasses.asdict(config), "model": shape_to_json(model)})
    try:
        found = answer_of("llmc_jax.plan.separate", asked=asked, limit=PATIENCE, environment=environment, python=python)
    except Failed as why:
        raise InputError(f"the step could not be compiled for {gpu}: {why}") from None
    if "problem" in found:
        raise InputError(found["problem"])
    memory: Memory = from_json(Memory, found)
    return memory


def answer(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Compile what is asked in this process; return its memory, or the problem, as JSON has it."""
    from llmc_jax.plan import compiled, memory

    try:
        chosen(asked["config"]["model_file"])
        plan = compiled.plan_for(asked["gpu"], TrainConfig(**asked["config"]), shape_from_json(asked["model"]))
        found: dict[str, Any] = to_json(memory.compiled(plan, asked["gpu"])._replace(available=None, card=None))
        return found
    except InputError as error:
        return {"problem": str(error)}


if __name__ == "__main__":
    print(json.dumps(answer(json.loads(sys.stdin.read()))))
