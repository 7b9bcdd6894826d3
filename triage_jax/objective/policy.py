"""Policy loss of one response: PPO clip, times truncated importance weight, in a Gate-weighted reduction."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from triage_jax.objective.batch import Response, Totals
from triage_jax.objective.config import ClipConfig, Reduction, TisConfig

LOG_RATIO_BOUND = 20.0
"""Log-ratios are cut to ± this before `exp`, so that a ratio stays finite in float32."""


def ratio(log_ratio: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """exp, with the logarithm cut at ±`LOG_RATIO_BOUND`."""
    return jnp.exp(jnp.clip(log_ratio, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))


def tis_weights(sampler_ratio: Float[Array, "*shape"], config: TisConfig) -> Float[Array, "*shape"]:
    """min(max(ρ, low), high) of ρ = exp(old_logp - sampler_logp), without gradient; 1 when disabled."""
    if not config.enabled:
        return jnp.ones_like(sampler_ratio)
    return lax.stop_gradient(jnp.clip(sampler_ratio, config.low, config.high))


def ppo_loss(
    policy_ratio: Float[Array, "*shape"], advantage: Float[Array, "*shape"], config: ClipConfig
) -> Float[Array, "*shape"]:
    """max(-A r, -A clip(r, 1 - low, 1 + high)) per token, r = exp(logp - old_logp) (arXiv 1707.06347)."""
    clipped = jnp.clip(policy_ratio, 1 - config.low, 1 + config.high)
    return jnp.maximum(-advantage * policy_ratio, -advantage * clipped)


def policy_loss(
    logp: Float[Array, " T"],
    response: Response,
    hundredths: Int[Array, " T"],
    clip: ClipConfig,
    tis: TisConfig,
    reduction: Reduction,
) -> Float[Array, ""]:
    """One response's share of the policy loss, before `normalizer` divides the sum of the shares.

    With token losses l and Gate weights w (0 where masked): sum(w l) / sum(w) for "response", else sum(w l).
    """
    losses = ppo_loss(ratio(logp - response.old_logp), response.advantage, clip)
    losses = losses * tis_weights(ratio(response.gap), tis)
    weighted = (hundredths.astype(losses.dtype) * losses).sum()
    if reduction != "response":
        return weighted / 100
    return weighted / jnp.maximum(hundredths.sum(dtype=jnp.int32), 1).astype(losses.dtype)


def normalizer(totals: Totals, reduction: Reduction, dtype: jnp.dtype) -> Float[Array, ""]:
    """Divisor of the summed shares: responses; weighted tokens; or, for "fixed", valid tokens.

    "response" is the paper's reduction and keeps each response's mass; "token" is the released code's, one
    weighted mean over the update; "fixed" does not renormalise, so that the Gate is pure damping.
    """
    if reduction == "response":
        total = totals.responses.astype(dtype)
    elif reduction == "token":
        total = totals.weighted_tokens(dtype)
    else:
        total = totals.tokens.astype(dtype)
    return jnp.where(total > 0, total, 1)
