"""What a token costs when GPT-2 124M generates at the end of its context: ours, recomputing, and Hugging Face's.

    python benchmarks/generate.py --torch-python PATH [--write]

All in turns, in one run: reading memory at the machine's own rate, a token by the whole engine (decode, draw, to the
host), the same for several samples, a token by the whole forward again, Hugging Face's generate on the same weights. A
ratio is of the same round. Without --torch-python the last is left out. --write keeps the table in results/generate.md.
"""

import argparse
import contextlib
import io
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.heading import machine_line
from benchmarks.turns import Peer, Spread, blocks_in_turns, ratios, spread
from llmc_jax.checkpoint.convert import main as convert
from llmc_jax.generate.engine import Drawn, Request, generate
from llmc_jax.generate.model import Model, flat_weights, open_model
from llmc_jax.generate.sampling import Sampling
from llmc_jax.machine.device import first_device
from llmc_jax.models.gpt2.decode import cache_bytes
from llmc_jax.models.gpt2.model import PLAIN, forward_stream
from llmc_jax.models.gpt2.tensors import views
from llmc_jax.models.gpt2.work import COMPUTE_BYTES
from llmc_jax.ops.linear import linear_forward

PAGE = Path(__file__).parent / "results/generate.md"
T = 1024
STREAM_BYTES = 1 << 29


