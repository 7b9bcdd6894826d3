"""Corrections of the sampler's distribution that do not look at the advantage. ρ = exp(old_logp - sampler_logp)."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from triage_jax.objective.batch import Response
from triage_jax.objective.config import TriageConfig
from triage_jax.objective.policy import TokenLosses, ppo_losses, response_mean
from triage_jax.objective.ratios import LOG_RATIO_BOUND, ratio


def tis_sequence(logp: Float[Array, " T"], response: Response, config: TriageConfig) -> TokenLosses:
    """The PPO clip times min(Π_t ρ_t, `rivals.tis_sequence.high`), one weight per response; Σ_t log ρ_t is cut to ±20.

    verl rollout_corr_helper.py (rollout_is "sequence"), TRL grpo_trainer.py (`sequence_truncate`).
    """
    weight = jnp.minimum(ratio(response.gap.sum()), config.rivals.tis_sequence.high)
    return ppo_losses(logp, response, config.clip).weighted(weight)


def icepop(logp: Float[Array, " T"], response: Response, config: TriageConfig) -> TokenLosses:
    """The PPO clip times ρ 1[low <= ρ <= high].

    IcePop (Ring-1T, arXiv 2510.18855; NeMo-RL loss_functions.py), which is masked importance sampling by token.
    """
    band, rho = config.rivals.icepop, ratio(response.gap)
    inside = (rho >= band.low) & (rho <= band.high)
    return ppo_losses(logp, response, config.clip).weighted(rho).kept(inside)


def geo_rejection(logp: Float[Array, " T"], response: Response, config: TriageConfig) -> TokenLosses:
    """The PPO clip times ρ_t 1[low <= exp(mean_t log ρ) <= high]: a response is kept or dropped as a whole.

    NeMo-RL loss_functions.py (seq-mask-tis), verl rollout_corr_helper.py (seq_mean_k1).
    """
    band = config.rivals.geo_rejection
    centre = ratio(response_mean(response.gap, response))
    inside = (centre >= band.low) & (centre <= band.high)
    return ppo_losses(logp, response, config.clip).weighted(ratio(response.gap)).kept(inside)


def k3_rejection(logp: Float[Array, " T"], response: Response, config: TriageConfig) -> TokenLosses:
    """The PPO clip times 1[mean_t(ρ - 1 - log ρ) <= threshold], without importance weight.

    verl rollout_corr_helper.py (seq_mean_k3).
    """
    bounded = jnp.clip(response.gap, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    divergence = response_mean(jnp.expm1(bounded) - bounded, response)
    return ppo_losses(logp, response, config.clip).kept(divergence <= config.rivals.k3_rejection.threshold)
