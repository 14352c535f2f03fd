"""llmc-jax: llm.c's GPT-2 trainer as a functional JAX program, and a small library. docs/library.md shows it.

The names below are what is promised; each is fetched when it is first used, so that `import llmc_jax`, and the command
line, do without JAX. Everything else in the package can be imported too, and may change with any version.
"""

import os
import sys

if sys.argv and os.path.basename(sys.argv[0]) in ("-m", "llmc-jax"):  # a program of ours, whose modules come next
    from llmc_jax.base.entrance import enter

    enter()

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmc_jax import ops
    from llmc_jax.base.errors import FormatError, InputError
    from llmc_jax.config.model import ModelConfig
    from llmc_jax.library import (
        Completion,
        Model,
        attention_weights,
        begin,
        complete,
        decode,
        encode,
        estimate,
        load,
        logits,
        loss,
        loss_and_gradient,
        save,
        stream,
        trained,
    )

    __version__: str

__all__ = [
    "Completion",
    "FormatError",
    "InputError",
    "Model",
    "ModelConfig",
    "__version__",
    "attention_weights",
    "begin",
    "complete",
    "decode",
    "encode",
    "estimate",
    "load",
    "logits",
    "loss",
    "loss_and_gradient",
    "ops",
    "save",
    "stream",
    "trained",
]

_ELSEWHERE = {"FormatError": "base.errors", "InputError": "base.errors", "ModelConfig": "config.model"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'llmc_jax' has no attribute {name!r}")
    if name == "ops":
        return import_module("llmc_jax.ops")
    if name == "__version__":
        value = _version()
    else:
        value = getattr(import_module(f"llmc_jax.{_ELSEWHERE.get(name, 'library')}"), name)
    globals()[name] = value  # found at once from now on
    return value


def __dir__() -> list:  # without [str], so that an old Python reads on to where it is refused
    return list(__all__)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # here, because it takes longer than all the rest

    try:
        return version("llmc-jax")
    except PackageNotFoundError:
        return "0+unknown"  # a source tree that is not installed
