"""Corrections of the sampler's distribution that do not look at the advantage. ρ = exp(old_logp - sampler_logp)."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from triage_jax.objective.batch import Response, TokenBatch, response_of
from triage_jax.objective.config import TriageConfig
from triage_jax.objective.policy import TokenLosses, ppo_losses, response_mean
from triage_jax.objective.ratios import LOG_RATIO_BOUND, ratio
from triage_jax.objective.variants.base import Variant


def tis_sequence(logp: Float[Array, " T"], response: Response, config: TriageConfig) -> TokenLosses:
    """The PPO clip times min(Π_t ρ_t, `rivals.tis_sequence.high`), one weight per response; Σ_t log ρ_t is cut to ±20.

    verl rollout_corr_helper.py (rollout_is "sequence"), TRL grpo_trainer.py (`sequence_truncate`).
    """
    weight = jnp.minimum(ratio(response.gap.sum()), config.rivals.tis_sequence.high)
    return ppo_losses(logp, response, config.clip).weighted(weight)


def icepop_keeps(response: Response, config: TriageConfig) -> Bool[Array, " T"]:
    """low <= ρ <= high."""
    band, rho = config.rivals.icepop, ratio(response.gap)
    return (rho >= band.low) & (rho <= band.high)


def icepop(logp: Float[Array, " T"], response: Response, config: TriageConfig) -> TokenLosses:
    """The PPO clip times ρ 1[low <= ρ <= high].

    IcePop (Ring-1T, arXiv 2510.18855; NeMo-RL loss_functions.py), which is masked importance sampling by token.
    """
    losses = ppo_losses(logp, response, config.clip).weighted(ratio(response.gap))
    return losses.kept(icepop_keeps(response, config))


def geo_rejection_keeps(response: Response, config: TriageConfig) -> Bool[Array, " T"]:
    """low <= exp(mean_t log ρ) <= high, the same for every token."""
    band = config.rivals.geo_rejection
    centre = ratio(response_mean(response.gap, response))
    return jnp.full_like(response.mask, (centre >= band.low) & (centre <= band.high))


def geo_rejection(logp: Float[Array, " T"], response: Response, config: TriageConfig) -> TokenLosses:
    """The PPO clip times ρ_t 1[low <= exp(mean_t log ρ) <= high]: a response is kept or dropped as a whole.

    NeMo-RL loss_functions.py (seq-mask-tis), verl rollout_corr_helper.py (seq_mean_k1).
    """
    losses = ppo_losses(logp, response, config.clip).weighted(ratio(response.gap))
    return losses.kept(geo_rejection_keeps(response, config))


def k3_rejection_keeps(response: Response, config: TriageConfig) -> Bool[Array, " T"]:
    """mean_t(ρ - 1 - log ρ) <= threshold, the same for every token."""
    bounded = jnp.clip(response.gap, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    divergence = response_mean(jnp.expm1(bounded) - bounded, response)
    return jnp.full_like(response.mask, divergence <= config.rivals.k3_rejection.threshold)


def k3_rejection(logp: Float[Array, " T"], response: Response, config: TriageConfig) -> TokenLosses:
    """The PPO clip times 1[mean_t(ρ - 1 - log ρ) <= threshold], without importance weight.

    verl rollout_corr_helper.py (seq_mean_k3).
    """
    return ppo_losses(logp, response, config.clip).kept(k3_rejection_keeps(response, config))


@runtime_checkable
class Keeps(Protocol):
    """Which tokens of a response a rejection keeps; decided before the update."""

    def __call__(self, response: Response, config: TriageConfig) -> Bool[Array, " T"]: ...


@dataclass(frozen=True, kw_only=True)
class RejectionVariant(Variant):
    """Rejection of tokens, which stay in the denominator unless `rivals.renormalise`.

    Both are in use: NeMo-RL and OpenRLHF divide by all tokens, verl by those that are left.
    """

    keeps_tokens: Keeps

    def weights(self, batch: TokenBatch, config: TriageConfig) -> Float[Array, "B T"]:
        """Ones, or with `rivals.renormalise` 0 for rejected tokens: so they are in no sum of weights."""
        ones = super().weights(batch, config)
        if not config.rivals.renormalise:
            return ones

        def one(batch: TokenBatch) -> Bool[Array, " T"]:
            return self.keeps_tokens(response_of(batch, ones.dtype), config)

        return jax.vmap(one)(batch).astype(ones.dtype)
