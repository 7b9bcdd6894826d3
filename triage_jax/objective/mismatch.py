"""Statistics of the gap between learner and sampler, usable without a loss. `metrics.py` lists the keys."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from triage_jax.objective.batch import (
    Response,
    TokenBatch,
    check_shapes,
    response_of,
    to_hundredths,
    zero_masked,
)
from triage_jax.objective.config import TriageConfig
from triage_jax.objective.gate import gate_segments, gate_weights
from triage_jax.objective.metrics import EffectiveSize, Max, Mean, Metrics, Min, Sum, collapse
from triage_jax.objective.policy import tis_weights
from triage_jax.objective.ratios import LOG_RATIO_BOUND, ratio


def _count(mask: Bool[Array, "..."]) -> Array:
    return mask.sum(dtype=jnp.int32)


def _gap_metrics(response: Response) -> Metrics:
    gap, mask, tokens = response.gap, response.mask, _count(response.mask)
    bounded = jnp.clip(gap, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    rise, fall = jnp.expm1(bounded), jnp.expm1(-bounded)  # ρ - 1 and 1/ρ - 1, exact near δ = 0
    size = jnp.abs(gap)
    js = ((1 + rise) * bounded - (2 + rise) * jnp.log1p(rise / 2)) / 2
    n = tokens.astype(gap.dtype)
    size_sum = size.sum()
    return {
        "batch/responses": Sum(total=(tokens > 0).astype(jnp.int32)),
        "batch/tokens": Sum(total=tokens),
        "gap/mean/token": Mean(total=gap.sum(), count=tokens),
        "gap/abs_mean/token": Mean(total=size_sum, count=tokens),
        "gap/abs_mean/response": Mean(
            total=size_sum / jnp.maximum(n, 1), count=(tokens > 0).astype(jnp.int32)
        ),
        "gap/min": Min(extreme=jnp.where(mask, gap, jnp.inf).min(initial=jnp.inf)),
        "gap/max_abs": Max(extreme=jnp.where(mask, size, -jnp.inf).max(initial=-jnp.inf)),
        "gap/within_0.05/token": Mean(total=_count(mask & (size < 0.05)), count=tokens),
        "gap/k1/token": Mean(total=-gap.sum(), count=tokens),
        "gap/k3_sampler_learner/token": Mean(total=(rise - bounded).sum(), count=tokens),
        "gap/k3_learner_sampler/token": Mean(total=(fall + bounded).sum(), count=tokens),
        "gap/js/token": Mean(total=js.sum(), count=tokens),
        "gap/mult_prob_error/token": Mean(
            total=zero_masked(1 + jnp.maximum(rise, fall), mask).sum(), count=tokens
        ),
    }


def _tis_metrics(response: Response, config: TriageConfig) -> Metrics:
    mask, tokens = response.mask, _count(response.mask)
    rho = ratio(response.gap)
    inside = (rho >= config.tis.low) & (rho <= config.tis.high)
    total = zero_masked(rho, mask).sum()
    return {
        "tis/ratio/token": Mean(total=total, count=tokens),
        "tis/ratio_max": Max(extreme=jnp.where(mask, rho, -jnp.inf).max(initial=-jnp.inf)),
        "tis/abs/token": Mean(total=jnp.abs(rho - 1).sum(), count=tokens),  # a masked ρ is 1
        "tis/clip_fraction/token": Mean(total=_count(mask & ~inside), count=tokens),
        "tis/ess/token": EffectiveSize(total=total, squares=zero_masked(rho**2, mask).sum(), count=tokens),
    }


def _region_metrics(response: Response, weights: Float[Array, " T"], config: TriageConfig) -> Metrics:
    """Masses of the four regions and the ratio of the two amplifying ones (docs/CHARACTERIZATION.md)."""
    advantage, gap = response.advantage, response.gap
    mass = jnp.abs(advantage)
    q1, q2 = (advantage > 0) & (gap > 0), (advantage > 0) & (gap < 0)
    q3, q4 = (advantage < 0) & (gap < 0), (advantage < 0) & (gap > 0)
    effective = mass * tis_weights(ratio(gap), config.tis)
    masses = {
        name: zero_masked(mass, q).sum() for name, q in (("q1", q1), ("q2", q2), ("q3", q3), ("q4", q4))
    }
    length = jnp.maximum(_count(response.mask), 1).astype(gap.dtype)

    def asymmetry(mass: Float[Array, " T"]) -> Mean:
        return Mean(total=zero_masked(mass, q3).sum(), count=zero_masked(mass, q1).sum())

    metrics: Metrics = {f"quadrant/{name}/mass": Sum(total=total) for name, total in masses.items()}
    return metrics | {
        "rho_asym/raw": Mean(total=masses["q3"], count=masses["q1"]),
        "rho_asym/length_normalised": Mean(total=masses["q3"] / length, count=masses["q1"] / length),
        "rho_asym/effective": asymmetry(effective),
        "rho_asym/gated": asymmetry(effective * weights),
    }


def _gate_metrics(response: Response, weights: Float[Array, " T"], config: TriageConfig) -> Metrics:
    gate, mask, tokens = config.gate, response.mask, _count(response.mask)
    found = gate_segments(response, gate)
    valid, eligible = _count(found.valid), _count(found.eligible)
    severe = found.mean_gap < gate.mean_severe
    tiers = {
        "mean_mild": (found.mean_gap < gate.mean_mild) & ~severe,
        "mean_severe": severe,
        "tail_one": (found.deep > 0) & (found.deep < gate.deep_count),
        "tail_full": found.deep >= gate.deep_count,
    }
    verdict = zero_masked(found.weight, found.valid).sum(dtype=jnp.int32).astype(response.gap.dtype) / 100
    return {
        "gate/weight_mean/token": Mean(total=zero_masked(weights, mask).sum(), count=tokens),
        "gate/weight_units": Sum(total=to_hundredths(weights, mask).sum(dtype=jnp.int32)),
        "gate/damped_fraction/token": Mean(total=_count(mask & (weights < 1)), count=tokens),
        "gate/segment_weight_mean/segment": Mean(total=verdict, count=valid),
        "gate/eligible_fraction/segment": Mean(total=eligible, count=valid),
        "gate/deep_tokens": Sum(total=found.deep.sum(dtype=jnp.int32)),
    } | {
        f"gate/trigger_rate/{tier}/segment": Mean(total=_count(found.eligible & hit), count=eligible)
        for tier, hit in tiers.items()
    }


def response_metrics(response: Response, weights: Float[Array, " T"], config: TriageConfig) -> Metrics:
    """Mismatch metrics of one response."""
    return (
        _gap_metrics(response)
        | _tis_metrics(response, config)
        | _region_metrics(response, weights, config)
        | _gate_metrics(response, weights, config)
    )


def mismatch_metrics(
    batch: TokenBatch, config: TriageConfig | None = None, weights: Float[Array, "B T"] | None = None
) -> Metrics:
    """The keys of `metrics.py` that need no live log-probabilities: gap, tis, quadrant, rho_asym and gate.

    `config` (default `TriageConfig()`) gives the thresholds; `weights` default to the Gate's own. Raises
    ValueError on shapes that do not agree.
    """
    config = config or TriageConfig()
    check_shapes(batch, weights=weights)
    dtype = jnp.result_type(batch.old_logp)
    if weights is None:
        weights = gate_weights(batch.old_logp - batch.sampler_logp, batch.advantages, batch.mask, config)

    def one(batch: TokenBatch, weights: Float[Array, " T"]) -> Metrics:
        return response_metrics(response_of(batch, dtype), weights, config)

    return collapse(jax.vmap(one)(batch, weights))
