"""Log-probabilities of given tokens, without ever holding the logits of all of them."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float, Int


class TokenScores(NamedTuple):
    """Per token, in nats: `logp` of the target, `entropy` of the distribution (a metric: gradient zero)."""

    logp: Float[Array, "B T"]
    entropy: Float[Array, "B T"]


def token_logprobs(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
) -> TokenScores:
    """logp = log softmax(hidden headᵀ / temperature) at the targets, and the entropy of that softmax.

    The product takes `head` in hidden's dtype: BF16 with float32 accumulation, float32 at highest precision,
    or float64. Softmax and results are float32 (float64). The vocabulary is walked in tiles of `chunk` rows
    with an online softmax (Milakov and Gimelshein, arXiv 1805.02867); the backward pass computes each tile
    again and multiplies in hidden's dtype, so the extra memory is one [chunk, B*T] tile and one float32
    copy of `hidden`. Under a mesh, shard `head` over its width: its tiles are then gathered one by one, but
    sharded over the vocabulary it is gathered whole. A target outside the vocabulary gives NaN. Raises
    ValueError for shapes that do not fit, `temperature` <= 0 or `chunk` < 1.
    """
    if hidden.shape[:-1] != targets.shape or hidden.shape[-1] != head.shape[-1]:
        raise ValueError(
            f"hidden {hidden.shape}, head {head.shape}, targets {targets.shape}: need [B,T,D], [V,D], [B,T]"
        )
    if not temperature > 0:
        raise ValueError(f"temperature = {temperature}: must be positive (greedy has no log-probability)")
    tokens = targets.size
    chunk = _default_chunk(tokens) if chunk is None else chunk
    if chunk < 1:
        raise ValueError(f"chunk = {chunk}: must be at least 1")
    logp, entropy = _scores(
        hidden.reshape(tokens, -1), head, targets.reshape(tokens), float(temperature), min(chunk, len(head))
    )
    return TokenScores(logp.reshape(targets.shape), entropy.reshape(targets.shape))


def _default_chunk(tokens: int) -> int:
    """A CPU wants the logits tile in its cache (8 MB of float32), an accelerator few, large products."""
    elements = 1 << 21 if jax.default_backend() == "cpu" else 1 << 26
    return min(max(elements // max(tokens, 1), 256), 8192)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _scores(
    hidden: Array, head: Array, targets: Array, temperature: float, chunk: int
) -> tuple[Array, Array]:
    return _forward(hidden, head, targets, temperature, chunk)[0]


def _forward(hidden: Array, head: Array, targets: Array, temperature: float, chunk: int):
    dtype = jnp.promote_types(hidden.dtype, jnp.float32)

    def tile(start, size, carry):
        top, total, weighted, chosen = carry
        logits = _logits(hidden, _rows(head, start, size, hidden.dtype), temperature)
        new_top = jnp.maximum(top, logits.max(0))
        shifted = logits - new_top[None]
        mass = jnp.exp(shifted)
        decay = jnp.exp(top - new_top)
        # weighted = sum of exp(z - top) (z - top): small terms, where sums of z itself would cancel.
        weighted = decay * (weighted + (top - new_top) * total) + (mass * shifted).sum(0)
        total = decay * total + mass.sum(0)
        here = targets - start
        found = jnp.take_along_axis(logits, here[None], axis=0, mode="clip")[0]
        chosen = jnp.where((here >= 0) & (here < size), found, chosen)
        return new_top, total, weighted, chosen

    zeros = jnp.zeros(hidden.shape[:1], dtype)
    lowest = jnp.full_like(zeros, jnp.finfo(dtype).min)  # not -inf: (top - new_top) * 0 must be 0
    carry = (lowest, zeros, zeros, jnp.full_like(zeros, jnp.nan))
    top, total, weighted, chosen = _walk(head.shape[0], chunk, tile, carry)
    log_total = jnp.log(total)
    scores = (chosen - top) - log_total, log_total - weighted / total
    return scores, (hidden, head, targets, top + log_total)


def _backward(temperature: float, chunk: int, residuals: tuple[Array, ...], cotangents: tuple[Array, Array]):
    """d logp / d logits = onehot(target) - softmax; logits are transposed, [V, tokens], throughout.

    That orientation lets both products contract the tile's minor or major axis without transposing it:
    d_head = tile hidden, and d_hiddenᵀ = headᵀ tile, where only the small slice of `head` is turned.
    """
    hidden, head, targets, log_norm = residuals
    scale = cotangents[0] / temperature

    def tile(start, size, carry):
        d_hidden, d_head = carry
        rows = _rows(head, start, size, hidden.dtype)
        logits = _logits(hidden, rows, temperature)
        hit = lax.broadcasted_iota(targets.dtype, logits.shape, 0) == (targets - start)[None]
        d_logits = (hit - jnp.exp(logits - log_norm[None])) * scale[None]
        d_logits = d_logits.astype(hidden.dtype)
        d_hidden += _product(_transposed(rows), d_logits, contract=(1, 0))
        update = _product(d_logits, hidden, contract=(1, 0)).astype(head.dtype)
        return d_hidden, lax.dynamic_update_slice_in_dim(d_head, update, start, 0)

    carry = (jnp.zeros(hidden.shape[::-1], log_norm.dtype), jnp.zeros_like(head))
    d_hidden, d_head = _walk(head.shape[0], chunk, tile, carry)
    return d_hidden.T.astype(hidden.dtype), d_head, None


_scores.defvjp(_forward, _backward)


def _walk[Carry](
    vocab: int, chunk: int, tile: Callable[[Array | int, int, Carry], Carry], carry: Carry
) -> Carry:
    """Fold `tile(start, size, carry)` over the vocabulary; the last tile may be smaller."""
    whole = vocab // chunk
    carry = lax.fori_loop(0, whole, lambda index, carry: tile(index * chunk, chunk, carry), carry)
    return tile(whole * chunk, vocab % chunk, carry) if vocab % chunk else carry


def _rows(head: Array, start: Array | int, size: int, dtype: jnp.dtype) -> Array:
    # Cast per tile: a copy of the whole head in BF16 would be the largest temporary by far.
    return lax.dynamic_slice_in_dim(head, start, size).astype(dtype)


def _logits(hidden: Array, rows: Array, temperature: float) -> Array:
    logits = _product(rows, hidden, contract=(1, 1))
    return logits if temperature == 1 else logits / temperature


def _product(left: Array, right: Array, *, contract: tuple[int, int]) -> Array:
    return lax.dot_general(
        left,
        right,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=None if left.dtype == jnp.bfloat16 else lax.Precision.HIGHEST,
        preferred_element_type=jnp.promote_types(left.dtype, jnp.float32),
    )


def _transposed(rows: Array) -> Array:
    """On a CPU a transpose in memory: a mere view puts the BF16 product on a path 7 times slower."""
    cpu = jax.default_backend() == "cpu"
    return with_layout_constraint(rows.T, Layout(major_to_minor=(0, 1))) if cpu else rows.T
