"""What a generated token is on a GPU that is not there: the kernels and arguments of its compiled program, its bytes.

    python benchmarks/generate.py [-e d12] [--gpu h200] [--samples 1 16] [--top-k 50] [--json FILE]

Needs a Python with JAX's CUDA plugin (`make test-aot` makes one). Nothing runs: kernels are those of the optimized
program, all of one CUDA graph, arguments the buffers that the host hands over for each token, and the time an estimate
from both (llmc_jax/plan/token.py).
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
# Before anything initialises JAX: no GPU is looked for, and the plugin does not ask for cuDNN.
os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from benchmarks.launches import launched  # noqa: E402
from llmc_jax.base.errors import InputError  # noqa: E402
from llmc_jax.config.model import ModelConfig, parse_descriptor  # noqa: E402
from llmc_jax.generate import engine  # noqa: E402
from llmc_jax.generate.sampling import Sampling, numbers_of, steps_of  # noqa: E402
from llmc_jax.kernels import decode  # noqa: E402
from llmc_jax.kernels.choice import decoding_refusal  # noqa: E402
from llmc_jax.machine import deviceless, gpus  # noqa: E402
from llmc_jax.models.gpt2.decode import empty_cache  # noqa: E402
from llmc_jax.models.layout import flat_size, num_parameters  # noqa: E402
from llmc_jax.models.packed import Packed  # noqa: E402
from llmc_jax.models.program import separated  # noqa: E402
from llmc_jax.plan.program import Program  # noqa: E402
from llmc_jax.plan.token import tokens_of  # noqa: E402


class Facts(NamedTuple):
    """A token of each of some texts, in bf16, as one program decodes and draws it."""

    made_by: str  # --kernels of generate
    texts: int
    kernels: int
    ours: int  # of them, handwritten ones
    loops: int  # whose turns the host would start
    arguments: int  # buffers
    new: int  # bytes of what does not lie in a donated argument's place: temporaries, tokens
    planned: int  # kernels that the plan counts with --top-k


def facts(gpu: str, model: str, made_by: str, texts: int, top_k: int) -> Facts:
    """Compile a token's program at a model's last position."""
    config, target = parse_descriptor(model), gpus.known_target(gpu)
    assert isinstance(config, ModelConfig)
    sampling = Sampling(top_k=top_k) if top_k else Sampling(temperature=0)
    given = jax.eval_shape(lambda: arguments(config, target.architecture, made_by, texts, sampling))
    program = deviceless.compile_for(engine.in_one_program, (*given, config, steps_of(sampling, 0)), gpu)
    text, memory = Program(program.hlo), program.memory
    names = [each.rest for each, times in launched(text) for _ in range(times)]
    machine = gpus.Machine("gpu", target.device_kind, target.capability)
    return Facts(
        made_by, texts, len(names), sum("mosaic_gpu" in rest for rest in names), program.hlo.count(" while("),
        len(jax.tree.leaves(given)), memory.temporaries + memory.outputs - memory.aliased,
        tokens_of(config, machine, "bf16", texts)[made_by].kernels,
    )  # fmt: skip


def arguments(config: ModelConfig, target: str, made_by: str, texts: int, sampling: Sampling) -> tuple[Any, ...]:
    """Return what `engine.in_one_program` is given of weights, tokens and cache."""
    cache: Any = empty_cache(config, texts, config.max_seq_len, jnp.bfloat16)
    if made_by == "pallas":
        rows = jnp.zeros((num_parameters(config) // config.channels, config.channels), jnp.bfloat16)
        weights, cache = Packed(rows, config, target), decode.stacked(cache)
    else:
        weights = separated(jnp.zeros(flat_size(config), jnp.bfloat16), config)
    tokens, position = jnp.zeros(texts, jnp.int32), jnp.int32(0)
    coins = engine.Coins(tokens, position, jax.tree.map(jnp.asarray, numbers_of(sampling)))
    return weights, tokens, position, cache, coins


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-e", dest="model", default="d12")
    parser.add_argument("--gpu", default="h200", help=f"one of {', '.join(gpus.TARGETS)} (default h200)")
    parser.add_argument("--samples", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--kernels", nargs="+", default=["xla", "pallas"])
    parser.add_argument("--top-k", type=int, default=50, help="0: greedy")
    parser.add_argument("--json", type=Path, metavar="FILE")
    asked = parser.parse_args()
    try:
        config, target = parse_descriptor(asked.model), gpus.known_target(asked.gpu)
        if why := decoding_refusal(config):
            raise InputError(f"{asked.model}: no kernels of ours decode it, and the plan has not counted XLA's: {why}")
        found = [
            facts(asked.gpu, asked.model, by, texts, asked.top_k) for by in asked.kernels for texts in asked.samples
        ]
    except InputError as error:
        parser.exit(2, f"generate.py: {error}\n")
    if asked.json:
        asked.json.write_text(json.dumps([each._asdict() for each in found]))
    print(f"{asked.model}, bf16, {asked.gpu}, JAX {jax.__version__}, top-k {asked.top_k}\n")
    print("| --kernels | texts | kernels | ours | loops | arguments | MB to read | ms, estimated |\n|" + "---|" * 8)
    machine = gpus.Machine("gpu", target.device_kind, target.capability)
    for each in found:
        token = tokens_of(config, machine, "bf16", each.texts)[each.made_by]
        low, typical, high = (1e3 * seconds for seconds in token.seconds)
        print(
            f"| {each.made_by} | {each.texts} | {each.kernels} | {each.ours} | {each.loops} | {each.arguments} | "
            f"{token.bytes / 1e6:,.0f} | {typical:.2f} ({low:.2f} to {high:.2f}) |"
        )


if __name__ == "__main__":
    main()
