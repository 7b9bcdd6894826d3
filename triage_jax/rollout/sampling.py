"""Drawing one token per row from logits."""

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


def draw(
    logits: Float[Array, "V B"], uniforms: Float[Array, "B"], block: int = 256
) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
    """A token per row from softmax(logits), and its log-probability in nats; logits have the vocabulary first.

    Exact, by inverse distribution function in two levels: which block of the vocabulary, then which token. That takes
    one exponential per logit and one uniform per row, where the Gumbel trick takes a variate and two logarithms per
    logit. A token of probability zero is never drawn.
    """
    vocab, rows = logits.shape
    highest = jnp.max(logits, axis=0, keepdims=True)
    padding = ((0, -vocab % block), (0, 0))
    blocks = jnp.pad(logits, padding, constant_values=-jnp.inf).reshape(-1, block, rows)
    # The exponentials are summed as they are made, and those of one block made again: cheaper than to keep them all.
    mass = jnp.sum(jnp.exp(blocks - highest[None]), axis=1).T
    total = jnp.sum(mass, axis=-1)
    chosen, rest = _pick(mass, uniforms * total)
    inside = jnp.exp(jnp.take_along_axis(blocks, chosen[None, None], axis=0)[0] - highest).T
    offset, _ = _pick(inside, rest)
    token = chosen * block + offset
    picked = jnp.take_along_axis(logits, token[None], axis=0) - highest
    return token.astype(jnp.int32), picked[0] - jnp.log(total)


def greedy(logits: Float[Array, "V B"]) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
    """The most probable token per row (the first of equals), and its log-probability."""
    token = jnp.argmax(logits, axis=0).astype(jnp.int32)
    logp = jax.nn.log_softmax(logits, axis=0)
    return token, jnp.take_along_axis(logp, token[None], axis=0)[0]


def _pick(
    weights: Float[Array, "B N"], target: Float[Array, "B"]
) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
    """First index with weight whose cumulative weight exceeds `target`, and what of the target is left there.

    A parallel cumulative sum is not monotone to the last bit, and rounding can put the target at the total: so only
    entries with weight are eligible, and the last of them is taken where none exceeds.
    """
    cumulative = jnp.cumsum(weights, axis=-1)
    positive = weights > 0
    last = weights.shape[-1] - 1 - jnp.argmax(positive[:, ::-1], axis=-1)
    exceeds = positive & (cumulative > target[:, None])
    index = jnp.where(jnp.any(exceeds, axis=-1), jnp.argmax(exceeds, axis=-1), last)
    before = jnp.take_along_axis(cumulative - weights, index[:, None], axis=-1)[:, 0]
    return index, jnp.maximum(target - before, 0.0)
