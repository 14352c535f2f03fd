"""A plain GPT-2 and a plain AdamW: the oracle. It holds nothing of llmc_jax and no derivative written by hand.

The model is the textbook's (softmax, log_softmax, gelu and variance are JAX's own, heads are a loop, and so is what
each position sees), differentiated by `jax.grad`; the optimizer and the schedule are NumPy and plain Python. Meant for
float64 and small shapes; slow and wasteful on purpose. A configuration is anything with the attributes of
llmc_jax.config.model.ModelConfig.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

EPS = 1e-5  # of the layernorms


def shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Name and shape of the 16 tensors in the order of llm.c's checkpoint."""
    L, C, Vp, maxT = config.num_layers, config.channels, config.padded_vocab_size, config.max_seq_len
    F, Q = config.mlp_channels or 4 * C, C + 2 * C // config.num_heads * heads_of_keys(config)
    return {
        "wte": (Vp, C), "wpe": (maxT, C),
        "ln1w": (L, C), "ln1b": (L, C), "qkvw": (L, Q, C), "qkvb": (L, Q),
        "attprojw": (L, C, C), "attprojb": (L, C), "ln2w": (L, C), "ln2b": (L, C),
        "fcw": (L, F, C), "fcb": (L, F), "fcprojw": (L, C, F), "fcprojb": (L, C),
        "lnfw": (C,), "lnfb": (C,),
    }  # fmt: skip


def heads_of_keys(config: Any) -> int:
    """KV, the heads of keys and of values."""
    return config.attention.kv_heads or config.num_heads


def unflatten(flat: Any, config: Any) -> dict[str, Any]:
    """The 16 tensors of a flat array, read one after the other; what follows them is ignored."""
    tensors, start = {}, 0
    for name, shape in shapes(config).items():
        tensors[name] = flat[start : start + math.prod(shape)].reshape(shape)
        start += math.prod(shape)
    return tensors


def random_flat(config: Any, size: int, seed: int) -> np.ndarray:
    """Parameters (size,) float64 unlike any initialisation: no bias is 0, no layernorm weight 1, no padded row 0.

    Weights shrink with the number of inputs, so that activations stay of the order of 1 and the softmaxes are neither
    flat nor saturated. What follows the 16 tensors is 0.
    """
    rng = np.random.default_rng(seed)
    pieces = []
    for name, shape in shapes(config).items():
        if name in ("wte", "wpe"):
            piece = rng.normal(0.0, 1.5 / math.sqrt(shape[-1]), shape)
        elif name.startswith("ln") and name.endswith("w"):
            piece = rng.normal(1.0, 0.3, shape)
        elif name.endswith("b"):
            piece = rng.normal(0.0, 0.3, shape)
        else:
            piece = rng.normal(0.0, 1.0 / math.sqrt(shape[-1]), shape)
        pieces.append(piece.ravel())
    flat = np.concatenate(pieces)
    return np.pad(flat, (0, size - flat.size))


def logits(flat: Any, tokens: Any, config: Any) -> Any:
    """Logits (B, T, V) of tokens (B, T): the real vocabulary alone."""
    p = unflatten(flat, config)
    positions = jnp.arange(tokens.shape[1])
    x = jnp.take(p["wte"], tokens, axis=0) + jnp.take(p["wpe"], positions, axis=0)
    for i in range(config.num_layers):
        qkv = _layernorm(x, p["ln1w"][i], p["ln1b"][i]) @ p["qkvw"][i].T + p["qkvb"][i]
        atty = attention(qkv, tokens, config.num_heads, config.attention)
        x = x + atty @ p["attprojw"][i].T + p["attprojb"][i]
        fch = _layernorm(x, p["ln2w"][i], p["ln2b"][i]) @ p["fcw"][i].T + p["fcb"][i]
        x = x + jax.nn.gelu(fch, approximate=True) @ p["fcprojw"][i].T + p["fcprojb"][i]
    return _layernorm(x, p["lnfw"], p["lnfb"]) @ p["wte"][: config.vocab_size].T


def loss(flat: Any, tokens: Any, targets: Any, config: Any) -> Any:
    """Mean cross-entropy in nats, of the positions that do not see the next one, which is their target."""
    T = tokens.shape[1]
    log_probs = jax.nn.log_softmax(logits(flat, tokens, config), axis=-1)  # (B, T, V)
    chosen = log_probs * jax.nn.one_hot(targets, config.vocab_size, dtype=log_probs.dtype)
    counted = [t for t in range(T) if t + 1 == T or not sees(config.attention, t, t + 1)]
    return jnp.mean(-jnp.sum(chosen, axis=-1)[:, jnp.array(counted)])


