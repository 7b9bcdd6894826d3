"""What the objective reads (`TokenBatch`) and the sums over one update that normalise it (`Totals`)."""

from typing import Self, no_type_check

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Num, Shaped

from triage_jax.objective import segments
from triage_jax.objective.config import TriageConfig
from triage_jax.objective.ratios import ratio
from triage_jax.objective.signed_mass import SignedMass, signed_mass


@no_type_check  # fields may also hold shapes, dtypes or PartitionSpecs of the same tree
@struct.dataclass
class TokenBatch:
    """Completion tokens of B responses, recorded before the update; none of it carries gradient.

    `old_logp` are the learner's log-probabilities (nats) just before the update, `sampler_logp` those
    recorded at generation. `advantages` is one value per response, `[B]`, or per token, `[B, T]`. `mask`
    marks the valid tokens (bool, or 0/1 of any number type); masked positions may hold anything, NaN and
    infinities included.
    """

    old_logp: Float[Array, "B T"]
    sampler_logp: Float[Array, "B T"]
    advantages: Float[Array, "B *token"]
    mask: Bool[Array, "B T"] | Num[Array, "B T"]


@no_type_check
@struct.dataclass
class Response:
    """One response made safe: zeros where masked, the advantage spread over the tokens, no gradient."""

    old_logp: Float[Array, " T"]
    gap: Float[Array, " T"]
    sampler_logp: Float[Array, " T"]
    advantage: Float[Array, " T"]
    mask: Bool[Array, " T"]


@no_type_check
@struct.dataclass
class Totals:
    """Sums over a whole update. Sums of parts are the sums of the whole; exactly, where they are integers.

    The Gate's weights add up to `weighted_whole + weighted_hundredths / 100` tokens. (Hundredths in one int32
    would overflow at 21 million tokens.) `responses` counts those with a positive sum of weights: a response
    without a valid token takes part in no mean. `repair_segments` counts segments with a valid token.
    `signed_mass` is what BAPO finds its bounds from, and there for that objective only.
    """

    responses: Int[Array, ""]
    tokens: Int[Array, ""]
    weighted_whole: Int[Array, ""]
    weighted_hundredths: Int[Array, ""]
    repair_segments: Int[Array, ""]
    signed_mass: SignedMass | None = None

    def __add__(self, other: Self) -> Self:
        return jax.tree.map(jnp.add, self, other)

    def weighted_tokens(self, dtype: jnp.dtype) -> Float[Array, ""]:
        """Sum of the Gate's weights over the valid tokens."""
        return self.weighted_whole.astype(dtype) + self.weighted_hundredths.astype(dtype) / 100


def zero_masked(x: Num[Array, "*shape"], mask: Bool[Array, "*shape"]) -> Num[Array, "*shape"]:
    """Zero wherever the mask is False, whatever stands there; so the gradient there is zero too."""
    return jnp.where(mask, x, jnp.zeros((), x.dtype))


def as_mask(mask: Shaped[Array, "*shape"]) -> Bool[Array, "*shape"]:
    """Bool from bool or 0/1 of any number type."""
    return mask if mask.dtype == bool else mask != 0


def response_of(batch: TokenBatch, dtype: jnp.dtype) -> Response:
    """The safe view of one response, a `TokenBatch` without its B axis (inside `vmap`)."""
    mask = as_mask(batch.mask)
    old, sampler, advantage = (
        lax.stop_gradient(zero_masked(jnp.broadcast_to(x, mask.shape).astype(dtype), mask))
        for x in (batch.old_logp, batch.sampler_logp, batch.advantages)
    )
    return Response(old_logp=old, gap=old - sampler, sampler_logp=sampler, advantage=advantage, mask=mask)


def check_shapes(batch: TokenBatch, **others: Shaped[Array, "..."] | None) -> None:
    """Raise ValueError unless everything is `[B, T]`, the advantages `[B]` or `[B, T]`; None is skipped."""
    shape = jnp.shape(batch.mask)
    if len(shape) != 2:
        raise ValueError(f"mask has shape {shape}; accepted: [B, T]")
    arrays = {"old_logp": batch.old_logp, "sampler_logp": batch.sampler_logp} | others
    for name, array in arrays.items():
        if array is not None and jnp.shape(array) != shape:
            raise ValueError(f"{name} has shape {jnp.shape(array)}; accepted: {shape}, the shape of mask")
    if jnp.shape(batch.advantages) not in (shape, shape[:1]):
        raise ValueError(
            f"advantages has shape {jnp.shape(batch.advantages)}; accepted: {shape[:1]} (one per response) "
            f"or {shape} (one per token)"
        )


def to_hundredths(weights: Float[Array, "*shape"], mask: Bool[Array, "*shape"]) -> Int[Array, "*shape"]:
    """Gate weights as whole hundredths, 0 where masked."""
    return zero_masked(jnp.round(weights * 100).astype(jnp.int32), mask)


def update_totals(batch: TokenBatch, weights: Float[Array, "B T"], config: TriageConfig) -> Totals:
    """The sums that normalise one update, to be taken before it is split into micro-batches or over devices.

    Totals of parts add up (`+`, or `psum` of every leaf). `config.name` "bapo" adds what that objective needs.
    Raises ValueError on shapes that do not agree.
    """
    check_shapes(batch, weights=weights)
    balanced = config.name == "bapo"

    def one(batch: TokenBatch, weights: Float[Array, " T"]) -> Totals:
        mask = as_mask(batch.mask)
        hundredths = to_hundredths(weights, mask).sum(dtype=jnp.int32)
        filled = segments.count(segments.split(mask, config.repair.segment)) > 0
        return Totals(
            responses=(hundredths > 0).astype(jnp.int32),
            tokens=mask.sum(dtype=jnp.int32),
            weighted_whole=hundredths // 100,
            weighted_hundredths=hundredths % 100,
            repair_segments=filled.sum(dtype=jnp.int32),
            signed_mass=_signed_mass(batch, config) if balanced else None,
        )

    per_response = jax.vmap(one)(batch, weights)
    return lax.stop_gradient(jax.tree.map(lambda x: x.sum(axis=0, dtype=x.dtype), per_response))


def _signed_mass(batch: TokenBatch, config: TriageConfig) -> SignedMass:
    response = response_of(batch, jnp.result_type(batch.old_logp))
    return signed_mass(ratio(response.gap), response.advantage, config.rivals.bapo)
