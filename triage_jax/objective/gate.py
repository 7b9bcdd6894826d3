"""The Gate: detached weights that damp the amplifying tokens of flagged segments (TRIAGE docs/METHODS.md)."""

from typing import no_type_check

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Num

from triage_jax.objective import segments
from triage_jax.objective.batch import Response, TokenBatch, check_shapes, response_of
from triage_jax.objective.config import GateConfig, TriageConfig


@no_type_check  # fields may also hold shapes, dtypes or PartitionSpecs of the same tree
@struct.dataclass
class GateSegments:
    """Statistics and verdict of each segment of one response; weights in hundredths."""

    valid: Bool[Array, " S"]
    eligible: Bool[Array, " S"]
    mean_gap: Float[Array, " S"]
    deep: Int[Array, " S"]
    weight: Int[Array, " S"]


def _hundredths(weight: float) -> int:
    return round(100 * weight)


def gate_segments(response: Response, config: GateConfig) -> GateSegments:
    """Tiers of one response, whether or not the Gate is enabled."""
    mask = segments.split(response.mask, config.segment)
    gap = segments.split(response.gap, config.segment)
    valid = segments.count(mask)
    mean_gap = segments.mean(gap, valid)
    # The sign of the sum is the sign of the mean, without its rounding.
    eligible = segments.split(response.advantage, config.segment).sum(axis=-1) < 0
    deep = segments.count(gap < config.deep)  # a masked gap is 0, never below a threshold of at most 0

    mild, severe = _hundredths(config.mean_mild_weight), _hundredths(config.mean_severe_weight)
    by_mean = jnp.where(mean_gap < config.mean_mild, mild, 100)
    by_mean = jnp.where(mean_gap < config.mean_severe, severe, by_mean)
    ramp = [_hundredths(1 - (1 - config.floor) * k / config.deep_count) for k in range(config.deep_count + 1)]
    by_tail = jnp.asarray(ramp, jnp.int32)[jnp.minimum(deep, config.deep_count)]
    weight = jnp.where(eligible, jnp.minimum(by_mean, by_tail), 100).astype(jnp.int32)
    return GateSegments(valid=valid > 0, eligible=eligible, mean_gap=mean_gap, deep=deep, weight=weight)


def response_weights(response: Response, config: GateConfig) -> Float[Array, " T"]:
    """Gate weights of one response; 1 where masked."""
    if not config.enabled:
        return jnp.ones_like(response.gap)
    return spread_weights(gate_segments(response, config).weight, response, config)


def spread_weights(
    hundredths: Int[Array, " S"], response: Response, config: GateConfig
) -> Float[Array, " T"]:
    """Weight of every token from those of the segments, by `config.scope`; 1 where masked or undamped."""
    damped = response.mask if config.scope == "whole" else response.gap < 0
    # A table, because a compiled division by 100 is a product with 0.01, which misses the nearest float.
    weight = jnp.asarray([k / 100 for k in range(101)], response.gap.dtype)[hundredths]
    spread = jnp.broadcast_to(weight[:, None], (weight.shape[0], config.segment))
    spread = segments.join(spread, response.gap.shape[0])
    return lax.stop_gradient(jnp.where(damped, spread, 1))


def gate_weights(
    gap: Float[Array, "B T"],
    advantages: Float[Array, "B *token"],
    mask: Bool[Array, "B T"] | Num[Array, "B T"],
    config: TriageConfig,
) -> Float[Array, "B T"]:
    """Weight of every token's policy loss, a multiple of 0.01, without gradient; 1 where masked or undamped.

    A segment s of `config.gate.segment` positions with mean advantage A_s < 0, mean gap d_s and k_s tokens
    with gap < deep gets w_s = min(w_mean(d_s), 1 - (1 - floor) min(k_s / deep_count, 1)), where w_mean is
    `mean_severe_weight` for d_s < mean_severe, `mean_mild_weight` for d_s < mean_mild, else 1. All
    comparisons are strict. Its tokens with gap < 0 (scope "q3") or all its valid ones ("whole") weigh w_s.

    `gap` is old_logp - sampler_logp. Compute the weights once per update, before any split, so that every
    part sees the same. Raises ValueError on shapes that do not agree.
    """
    dtype, zeros = jnp.result_type(gap), jnp.zeros_like(gap)
    batch = TokenBatch(old_logp=gap, sampler_logp=zeros, advantages=advantages, mask=mask)
    check_shapes(batch)

    def one(response: TokenBatch) -> Float[Array, " T"]:
        return response_weights(response_of(response, dtype), config.gate)

    return jax.vmap(one)(batch)
