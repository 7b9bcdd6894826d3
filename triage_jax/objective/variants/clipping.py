"""Policy gradients with a clipped or truncated ratio. r = exp(logp - old_logp), ρ = exp(old_logp - sampler_logp)."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from triage_jax.objective.batch import Response
from triage_jax.objective.config import TriageConfig
from triage_jax.objective.policy import TokenLosses, clipped, ppo_losses, response_mean
from triage_jax.objective.ratios import ratio


def grpo(logp: Float[Array, " T"], response: Response, config: TriageConfig) -> TokenLosses:
    """max(-A r, -A clip(r, 1 - clip.low, 1 + clip.high)), the PPO clip.

    Mean over each response, then over responses: GRPO (arXiv 2402.03300). Mean over the tokens of the update: DAPO
    (arXiv 2503.14476).
    """
    return ppo_losses(logp, response, config.clip)


def dr_grpo(logp: Float[Array, " T"], response: Response, config: TriageConfig) -> TokenLosses:
    """The PPO clip, summed over a response and divided by the constant L = `rivals.dr_grpo.max_tokens`.

    Dr. GRPO (arXiv 2503.20783) has no length bias: the factor n / L undoes the mean over the response's n tokens. Its
    advantages are R - mean(R) without division by the standard deviation; whoever makes them has to see to that.
    """
    length = config.rivals.dr_grpo.max_tokens or logp.shape[0]
    tokens = response.mask.sum(dtype=jnp.int32).astype(logp.dtype)
    return ppo_losses(logp, response, config.clip).weighted(tokens / length)


def gspo(logp: Float[Array, " T"], response: Response, config: TriageConfig) -> TokenLosses:
    """max(-A s, -A clip(s, 1 - low, 1 + high)) with the response's geometric mean s = exp(mean_t log r).

    Mean over responses; GSPO (arXiv 2507.18071). The gradient of s reaches every token of the response.
    """
    sequence = ratio(response_mean(logp - response.old_logp, response))
    bounds = config.rivals.gspo
    return clipped(jnp.full_like(logp, sequence), response.advantage, 1 - bounds.low, 1 + bounds.high)


def cispo(logp: Float[Array, " T"], response: Response, config: TriageConfig) -> TokenLosses:
    """-sg(clip(r, low, high)) A logp: a truncated weight, so that no token loses its gradient.

    Mean over the tokens of the update; CISPO (MiniMax-M1, arXiv 2506.13585), bounds of ScaleRL (TRL
    grpo_trainer.py).
    """
    bounds = config.rivals.cispo
    weight = lax.stop_gradient(jnp.clip(ratio(logp - response.old_logp), bounds.low, bounds.high))
    return TokenLosses(-weight * response.advantage * logp, jnp.zeros_like(response.mask))


def clip_sampler(logp: Float[Array, " T"], response: Response, config: TriageConfig) -> TokenLosses:
    """max(-A q, -A clip(q, 1 - clip.low, 1 + clip.high)) with q = exp(logp - sampler_logp).

    The PPO clip taken against the sampler (verl's bypass mode, docs/algo/rollout_corr.md): gradient is lost where
    A > 0 and q > 1 + high, or A < 0 and q < 1 - low, which is where mismatch is large and amplifying.
    """
    clip = config.clip
    return clipped(ratio(logp - response.sampler_logp), response.advantage, 1 - clip.low, 1 + clip.high)
