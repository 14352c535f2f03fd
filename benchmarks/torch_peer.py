"""GPT-2's training step in plain PyTorch, timed: the peer that benchmarks/cpu_step.py measures against.

Runs under an interpreter that has PyTorch; imports nothing of this project. What a careful user would write: fp32 (with
--autocast products in bf16), F.scaled_dot_product_attention, the optimizer that is fastest here, all cores. Leaves out
llm.c's files and schedules: weights and tokens are random, which costs the same time.

    python benchmarks/torch_peer.py -b 4 -t 64              prints one JSON line
    python benchmarks/torch_peer.py -b 4 -t 64 --compile    the same through torch.compile
    python benchmarks/torch_peer.py -b 4 -t 64 --serve      one JSON line when ready, then one for every line on stdin

A line on stdin is a number of steps. That is how two programs are measured in turns on one machine.
"""

import argparse
import json
import math
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from turns import serve

MAX_T, V, VP, L, NH, C = 1024, 50257, 50304, 12, 12, 768  # GPT-2 124M; the padded vocabulary, as llm.c and nanoGPT
Batch = tuple[Tensor, Tensor]  # tokens, targets: (B,T) each


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.qkv, self.attproj = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.fc, self.fcproj = nn.Linear(C, 4 * C), nn.Linear(4 * C, C)

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        q, k, v = self.qkv(self.ln1(x)).split(C, dim=2)  # (B,T,C) each
        q, k, v = (z.view(B, T, NH, C // NH).transpose(1, 2) for z in (q, k, v))  # (B,NH,T,HS)
        atty = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, C)
        x = x + self.attproj(atty)
        return x + self.fcproj(F.gelu(self.fc(self.ln2(x)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VP, C), nn.Embedding(MAX_T, C)
        self.blocks = nn.ModuleList(Block() for _ in range(L))
        self.lnf = nn.LayerNorm(C)
        for name, p in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(p)
            elif p.dim() == 2:
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * L) if "proj" in name else 0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]  # (B,T,C)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.lnf(x), self.wte.weight)  # (B,T,Vp), tied head
        return F.cross_entropy(logits.view(-1, VP), targets.view(-1))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW with llm.c's hyperparameters, fused, which is the fastest; weight decay on matrices only."""
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), eps=1e-8, fused=True)


def update(model: nn.Module, loss_fn: Callable, optimizer: torch.optim.Optimizer, batch: Batch) -> Tensor:
    """Make one training step and return its loss, which may still be under way on a GPU."""
    loss = loss_fn(*batch)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss


def under_autocast(loss_fn: Callable) -> Callable:
    """Return a loss whose products are in bf16, and with them those of its backward; the weights stay in fp32."""

    def loss(*batch: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_fn(*batch)

    return loss


def make_step(model: nn.Module, loss_fn: Callable, optimizer: torch.optim.Optimizer, batch: Batch) -> Callable:
    """Return a training step that gives (milliseconds, loss). It reads the loss, so it ends before the clock stops."""

    def step() -> tuple[float, float]:
        start = time.perf_counter()
        value = update(model, loss_fn, optimizer, batch).item()
        return 1e3 * (time.perf_counter() - start), value

    return step


def peak_rss_gb() -> float:
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def measure(step: Callable, steps: int, about: dict[str, Any]) -> dict[str, Any]:
    times, losses = zip(*(step() for _ in range(steps)), strict=True)
    return about | {
        "median_ms": round(statistics.median(times), 2),
        "ms": [round(t, 2) for t in times],
        "loss": losses[-1],
        "peak_rss_gb": round(peak_rss_gb(), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("-b", "--batch-size", type=int, default=4, help="B, sequences a step (default 4)")
    parser.add_argument("-t", "--seq-len", type=int, default=64, help="T, tokens a sequence (default 64)")
    parser.add_argument("-n", "--steps", type=int, default=10, help="steps measured after the warm-up (default 10)")
    parser.add_argument("--compile", nargs="?", const="default", metavar="MODE", help="torch.compile, with this mode")
    parser.add_argument("--autocast", action="store_true", help="forward and backward under torch.autocast, in bf16")
    parser.add_argument("--threads", type=int, default=0, help="threads (default: all cores this process may use)")
    parser.add_argument("--serve", action="store_true", help="measure as many steps as each line of stdin says")
    args = parser.parse_args()

    affinity = getattr(os, "sched_getaffinity", None)
    torch.set_num_threads(args.threads or (len(affinity(0)) if affinity else os.cpu_count() or 1))
    torch.manual_seed(1337)
    model = GPT2()
    tokens = torch.randint(V, (args.batch_size, args.seq_len + 1))
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    loss_fn = torch.compile(model, mode=args.compile) if args.compile else model
    loss_fn = under_autocast(loss_fn) if args.autocast else loss_fn
    step = make_step(model, loss_fn, make_optimizer(model), batch)
    for _ in range(3):  # compiles, and touches the optimizer's memory for the first time
        step()
    about = {
        "program": f"pytorch {'compiled ' + args.compile if args.compile else 'eager'}{' autocast' * args.autocast}",
        "B": args.batch_size,
        "T": args.seq_len,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "matmul_precision": torch.get_float32_matmul_precision(),
    }
    if not args.serve:
        print(json.dumps(measure(step, args.steps, about)), flush=True)
        return
    ready = about | {"ready": True, "peak_rss_gb": round(peak_rss_gb(), 3)}
    serve(ready, lambda steps: measure(step, steps, about))


if __name__ == "__main__":
    main()
