"""The gated activation that dense and expert MLPs share."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def swiglu(gate: Float[Array, "*B F"], up: Float[Array, "*B F"]) -> Float[Array, "*B F"]:
    """silu(gate) · up, computed in float32 and rounded once, as the fused kernels of both sides do."""
    return (jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(gate.dtype)
