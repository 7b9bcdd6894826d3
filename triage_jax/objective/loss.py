"""The TRIAGE objective (arXiv 2610.07043): policy loss under the Gate, plus Repair."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from triage_jax.objective.batch import (
    Response,
    TokenBatch,
    Totals,
    check_shapes,
    response_of,
    to_hundredths,
    update_totals,
    zero_masked,
)
from triage_jax.objective.config import TriageConfig
from triage_jax.objective.gate import gate_weights
from triage_jax.objective.metrics import Max, Mean, Metrics, Sum, collapse
from triage_jax.objective.mismatch import response_metrics
from triage_jax.objective.policy import TokenLoss, normalizer, policy_loss, ppo_tis_losses
from triage_jax.objective.ratios import ratio
from triage_jax.objective.repair import RepairSegments, repair_segments


def _coefficient(
    config: TriageConfig, step: int | Int[Array, ""] | None, dtype: jnp.dtype
) -> Float[Array, ""]:
    repair = config.repair
    if not repair.enabled:
        return jnp.zeros((), dtype)
    if repair.start_step == 0:
        return jnp.full((), repair.coefficient, dtype)
    if step is None:
        raise ValueError(f"repair.start_step is {repair.start_step}, so the loss needs `step`")
    return jnp.where(jnp.asarray(step) >= repair.start_step, repair.coefficient, 0.0).astype(dtype)


def _live_metrics(
    logp: Float[Array, " T"], response: Response, removed: Bool[Array, " T"], repair: RepairSegments
) -> Metrics:
    """Metrics of one response that depend on the live log-probabilities."""
    mask = response.mask
    tokens, segments = mask.sum(dtype=jnp.int32), repair.valid.sum(dtype=jnp.int32)
    log_ratio = lax.stop_gradient(logp) - response.old_logp
    r = ratio(log_ratio)
    removed = removed & (response.advantage != 0)
    active = repair.valid & (repair.force > 0)
    in_scope = repair.selected > 0
    return {
        "ppo/ratio/token": Mean(total=zero_masked(r, mask).sum(), count=tokens),
        "ppo/clip_fraction/token": Mean(total=removed.sum(dtype=jnp.int32), count=tokens),
        "ppo/approx_kl/token": Mean(total=(r - 1 - log_ratio).sum(), count=tokens),
        "repair/mean_gap/segment": Mean(total=repair.mean_gap.sum(), count=segments),
        "repair/active_fraction/segment": Mean(total=active.sum(dtype=jnp.int32), count=segments),
        "repair/force_mean/segment": Mean(total=repair.force.sum(), count=segments),
        "repair/scoped_force_mean/segment": Mean(
            total=zero_masked(repair.force, in_scope).sum(), count=in_scope.sum(dtype=jnp.int32)
        ),
        "repair/segments/response": Mean(total=segments, count=(tokens > 0).astype(jnp.int32)),
        "repair/scope_token_fraction/token": Mean(total=repair.selected.sum(dtype=jnp.int32), count=tokens),
    }


def triage_loss(
    logp: Float[Array, "B T"],
    batch: TokenBatch,
    config: TriageConfig,
    totals: Totals | None = None,
    weights: Float[Array, "B T"] | None = None,
    step: int | Int[Array, ""] | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """Loss to be minimised with respect to `logp`, the live log-probabilities, and metrics to be merged.

    L = L_policy + coefficient · `repair_loss`, with token losses
    l = max(-A r, -A clip(r, 1 - clip.low, 1 + clip.high)) · clip(ρ, tis.low, tis.high),
    r = exp(logp - old_logp), ρ = exp(old_logp - sampler_logp), and Gate weights w, over the valid tokens:

    * "response" (the paper): mean over responses of sum(w l) / sum(w);
    * "token" (the released code): sum(w l) / sum(w) over the update;
    * "fixed": sum(w l) / (number of valid tokens of the update).

    Over any split of a batch by rows, losses and gradients add up to those of the whole if every part is
    given the `totals` of the whole (`update_totals`) and its rows of the `weights` (`gate_weights`); by
    default both are this batch's own. Responses without a valid token contribute nothing and are not counted.
    `step`, the number of the update, is read only if `repair.start_step` is set. Raises ValueError on shapes
    that do not agree, and without a `step` that is needed.
    """
    check_shapes(batch, logp=logp, weights=weights)
    if weights is None:
        weights = gate_weights(batch.old_logp - batch.sampler_logp, batch.advantages, batch.mask, config)
    if totals is None:
        totals = update_totals(batch, weights, config)
    return objective_loss(partial(ppo_tis_losses, config=config), logp, batch, config, totals, weights, step)


def objective_loss(
    token_loss: TokenLoss,
    logp: Float[Array, "B T"],
    batch: TokenBatch,
    config: TriageConfig,
    totals: Totals,
    weights: Float[Array, "B T"],
    step: int | Int[Array, ""] | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """What every objective shares: token losses in the weighted reduction, Repair, and the metrics.

    Arguments and splits as for `triage_loss`, which is this with `ppo_tis_losses`; `token_loss` sees one
    response at a time, zero where masked.
    """
    check_shapes(batch, logp=logp, weights=weights)
    dtype = jnp.result_type(logp)
    policy_total = normalizer(totals, config.reduction, dtype)
    repair_total = jnp.maximum(totals.repair_segments, 1).astype(dtype)
    coefficient = _coefficient(config, step, dtype)

    def one(
        logp: Float[Array, " T"], batch: TokenBatch, weights: Float[Array, " T"]
    ) -> tuple[Float[Array, ""], Float[Array, ""], Metrics]:
        response = response_of(batch, dtype)
        logp = zero_masked(logp, response.mask)
        losses, removed = token_loss(logp, response)
        policy = policy_loss(losses, to_hundredths(weights, response.mask), config.reduction)
        repair = repair_segments(logp, response, config.repair)
        metrics = response_metrics(response, weights, config) | _live_metrics(logp, response, removed, repair)
        return policy, repair.penalty.sum(), metrics

    policy, penalty, metrics = jax.vmap(one)(logp, batch, lax.stop_gradient(weights))
    policy = policy.sum() / policy_total
    penalty = penalty.sum() / repair_total
    loss = policy + coefficient * penalty if config.repair.enabled else policy
    return loss, collapse(metrics) | {
        "loss": Sum(total=lax.stop_gradient(loss)),
        "loss/policy": Sum(total=lax.stop_gradient(policy)),
        "loss/repair": Sum(total=lax.stop_gradient(coefficient * penalty)),
        "repair/loss": Sum(total=lax.stop_gradient(penalty)),
        "repair/coefficient": Max(extreme=coefficient),
    }
