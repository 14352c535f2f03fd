"""Makes torch_small.npz: what plain PyTorch computes for a small GPT-2, the reference of a test.

    python tests/golden/make_torch_reference.py [OUT]      (OUT: torch_small.npz beside this file)

Needs PyTorch and NumPy, and nothing of this project: the committed file was made with torch 2.13.0 (CPU), NumPy 2.4.6,
Python 3.11. One thread, a few seconds; the same versions on the same machine give the same file byte for byte.

The model is GPT-2 from PyTorch's own modules (nn.LayerNorm, F.gelu(approximate="tanh"), F.scaled_dot_product_attention,
F.cross_entropy), gradients are autograd's, the update is torch.optim.AdamW. Everything is run twice, in float32 and in
float64, from the same initial parameters. Contents of the file, where * is fp32 or fp64, all in llm.c's tensor order:

    meta            JSON: versions, settings, tensor names
    tokens          (S, B, T+1) uint8; step s trains on x = tokens[s, :, :-1], y = tokens[s, :, 1:]
    init            (N,) float32, wte padded with zero rows from V to Vp
    torch_init_sum, torch_init_sumsq  (16,) float64: of llm.c's initialisation before the rounding described below
    torch_init_first                  (16, 4) float32: the first 4 values of each tensor before the rounding
    loss_*          () of step 0, before any update
    logits_*        (P, V) of step 0 at the positions logits_at (P, 2), pairs (b, t)
    grad_norm_*     (16,) float64: 2-norm of each tensor's gradient at step 0, not clipped
    grad_sample_*   (16, K) of each gradient at grad_at (16, K): indices into the flattened tensor; rows are filled up
                    with index 0
    losses_*        (S,) of each step, before its update
    norms_*         (S,) float64: global gradient norm of each step, before clipping
    final_norm_*    (16,) float64: 2-norm of each tensor after S updates
    final_sample_*  (16, K) of each tensor after S updates, at grad_at

`init` is llm.c's initialisation (torch.manual_seed(42), then normal_ in its order), rounded to multiples of 2**-18 (a
5000th of the standard deviation): the last bits of normal_ depend on the machine's logarithm and cosine, and the
rounded values, which float32 and float64 both hold exactly, compress to half.
"""

import json
import math
import platform
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

