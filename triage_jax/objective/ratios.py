"""Ratios of probabilities, bounded before `exp`."""

import jax.numpy as jnp
from jaxtyping import Array, Float

LOG_RATIO_BOUND = 20.0
"""Log-ratios are cut to ± this before `exp`, so that a ratio stays finite in float32."""


def ratio(log_ratio: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """exp, with the logarithm cut at ±`LOG_RATIO_BOUND`."""
    return jnp.exp(jnp.clip(log_ratio, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))
