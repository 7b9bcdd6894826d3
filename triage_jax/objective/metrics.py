"""Metrics that merge: sums, counts and extremes, divided once, after the last micro-batch, device and host.

A key ends with what its mean runs over: `/token`, `/segment` or `/response`. Statistics are taken on the mask
before the Gate. A mean over nothing is NaN. Every configuration yields every key. Notation: δ = old_logp -
sampler_logp (the gap, nats), ρ = exp(δ), r = exp(logp - old_logp), A advantage; log-ratios are cut to ±20
before `exp`. Gate and Repair diagnostics follow their thresholds whether or not they are enabled.

| key | unit | kind | meaning |
| --- | --- | --- | --- |
| `loss` | 1 | sum | policy + repair, the value that is differentiated |
| `loss/policy` | 1 | sum | policy loss |
| `loss/repair` | 1 | sum | Repair's contribution, coefficient included |
| `batch/responses` | 1 | sum | responses with a valid token |
| `batch/tokens` | 1 | sum | valid tokens |
| `gap/mean/token` | nat | mean | δ |
| `gap/abs_mean/token` | nat | mean | abs(δ) |
| `gap/abs_mean/response` | nat | mean | mean abs(δ) of a response |
| `gap/min` | nat | min | δ |
| `gap/max_abs` | nat | max | abs(δ) |
| `gap/within_0.05/token` | 1 | mean | share with abs(δ) < 0.05 |
| `gap/k1/token` | nat | mean | -δ, which estimates KL(sampler, learner) |
| `gap/k3_sampler_learner/token` | nat | mean | ρ - 1 - δ, which estimates KL(sampler, learner) |
| `gap/k3_learner_sampler/token` | nat | mean | 1/ρ - 1 + δ, the same with the sides exchanged |
| `gap/js/token` | nat | mean | (ρ δ - (1 + ρ) log((1 + ρ) / 2)) / 2, Jensen-Shannon divergence |
| `gap/mult_prob_error/token` | 1 | mean | exp(abs(δ)) |
| `tis/ratio/token` | 1 | mean | ρ |
| `tis/ratio_max` | 1 | max | ρ |
| `tis/abs/token` | 1 | mean | abs(ρ - 1) |
| `tis/clip_fraction/token` | 1 | mean | share with ρ outside [low, high] |
| `tis/ess/token` | 1 | ess | (Σρ)² / (n Σρ²), effective share of the tokens |
| `ppo/ratio/token` | 1 | mean | r |
| `ppo/clip_fraction/token` | 1 | mean | share that a clip, mask or rejection leaves without gradient |
| `ppo/approx_kl/token` | nat | mean | r - 1 - log r |
| `quadrant/q1/mass` | 1 | sum | abs(A) over A > 0, δ > 0 (amplifying) |
| `quadrant/q2/mass` | 1 | sum | abs(A) over A > 0, δ < 0 (contracting) |
| `quadrant/q3/mass` | 1 | sum | abs(A) over A < 0, δ < 0 (amplifying) |
| `quadrant/q4/mass` | 1 | sum | abs(A) over A < 0, δ > 0 (contracting) |
| `rho_asym/raw` | 1 | ratio | q3 over q1, weighed by abs(A) |
| `rho_asym/length_normalised` | 1 | ratio | weighed by abs(A) / tokens of the response |
| `rho_asym/effective` | 1 | ratio | weighed by abs(A) times the TIS weight |
| `rho_asym/gated` | 1 | ratio | weighed by abs(A) times TIS and Gate weight |
| `gate/weight_mean/token` | 1 | mean | applied Gate weight |
| `gate/weight_units` | 1/100 | sum | applied Gate weights of the valid tokens, in hundredths |
| `gate/damped_fraction/token` | 1 | mean | share with an applied weight below 1 |
| `gate/segment_weight_mean/segment` | 1 | mean | verdict w_s over valid segments |
| `gate/eligible_fraction/segment` | 1 | mean | share of valid segments with mean A < 0 |
| `gate/trigger_rate/mean_mild/segment` | 1 | mean | share of eligible: mean_severe <= mean δ < mean_mild |
| `gate/trigger_rate/mean_severe/segment` | 1 | mean | share of eligible: mean δ < mean_severe |
| `gate/trigger_rate/tail_one/segment` | 1 | mean | share of eligible: 1 to deep_count - 1 deep tokens |
| `gate/trigger_rate/tail_full/segment` | 1 | mean | share of eligible: deep_count deep tokens or more |
| `gate/deep_tokens` | 1 | sum | tokens with δ < deep, of any advantage |
| `repair/loss` | 1 | sum | penalty before its coefficient |
| `repair/coefficient` | 1 | max | coefficient at this step |
| `repair/mean_gap/segment` | nat | mean | d_R of the live gap logp - sampler_logp |
| `repair/active_fraction/segment` | 1 | mean | share of valid segments with a penalty |
| `repair/force_mean/segment` | nat | mean | slope of the penalty, 0 where inactive |
| `repair/scoped_force_mean/segment` | nat | mean | the same over segments with a token in scope |
| `repair/segments/response` | 1 | mean | valid segments per response |
| `repair/scope_token_fraction/token` | 1 | mean | share that Repair's scope selects |
"""

