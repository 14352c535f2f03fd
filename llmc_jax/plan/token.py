"""What a generated token takes on a GPU, by its program's kernels and the bytes that they read. Knows no JAX.

Leaves out the prefill, and a CPU, whose token takes its bytes (benchmarks/results/generate.md).
"""

from typing import NamedTuple

from llmc_jax.base.numbers import Interval
from llmc_jax.config.model import ModelShape
from llmc_jax.kernels.choice import decoding_refusal
from llmc_jax.machine.gpus import GPUS, Machine
from llmc_jax.models.layout import num_layers, num_parameters, tensor_specs
from llmc_jax.models.work import COMPUTE_BYTES
from llmc_jax.plan.efficiency import COPY, gpu

# By --kernels of generate: kernels of each layer, and of all else with --top-k 50, in the program compiled for an H200
# (benchmarks/generate.py).
PROGRAMS = {"xla": (26, 45), "pallas": (5, 40)}
KERNEL = Interval(1e-6, 2e-6, 3e-6)  # seconds from one to the next in a CUDA graph, besides their bytes: an estimate


class Token(NamedTuple):
    """A token of each of some texts at a model's last position."""

    kernels: int
    bytes: int  # of weights, keys and values: what must be read
    seconds: Interval


def tokens_of(model: ModelShape, machine: Machine, dtype: str, texts: int = 1) -> dict[str, Token]:
    """Return what a token takes on a GPU, by `--kernels` of generate; nothing where their programs were not counted.

    dtype: fp32, bf16 or fp16, which the model computes in.
    """
    if machine.target is None or machine.kind not in GPUS or decoding_refusal(model):
        return {}
    positions = next(spec.size for spec in tensor_specs(model) if spec.name == "wpe")  # one row of which is read
    cache = 2 * num_layers(model) * texts * positions
    moved = COMPUTE_BYTES[dtype] * (num_parameters(model) - positions + cache)
    card, found = gpu(machine.kind, "bf16"), {}
    for name, (of_layer, rest) in PROGRAMS.items():
        count = of_layer * num_layers(model) + rest
        shares = sorted(card.share(COPY)[:3], reverse=True)  # the highest gives the least time
        times = (count * each + moved / (card.bandwidth * share) for each, share in zip(KERNEL, shares, strict=True))
        found[name] = Token(count, moved, Interval(*times))
    return found
