"""The Gate with thresholds from a reference window (TRIAGE docs/CALIBRATION.md); `calibration.py` finds them."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from triage_jax.objective import segments
from triage_jax.objective.batch import Response, TokenBatch, check_shapes, response_of
from triage_jax.objective.config import TriageConfig
from triage_jax.objective.gate import gate_segments, spread_weights


def calibrated_gate_weights(
    gap: Float[Array, "B T"],
    advantages: Float[Array, "B *token"],
    mask: Bool[Array, "B T"] | Num[Array, "B T"],
    config: TriageConfig,
) -> Float[Array, "B T"]:
    """As `gate_weights`, with w_s = 1 - (1 - floor) e for a segment with mean advantage < 0.

    e = max over features of clip((x - t) / (f - t), 0, 1), where the features x are the depth -mean(gap), with
    t, f = mean, mean_full, and the share of gaps < -deep, with t, f = tail, tail_full; a feature with f <= t takes no
    part. w_s is rounded to 0.01. Segments and scope are those of `config.gate`, thresholds and floor those of
    `config.calibration`. Raises ValueError without thresholds and on shapes that do not agree.
    """
    if not config.calibration.thresholds:
        raise ValueError("calibration.thresholds is (); accepted: the five of a frozen GateCalibration")
    dtype = jnp.result_type(gap)
    batch = TokenBatch(old_logp=gap, sampler_logp=jnp.zeros_like(gap), advantages=advantages, mask=mask)
    check_shapes(batch)

    def one(batch: TokenBatch) -> Float[Array, " T"]:
        response = response_of(batch, dtype)
        if not config.gate.enabled:
            return jnp.ones_like(response.gap)
        return spread_weights(_hundredths(response, config), response, config.gate)

    return jax.vmap(one)(batch)


def _hundredths(response: Response, config: TriageConfig) -> Int[Array, " S"]:
    deep, mean, mean_full, tail, tail_full = config.calibration.thresholds
    size = config.gate.segment
    found = gate_segments(response, config.gate)
    valid = segments.count(segments.split(response.mask, size))
    dtype = response.gap.dtype
    deep_tokens = segments.count(
        segments.split(response.gap, size) < -deep
    )  # a masked gap is 0, and deep > 0
    share = deep_tokens.astype(dtype) / jnp.maximum(valid, 1).astype(dtype)

    excess = jnp.zeros_like(share)
    for feature, start, full in ((-found.mean_gap, mean, mean_full), (share, tail, tail_full)):
        if full > start:
            excess = jnp.maximum(excess, (feature - start) / (full - start))
    damped = 100 - (100 - round(100 * config.calibration.floor)) * jnp.minimum(excess, 1)
    return jnp.where(found.eligible, jnp.round(damped).astype(jnp.int32), 100)