def _layernorm(x: Any, w: Any, b: Any) -> Any:
    mean, rstd = jnp.mean(x, axis=-1, keepdims=True), 1 / jnp.sqrt(jnp.var(x, axis=-1, keepdims=True) + EPS)
    return (x - mean) * rstd * w + b


def sees(spec: Any, t: int, u: int) -> bool:
    """Return whether position t sees position u of its document."""
    near = spec.window == 0 or abs(t - u) < spec.window
    return u < spec.prefix or (near and {"causal": u <= t, "reversed": u >= t, "none": True}[spec.mask])


def mask(spec: Any, tokens: Any) -> Any:
    """Return the positions that each position of tokens (B, T) sees, (B, T, T)."""
    places = range(tokens.shape[1])
    seen = jnp.array([[sees(spec, t, u) for u in places] for t in places])
    document = jnp.cumsum(tokens == spec.documents, axis=1)  # its number
    return seen & (document[:, :, None] == document[:, None, :])


def attention(qkv: Any, tokens: Any, num_heads: int, spec: Any) -> Any:
    """Return attention (B, T, C) of packed qkv (B, T, Q), head by head, for tokens (B, T)."""
    KV = spec.kv_heads or num_heads
    channels, out, seen = jnp.split(qkv, num_heads + 2 * KV, axis=-1), [], mask(spec, tokens)
    for head, q in enumerate(channels[:num_heads]):
        k, v = (channels[num_heads + which * KV + head * KV // num_heads] for which in (0, 1))
        scores = q @ jnp.swapaxes(k, 1, 2) * (spec.scale or 1 / np.sqrt(q.shape[-1]))  # (B, T, T)
        if spec.softcap:
            scores = spec.softcap * jnp.tanh(scores / spec.softcap)
        if spec.bias:
            place = np.arange(q.shape[1])
            scores = scores - 2 ** (-8 * (head + 1) / num_heads) * np.abs(place[:, None] - place)
        if spec.weights == "relu":
            out.append(jnp.where(seen, jax.nn.relu(scores), 0) @ v)
        else:
            out.append(jax.nn.softmax(scores, axis=-1, where=seen) @ v)
    return jnp.concatenate(out, axis=-1)


def adamw(
    params: np.ndarray, m: np.ndarray, v: np.ndarray, gradient: np.ndarray, *, update: int, learning_rate: float,
    beta1: float, beta2: float, eps: float, decay: np.ndarray | float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """AdamW as Loshchilov and Hutter's algorithm 2 has it; decay: per parameter; update counts from 1."""
    m = beta1 * m + (1 - beta1) * gradient
    v = beta2 * v + (1 - beta2) * gradient**2
    step_size = learning_rate * (m / (1 - beta1**update)) / (np.sqrt(v / (1 - beta2**update)) + eps)
    return params - step_size - learning_rate * decay * params, m, v


def decay_mask(config: Any, rule: str) -> np.ndarray:
    """1 where a parameter of the 16 tensors decays, else 0: (N,). 'matrices': what has two axes besides the layers'."""
    sizes = {name: math.prod(shape) for name, shape in shapes(config).items()}
    matrices = {"wte", "wpe", "qkvw", "attprojw", "fcw", "fcprojw"}
    decays = {"all": set(sizes), "matrices": matrices, "none": set()}[rule]
    return np.concatenate([np.full(size, name in decays, np.float64) for name, size in sizes.items()])


def learning_rate(kind: str, step: int, lr: float, W: int, S: int, final: float, every: int, factor: float) -> float:
    """The schedules of llm.c's llmc/schedulers.h, and `step`. W warm-up steps of S; step counts from 0."""
    low = lr * final
    if kind == "constant":
        return lr
    if step < W:
        return lr * (step + 1) / W
    if kind == "step":
        return lr * factor ** (step // every)
    if kind == "wsd":
        start = int(0.8 * S)
        return lr if step < start else low + (1 - math.sqrt((step - start) / (S - start))) * (lr - low)
    ratio = (step - W) / (S - W)
    if kind == "linear":
        return lr - ratio * (lr - low)
    assert kind == "cosine"
    return low + 0.5 * (1 + math.cos(math.pi * ratio)) * (lr - low)


def relative_error(found: Any, expected: Any) -> float:
    """Norm of the difference over the norm of what is expected; both zero: 0."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    difference, size = np.linalg.norm(found - expected), np.linalg.norm(expected)
    return float(difference / size) if size else float(difference)
