"""The gated activation that dense and expert MLPs share."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float


def swiglu(
    gate: Float[Array, "*B F"], up: Float[Array, "*B F"], dtype: DTypeLike | None = None
) -> Float[Array, "*B F"]:
    """silu(gate) · up, computed in float32 and rounded once, to `dtype` or the operands' own."""
    return (jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(dtype or gate.dtype)
