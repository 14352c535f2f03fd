"""How many tokens a second the loader gives, from the page cache. Leaves out the disk.

    python benchmarks/loader_speed.py > benchmarks/results/loader_speed.md

Makes a token file of 100 million random ids in a temporary folder (200 or 400 MB), goes through it once, then takes the
best of five passes of 40 million tokens for each row. A step of GPT-2 takes B*T tokens: the loader is fast enough when
it is far from the time of a step.
"""

import argparse
import os
import platform
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np

from llmc_jax.config.model import GPT2_VOCAB
from llmc_jax.data.loader import Prefetcher, TokenLoader
from llmc_jax.data.tokenfile import write_token_file
from llmc_jax.machine import device as hardware

FILE_TOKENS = 100_000_000
PASS_TOKENS = 40_000_000
PASSES = 5


def best_rate(next_batch: Callable[[], object], tokens_per_batch: int) -> float:
    """Tokens per second of the fastest pass."""
    best = float("inf")
    for _ in range(PASSES):
        batches = PASS_TOKENS // tokens_per_batch
        start = time.perf_counter()
        for _ in range(batches):
            next_batch()
        best = min(best, (time.perf_counter() - start) / (batches * tokens_per_batch))
    return 1 / best


def measure(path: Path, B: int, T: int, micro_batches: int, shuffle: bool, prefetch: bool) -> float:
    loader = TokenLoader(path, B, T, vocab_size=GPT2_VOCAB, shuffle=shuffle, flag="-i")
    if not prefetch:
        return best_rate(lambda: loader.next_batch(micro_batches), B * T * micro_batches)
    with closing(Prefetcher(loader, micro_batches)) as prefetcher:
        return best_rate(lambda: next(prefetcher), B * T * micro_batches)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rows = [
        ("gpt2-uint16", 4, 1024, 1, False, False),
        ("gpt2-uint16", 4, 1024, 1, True, False),
        ("gpt2-uint16", 4, 1024, 1, False, True),
        ("gpt2-uint16", 4, 1024, 1, True, True),
        ("gpt2-uint16", 4, 1024, 8, True, False),
        ("gpt2-uint16", 64, 1024, 1, True, False),
        ("gpt2-uint16", 4, 64, 1, True, False),
        ("llama3-uint32", 4, 1024, 1, True, False),
        ("raw-int32", 4, 1024, 1, True, False),
    ]
    print("# Speed of the loader\n\n`python benchmarks/loader_speed.py`\n")
    print(f"{hardware.cpu_name()}, {os.cpu_count()} cores, {platform.system()};")
    print(
        f"Python {platform.python_version()}, NumPy {np.__version__}; from the page cache, best of {PASSES} passes of"
    )
    print(f"{PASS_TOKENS // 10**6} million tokens over one file of {FILE_TOKENS // 10**6} million.\n")
    print("| file | B | T | micro-batches | shuffled | prefetched | million tokens/s |\n|---|---|---|---|---|---|---|")
    tokens = np.random.default_rng(0).integers(0, GPT2_VOCAB, FILE_TOKENS, np.uint16)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.bin"
        written = None
        for kind, B, T, micro_batches, shuffle, prefetch in rows:
            if kind != written:
                write_token_file(path, tokens, kind)
                written = kind
            rate = measure(path, B, T, micro_batches, shuffle, prefetch) / 1e6
            yes_no = " | ".join("yes" if on else "no" for on in (shuffle, prefetch))
            print(f"| {kind} | {B} | {T} | {micro_batches} | {yes_no} | {rate:.0f} |", flush=True)


if __name__ == "__main__":
    main()
