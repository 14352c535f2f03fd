"""Makes run_small.json: 20 training steps by the plain model, in float64, which a test repeats with train_step.

    python -m tests.golden.make_run          (from the repository's root; seconds; JAX on the CPU)

Initial parameters are the deterministic ones of llmc_jax.models.gpt2.init (seed 42), tokens come from a seed.
Everything else is tests/plain_model.py: its loss differentiated by jax.grad, its AdamW and schedule in NumPy and
Python, and the clipping and the mean over micro-batches below. So the file changes only with the initialisation or the
mathematics; run this again after a change that is meant to alter either, and say in the commit why. What it holds:

    made_by, versions      provenance
    settings               model, batch and optimizer, as `SETTINGS` below
    tokens_sha256          of the tokens (S, A, B, T+1) as little-endian int32
    init_norms             2-norm of each of the 16 initial tensors
    losses, norms, rates   of each step: mean loss before its update, gradient norm before clipping, learning rate
    final_norms            2-norm of each tensor after the last update
"""

import hashlib
import json
import platform
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from llmc_jax.config.model import parse_descriptor
from llmc_jax.models.gpt2.init import random_parameters
from llmc_jax.models.layout import num_parameters
from tests import plain_model
from tests.comparisons import Batch, skewed_tokens

SETTINGS = {
    "model": "L2-NH2-C32-V97-T20",  # T below is smaller: some positions never train
    "init_seed": 42, "token_seed": 7, "steps": 20, "micro_batches": 2, "batch_size": 4, "sequence_length": 16,
    "schedule": "cosine", "learning_rate": 3e-3, "warmup_steps": 4, "final_fraction": 0.1,
    "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "decay": "matrices",
    "grad_clip": 1.5,  # some norms are above, some below
}  # fmt: skip


def tokens(settings: dict[str, Any]) -> np.ndarray:
    """All tokens of the run: (S, A, B, T+1) int32."""
    shape = (settings["steps"], settings["micro_batches"], settings["batch_size"], settings["sequence_length"] + 1)
    return skewed_tokens(settings["token_seed"], parse_descriptor(settings["model"]).vocab_size, shape)


def batches(settings: dict[str, Any]) -> list[Batch]:
    """One batch per step."""
    return [Batch(step[..., :-1], step[..., 1:]) for step in tokens(settings)]


def fingerprint(settings: dict[str, Any]) -> str:
    return hashlib.sha256(tokens(settings).astype("<i4").tobytes()).hexdigest()


def tensor_norms(flat: np.ndarray, config: Any) -> dict[str, float]:
    return {name: float(np.linalg.norm(tensor)) for name, tensor in plain_model.unflatten(flat, config).items()}


def run(settings: dict[str, Any]) -> dict[str, Any]:
    """The figures of the run, by the plain model in float64."""
    config = parse_descriptor(settings["model"])
    params = random_parameters(config, settings["init_seed"])[: num_parameters(config)].astype(np.float64)
    decay = settings["weight_decay"] * plain_model.decay_mask(config, settings["decay"])
    schedule = partial(
        plain_model.learning_rate, settings["schedule"], lr=settings["learning_rate"], W=settings["warmup_steps"],
        S=settings["steps"], final=settings["final_fraction"], every=1, factor=1.0,
    )  # fmt: skip
    adamw = partial(plain_model.adamw, **{name: settings[name] for name in ("beta1", "beta2", "eps")}, decay=decay)
    value_and_grad = jax.jit(jax.value_and_grad(plain_model.loss), static_argnums=3)
    figures: dict[str, Any] = {"init_norms": tensor_norms(params, config), "losses": [], "norms": [], "rates": []}
    m, v = np.zeros_like(params), np.zeros_like(params)
    for step, batch in enumerate(batches(settings)):
        parts = [value_and_grad(params, x, y, config) for x, y in zip(*batch, strict=True)]
        gradient = np.mean([np.asarray(part[1]) for part in parts], axis=0)
        norm = float(np.linalg.norm(gradient))
        figures["losses"].append(float(np.mean([float(part[0]) for part in parts])))
        figures["norms"].append(norm)
        figures["rates"].append(schedule(step))
        gradient *= min(1.0, settings["grad_clip"] / norm)
        params, m, v = adamw(params, m, v, gradient, update=step + 1, learning_rate=figures["rates"][-1])
    return figures | {"final_norms": tensor_norms(params, config)}


def main() -> None:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("run_small.json")
    with jax.enable_x64(True):
        figures = run(SETTINGS)
    provenance = {
        "made_by": "python -m tests.golden.make_run",
        "versions": {
            "python": platform.python_version(), "jax": jax.__version__, "numpy": np.__version__,
            "machine": platform.machine(), "backend": jax.default_backend(), "precision": "float64",
        },
    }  # fmt: skip
    content = provenance | {"settings": SETTINGS, "tokens_sha256": fingerprint(SETTINGS)} | figures
    out.write_text(json.dumps(content, indent=1) + "\n")
    print(f"{out}: {out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
