"""Counts of gaps on a fixed grid, per bin of advantage: quantiles and heat maps of any number of updates.

The grid is that of the bfloat16 numbers from 2^-17 to 128 of either sign, with one bin for what is smaller and one at
each end for what is larger. Adding counts is exact; a quantile read off them is at most one bin off (1/128 of it).
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from triage_jax.characterize.arrays import Advantages, Gap, Mask, check_shapes, per_token

LOWEST, HIGHEST, STEPS = -17, 7, 128
HALF = (HIGHEST - LOWEST) * STEPS + 1
BINS = 2 * HALF + 1
EXPONENT_BIAS = 127

_magnitudes = np.ldexp(
    np.tile(1 + np.arange(STEPS) / STEPS, HIGHEST - LOWEST), np.repeat(np.arange(LOWEST, HIGHEST), STEPS)
)
_positive = np.concatenate([_magnitudes, [2.0**HIGHEST]])
EDGES: Float[np.ndarray, "..."] = np.concatenate([[-np.inf], -_positive[::-1], _positive, [np.inf]])
"""Bin i holds EDGES[i] < δ < EDGES[i + 1], with the edge that is nearer to 0"""

ADVANTAGE_EDGES: Float[np.ndarray, "..."] = np.concatenate(
    [[-np.inf], np.arange(-3.0, 0.0, 0.25), [-1e-9, 1e-9], np.arange(0.25, 3.25, 0.25), [np.inf]]
)
"""Bins of the advantage, closed on the left; the middle one holds the zeros"""


@dataclass(frozen=True, kw_only=True, eq=False)
class GapSketch:
    """`counts[a, g]`: valid tokens with advantage in bin a and gap in bin g."""

    counts: Int[np.ndarray, "A G"]

    def __add__(self, other: "GapSketch") -> "GapSketch":
        return GapSketch(counts=self.counts + other.counts)

    def quantiles(self, shares: list[float]) -> list[float]:
        """Quantiles of δ over all advantages, interpolated inside a bin; NaN over nothing."""
        total = np.cumsum(self.counts.sum(axis=0))
        if not total[-1]:
            return [float("nan")] * len(shares)
        return [self._quantile(total, share) for share in shares]

    def _quantile(self, total: Int[np.ndarray, " G"], share: float) -> float:
        rank = share * float(total[-1])
        place = min(int(np.searchsorted(total, rank)), len(total) - 1)
        place = place if total[place] else int(np.argmax(total > 0))  # share 0: the first filled bin
        low, high = EDGES[place], EDGES[place + 1]
        if not np.isfinite(low + high):
            return float(high if np.isfinite(high) else low)
        before = float(total[place - 1]) if place else 0.0
        inside = (rank - before) / (float(total[place]) - before)
        return float(low + (high - low) * min(max(inside, 0.0), 1.0))

    def rebin(self, edges: Float[np.ndarray, " E"]) -> Int[np.ndarray, "A _"]:
        """Counts between coarser edges, which are moved to the nearest ones of the grid; what lies outside is lost."""
        place = np.abs(EDGES[None, 1:-1] - edges[:, None]).argmin(axis=1) + 1
        totals = np.cumsum(np.pad(self.counts, ((0, 0), (1, 0))), axis=1)
        return np.diff(totals[:, place], axis=1)


def empty_sketch() -> GapSketch:
    """No tokens yet."""
    return GapSketch(counts=np.zeros((len(ADVANTAGE_EDGES) - 1, BINS), np.int64))


def gap_bins(gap: Gap) -> Int[np.ndarray, "B T"]:
    """Bin of each gap: the upper half of its float32 bits, which sort as the magnitudes do."""
    bits = gap.astype(np.float32, copy=False).view(np.int32)
    size = (bits & 0x7FFFFFFF) >> 16
    size -= (EXPONENT_BIAS + LOWEST) * STEPS - 1
    np.maximum(size, 0, out=size)
    np.minimum(size, HALF, out=size)
    sign = bits >> 31  # -1 or 0: complement and add one, which negates, where the number is negative
    size ^= sign
    size -= sign
    size += HALF
    return size


def gap_sketch(gap: Gap, advantages: Advantages, mask: Mask) -> GapSketch:
    """Count the valid tokens. Raises ValueError on shapes that do not agree."""
    check_shapes(gap, advantages, mask)
    bins = gap_bins(gap)
    rows = np.searchsorted(ADVANTAGE_EDGES, per_token(advantages), side="right") - 1
    height = len(ADVANTAGE_EDGES) - 1
    if rows.shape[1] > 1:
        flat = (rows.clip(0, height - 1) * BINS + bins)[mask]
        return GapSketch(counts=np.bincount(flat, minlength=height * BINS).reshape(height, BINS))
    counts = np.zeros((height, BINS), np.int64)
    bins = np.where(mask, bins, BINS)
    for row, found in zip(rows[:, 0].clip(0, height - 1), bins, strict=True):
        counts[row] += np.bincount(found, minlength=BINS + 1)[:BINS]
    return GapSketch(counts=counts)
