"""Causal attention of whole sequences; of long ones a block of queries at a time."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from triage_jax.model.layout import split_rows

type Attend = Callable[[Array, Array, Array], Array]
"""`attend(q, k, v)`, q [B, T, H, d], k and v [B, S, K, d]"""

LONGEST_WHOLE = 4096
"""Tokens up to which all scores exist at once: [B, H, T, T] grows to 65 GB for one row of 22,528 and 32 heads"""
BLOCK = 1024


def causal_attention(
    valid: Bool[Array, "B T"], *, longest_whole: int = LONGEST_WHOLE, block: int = BLOCK
) -> Attend:
    """Attention of every token to the valid ones up to itself, in q's dtype.

    Beyond `longest_whole` tokens, blocks of queries follow each other and are computed again for the gradient, which
    is summed over them in float32.
    """
    steps = jnp.arange(valid.shape[1])

    def allowed(queries: Array) -> Bool[Array, "B 1 Q T"]:
        return (queries[:, None] >= steps[None, :])[None, None] & valid[:, None, None, :]

    if valid.shape[1] <= longest_whole:
        mask = allowed(steps)
        return lambda q, k, v: jax.nn.dot_product_attention(q, k, v, mask=mask)

    def attend(q: Array, k: Array, v: Array) -> Float[Array, "B T H d"]:
        rows, length, *heads = q.shape
        count = -(-length // block)
        q = jnp.pad(q, ((0, 0), (0, count * block - length), (0, 0), (0, 0)))
        blocks = split_rows(q.reshape(rows, count, block, *heads).swapaxes(0, 1), axis=1)
        # In float32, so that their gradients are summed in it; the products see what they were.
        wide_k, wide_v = k.astype(jnp.float32), v.astype(jnp.float32)

        @jax.checkpoint
        def one(queries: Array, index: Array) -> Array:
            mask = allowed(index * block + jnp.arange(block))
            narrow_k, narrow_v = wide_k.astype(k.dtype), wide_v.astype(v.dtype)
            return jax.nn.dot_product_attention(queries, narrow_k, narrow_v, mask=mask)

        mixed = jax.lax.map(lambda given: one(*given), (blocks, jnp.arange(count)))
        return mixed.swapaxes(0, 1).reshape(rows, count * block, *heads)[:, :length]

    return attend