from collections.abc import Callable
from typing import NamedTuple, no_type_check

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Num


def _divide(numerator: Array, denominator: Array) -> Array:
    return jnp.where(denominator == 0, jnp.nan, numerator / jnp.where(denominator == 0, 1, denominator))


@no_type_check  # fields may also hold shapes, dtypes or PartitionSpecs of the same tree
@struct.dataclass
class Mean:
    """total / count; also a ratio of two sums."""

    total: Num[Array, "*batch"]
    count: Num[Array, "*batch"]

    def value(self) -> Array:
        return _divide(self.total, self.count)


@no_type_check
@struct.dataclass
class Sum:
    total: Num[Array, "*batch"]

    def value(self) -> Array:
        return self.total


@no_type_check
@struct.dataclass
class EffectiveSize:
    """Kish's effective sample size as a share of the count: total² / (count · squares)."""

    total: Num[Array, "*batch"]
    squares: Num[Array, "*batch"]
    count: Num[Array, "*batch"]

    def value(self) -> Array:
        return _divide(self.total / jnp.maximum(self.count, 1) * self.total, self.squares)


@no_type_check
@struct.dataclass
class Max:
    """Largest value; -inf over nothing."""

    extreme: Num[Array, "*batch"]

    def value(self) -> Array:
        return jnp.where(jnp.isneginf(self.extreme), jnp.nan, self.extreme)


@no_type_check
@struct.dataclass
class Min:
    """Smallest value; inf over nothing."""

    extreme: Num[Array, "*batch"]

    def value(self) -> Array:
        return jnp.where(jnp.isposinf(self.extreme), jnp.nan, self.extreme)


type Metric = Mean | Sum | EffectiveSize | Max | Min
type Metrics = dict[str, Metric]


class _Combine(NamedTuple):
    pair: Callable[[Array, Array], Array]
    axis: Callable[..., Array]
    devices: Callable[..., Array]


_SUMS = _Combine(jnp.add, jnp.sum, lax.psum)
_COMBINE = {Max: _Combine(jnp.maximum, jnp.max, lax.pmax), Min: _Combine(jnp.minimum, jnp.min, lax.pmin)}


def _combine(metric: Metric) -> _Combine:
    return _COMBINE.get(type(metric), _SUMS)


def merge(a: Metrics, b: Metrics) -> Metrics:
    """Metrics of two disjoint parts, put together; associative. Raises ValueError if their keys differ."""
    if a.keys() != b.keys():
        raise ValueError(
            f"metrics with different keys cannot be merged; only one has {sorted(a.keys() ^ b.keys())}"
        )
    return {key: jax.tree.map(_combine(metric).pair, metric, b[key]) for key, metric in a.items()}


def collapse(metrics: Metrics) -> Metrics:
    """Merge along a leading axis: of responses, of `scan`ned micro-batches, of stacked devices."""
    return {key: jax.tree.map(lambda x, m=m: _combine(m).axis(x, axis=0), m) for key, m in metrics.items()}


def all_reduce(metrics: Metrics, axis_name: str) -> Metrics:
    """Merge over a named axis, inside `shard_map` or `pmap`."""
    return {
        key: jax.tree.map(lambda x, m=m: _combine(m).devices(x, axis_name), m) for key, m in metrics.items()
    }


def finalize(metrics: Metrics) -> dict[str, Array]:
    """The values to log: every division is done here. NaN for a mean, ratio or extreme over nothing."""
    return {key: metric.value() for key, metric in metrics.items()}