def reading() -> Any:
    """A function that reads STREAM_BYTES of memory by XLA's sum, and returns milliseconds."""
    values = jnp.ones(STREAM_BYTES // 4, jnp.float32)
    total = jax.jit(jnp.sum)
    total(values).block_until_ready()

    def once() -> float:
        start = time.perf_counter()
        total(values).block_until_ready()
        return 1e3 * (time.perf_counter() - start)

    return lambda: statistics.median(once() for _ in range(5))


def request_of(samples: int, tokens: int) -> Request:
    """Generation that ends at the model's last position."""
    prompt = tuple(np.random.default_rng(1).integers(0, 50257, T - tokens).tolist())
    return Request(prompt, tokens, samples, Sampling(temperature=0), ignore_end=True)


def token_ms(model: Model, request: Request) -> tuple[float, list[int]]:
    """Median milliseconds between two positions, after the first ones; and the first sample's tokens."""
    times, tokens = [], []
    for event in generate(model, request):
        assert isinstance(event, Drawn)
        if event.sample == 0:
            times.append(time.perf_counter())
            tokens.append(event.token)
    return 1e3 * statistics.median(np.diff(times[2:]).tolist()), tokens


def forward_again(model: Model) -> Any:
    """A function that computes the logits of the last position by the whole forward, and returns milliseconds."""
    weights, tokens = flat_weights(model.weights, model.config), jnp.zeros((1, T), jnp.int32)

    @jax.jit
    def last_logits(weights: jax.Array, tokens: jax.Array) -> jax.Array:
        tensors = views(weights, model.config)
        lnf, _ = forward_stream(tensors, tokens, model.config, PLAIN)
        return linear_forward(lnf[0, -1], tensors.wte, None)

    def once() -> float:
        start = time.perf_counter()
        last_logits(weights, tokens).block_until_ready()
        return 1e3 * (time.perf_counter() - start)

    once()
    return once


def exported(name: str, folder: Path, dtype: str) -> Path:
    """The same weights as a folder of Hugging Face's."""
    out = folder / "hf"
    with contextlib.redirect_stdout(io.StringIO()):
        assert convert(["convert", name, str(out), "--to", "hf", "--dtype", dtype]) == 0
    return out


def measure(args: argparse.Namespace) -> tuple[list[str], dict[str, Any]]:
    """The rows of the table, and versions."""
    model = open_model(args.model, dtype=args.dtype, tokenizer="none")
    request, several = request_of(1, args.tokens), request_of(args.samples, args.tokens)
    blocks: dict[str, Any] = {"reading": reading()}
    blocks["ours"] = lambda: token_ms(model, request)[0]
    blocks["several"] = lambda: token_ms(model, several)[0]
    blocks["again"] = forward_again(model)
    about: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        peer = None
        same = None
        if args.torch_python:
            command = [args.torch_python, str(Path(__file__).with_name("transformers_peer.py"))]
            peer = Peer([*command, str(exported(args.model, Path(folder), args.dtype)), args.dtype]).wait_ready()
            about, asked = peer.about, {"prompt": request.prompt, "samples": 1, "tokens": args.tokens}
            theirs, ours = peer.ask(asked)["tokens"], token_ms(model, request)[1]
            same = sum(a == b for a, b in zip(ours, theirs, strict=True))
            blocks["hugging face"] = lambda: peer.ask(asked)["ms"]
            blocks["hugging face, several"] = lambda: peer.ask(asked | {"samples": args.samples})["ms"]
        for block in blocks.values():
            block()  # compiled, and touched for the first time
        found = blocks_in_turns(blocks, args.rounds)
        if peer is not None:
            peer.close()
    return rows_of(model, args, found, same), about


def rows_of(model: Model, args: argparse.Namespace, found: dict[str, list[float]], same: int | None) -> list[str]:
    """The lines of the table."""
    element = COMPUTE_BYTES[args.dtype]
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(model.weights)) - model.weights.wpe.nbytes
    cache = cache_bytes(model.config, 1, T, element)

    def share(nbytes: int) -> Spread:
        """Of the rate at which memory is read, in the same round."""
        rates = [nbytes / ms / (STREAM_BYTES / read) for ms, read in zip(found["ours"], found["reading"], strict=True)]
        return spread([100 * rate for rate in rates])

    gbps = spread([STREAM_BYTES / ms / 1e6 for ms in found["reading"]])
    rows = [
        ("reading memory", f"{gbps.text(1)} GB/s"),
        ("one token", f"{spread(found['ours']).text(1)} ms"),
        ("of the reading rate, counting the weights", f"{share(weights).text(0)} %"),
        ("of the reading rate, counting keys and values too", f"{share(weights + cache).text(0)} %"),
        (f"{args.samples} tokens, of as many samples", f"{spread(found['several']).text(1)} ms"),
        ("one token by the whole forward again", f"{spread(found['again']).text(0)} ms"),
        ("times as long as one token", ratios(found["again"], found["ours"]).text(1)),
    ]
    if "hugging face" in found:
        theirs, several = found["hugging face"], found["hugging face, several"]
        rows += [
            ("Hugging Face's generate, one token", f"{spread(theirs).text(1)} ms"),
            ("times as long as ours", ratios(theirs, found["ours"]).text(2)),
            (f"Hugging Face's, {args.samples} samples", f"{spread(several).text(1)} ms"),
            ("times as long as ours", ratios(several, found["several"]).text(2)),
            ("tokens that are the same", f"{same} of {args.tokens}"),
        ]
    return [f"| {name} | {value} |" for name, value in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--torch-python", metavar="PATH", help="an interpreter with PyTorch and transformers")
    parser.add_argument("--model", default="d12", help="a checkpoint or a model's shape (default d12)")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--tokens", type=int, default=33, help="that are generated, up to position 1024 (default 33)")
    parser.add_argument("--samples", type=int, default=4, help="of the batch (default 4)")
    parser.add_argument("--rounds", type=int, default=5, help="(default 5)")
    parser.add_argument("--write", action="store_true", help="keep the table in results/generate.md")
    args = parser.parse_args()
    rows, about = measure(args)
    command = f"python benchmarks/generate.py --model {args.model} --dtype {args.dtype} --rounds {args.rounds}"
    peer = f" --torch-python PATH`; PyTorch {about['torch']}, transformers {about['transformers']}" if about else "`"
    device = first_device()
    where = machine_line() if device.platform == "cpu" else f"{device.device_kind}; {machine_line()}"
    lines = [f"## {args.model}, {args.dtype}", "", f"{where}. `{command}{peer}.", "", "| what | median (range) |"]
    section = "\n".join([*lines, "|---|---|", *rows, ""])
    print(section)
    if args.write:
        keep(section)


def keep(section: str) -> None:
    """Put a section in the place of the one with its title, or behind the others."""
    title = section.partition("\n")[0]
    text = PAGE.read_text() if PAGE.exists() else ""
    parts = [part for part in text.split("\n## ") if f"## {part.partition(chr(10))[0]}" != title]
    PAGE.write_text("\n## ".join([*parts, section.removeprefix("## ")]))


if __name__ == "__main__":
    main()
