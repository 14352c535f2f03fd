"""The peer: GPT-2 124M's training step in PyTorch on a GPU, compiled, fused AdamW, bf16 by autocast.

The model is benchmarks/torch_peer.py's. Its attention is what PyTorch chooses, FlashAttention, or cuDNN's. Imports
nothing of JAX.
"""

import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np

from benchmarks.gpu.stepping import STEPS, seconds_of_a_step
from llmc_jax.trials.children import Figures, NotMeasured


def measure(
    B: int, dtype: str, T: int = 1024, compiled: bool = True, steps: int = STEPS, attention: str = ""
) -> Figures:
    """Tokens per second. dtype: bf16, or tf32 for fp32 with TF32 products. attention: cudnn, or PyTorch's choice."""
    # Its key lacks the choice of attention: cuDNN's step would be the one with FlashAttention, compiled before.
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    try:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
    except ImportError as error:
        raise NotMeasured(f"there is no PyTorch with a choice of attention kernels: {error}") from None
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import torch_peer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(1337)
    model = torch_peer.GPT2().to(device)
    optimizer = torch_peer.make_optimizer(model)
    loss_of = torch.compile(model) if compiled else model
    share = np.cumsum(1.0 / np.arange(1, torch_peer.V + 1))
    rng = np.random.default_rng(1)
    ids = rng.permutation(torch_peer.V)[np.searchsorted(share / share[-1], rng.random((B, T + 1)))]
    tokens = torch.as_tensor(ids, device=device)
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def loss_fn(*batch: "torch.Tensor") -> "torch.Tensor":
        with torch.autocast(device, torch.bfloat16, enabled=dtype == "bf16"):
            return loss_of(*batch)

    def step() -> "torch.Tensor":
        return torch_peer.update(model, loss_fn, optimizer, batch)

    def run(count: int) -> float:
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]) if attention == "cudnn" else nullcontext():
            for _ in range(count):
                loss = step()
        if device == "cuda":
            torch.cuda.synchronize()
        return loss.item()

    start = time.perf_counter()
    first_loss = run(1)
    first = time.perf_counter() - start
    seconds, spread = seconds_of_a_step(run, steps)
    gib = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    return {
        "tok/s": B * T / seconds, "ms": 1e3 * seconds, "spread": spread,
        "first call s": first, "GiB": gib, "loss": first_loss, "loss later": run(1),
        "runs": f"torch {torch.__version__}{', compiled' if compiled else ''}",
    }  # fmt: skip
