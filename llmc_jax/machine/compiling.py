"""How programs are compiled: with the options of XLA that were chosen for the GPU, by one function for all of them.

The options are given when a lowered program is compiled. As an argument of jax.jit they would bind every function that
calls the jitted one, and override what the user has set in XLA_FLAGS. Leaves out what surrounds the compiler, such as
its cache (jax_setup.py), and GPUs that are not there (deviceless.py).
"""

import os
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding

from llmc_jax.errors import InputError

Options = tuple[tuple[str, bool], ...]  # XLA's options and their values: hashable, and plain enough for JSON

TRITON_GEMM = "xla_gpu_enable_triton_gemm"  # XLA may make a product itself, in Triton, instead of calling cuBLASLt
# By architecture, what is better than XLA's default; what is not here has it. On Hopper, by bytes: cuBLASLt adds the
# bias inside its product. In a product by Triton, and wherever XLA only looked for one, that is a kernel of its own,
# which reads and writes the whole result once more (benchmarks/results/step_table.md).
ESTIMATED: dict[str, bool] = {"sm_90": False}


def triton_gemm(wish: str, target: str | None, flags: Mapping[str, bool]) -> Options:
    """Return the options by which a run's programs are compiled.

    wish: --triton-gemm; target: the GPU's architecture; flags: what the user has set (`user_flags`), which counts more
    than the wish. Where there are no options XLA has its own default, as it always has on a CPU (target None).
    """
    if target is None:
        return ()
    value = flags.get(TRITON_GEMM)
    if value is None:
        value = ESTIMATED.get(target) if wish == "auto" else wish == "on"
    return () if value is None else ((TRITON_GEMM, value),)


def untried(wish: str, target: str | None, flags: Mapping[str, bool]) -> Options:
    """Return the options that nobody has decided for a GPU, with the value that is not XLA's default.

    Where Triton is off by estimate, its products are not tried: XLA would time each of them for minutes first.
    """
    if target is None or target in ESTIMATED or wish != "auto" or TRITON_GEMM in flags:
        return ()
    return ((TRITON_GEMM, False),)


def decided_by(wish: str, flags: Mapping[str, bool]) -> str:
    """Return who decided what `triton_gemm` returned, for the table of a run."""
    if TRITON_GEMM in flags:
        return "XLA_FLAGS"
    return "as asked" if wish != "auto" else "by estimate: not measured on a GPU yet"


def user_flags() -> dict[str, bool]:
    """Return the options of XLA that the environment sets true or false, in XLA_FLAGS or in the file that it names."""
    text = os.environ.get("XLA_FLAGS", "").strip()
    if text and not text.startswith("-"):
        try:
            text = Path(text).read_text()
        except OSError:  # XLA takes a file that it cannot read for an empty one
            text = ""
    found = {}
    for word in text.split():
        name, equals, value = word.lstrip("-").partition("=")
        if not equals or value.lower() in ("true", "1", "false", "0"):
            found[name] = not equals or value.lower() in ("true", "1")
    return found


def compiled(lowered: Any, options: Options) -> Any:
    """Return the `jax.stages.Compiled` of what `jax.jit(...).lower(...)` gave.

    Raises InputError where this XLA does not know an option.
    """
    if not options:
        return lowered.compile()
    try:
        return lowered.compile(compiler_options=dict(options))
    except jax.errors.JaxRuntimeError as error:
        unknown = next((name for name, _ in options if f"No such compile option: '{name}'" in str(error)), None)
        if unknown is None:
            raise
        raise InputError(
            f"the XLA of JAX {jax.__version__} does not know its option {unknown}, which the run is compiled with; "
            "install a JAX that pyproject.toml allows"
        ) from error


@cache
def _program(function: Any, shapes: tuple[Any, ...], static: tuple[Any, ...], options: Options) -> Any:
    return compiled(function.lower(*shapes, *static), options)


def _mesh_sharding(array: Any) -> Any:
    """Return how an array lies on a mesh; None where it is on one device, which is left to JAX."""
    sharding = getattr(array, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None


def call(function: Callable[..., Any], arrays: tuple[Any, ...], static: tuple[Any, ...], options: Options) -> Any:
    """Call a jitted function that takes some arrays and then some static arguments, compiled with the options.

    It is compiled once for each combination of shapes, as by jax.jit itself, which does it where there are no options.
    """
    if not options:
        return function(*arrays, *static)
    shapes = tuple(jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=_mesh_sharding(each)) for each in arrays)
    return _program(function, shapes, static, options)(*arrays)
