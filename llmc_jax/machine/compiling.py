"""How programs are compiled: with the options of XLA that were chosen for the GPU, by one function for all of them.

The options are given when a lowered program is compiled. As an argument of jax.jit they would bind every function that
calls the jitted one, and override what the user has set in XLA_FLAGS. Leaves out what surrounds the compiler, such as
its cache (jax_setup.py), and GPUs that are not there (deviceless.py).
"""

import os
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding

from llmc_jax.base.errors import InputError
from llmc_jax.machine import algorithms
from llmc_jax.machine.gpus import AMX, Machine, measured_on

Options = tuple[tuple[str, bool | int], ...]  # XLA's options and their values: hashable, and plain enough for JSON
Settings = tuple[tuple[str, bool | int | str], ...]  # the same, and names of files among them
Flags = Mapping[str, Any]  # what the user has set of them (`user_flags`): bool, int or str

TRITON_GEMM = "xla_gpu_enable_triton_gemm"  # XLA may make a product itself, in Triton, instead of calling cuBLASLt
# Of which kinds of kernels XLA makes CUDA graphs, in which a trace finds no kernel's instruction; empty: of none.
GRAPHS = "xla_gpu_enable_command_buffer"
# A folder in which XLA keeps which way of a product was the fastest, and finds it: two programs choose alike.
ALGORITHMS = "xla_gpu_per_fusion_autotune_cache_dir"
# A file of the ways that XLA found the fastest before, by which it makes these products. It reads one file in the life
# of a process, with the first program that names it. Here it has the name that algorithms.py gave it.
PINNED = "xla_gpu_load_autotune_results_from"
# By architecture, what is better than XLA's default, and the card whose step was timed so; what is not here has the
# default. On Hopper, by bytes: cuBLASLt adds the bias inside its product. In a product by Triton, and wherever XLA only
# looked for one, that is a kernel of its own, which reads and writes the whole result once more
# (benchmarks/results/step_table.md). No step with Triton's products has been timed beside it.
CHOSEN: dict[str, tuple[bool, str]] = {"sm_90": (False, "NVIDIA H200")}

# On a CPU with AMX oneDNN makes the products in bf16: XLA's own library makes the weights' gradients no faster than in
# fp32. Products in fp32 are no faster by oneDNN, and no CPU without AMX has timed it (benchmarks/results/cpu_step.md).
ONEDNN = "xla_cpu_use_onednn"
ONEDNN_FOR = ("xla_cpu_experimental_onednn_fusion_type", 1)  # of what: products. Given together with it
ONEDNN_SHARE = 0.45  # of the time of a step of GPT-2 124M in fp32 at B=4 T=64, what one in bf16 takes on a Xeon

# With several devices: a collective for each layer, which starts as soon as what it sends is there and is waited for
# when its result is needed. Seen in programs compiled for sm_80 and sm_90; no machine with several GPUs has timed it.
OVERLAP: Options = (
    # XLA joins collectives of one kind up to so many bytes, by default 30 MiB of all-reduces and of all-gathers, and
    # every reduce-scatter of a backward: one at its end, beside which nothing runs. All-reduces it copies together
    # first. 0: it joins none. (All-to-alls it never does.)
    ("xla_gpu_all_gather_combine_threshold_bytes", 0),
    ("xla_gpu_all_reduce_combine_threshold_bytes", 0),
    ("xla_gpu_reduce_scatter_combine_threshold_bytes", 0),
    # Which scheduler orders the program: this one, or one for little memory, which puts little beside a collective, or
    # nothing. Programs for Hopper come out of this one by default, those for Ampere out of the other.
    ("xla_gpu_enable_latency_hiding_scheduler", True),
    # It starts a collective as late as it can by its own estimate of the time it takes, which is short: that of the
    # first layer in a backward of twelve came nine layers later, and all then stood in line at the end. True: when its
    # operands are there. That needs the next option, because by default one is under way at a time.
    ("xla_gpu_experimental_collective_start_as_early_as_possible", True),
    # How many may be under way: more than any program has. They take turns all the same, on one stream in this order.
    ("xla_gpu_experimental_parallel_collective_overlap_limit", 1024),
    # Several processes would share out the timing of products among them, and wait for each other's results: for ever
    # where one of them does not compile, since it has the program in its cache or waits for its turn. Each times all.
    ("xla_gpu_shard_autotuning", False),
)


def overlap(target: str | None, devices: int, flags: Flags) -> Options:
    """Return the options by which a program of several devices computes while it sends.

    target: the GPU's architecture, None for a CPU; flags: what the user has set, which counts more. Without a GPU, or
    with one alone, there is nothing to set.
    """
    if target is None or devices < 2:
        return ()
    return tuple((name, type(value)(flags.get(name, value))) for name, value in OVERLAP)


def without_files(options: Settings) -> Options:
    """Return a program's options but for those that name files, as `pinned` does."""
    return tuple((name, value) for name, value in options if not isinstance(value, str))


