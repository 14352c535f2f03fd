"""Each matrix product of GPT-2 124M's step on the CPU: XLA's beside PyTorch's, in turns, and XLA's libraries by flags.

    python benchmarks/cpu_products.py --torch-python PATH [--shapes 4x64,4x256] [--rounds 7] [--libraries]

A row is one product: n rows times a weight forward, for the gradient of its input (dx) and of its weight (dw); and
attention's, batched over sequences and heads. Operands of their own for each layer, as in the step: twelve layers do
not fit in any cache. Results are written over old ones on both sides, so that no memory is mapped while the clock runs.
--libraries adds what else XLA can be told to use: Eigen, oneDNN.
"""

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "benchmarks"))

from turns import Peer, blocks_in_turns, ratios, serve, spread  # noqa: E402

from llmc_jax.machine import jax_setup as llmc_platform  # noqa: E402

LIBRARIES = {  # what XLA is told to use for its products
    "XLA": "",
    "Eigen": "--xla_cpu_experimental_ynn_fusion_type=",
    "oneDNN": "--xla_cpu_use_onednn=true --xla_cpu_experimental_onednn_fusion_type=dot",
}


class Product(NamedTuple):
    """One product of a step."""

    name: str
    einsum: str
    a: tuple[int, ...]
    b: tuple[int, ...]
    count: int  # how often in a step


def products(C: int, L: int, NH: int, Vp: int, B: int, T: int) -> list[Product]:
    """Return every matrix product of a step: of C channels, L layers, NH heads, Vp rows of the padded vocabulary."""
    n, found = B * T, []
    linears = [("qkv", 3 * C, C, L), ("attproj", C, C, L), ("fc", 4 * C, C, L), ("fcproj", C, 4 * C, L)]
    for name, outputs, inputs, count in [*linears, ("head", Vp, C, 1)]:
        found.append(Product(f"{name} forward", "ni,oi->no", (n, inputs), (outputs, inputs), count))
        found.append(Product(f"{name} dx", "no,oi->ni", (n, outputs), (outputs, inputs), count))
        found.append(Product(f"{name} dw", "no,ni->oi", (n, outputs), (n, inputs), count))
    head, square = (B, NH, T, C // NH), (B, NH, T, T)
    found.append(Product("attention scores, datt", "bnth,bnuh->bntu", head, head, 2 * L))
    found.append(Product("attention out, dq", "bntu,bnuh->bnth", square, head, 2 * L))
    found.append(Product("attention dv, dk", "bntu,bnth->bnuh", square, head, 2 * L))
    return found


def flops(product: Product) -> int:
    """Return the operations of one product: a multiplication and an addition for each pair of elements that meet."""
    sizes = dict(zip(product.einsum.replace("->", ",").replace(",", ""), (*product.a, *product.b), strict=False))
    total = 2
    for size in sizes.values():
        total *= size
    return total


def runner(product: Product, layers: int) -> Callable[[], float]:
    """Return a function that makes each of a step's products of one kind once, and returns milliseconds for one."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    rng = np.random.default_rng(0)
    pairs = [
        [jnp.asarray(rng.standard_normal(shape, np.float32)) for shape in (product.a, product.b)]
        for _ in range(min(product.count, layers))
    ]
    # The old result is handed over, and the new one written there.
    run = jax.jit(lambda a, b, old: jnp.einsum(product.einsum, a, b), donate_argnums=2, keep_unused=True)
    old = [jax.block_until_ready(jnp.einsum(product.einsum, *pair)) for pair in pairs]

    def once() -> float:
        start = time.perf_counter()
        for i in range(product.count):
            old[i % len(old)] = run(*pairs[i % len(pairs)], old[i % len(old)])
        jax.block_until_ready(old)
        return 1e3 * (time.perf_counter() - start) / product.count

    return once


def serve_products(layers: int, make: Callable[[Product, int], Callable[[], float]], about: dict[str, Any]) -> None:
    """Be a peer that is sent products, and then numbers of times to make the latest."""
    current: list[Callable[[], float]] = []

    def answer(request: Any) -> dict[str, Any]:
        if isinstance(request, list):
            current.clear()  # its operands go before new ones come
            name, einsum, a, b, count = request
            current.append(make(Product(name, einsum, tuple(a), tuple(b), count), layers))
            current[0]()
            return {}
        return {"ms": [current[0]() for _ in range(request)]}

    serve(about, answer)


def flags_for(flags: str) -> dict[str, str]:
    """Return the environment with some more XLA flags."""
    return os.environ | {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()}


def peers(torch_python: str | None, libraries: bool) -> dict[str, Peer]:
    """Return the programs that take part, XLA as it is first."""
    found = {}
    for name, flags in LIBRARIES.items() if libraries else [("XLA", "")]:
        found[name] = Peer([sys.executable, __file__, "--serve"], flags_for(flags)).wait_ready()
    if torch_python:
        found["PyTorch"] = Peer([torch_python, str(ROOT / "benchmarks/torch_peer.py"), "--products"]).wait_ready()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="d12")
    parser.add_argument("--shapes", default="4x64,4x256", help="BxT, separated by commas")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--torch-python", help="a Python with torch; without it PyTorch is left out")
    parser.add_argument("--libraries", action="store_true", help="XLA with other matrix libraries too")
    parser.add_argument("--only", default="", help="only products whose name contains this")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        llmc_platform.restart_with_huge_pages()
        llmc_platform.configure()
        import jax

        serve_products(12, runner, {"jax": jax.__version__})
        return
    from llmc_jax.config.model import parse_descriptor
    from llmc_jax.machine import device as hardware

    config = parse_descriptor(args.model)
    taking_part = peers(args.torch_python, args.libraries)
    versions = ", ".join(f"{k} {v}" for peer in taking_part.values() for k, v in peer.about.items() if "lib" not in k)
    print(f"{platform.machine()}, {hardware.cpu_name()}, {os.cpu_count()} cores; {versions}; {args.rounds} rounds\n")
    others = [name for name in taking_part if name != "XLA"]
    print("| B x T | product | in a step | XLA ms | GFLOP/s |" + "".join(f" {name} / XLA |" for name in others))
    print("|---|---|---|---|---|" + "---|" * len(others))
    for shape in args.shapes.split(","):
        B, T = map(int, shape.split("x"))
        totals = {name: [0.0] * args.rounds for name in taking_part}
        work = 0.0
        for product in products(config.channels, config.num_layers, config.num_heads, config.padded_vocab_size, B, T):
            if args.only not in product.name:
                continue
            for peer in taking_part.values():
                peer.ask(product)
            blocks = {name: lambda peer=peer: peer.block(2) for name, peer in taking_part.items()}
            times = blocks_in_turns(blocks, args.rounds)
            for name, each in times.items():
                totals[name] = [t + product.count * ms for t, ms in zip(totals[name], each, strict=True)]
            work += product.count * flops(product)
            print_row(shape, product.name, product.count, times, flops(product))
        print_row(shape, "**all of a step**", 1, totals, work)
    for peer in taking_part.values():
        peer.close()


def print_row(shape: str, name: str, count: int, times: dict[str, list[float]], work: float) -> None:
    ms = spread(times["XLA"]).median
    others = "".join(f" {ratios(each, times['XLA']).text(2)} |" for name, each in times.items() if name != "XLA")
    print(f"| {shape.replace('x', ' x ')} | {name} | {count} | {ms:.2f} | {work / ms / 1e6:.0f} |{others}", flush=True)


if __name__ == "__main__":
    main()
