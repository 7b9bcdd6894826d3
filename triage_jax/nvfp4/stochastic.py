"""Stochastic rounding to E2M1 with eight random bits an element."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32

from triage_jax.nvfp4.formats import E2M1_MAX


def e2m1_round_stochastic(x: Float[Array, "..."], key: Array) -> Float32[Array, "..."]:
    """E2M1 value below or above |x|, with x's sign: ⌊|x| + step·u/256⌋ on the grid, u uniform in 0…255.

    The expectation is x where |x| ≤ 6 is a whole number of step/256, and is else less than step/256 nearer to zero;
    beyond ±6 it saturates. A NaN stays NaN. Source: the software form of `cvt.rs.satfinite.e2m1x4.f32` in
    TransformerEngine common/util/ptx.cuh.
    """
    x = x.astype(jnp.float32)
    magnitude = jnp.where(jnp.abs(x) > E2M1_MAX, np.float32(E2M1_MAX), jnp.abs(x))
    # Steps are powers of two, so that only the addition of u can round.
    step = jnp.where(magnitude < 2, np.float32(0.5), jnp.where(magnitude < 4, np.float32(1), np.float32(2)))
    jitter = jax.random.bits(key, x.shape, jnp.uint8).astype(jnp.float32) / 256
    rounded = jnp.floor(magnitude / step + jitter) * step
    return lax.bitcast_convert_type(
        lax.bitcast_convert_type(rounded, jnp.uint32)
        | (lax.bitcast_convert_type(x, jnp.uint32) & np.uint32(0x80000000)),
        jnp.float32,
    )
