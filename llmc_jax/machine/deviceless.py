"""GPUs that are not there: lower a program for one, or compile it to machine code, on a machine without any.

Lowering (`lower_for`) needs JAX alone: every Python pass of the kernels runs, layouts are inferred, nothing is
assembled. Compiling (`compile_for`) needs the packages of JAX's CUDA plugin and of NVIDIA's assembler as well, but no
driver and nothing else of CUDA. What comes out is the program a GPU would run, with its memory to the byte. Leaves out
running it, the registers of its kernels (benchmarks/assembler.py), and cuDNN, whose package is not needed here.

Start Python with JAX_PLATFORMS=cpu: without it JAX looks for a GPU first and complains at length that there is none.
"""

import dataclasses
import importlib.util
import math
import os
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from llmc_jax.base.errors import InputError
from llmc_jax.machine import compiling
from llmc_jax.machine.gpus import Target, known_target

# By JAX's plugin the CUDA that its programs run on. XLA makes CUDA graphs only for a target that names its driver.
PLUGINS = {"jax_plugins.xla_cuda13": "13.0.0", "jax_plugins.xla_cuda12": "12.9.0"}


class MemoryUse(NamedTuple):
    """Bytes that a compiled program needs on each device."""

    arguments: int
    outputs: int  # those that lie in a donated argument's place included
    aliased: int  # of the outputs: lie in the place of a donated argument
    temporaries: int  # the largest total that is live at once beside arguments and outputs
    code: int

    @property
    def total(self) -> int:
        """Return the bytes of everything that exists at once while the program runs."""
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.code


class Program(NamedTuple):
    """A program compiled for a device, which need not be there."""

    target: str
    memory: MemoryUse
    compiled: jax.stages.Compiled

    @property
    def hlo(self) -> str:
        """Return XLA's program after all optimisations, as text."""
        return self.compiled.as_text() or ""


def plugin_installed() -> bool:
    """Return whether this Python has JAX's CUDA plugin, which `compile_for` needs.

    The assembler, ptxas, is found beside the plugin (package nvidia-cuda-nvcc), or else on PATH or in /usr/local/cuda.
    """
    return bool(_cuda_version())


def _cuda_version() -> str:
    """Return the CUDA of the plugin that is installed; empty: there is none."""
    if importlib.util.find_spec("jax_plugins") is None:
        return ""
    return next((version for plugin, version in PLUGINS.items() if importlib.util.find_spec(plugin)), "")


# ----- lowering -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Gpu(AbstractDevice):
    """JAX's abstract device with its compute capability, without which Mosaic GPU takes every GPU for an sm_90."""

    compute_capability: str = ""


def abstract_gpu(name: str, shape: Sequence[int] = (1,), axis_names: Sequence[str] = ("data",)) -> AbstractMesh:
    """Return a mesh of GPUs that are not there: `with jax.sharding.use_abstract_mesh(abstract_gpu("h200"))`.

    Then `jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",))`, or both in one: `lower_for`.
    shape, axis_names: the mesh's, as for a real one. Raises InputError for a GPU that is not known.
    """
    target = known_target(name)
    device = _Gpu(target.device_kind, target.multiprocessors, "gpu", target.capability)
    return AbstractMesh(
        tuple(shape), tuple(axis_names), axis_types=(AxisType.Auto,) * len(axis_names), abstract_device=device
    )


def lower_for(function: Any, arguments: Sequence[Any], name: str) -> Any:
    """Return the `jax.stages.Lowered` of a jitted function for one GPU. Needs no CUDA packages.

    arguments: positional; arrays may be `jax.ShapeDtypeStruct`s.
    Raises InputError for a GPU that is not known, and whatever the kernels raise for shapes that they refuse.
    """
    with jax.sharding.use_abstract_mesh(abstract_gpu(name)):
        return function.trace(*arguments).lower(lowering_platforms=("cuda",))


# ----- compiling ----------------------------------------------------------------------------------------------------


