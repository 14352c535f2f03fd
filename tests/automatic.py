"""A GPT-2 in a user's file without a backward and a decoder: JAX differentiates it through the run's operations."""

from typing import Any

from llmc_jax.models.gpt2.family import FAMILY as GPT2


def program() -> Any:
    """Return what computes it."""
    from llmc_jax.models.automatic import differentiable
    from llmc_jax.models.gpt2.model import block_params
    from llmc_jax.models.program import Program, running

    def hidden(params: Any, tokens: Any, shape: Any, execution: Any) -> Any:
        """Return what the head reads, (B, T, C), of tokens (B, T)."""
        op = differentiable(running(shape, execution, tokens)[1].op)
        x = op.embedding(tokens, params.wte, params.wpe)
        for layer in range(shape.num_layers):
            p = block_params(params, layer)
            qkv = op.linear(op.layernorm(x, p.ln1w, p.ln1b), p.qkvw, p.qkvb)
            x = x + op.linear(op.attention(qkv, shape.num_heads), p.attprojw, p.attprojb)
            fch = op.linear(op.layernorm(x, p.ln2w, p.ln2b), p.fcw, p.fcb)
            x = x + op.linear(op.gelu(fch), p.fcprojw, p.fcprojb)
        return op.layernorm(x, params.lnfw, params.lnfb)

    return Program(hidden)


FAMILY = GPT2._replace(name="automatic", program=program)