L, NH, C, V, Vp, maxT = 2, 3, 48, 211, 256, 40
B, T, S = 3, 40, 20
SEED = 42
LR, WARMUP, LR_END = 1e-3, 5, 0.1
BETAS, EPS, DECAY, CLIP = (0.9, 0.95), 1e-8, 0.1, 1.6  # norms are from 1.3 to 2.3: some steps are clipped, some not
GRID = 2.0**-18
SAMPLES = 384
LOGITS_AT = [(0, 0), (0, 1), (0, T - 1), (1, 17), (2, 5), (2, T - 1)]
LAYER_TENSORS = {
    "ln1w": "ln_1.weight", "ln1b": "ln_1.bias", "qkvw": "c_attn.weight", "qkvb": "c_attn.bias",
    "attprojw": "attn_proj.weight", "attprojb": "attn_proj.bias", "ln2w": "ln_2.weight", "ln2b": "ln_2.bias",
    "fcw": "c_fc.weight", "fcb": "c_fc.bias", "fcprojw": "mlp_proj.weight", "fcprojb": "mlp_proj.bias",
}  # fmt: skip
NAMES = ["wte", "wpe", *LAYER_TENSORS, "lnfw", "lnfb"]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1 = nn.LayerNorm(C)  # eps 1e-5
        self.c_attn = nn.Linear(C, 3 * C)
        self.attn_proj = nn.Linear(C, C)
        self.ln_2 = nn.LayerNorm(C)
        self.c_fc = nn.Linear(C, 4 * C)
        self.mlp_proj = nn.Linear(4 * C, C)

    def forward(self, x):
        q, k, v = self.c_attn(self.ln_1(x)).split(C, dim=2)  # (B, T, C) each
        q, k, v = (z.unflatten(2, (NH, C // NH)).transpose(1, 2) for z in (q, k, v))  # (B, NH, T, HS)
        att = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, NH, T, HS)
        x = x + self.attn_proj(att.transpose(1, 2).flatten(2))
        return x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(V, C)
        self.wpe = nn.Embedding(maxT, C)
        self.h = nn.ModuleList(Block() for _ in range(L))
        self.ln_f = nn.LayerNorm(C)

    def forward(self, x, y):
        hidden = self.wte(x) + self.wpe.weight[: x.shape[1]]  # (B, T, C)
        for block in self.h:
            hidden = block(hidden)
        logits = F.linear(self.ln_f(hidden), self.wte.weight)  # (B, T, V), tied head
        return logits, F.cross_entropy(logits.flatten(0, 1), y.flatten())


def initialise(model):
    """llm.c's initialisation: wte, wpe, then for each layer qkvw, attprojw, fcw, fcprojw from one random stream."""
    torch.manual_seed(SEED)
    residual_std = 0.02 / math.sqrt(2 * L)
    nn.init.normal_(model.wte.weight, 0.0, 0.02)
    nn.init.normal_(model.wpe.weight, 0.0, 0.02)
    for block in model.h:
        for linear in (block.c_attn, block.attn_proj, block.c_fc, block.mlp_proj):
            nn.init.normal_(linear.weight, 0.0, residual_std if linear in (block.attn_proj, block.mlp_proj) else 0.02)
            nn.init.zeros_(linear.bias)


def tensors(model, of=lambda parameter: parameter):
    """llm.c's 16 tensors, flattened: all layers of a tensor one after the other."""
    found = {"wte": [model.wte.weight], "wpe": [model.wpe.weight]}
    for name, path in LAYER_TENSORS.items():
        found[name] = [block.get_parameter(path) for block in model.h]
    found |= {"lnfw": [model.ln_f.weight], "lnfb": [model.ln_f.bias]}
    return [torch.cat([of(p).detach().flatten() for p in found[name]]).numpy().copy() for name in NAMES]


def padded_flat(pieces):
    return np.concatenate([pieces[0], np.zeros((Vp - V) * C, pieces[0].dtype), *pieces[1:]])


def make_tokens():
    """Tokens that can be learned: frequencies fall as 1/rank, ranks in random order. First and last id occur."""
    rng = np.random.default_rng(0)
    weights = 1 / np.arange(1, V + 1)
    tokens = rng.choice(rng.permutation(V), size=(S, B, T + 1), p=weights / weights.sum())
    tokens[0, 0, :2] = 0, V - 1
    return tokens.astype(np.uint8)


def learning_rate(step):
    if step < WARMUP:
        return LR * (step + 1) / WARMUP
    ratio = (step - WARMUP) / (S - WARMUP)
    return LR * LR_END + 0.5 * (1 + math.cos(math.pi * ratio)) * (LR - LR * LR_END)


def sample_indices(pieces):
    """(16, K): evenly spaced indices into each tensor; an odd stride where there are many, so that columns vary."""
    rows = []
    for piece in pieces:
        stride = max(1, piece.size // SAMPLES) | 1
        index = np.arange(0, piece.size, stride)[:SAMPLES]
        rows.append(np.pad(index, (0, SAMPLES - index.size)))
    return np.array(rows, np.int32)


def sample(pieces, at):
    return np.stack([piece[index] for piece, index in zip(pieces, at, strict=True)])


def norms(pieces):
    return np.array([np.linalg.norm(piece.astype(np.float64)) for piece in pieces])


def train(model, tokens, at):
    """Step 0 in detail, then S updates."""
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
    out = {"losses": [], "norms": []}
    for step in range(S):
        batch = torch.from_numpy(tokens[step].astype(np.int64))
        optimizer.zero_grad()
        logits, loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        grads = tensors(model, of=lambda p: p.grad)
        if step == 0:
            out["loss"] = loss.detach().numpy()
            out["logits"] = np.stack([logits[b, t].detach().numpy() for b, t in LOGITS_AT])
            out["grad_norm"] = norms(grads)
            out["grad_sample"] = sample(grads, at)
        norm = float(np.linalg.norm(norms(grads)))
        if norm > CLIP:  # llm.c's rule; torch's clip_grad_norm_ divides by norm + 1e-6
            for parameter in model.parameters():
                parameter.grad.mul_(CLIP / norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        optimizer.step()
        out["losses"].append(loss.detach().numpy())
        out["norms"].append(norm)
    final = tensors(model)
    out["final_norm"], out["final_sample"] = norms(final), sample(final, at)
    return {key: np.array(value) for key, value in out.items()}


def main():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("torch_small.npz")
    model = GPT2()
    initialise(model)
    raw = tensors(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.round(parameter / GRID) * GRID)
    init, start = tensors(model), model.state_dict()
    tokens, at = make_tokens(), sample_indices(init)
    arrays = {
        "tokens": tokens,
        "init": padded_flat(init),
        "torch_init_sum": np.array([p.astype(np.float64).sum() for p in raw]),
        "torch_init_sumsq": np.array([(p.astype(np.float64) ** 2).sum() for p in raw]),
        "torch_init_first": np.stack([p[:4] for p in raw]),
        "logits_at": np.array(LOGITS_AT, np.int32),
        "grad_at": at,
    }
    start = {name: value.clone() for name, value in start.items()}
    for suffix, dtype in (("fp32", torch.float32), ("fp64", torch.float64)):
        model = GPT2().to(dtype)
        model.load_state_dict(start)
        arrays |= {f"{key}_{suffix}": value for key, value in train(model, tokens, at).items()}
    meta = {
        "made_by": "tests/golden/make_torch_reference.py",
        "torch": torch.__version__, "numpy": np.__version__, "python": platform.python_version(),
        "machine": platform.machine(), "tensors": NAMES,
        "L": L, "NH": NH, "C": C, "V": V, "Vp": Vp, "maxT": maxT, "B": B, "T": T, "S": S, "seed": SEED,
        "lr": LR, "warmup": WARMUP, "lr_end": LR_END, "schedule": "cosine", "beta1": BETAS[0], "beta2": BETAS[1],
        "eps": EPS, "weight_decay": DECAY, "decayed": ["wte", "wpe", "qkvw", "attprojw", "fcw", "fcprojw"],
        "grad_clip": CLIP, "init_grid": GRID,
    }  # fmt: skip
    np.savez_compressed(out, meta=np.array(json.dumps(meta)), **arrays)
    print(f"{out}: {out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
