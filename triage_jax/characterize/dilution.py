"""Do whole-response averages see the tail? Counts over A < 0 responses with a tail-heavy segment.

A sequence-level rule (GSPO, geometric rejection, OPSM) looks at mean δ, or mean |δ|, of a response. The share of the
responses with a tail-heavy segment whose mean stays below 0.05 is what such a rule lets pass unseen.
Source: the official docs/CHARACTERIZATION.md.
"""

from dataclasses import dataclass

import numpy as np

from triage_jax.characterize.arrays import Advantages, Gap, Mask, per_response
from triage_jax.characterize.gaps import SMALL
from triage_jax.characterize.localize import HEAVY
from triage_jax.characterize.tails import SEGMENT, count_segments


@dataclass(frozen=True, kw_only=True)
class Dilution:
    """Responses with A < 0 and a tail-heavy segment, and how many of them an average hides."""

    responses: int = 0
    hidden_by_mean: int = 0
    """|mean δ| < 0.05"""
    hidden_by_size: int = 0
    """mean |δ| < 0.05"""

    def __add__(self, other: "Dilution") -> "Dilution":
        return Dilution(**{name: getattr(self, name) + getattr(other, name) for name in self.__annotations__})

    def shares(self) -> dict[str, float]:
        n = self.responses or float("nan")
        return {"dilution/mean": self.hidden_by_mean / n, "dilution/abs_mean": self.hidden_by_size / n}


def dilution(
    gap: Gap,
    advantages: Advantages,
    mask: Mask,
    *,
    threshold: float,
    segment: int = SEGMENT,
    heavy: float = HEAVY,
    small: float = SMALL,
) -> Dilution:
    """Count them; a tail token has δ < threshold."""
    valid = count_segments(mask, segment)
    tail = count_segments((gap < float(threshold)) & mask, segment)
    stricken = (tail > 0) & (tail / np.maximum(valid, 1) > heavy)
    chosen = (per_response(advantages, mask) < 0) & stricken.any(axis=1)
    n = np.maximum(mask[chosen].sum(axis=1), 1)
    gap = np.where(mask[chosen], gap[chosen], 0)
    mean, size = gap.sum(axis=1, dtype=float) / n, np.abs(gap).sum(axis=1, dtype=float) / n
    return Dilution(
        responses=int(np.count_nonzero(chosen)),
        hidden_by_mean=int(np.count_nonzero(np.abs(mean) < small)),
        hidden_by_size=int(np.count_nonzero(size < small)),
    )
