"""Token losses and their reduction: PPO clip, times truncated importance weight, in a weighted mean."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from triage_jax.objective.batch import Response, Totals
from triage_jax.objective.config import ClipConfig, Reduction, TisConfig, TriageConfig
from triage_jax.objective.ratios import ratio


class TokenLosses(NamedTuple):
    """Loss of every token of a response, and where a clip, mask or rejection leaves it without gradient."""

    loss: Float[Array, " T"]
    removed: Bool[Array, " T"]

    def weighted(self, weights: Float[Array, "..."]) -> "TokenLosses":
        """Times detached weights, per token or one for all."""
        return self._replace(loss=self.loss * lax.stop_gradient(weights))

    def kept(self, keep: Bool[Array, "..."]) -> "TokenLosses":
        """Zero where not `keep`: the token stays in the denominator."""
        keep = jnp.broadcast_to(keep, self.loss.shape)
        return TokenLosses(jnp.where(keep, self.loss, 0), self.removed | ~keep)


type TokenLoss = Callable[[Float[Array, " T"], Response], TokenLosses]
"""(logp, response) -> token losses; `logp` and everything of the response are zero where masked."""


def tis_weights(sampler_ratio: Float[Array, "*shape"], config: TisConfig) -> Float[Array, "*shape"]:
    """min(max(ρ, low), high) of ρ = exp(old_logp - sampler_logp), without gradient; 1 when disabled."""
    if not config.enabled:
        return jnp.ones_like(sampler_ratio)
    return lax.stop_gradient(jnp.clip(sampler_ratio, config.low, config.high))


def clipped(
    policy_ratio: Float[Array, " T"],
    advantage: Float[Array, " T"],
    low: float | Float[Array, ""],
    high: float | Float[Array, ""],
) -> TokenLosses:
    """max(-A r, -A clip(r, low, high)) per token (arXiv 1707.06347)."""
    surrogate = jnp.maximum(-advantage * policy_ratio, -advantage * jnp.clip(policy_ratio, low, high))
    beyond = jnp.where(advantage > 0, policy_ratio > high, (advantage < 0) & (policy_ratio < low))
    return TokenLosses(surrogate, beyond)


def ppo_losses(logp: Float[Array, " T"], response: Response, clip: ClipConfig) -> TokenLosses:
    """`clipped` to [1 - low, 1 + high], with r = exp(logp - old_logp)."""
    return clipped(ratio(logp - response.old_logp), response.advantage, 1 - clip.low, 1 + clip.high)


def ppo_tis_losses(logp: Float[Array, " T"], response: Response, config: TriageConfig) -> TokenLosses:
    """`ppo_losses` times `tis_weights`: the token losses of TRIAGE."""
    return ppo_losses(logp, response, config.clip).weighted(tis_weights(ratio(response.gap), config.tis))


def response_mean(x: Float[Array, " T"], response: Response) -> Float[Array, ""]:
    """Mean over the valid tokens, `x` being zero elsewhere; 0 for an empty response."""
    return x.sum() / jnp.maximum(response.mask.sum(dtype=jnp.int32), 1).astype(x.dtype)


def policy_loss(
    losses: Float[Array, " T"], hundredths: Int[Array, " T"], reduction: Reduction
) -> Float[Array, ""]:
    """One response's share of the policy loss, before `normalizer` divides the sum of the shares.

    With token losses l and weights w (0 where masked): sum(w l) / sum(w) for "response", else sum(w l).
    """
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