def of_one_device(options: Settings) -> Options:
    """Return a program's options but for those that `overlap` and `pinned` set, which are of one start of a run."""
    return tuple((name, value) for name, value in without_files(options) if name not in dict(OVERLAP))


def pinned(name: str, target: str | None, flags: Flags) -> Settings:
    """Return the option by which programs take their algorithms from a file (`algorithms.kept`), as `triton_gemm`."""
    return ((PINNED, name),) if name and target and PINNED not in flags else ()


def triton_gemm(wish: str, target: str | None, flags: Flags) -> Options:
    """Return the options by which a run's programs are compiled.

    wish: --triton-gemm; target: the GPU's architecture; flags: what the user has set (`user_flags`), which counts more
    than the wish. Where there are no options XLA has its own default, as it always has on a CPU (target None).
    """
    if target is None:
        return ()
    value = flags.get(TRITON_GEMM)
    if value is None:
        value = CHOSEN.get(target, (None, ""))[0] if wish == "auto" else wish == "on"
    return () if value is None else ((TRITON_GEMM, bool(value)),)


def onednn(dtype: str, machine: Machine, flags: Flags) -> Options:
    """Return the options by which oneDNN makes a program's products: none but in bf16, on a CPU with AMX.

    dtype: that of the products; flags: as `triton_gemm` has them.
    """
    return ((ONEDNN, True),) if dtype == "bf16" and machine.capability == AMX and ONEDNN not in flags else ()


def by_onednn(options: Settings) -> bool:
    """Return whether oneDNN makes a program's products: those of bf16 are fast where it rounds them to that."""
    return (ONEDNN, True) in options


def without_graphs(platform: str, flags: Flags) -> Settings:
    """Return the options by which a program has no CUDA graphs; none where it has no graphs anyway.

    That is on a CPU, and where the user has switched them off.
    """
    return ((GRAPHS, ""),) if platform == "gpu" and flags.get(GRAPHS) != "" else ()


def decided_by(wish: str, target: str | None, flags: Flags) -> str:
    """Return who decided what `triton_gemm` returned, for the table of a run."""
    if TRITON_GEMM in flags:
        return "XLA_FLAGS"
    return "as asked" if wish != "auto" or target not in CHOSEN else measured_on(CHOSEN[target][1])


def user_flags() -> dict[str, Any]:
    """Return the options of XLA that the environment sets, in XLA_FLAGS or in the file that it names.

    True and false are bool, numbers int, also where XLA takes 1 for true; other values are text, which may be empty.
    """
    text = os.environ.get("XLA_FLAGS", "").strip()
    if text and not text.startswith("-"):
        text = Path(text).read_text(errors="replace") if Path(text).is_file() else ""  # XLA refuses it
    found: dict[str, Any] = {}
    for word in text.split():
        name, equals, value = word.lstrip("-").partition("=")
        if not equals or value.lower() in ("true", "false"):
            found[name] = value.lower() != "false"
        else:
            found[name] = int(value) if re.fullmatch(r"[+-]?[0-9]+", value) else value
    return found


def compiled(lowered: Any, options: Settings) -> Any:
    """Return the `jax.stages.Compiled` of what `jax.jit(...).lower(...)` gave.

    Raises InputError where this XLA does not know an option, and where it does not read a file of algorithms.
    """
    if not options:
        return lowered.compile()
    given = dict(options)
    if by_onednn(options):
        given |= [ONEDNN_FOR]
    if PINNED in given:
        given[PINNED] = str(algorithms.path_of(str(given[PINNED])))
    try:
        return lowered.compile(compiler_options=given)
    except jax.errors.JaxRuntimeError as error:
        if PINNED in given and "utotune results" in str(error):
            words = str(error).splitlines()[0].rstrip(".")
            raise InputError(
                f"--algorithms: XLA does not read {given[PINNED]}: {words}; {algorithms.ADVICE}"
            ) from error
        unknown = next((name for name, _ in options if f"No such compile option: '{name}'" in str(error)), None)
        if unknown is None:
            raise
        raise InputError(
            f"the XLA of JAX {jax.__version__} does not know its option {unknown}, which the run is compiled with; "
            "install a JAX that pyproject.toml allows"
        ) from error


@cache
def _program(function: Any, shapes: tuple[Any, ...], static: tuple[Any, ...], options: Settings) -> Any:
    return compiled(function.lower(*shapes, *static), options)


def call(function: Callable[..., Any], arrays: tuple[Any, ...], static: tuple[Any, ...], options: Settings) -> Any:
    """Call a jitted function that takes some arrays, or tuples of them, and then some static arguments.

    It is compiled with the options, once for each combination of shapes, as by jax.jit itself, which does it where
    there are no options.
    """
    if not options:
        return function(*arrays, *static)

    def described(array: Any) -> jax.ShapeDtypeStruct:
        own = getattr(array, "sharding", None)
        mesh = own if isinstance(own, NamedSharding) else None  # where it is on one device that is left to JAX
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=mesh)

    shapes = jax.tree.map(described, arrays)
    return _program(function, shapes, static, options)(*arrays)
