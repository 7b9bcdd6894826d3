"""Drawing one token per row from log-probabilities."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32


def row_uniforms(seeds: UInt32[Array, "B"], step: Int[Array, ""]) -> Float[Array, "B"]:
    """One uniform in [0, 1) per row, a function of the row's own seed and the token index only.

    So a request draws the same token whatever else is in its batch, up to the numerics of its logits.
    """

    def one(seed: Array) -> Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.key(seed), step))

    return jax.vmap(one)(seeds)


def draw(logp: Float[Array, "B V"], uniforms: Float[Array, "B"], block: int = 256) -> Int[Array, "B"]:
    """Exact draw by inverse distribution function, in two levels: which block of the vocabulary, then which token.

    One uniform per row instead of one Gumbel variate per vocabulary entry, and cumulative sums of length
    V/block and block instead of V. A token of probability zero is never drawn.
    """
    rows, vocab = logp.shape
    probability = jnp.exp(jnp.pad(logp, ((0, 0), (0, -vocab % block)), constant_values=-jnp.inf))
    probability = probability.reshape(rows, -1, block)
    mass = jnp.sum(probability, axis=-1)
    chosen, rest = _pick(mass, uniforms[:, None] * jnp.sum(mass, axis=-1, keepdims=True))
    inside = jnp.take_along_axis(probability, chosen[:, None, None], axis=1)[:, 0]
    offset, _ = _pick(inside, rest)
    return (chosen * block + offset).astype(jnp.int32)


def _pick(weights: Float[Array, "B N"], target: Float[Array, "B 1"]) -> tuple[Array, Array]:
    """First index with weight whose cumulative weight exceeds `target`, and what of the target is left there.

    A parallel cumulative sum is not monotone to the last bit, and rounding can put the target at the total: so only
    entries with weight are eligible, and the last of them is taken where none exceeds.
    """
    cumulative = jnp.cumsum(weights, axis=-1)
    positive = weights > 0
    last = weights.shape[-1] - 1 - jnp.argmax(positive[:, ::-1], axis=-1)
    exceeds = positive & (cumulative > target)
    index = jnp.where(jnp.any(exceeds, axis=-1), jnp.argmax(exceeds, axis=-1), last)
    before = jnp.take_along_axis(cumulative - weights, index[:, None], axis=-1)
    return index, jnp.maximum(target - before, 0.0)