def gpu_mesh(name: str, shape: Sequence[int] = (1,), axis_names: Sequence[str] = ("data",)) -> Mesh:
    """Return a mesh of GPUs of one machine that are not there, to compile for. Arrays cannot be put on it.

    Raises InputError for a GPU that is not known, and where the CUDA plugin is not installed.
    """
    target = known_target(name)
    if not plugin_installed():
        version = jax.__version__
        raise InputError(
            "compiling for a GPU needs JAX's CUDA plugin and NVIDIA's assembler, on Linux: pip install --no-deps "
            f"jax-cuda13-plugin=={version} jax-cuda13-pjrt=={version} nvidia-cuda-nvcc"
        )
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # the plugin would ask for cuDNN, cuBLAS and others
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="", target_config=_target_config(target), topology=f"1x1x{math.prod(shape)}"
    )
    return topologies.make_mesh(topology, tuple(shape), tuple(axis_names))


def compile_for(
    function: Any,
    arguments: Sequence[Any],
    name: str,
    *,
    mesh: Mesh | None = None,
    specs: Sequence[Any] | None = None,
    compiler_options: compiling.Settings = (),
) -> Program:
    """Compile a jitted function to machine code for a GPU that is not there.

    arguments: as in `lower_for`. Without `mesh` the program runs on one GPU. mesh: several, from `gpu_mesh`; specs: for
    each argument the PartitionSpec of its arrays, or a tree of them like the argument. compiler_options: XLA's, as an
    Execution has them.
    Memory is that of one GPU. XLA chooses its matrix products without measuring, so the workspace they need on a real
    GPU, a few MiB, is not in it.

    Raises InputError for a GPU that is not known, without the CUDA plugin, and for a second compute capability in a
    process that has compiled a Mosaic kernel: the compiler would take the kernel for the first one.
    """
    assert mesh is not None or specs is None, "specs without a mesh"
    mesh = mesh or gpu_mesh(name)
    everywhere = jax.tree.broadcast(PartitionSpec() if specs is None else tuple(specs), tuple(arguments))
    placed = jax.tree.map(partial(_on, mesh), tuple(arguments), everywhere)
    shape, axis_names = mesh.devices.shape, mesh.axis_names
    with jax.sharding.use_abstract_mesh(abstract_gpu(name, shape, axis_names)):
        lowered = function.trace(*placed).lower(lowering_platforms=("cuda",))
        if "mosaic_gpu" in lowered.as_text():
            _only_capability(known_target(name))
        compiled = compiling.compiled(lowered, compiler_options)
    return Program(name, memory_use(compiled), compiled)


def memory_use(compiled: jax.stages.Compiled) -> MemoryUse:
    """Return what XLA says that a compiled program needs."""
    memory: Any = compiled.memory_analysis()
    return MemoryUse(
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        code=memory.generated_code_size_in_bytes,
    )


def _on(mesh: Mesh, leaf: Any, spec: PartitionSpec) -> Any:
    """Return an array's shape on the mesh. What is no array (a static argument, a Python number) stays as it is."""
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))


_capability: str | None = None  # that of this process's first Mosaic kernel, which Mosaic keeps


def _only_capability(target: Target) -> None:
    """Refuse a second compute capability: Mosaic would assemble for the first one, or end the process."""
    global _capability
    if _capability not in (None, target.capability):
        raise InputError(
            f"this process has compiled kernels for compute capability {_capability} and cannot "
            f"compile them for {target.capability}: start one process per GPU"
        )
    _capability = target.capability


def _target_config(target: Target) -> str:
    """Return XLA's GpuTargetConfigProto of a GPU, as text."""
    major, minor = target.capability.split(".")
    # Mosaic's kernels for consumer Blackwell are sm_120a, which plain sm_120 must not run.
    accelerated = " feature_extension: ACCELERATED_FEATURES" if major == "12" else ""
    cuda = _cuda_version()
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {target.shared_memory}
  shared_memory_per_core: {target.shared_memory_per_multiprocessor}
  threads_per_core_limit: {target.threads_per_multiprocessor}
  core_count: {target.multiprocessors}
  fpus_per_core: {target.cores_per_multiprocessor}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {round(target.gpu.bandwidth * 1e9)}
  l2_cache_size: {target.l2_cache}
  clock_rate_ghz: {target.clock}
  device_memory_size: {round(target.gpu.memory * 1e9)}
  cuda_compute_capability {{ major: {major} minor: {minor}{accelerated} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  driver_version: "{cuda}"
  compile_time_toolkit_version: "{cuda}"
  runtime_version: "{cuda}"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
runtime_version {{ major: {cuda.split(".")[0]} minor: {cuda.split(".")[1]} patch: 0 }}
device_description_str: "{target.device_kind}"
"""
