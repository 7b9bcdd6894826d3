"""What the known corrections would leave of each region: mean weight, weighed by |A|, without training anything.

Every rule is its published default, at r = 1 (one update per rollout), as a factor on the policy-gradient term of a
token. Renormalising afterwards is left out: it scales all of them alike, or all of a response.

| name | factor, with ρ = e^δ |
| --- | --- |
| TIS | min(ρ, 2) |
| IcePop | ρ where 0.5 <= ρ <= 5, else 0 |
| PPO clip, sampler | 0 where A > 0 and ρ > 1.28, or A < 0 and ρ < 0.8 |
| DPPO-TV | 0 where A > 0 and p - q > 0.2, or A < 0 and p - q < -0.2, p and q being the two probabilities |
| geometric | ρ in responses with 0.999 <= exp(mean δ) <= 1.002, else 0 |
| OPSM | 0 in responses with A < 0 and mean δ < -0.05 |
| TRIAGE Gate | 0.1 to 1 on δ < 0 of flagged 64-token segments with mean A < 0, times TIS |
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float

from triage_jax.characterize.arrays import Advantages, Gap, Mask, check_shapes, count_rows, per_token
from triage_jax.characterize.tails import SEGMENT, count_segments

CLASSES = ("A < 0, tail", "A < 0, δ < 0", "A > 0, δ > 0", "A > 0, δ < 0", "A < 0, δ > 0")
"""Amplifying ones first; the second is without the tail"""
REMEDIES = ("TIS", "IcePop", "PPO clip, sampler", "DPPO-TV", "geometric", "OPSM", "TRIAGE Gate")

MILD, SEVERE, DEEP = -0.5, -1.5, -6.0
MILD_WEIGHT, LEAST, DEEP_COUNT = 0.3, 0.1, 2


@dataclass(frozen=True, kw_only=True, eq=False)
class RemedySums:
    """Σ |A| and Σ |A| weight in each class of `CLASSES`, for each rule of `REMEDIES`."""

    mass: Float[np.ndarray, " C"]
    kept: Float[np.ndarray, "M C"]

    def __add__(self, other: "RemedySums") -> "RemedySums":
        return RemedySums(mass=self.mass + other.mass, kept=self.kept + other.kept)

    def mean_weights(self) -> Float[np.ndarray, "M C"]:
        """NaN in a class without mass."""
        return np.divide(self.kept, self.mass, where=self.mass > 0, out=np.full_like(self.kept, np.nan))


def remedy_sums(
    gap: Gap,
    advantages: Advantages,
    mask: Mask,
    difference: Float[np.ndarray, "B T"],
    *,
    threshold: float,
) -> RemedySums:
    """Sums of one block; `difference` is p - q. A tail token has δ < threshold. Raises ValueError on shapes."""
    check_shapes(gap, advantages, mask)
    spread, mass = per_token(advantages), np.abs(per_token(advantages)).astype(float)
    weights = _weights(gap, spread, mask, difference)
    below, above, tail = (gap < 0) & mask, (gap > 0) & mask, (gap < float(threshold)) & mask
    if spread.shape[1] > 1:
        down, up = spread < 0, spread > 0
        classes = (down & tail, down & below & ~tail, up & above, up & below, down & above)
        return RemedySums(
            mass=np.array([mass[c].sum() for c in classes]),
            kept=np.array([[(mass * w)[c].sum() for c in classes] for w in weights]),
        )
    # |A| factors out: sums over the tail, the rest below 0 and what is above, which A's sign then assigns.
    sides = np.stack([tail, below & ~tail, above], axis=1)
    kept = (
        np.stack([weights[:, row] @ side.T for row, side in enumerate(sides.astype(weights.dtype))])
        * mass[:, :, None]
    )  # [B, M, side]
    counts = np.stack([count_rows(sides[:, side]) for side in range(3)], axis=1) * mass
    down, up = advantages < 0, advantages > 0
    return RemedySums(mass=_assign(counts, down, up), kept=_assign(kept, down, up))


def _assign(
    sums: Float[np.ndarray, "B *m 3"], down: Bool[np.ndarray, " B"], up: Bool[np.ndarray, " B"]
) -> Float[np.ndarray, "*m C"]:
    """From sums over (tail, rest below 0, above) of each response to the classes of `CLASSES`."""
    negative, positive = sums[down].sum(axis=0), sums[up].sum(axis=0)
    tail, rest, above = np.moveaxis(negative, -1, 0)
    return np.stack([tail, rest, positive[..., 2], positive[..., 0] + positive[..., 1], above], axis=-1)


def _weights(
    gap: Gap, advantages: Float[np.ndarray, "B _"], mask: Mask, difference: Float[np.ndarray, "B T"]
) -> Float[np.ndarray, "M B T"]:
    """Weights in the order of `REMEDIES`."""
    ratio = np.exp(np.clip(gap, -20, 20))
    down, up = advantages < 0, advantages > 0
    mean = (gap * mask).sum(axis=1, dtype=float) / np.maximum(count_rows(mask), 1)
    inside = (np.exp(mean) >= 0.999) & (np.exp(mean) <= 1.002)
    weights = np.empty((len(REMEDIES), *gap.shape), gap.dtype)
    np.minimum(ratio, 2, out=weights[0])
    np.multiply(ratio, (ratio >= 0.5) & (ratio <= 5), out=weights[1])
    # One bound per sign of A, the other open: a comparison less per token.
    low, high = np.where(down, -1, -np.inf).astype(gap.dtype), np.where(up, 1, np.inf).astype(gap.dtype)
    weights[2] = (ratio >= np.where(down, 0.8, low)) & (ratio <= high * 1.28)
    weights[3] = (difference >= 0.2 * low) & (difference <= 0.2 * high)
    np.multiply(ratio, inside[:, None], out=weights[4])
    weights[5] = ~(down & (mean < -0.05)[:, None])
    weights[6] = weights[0]
    _apply_gate(weights[6], gap, advantages, mask)
    return weights


def _apply_gate(
    weights: Float[np.ndarray, "B T"], gap: Gap, advantages: Float[np.ndarray, "B _"], mask: Mask
) -> None:
    """Multiply by the Gate's weights with the reported thresholds, scope q3, where they are not 1."""
    valid = np.maximum(count_segments(mask, SEGMENT), 1)
    deep = count_segments((gap < DEEP) & mask, SEGMENT)
    mean = _segment_sums(gap * mask, SEGMENT) / valid
    signed = advantages if advantages.shape[1] == 1 else _segment_sums(advantages * mask, SEGMENT)
    tier = np.where(mean < SEVERE, LEAST, np.where(mean < MILD, MILD_WEIGHT, 1.0))
    ramp = 1 - (1 - LEAST) * np.minimum(deep / DEEP_COUNT, 1)
    found = np.where(signed < 0, np.minimum(tier, ramp), 1.0)
    rows, segments = np.nonzero(found < 1)
    tokens = np.minimum(segments[:, None] * SEGMENT + np.arange(SEGMENT), gap.shape[1])
    inside = tokens < gap.shape[1]
    rows = np.broadcast_to(rows[:, None], tokens.shape)[inside]
    tokens = tokens[inside]
    damped = np.repeat(found[found < 1], SEGMENT)[inside.ravel()]
    weights[rows, tokens] *= np.where(gap[rows, tokens] < 0, damped, 1.0)


def _segment_sums(x: Float[np.ndarray, "B T"], segment: int) -> Float[np.ndarray, "B S"]:
    rows, width = x.shape
    padded = x if width % segment == 0 else np.pad(x, ((0, 0), (0, -width % segment)))
    return padded.reshape(rows, -1, segment).sum(axis=2, dtype=float)
