"""Fixed cuts of one response by token position. Masked positions keep their place: nothing is re-indexed."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped


def split(x: Shaped[Array, " T"], size: int) -> Shaped[Array, "S W"]:
    """Segments of `size` positions; the last one is filled up with zeros (False for a mask)."""
    filled = jnp.pad(x, (0, -x.shape[0] % size))
    return filled.reshape(-1, size)


def join(segments: Shaped[Array, "S W"], length: int) -> Shaped[Array, " T"]:
    """Inverse of `split`: the first `length` positions."""
    return segments.reshape(-1)[:length]


def count(mask: Bool[Array, "S W"]) -> Int[Array, " S"]:
    """Valid tokens per segment."""
    return mask.sum(axis=-1, dtype=jnp.int32)


def mean(x: Float[Array, "S W"], valid: Int[Array, " S"]) -> Float[Array, " S"]:
    """Mean over the valid tokens of each segment, `x` being zero elsewhere; 0 for an empty segment."""
    return x.sum(axis=-1) / jnp.maximum(valid, 1).astype(x.dtype)
