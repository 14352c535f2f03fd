"""The peer of our attention kernels: PyTorch's, alone, on the same shapes. Imports nothing of JAX."""

from benchmarks.gpu.clock import timing
from llmc_jax.trials.children import Figures, NotMeasured


def measure(sizes: list[int], backend: str, *, quick: bool = False) -> Figures:
    """Forward, and forward with backward, of scaled_dot_product_attention on (B, T, NH, HS), causal, in bf16.

    backend: flash, cudnn or math. q, k and v lie side by side, as a model's product leaves them; FLOPs are counted as
    those of ours. quick: a single run.
    """
    try:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention
    except ImportError as error:
        raise NotMeasured(f"there is no PyTorch with a choice of attention kernels: {error}") from None
    backends = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION, "math": SDPBackend.MATH}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    B, T, NH, HS = sizes
    torch.manual_seed(1)
    packed = torch.randn(B, T, 3, NH, HS, device=device, dtype=torch.bfloat16)
    q, k, v = (packed[:, :, part].transpose(1, 2).detach().requires_grad_() for part in range(3))  # (B, NH, T, HS)
    dout = torch.randn(B, T, NH, HS, device=device, dtype=torch.bfloat16).transpose(1, 2)

    def run_calls(calls: int, backward: bool) -> None:
        for _ in range(calls):
            out = scaled_dot_product_attention(q, k, v, is_causal=True)
            if backward:
                torch.autograd.grad(out, (q, k, v), dout)
        if device == "cuda":
            torch.cuda.synchronize()

    with sdpa_kernel([backends[backend]]):
        pace = {"least": 0.0, "rounds": 1} if quick else {}
        forward = timing(lambda calls: run_calls(calls, backward=False), **pace)
        both = timing(lambda calls: run_calls(calls, backward=True), **pace)
    flops, behind = 7 * B * NH * T * T * HS, max(both.seconds - forward.seconds, 1e-9)
    return {
        "us": 1e6 * both.seconds, "TFLOP/s": flops / both.seconds / 1e12, "spread": both.spread,
        "forward us": 1e6 * forward.seconds, "forward TFLOP/s": flops * 2 / 7 / forward.seconds / 1e12,
        "backward us": 1e6 * behind, "backward TFLOP/s": flops * 5 / 7 / behind / 1e12,
        "runs": f"torch {torch.__version__}",
    }  # fmt: skip
