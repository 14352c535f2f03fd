"""Steps compiled in processes of their own, for what they take of memory, and kept: the next time costs no compiler.

A process can compile kernels for one kind of GPU only, and a compiler may end it: so each step has a process
(`python -m llmc_jax.plan.separate`), which reads a request from its standard input. Two run at a time. For a GPU it
needs a Python with JAX's CUDA plugin: this one, or the one beside the source that `make plan-tools` makes. Answers are
kept by content: what was asked, the versions, and the sources that shape the program. Imports no JAX. Leaves out what
is said of a program (memory.py).
"""

import dataclasses
import hashlib
import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from llmc_jax.base.child import Failed, answer_of
from llmc_jax.base.commands import ROOT
from llmc_jax.base.errors import InputError
from llmc_jax.base.files import cache_folder, digest_of_files, write_bytes
from llmc_jax.base.plain import from_json, to_json
from llmc_jax.config.train import OPTIONS, TrainConfig
from llmc_jax.machine import gpus
from llmc_jax.machine.jax_setup import child_environment
from llmc_jax.machine.versions import installed
from llmc_jax.plan.memory import CPU, Memory

AT_ONCE = 2  # processes
PATIENCE = 1200  # seconds that one may take
FORMAT = 2
SOURCES = (*(f"llmc_jax/{name}" for name in ("models", "ops", "training", "kernels", "machine")), "pallas_kernels")
FILES = ("plan", "compiled", "memory", "moments")  # of this room: what shapes a program and says what it takes
PACKAGES = ("jax", "jaxlib")
PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")  # modules


class Request(NamedTuple):
    """A step to compile."""

    gpu: str  # a key of gpus.TARGETS; or CPU
    config: TrainConfig


class Problem(NamedTuple):
    """Why a step was not compiled."""

    what: str  # in one line, and what to do


def compiled_apart(requests: Sequence[Request]) -> list[Memory | Problem]:
    """Return the memory of each step, as compiled before or by processes of their own, in the order of the requests.

    `available` is left to the caller: it is None. A request that stands there twice is compiled once.
    """
    keys = [digest(request) for request in requests]
    distinct = dict(zip(keys, requests, strict=True))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = dict(zip(distinct, pool.map(_known_or_compiled, distinct, distinct.values()), strict=True))
    return [found[key] for key in keys]


def python_that_compiles() -> str | None:
    """Return the Python that can compile for GPUs, with the same version of JAX: this one, or the one beside it."""
    if any(importlib.util.find_spec(name) for name in PLUGINS):
        return sys.executable
    beside = ROOT / f".venv-aot-{installed('jax').get('jax')}/bin/python"
    return str(beside) if beside.exists() else None


def how_to_install() -> str:
    """Return one line: what is missing, and the command that brings it."""
    what = "compiling for a GPU that is not there needs JAX's CUDA plugin and NVIDIA's assembler, on Linux"
    if (ROOT / "Makefile").exists():
        return f"{what}: make plan-tools"
    return f"{what}: pip install 'llmc-jax[plan]'"


# ----- kept by content ------------------------------------------------------------------------------------------------


def digest(request: Request) -> str:
    """Return what tells programs apart: of the request, the versions and the sources."""
    asked = _as_json(request)
    config = {about.name: asked["config"][about.name] for about in OPTIONS if "program" in about.reaches}
    facts = {  # whether there is weight decay shapes the program; no earlier choice of kernels is read here
        "format": FORMAT,
        "asked": asked | {"config": config | {"weight_decay": bool(config["weight_decay"]), "kernels_from": ""}},
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "versions": installed(*PACKAGES),
        "sources": _sources_digest(),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:24]


def folder() -> Path:
    """Return where the answers are kept."""
    return cache_folder() / "plan"


def is_kept(request: Request) -> bool:
    """Return whether a step was compiled before."""
    return _place(digest(request)).exists()


def _place(key: str) -> Path:
    return folder() / f"{key}.json"


def _sources_digest() -> str:
    found = [path for name in SOURCES for path in (ROOT / name).rglob("*.py")]
    return digest_of_files([*found, *(Path(__file__).with_name(f"{name}.py") for name in FILES)])


def _known_or_compiled(key: str, request: Request) -> Memory | Problem:
    path = _place(key)
    with suppress(OSError, ValueError, RecursionError):  # none is there, or a damaged one
        return from_json(Memory, json.loads(path.read_text()))
    found = _compiled(request)
    if isinstance(found, Memory):
        with suppress(OSError):  # without a cache it is compiled again
            path.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(path, json.dumps(to_json(found)).encode())
    return found


# ----- the parent's side ----------------------------------------------------------------------------------------------


def _compiled(request: Request) -> Memory | Problem:
    """Compile a step in a process of its own."""
    python = sys.executable if request.gpu == CPU else python_that_compiles()
    if python is None:
        return Problem(how_to_install())
    environment = child_environment() | {
        "JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "0", "TF_CPP_MIN_LOG_LEVEL": "3",
        "JAX_TRACEBACK_FILTERING": "off",  # else the last line of an error is about its traceback
    }  # fmt: skip
    asked = json.dumps(_as_json(request))
    try:
        values = answer_of(
            "llmc_jax.plan.separate", asked=asked, limit=PATIENCE, environment=environment, python=python
        )
    except Failed as why:
        return Problem(f"the step could not be compiled for {request.gpu}: {why}")
    return from_json(Memory if "kinds" in values else Problem, values)


def _as_json(request: Request) -> dict[str, Any]:
    """Return a request as JSON has it, with the GPU's facts: it may be one of the user's own."""
    target = None if request.gpu == CPU else gpus.known_target(request.gpu)
    facts = target and {"target": target._asdict(), "gpu": target.gpu._asdict()}
    return {"gpu": request.gpu, "config": dataclasses.asdict(request.config), "facts": facts}


# ----- the child's side -----------------------------------------------------------------------------------------------


def answer(asked: Mapping[str, Any]) -> Memory | Problem:
    """Compile what was asked for in this process."""
    from llmc_jax.plan import compiled
    from llmc_jax.plan.memory import compiled as memory_compiled

    if facts := asked["facts"]:
        target = gpus.Target(**facts["target"])
        gpus.TARGETS[asked["gpu"]], gpus.GPUS[target.device_kind] = target, gpus.Gpu(**facts["gpu"])
    config = TrainConfig(**asked["config"])
    try:
        plan = compiled.plan_for(asked["gpu"], config)
        return memory_compiled(plan, asked["gpu"])._replace(available=None, card=None)
    except InputError as error:
        return Problem(str(error))


def main() -> None:
    print(json.dumps(to_json(answer(json.loads(sys.stdin.read())))))


if __name__ == "__main__":
    main()
