"""Repair: a one-sided pull on segments whose mean gap is too negative (TRIAGE, docs/METHODS.md)."""

from typing import no_type_check

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from triage_jax.objective import segments
from triage_jax.objective.batch import (
    Response,
    TokenBatch,
    Totals,
    check_shapes,
    response_of,
    update_totals,
    zero_masked,
)
from triage_jax.objective.config import RepairConfig, TriageConfig


@no_type_check  # fields may also hold shapes, dtypes or PartitionSpecs of the same tree
@struct.dataclass
class RepairSegments:
    """Penalty and statistics of each segment of one response."""

    valid: Bool[Array, " S"]
    mean_gap: Float[Array, " S"]
    selected: Int[Array, " S"]
    penalty: Float[Array, " S"]
    force: Float[Array, " S"]


def repair_segments(logp: Float[Array, " T"], response: Response, config: RepairConfig) -> RepairSegments:
    """Penalties of one response, whether or not Repair is enabled; `logp` is zero where masked."""
    live = logp - response.sampler_logp
    if config.scope == "whole":
        selected = segments.split(response.mask, config.segment)
    else:
        positive = segments.split(response.advantage, config.segment).sum(axis=-1) > 0
        within = response.mask if config.scope == "adv_positive" else live < 0
        selected = segments.split(within, config.segment) & positive[:, None]

    valid = segments.count(segments.split(response.mask, config.segment))
    gap = segments.split(live, config.segment)
    mean_gap = segments.mean(jnp.where(selected, gap, lax.stop_gradient(gap)), valid)
    chosen = segments.count(selected)
    violation = zero_masked(jnp.maximum(config.target - mean_gap, 0), chosen > 0)
    root = jnp.sqrt(1 + (violation / config.beta) ** 2)
    return RepairSegments(
        valid=valid > 0,
        mean_gap=lax.stop_gradient(mean_gap),
        selected=chosen,
        penalty=violation**2 / (root + 1),  # beta^2 (root - 1) without its cancellation
        force=lax.stop_gradient(violation / root),
    )


def repair_loss(
    logp: Float[Array, "B T"], batch: TokenBatch, config: TriageConfig, totals: Totals | None = None
) -> Float[Array, ""]:
    """Repair's penalty before its coefficient, (1/S) sum_R phi(max(target - d_R, 0)).

    d_R is the mean of logp - sampler_logp over the valid tokens of a segment of `config.repair.segment`
    positions, and phi(q) = beta^2 (sqrt(1 + (q / beta)^2) - 1), whose slope q / sqrt(1 + (q / beta)^2) stays
    below beta. The value uses the whole segment, the gradient only the tokens that `config.repair.scope`
    selects; a segment without any adds nothing but is counted in S, the number of valid segments of the
    update (`totals`, or else this batch). Raises ValueError on shapes that do not agree.
    """
    check_shapes(batch, logp=logp)
    if totals is None:
        totals = update_totals(batch, jnp.ones_like(logp), config)

    def one(logp: Float[Array, " T"], batch: TokenBatch) -> Float[Array, ""]:
        response = response_of(batch, logp.dtype)
        return repair_segments(zero_masked(logp, response.mask), response, config.repair).penalty.sum()

    penalty = jax.vmap(one)(logp, batch).sum()
    return penalty / jnp.maximum(totals.repair_segments, 1).astype(penalty.dtype)
