"""Masks that look at the sign of the advantage: the nearest relatives of TRIAGE. q = exp(logp - sampler_logp)."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from triage_jax.objective.batch import Response
from triage_jax.objective.config import TriageConfig
from triage_jax.objective.policy import TokenLosses, ppo_losses, response_mean
from triage_jax.objective.ratios import ratio
from triage_jax.objective.rival_config import DppoConfig


def opsm(logp: Float[Array, " T"], response: Response, config: TriageConfig) -> TokenLosses:
    """The PPO clip, 0 for a response with mean A < 0 and mean_t(sampler_logp - logp) > threshold.

    Off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556, eq. 9; slime utils/ppo_utils.py): a Gate that is hard
    and sees whole responses only. The advantage that counts is the response's mean, so that a response with advantages
    per token is dropped as a whole or not at all.
    """
    gap = lax.stop_gradient(logp) - response.sampler_logp
    drifted = -response_mean(gap, response) > config.rivals.opsm.threshold
    negative = response.advantage.sum() < 0  # the sign of the mean, without its rounding
    return ppo_losses(logp, response, config.clip).kept(~(negative & drifted))


def dppo_tv(logp: Float[Array, " T"], response: Response, config: TriageConfig) -> TokenLosses:
    """-sg(min(q, ratio_max)) A logp, 0 where A > 0 and p - p_S > tv_high, or A < 0 and p - p_S < -tv_low.

    p and p_S are the token's probabilities for learner and sampler: their difference is a total variation of the two
    distributions {token, all others}. DPPO (arXiv 2602.04879; verl core_algos.py, prime-rl trainer/rl/loss.py, which
    adds `penalty` (log q)²).
    """
    rise = jnp.exp(lax.stop_gradient(logp)) - jnp.exp(response.sampler_logp)
    bounds = config.rivals.dppo
    return _masked(logp, response, bounds, fallen=rise < -bounds.tv_low, risen=rise > bounds.tv_high)


def dppo_kl(logp: Float[Array, " T"], response: Response, config: TriageConfig) -> TokenLosses:
    """As `dppo_tv`, 0 where KL > kl_high, p > p_S and A > 0, or KL > kl_low, p < p_S and A < 0.

    KL = p_S log(p_S / p) + (1 - p_S) log((1 - p_S) / (1 - p)), the divergence of {token, all others} (arXiv
    2602.04879; verl core_algos.py).
    """
    live, sampler, bounds = lax.stop_gradient(logp), response.sampler_logp, config.rivals.dppo
    smallest = jnp.finfo(logp.dtype).eps
    rest, sampler_rest = (jnp.maximum(-jnp.expm1(x), smallest) for x in (live, sampler))
    divergence = jnp.exp(sampler) * (sampler - live) + sampler_rest * jnp.log(sampler_rest / rest)
    fallen, risen = divergence > bounds.kl_low, divergence > bounds.kl_high
    return _masked(logp, response, bounds, fallen=fallen & (live < sampler), risen=risen & (live > sampler))


def _masked(
    logp: Float[Array, " T"],
    response: Response,
    bounds: DppoConfig,
    *,
    fallen: Bool[Array, " T"],
    risen: Bool[Array, " T"],
) -> TokenLosses:
    """Truncated policy gradient but for positive tokens that have risen and negative ones that have fallen."""
    log_ratio, advantage = logp - response.sampler_logp, response.advantage
    weight = lax.stop_gradient(jnp.minimum(ratio(log_ratio), bounds.ratio_max))
    away = jnp.where(advantage > 0, risen, (advantage < 0) & fallen)
    losses = TokenLosses(-weight * advantage * logp, jnp.zeros_like(response.mask)).kept(~away)
    if bounds.penalty:
        losses = losses._replace(loss=losses.loss + bounds.penalty * log_ratio**2)
    return losses
