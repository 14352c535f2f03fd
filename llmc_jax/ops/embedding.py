"""Token and position embedding: a row of wte plus a row of wpe.

forward     out[b,t] = wte[token[b,t]] + wpe[t]
backward    dwte[v] = sum of dout[b,t] over all (b,t) with token[b,t] = v
            dwpe[t] = sum of dout[b,t] over b
"""

import jax
import jax.numpy as jnp


def embedding_forward(tokens: jax.Array, wte: jax.Array, wpe: jax.Array) -> jax.Array:
    """Looks up tokens (B, T) int32 in wte (Vp, C) and adds the first T rows of wpe (maxT, C); returns (B, T, C).

    Token ids must lie in 0..Vp-1 (the loader checks them). Source: llm.c train_gpt2.c, `encoder_forward`.
    """
    T = tokens.shape[1]
    return wte[tokens] + wpe[:T]  # (B, T, C) + (T, C)


def embedding_backward(dout: jax.Array, tokens: jax.Array, dwte: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Gradients of the embedding: adds the tokens' rows to dwte and sums the positions.

    dout (B, T, C); tokens (B, T) int32; dwte (Vp, C) what the output head, which shares wte, has already contributed.
    Returns dwte (Vp, C) and the gradient of the first T rows of wpe (T, C).

    Each row of dwte is written once, after its tokens' gradients have been summed in a fixed order: no atomics, so the
    same input gives the same bits on every device. Source of the idea: llm.c `encoder_backward` (llmc/encoder.cuh).
    """
    padded_vocab, C = dwte.shape
    ids = jnp.ravel(tokens)  # (B*T,)
    order = jnp.argsort(ids, stable=True)  # (B*T,) equal tokens become neighbours
    ids = ids[order]  # (B*T,)
    rows = _sum_runs(dout.reshape(-1, C)[order], ids)  # (B*T, C) the last row of a run holds the sum of the run
    last = jnp.concatenate([ids[1:] != ids[:-1], jnp.array([True])])  # (B*T,)
    # Rows that are not the last of their run go to distinct places beyond the table, where the scatter drops them.
    target = jnp.where(last, ids, padded_vocab + jnp.arange(ids.size, dtype=ids.dtype))  # (B*T,)
    dwte = dwte.at[target].add(rows.astype(dwte.dtype), mode="drop", unique_indices=True)  # (Vp, C)
    dwpe = jnp.sum(dout, axis=0, dtype=jnp.promote_types(dout.dtype, jnp.float32)).astype(dout.dtype)  # (T, C)
    return dwte, dwpe


def _sum_runs(rows: jax.Array, ids: jax.Array) -> jax.Array:
    """Running sums of rows (n, C) inside each run of equal neighbouring ids (n,), in log2(n) doubling passes.

    After the pass with a given shift, row i holds the sum of the last 2*shift rows of its run up to i. ids are sorted,
    so ids[i] == ids[i-shift] means that everything between belongs to the same run.
    """
    rows = rows.astype(jnp.promote_types(rows.dtype, jnp.float32))
    shift = 1
    while shift < ids.size:
        same = ids[shift:] == ids[:-shift]
        earlier = jnp.where(same[:, None], rows[:-shift], 0)
        rows = jnp.concatenate([rows[:shift], rows[shift:] + earlier])
        shift *= 2
    return rows
