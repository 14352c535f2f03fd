"""What a model thinks of a text, in NumPy and float64: the oracle of the tests beside it, without llmc_jax."""

from typing import Any

import numpy as np

from tests import plain_model


def forward(flat: np.ndarray, tokens: np.ndarray, config: Any) -> tuple[np.ndarray, list[np.ndarray]]:
    """Logits (T, V) of tokens (T,), and the weights (NH, T, T) of each layer's attention, by softmax or relu."""
    p = plain_model.unflatten(flat.astype(np.float64), config)
    T, C, NH, window = len(tokens), config.channels, config.num_heads, config.attention.window
    x = p["wte"][tokens] + p["wpe"][:T]
    seen = []
    for i in range(config.num_layers):
        qkv = layernorm(x, p["ln1w"][i], p["ln1b"][i]) @ p["qkvw"][i].T + p["qkvb"][i]
        q, k, v = (z.reshape(T, NH, C // NH) for z in np.split(qkv, 3, axis=1))
        att, out = np.zeros((NH, T, T)), np.zeros((T, NH, C // NH))
        for head in range(NH):
            for t in range(T):
                near = slice(max(0, t + 1 - window) if window else 0, t + 1)
                scores = k[near, head] @ q[t, head] / np.sqrt(C // NH)
                relu = config.attention.weights == "relu"
                weights = np.maximum(scores, 0) if relu else np.exp(scores) / np.sum(np.exp(scores))
                att[head, t, near] = weights
                out[t, head] = weights @ v[near, head]
        seen.append(att)
        x = x + out.reshape(T, C) @ p["attprojw"][i].T + p["attprojb"][i]
        h = layernorm(x, p["ln2w"][i], p["ln2b"][i]) @ p["fcw"][i].T + p["fcb"][i]
        h = 0.5 * h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
        x = x + h @ p["fcprojw"][i].T + p["fcprojb"][i]
    return layernorm(x, p["lnfw"], p["lnfb"]) @ p["wte"][: config.vocab_size].T, seen


def layernorm(x: np.ndarray, w: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + plain_model.EPS) * w + b


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
