"""Makes torch_optimizers.npz: what torch.optim's optimizers do to three parameters, the reference of a test.

    python tests/golden/make_torch_optimizers.py [OUT]      (OUT: torch_optimizers.npz beside this file)

Needs PyTorch and NumPy, and nothing of this project: the committed file was made with torch 2.13.0 (CPU), NumPy 2.4.6,
Python 3.11. One thread, a second; the same versions on the same machine give the same file byte for byte.

There is no model: all cases start from the same parameters and take the same gradients, which are random. Contents of
the file, all arrays float64 and i from 0 to 2, one of the shapes (6, 4), (4, 6), (5, 5):

    meta            JSON: versions, the seed, the steps after which parameters are kept
    cases           JSON: by name, the class in torch.optim and its arguments; the names are the keys below
    start_i         (*shape) parameter i before the first step
    gradients_i     (S, *shape) its gradient at each step
    NAME_i          (K, *shape) parameter i of the case NAME after 1, 2, 10 and 50 steps

The scale of the gradients changes from step to step, between 10**-3 and 10, so that mistakes show: the largest error of
a case is above 0.05 for a decay of the wrong kind (but `sgd_decay`, where both are the same), 10**-5 to 10**-3 for an
epsilon inside the root, 6 * 10**-8 to 10**-6 for none. Muon's own epsilon, 1e-7, is never reached.

torch's Muon casts to bfloat16 before its iteration, whatever the parameters are. `muon` was made with that cast taken
out, all in float64; `muon_bf16` is torch as it is, for a loose comparison: up to 0.0013 from `muon`.
"""

import json
import platform
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import torch

SHAPES = [(6, 4), (4, 6), (5, 5)]
SEED, S = 1, 50
KEPT = [1, 2, 10, 50]
ADAM = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
MUON = {
    "lr": 0.02, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True, "adjust_lr_fn": "match_rms_adamw",
    "ns_steps": 5,
}  # fmt: skip
CASES = {
    "sgd": ("SGD", {"lr": 0.05}),
    "sgd_decay": ("SGD", {"lr": 0.05, "weight_decay": 0.1}),
    "momentum": ("SGD", {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}),
    "nesterov": ("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "adagrad": ("Adagrad", {"lr": 0.05, "eps": 1e-8, "weight_decay": 0.1}),
    "rmsprop": ("RMSprop", {"lr": 0.01, "alpha": 0.95, "eps": 1e-8, "weight_decay": 0.1}),
    "adam": ("Adam", ADAM),
    "adamw": ("AdamW", ADAM),
    "muon": ("Muon", MUON),
    "muon_bf16": ("Muon", MUON),
}


def make_inputs():
    """Draws the parameters, a scale for each step, and the gradients, in this order from one random stream."""
    rng = np.random.default_rng(SEED)
    start = [rng.normal(size=shape) for shape in SHAPES]
    scales = 10 ** rng.uniform(-3, 1, size=(S, 1, 1))
    return start, [scales * rng.normal(size=(S, *shape)) for shape in SHAPES]


def run(kind, arguments, start, gradients):
    """Takes S steps and returns each parameter after those in KEPT, stacked."""
    one_by_one = {} if kind == "Muon" else {"foreach": False}  # Muon has no other way
    parameters = [torch.tensor(value, requires_grad=True) for value in start]
    optimizer = getattr(torch.optim, kind)(parameters, **arguments, **one_by_one)
    kept = []
    for step in range(S):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = torch.tensor(gradient[step])
        optimizer.step()
        if step + 1 in KEPT:
            kept.append([parameter.detach().numpy().copy() for parameter in parameters])
    return [np.stack(values) for values in zip(*kept, strict=True)]


def main():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("torch_optimizers.npz")
    start, gradients = make_inputs()
    found = {"start": start, "gradients": gradients}
    for name, (kind, arguments) in CASES.items():
        if name == "muon_bf16":
            found[name] = run(kind, arguments, start, gradients)
        else:  # a copy where torch casts, and so makes one too: Muon divides it in place
            with mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone):
                found[name] = run(kind, arguments, start, gradients)
    arrays = {f"{name}_{i}": value for name, values in found.items() for i, value in enumerate(values)}
    if any(value.dtype != np.float64 for value in arrays.values()):
        sys.exit("not all is float64")
    if any(np.array_equal(*pair) for pair in zip(found["muon"], found["muon_bf16"], strict=True)):
        sys.exit("muon is muon_bf16: this torch casts to bfloat16 in another way")
    meta = {
        "made_by": "tests/golden/make_torch_optimizers.py",
        "torch": torch.__version__, "numpy": np.__version__, "python": platform.python_version(),
        "machine": platform.machine(), "seed": SEED, "S": S, "kept": KEPT,
    }  # fmt: skip
    cases = {name: {"class": kind, "arguments": arguments} for name, (kind, arguments) in CASES.items()}
    np.savez_compressed(out, meta=np.array(json.dumps(meta)), cases=np.array(json.dumps(cases)), **arrays)
    print(f"{out.name}: {out.stat().st_size:,} bytes, {len(CASES)} cases")


if __name__ == "__main__":
    main()
