"""Sums of the gap δ over valid tokens, under the names of `triage_jax.objective.metrics`; they add up over updates."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from triage_jax.characterize.arrays import Gap, Mask

LOG_RATIO_BOUND = 20.0
SMALL = 0.05
DEEP = -6.0


@dataclass(frozen=True, kw_only=True)
class GapSums:
    """With ρ = e^δ, δ cut to ±20 before the exponential; p and q are the two probabilities of a token."""

    tokens: int = 0
    gap: float = 0.0
    bounded_gap: float = 0.0
    """Σ δ, each cut to ±20"""
    size: float = 0.0
    """Σ |δ|"""
    ratio: float = 0.0
    squared_ratio: float = 0.0
    inverse_ratio: float = 0.0
    error: float = 0.0
    """Σ exp |δ|"""
    probability_difference: float = 0.0
    """Σ |p - q|; NaN where only gaps are known"""
    small: int = 0
    """Tokens with |δ| < 0.05"""
    deep: int = 0
    """Tokens with δ < -6"""
    lowest: float = np.inf
    largest: float = -np.inf

    def __add__(self, other: "GapSums") -> "GapSums":
        sums = {name: getattr(self, name) + getattr(other, name) for name in self.__annotations__}
        sums |= {"lowest": min(self.lowest, other.lowest), "largest": max(self.largest, other.largest)}
        return GapSums(**sums)

    def means(self) -> dict[str, float]:
        """Token means and extremes, in nats where not a share or a ratio. NaN over nothing."""
        n = self.tokens or float("nan")
        extremes = (self.lowest, self.largest) if self.tokens else (float("nan"), float("nan"))
        return {
            "gap/mean/token": self.gap / n,
            "gap/abs_mean/token": self.size / n,
            "gap/min": extremes[0],
            "gap/max": extremes[1],
            "gap/within_0.05/token": self.small / n,
            "gap/below_-6/token": self.deep / n,
            "gap/k3_sampler_learner/token": (self.ratio - self.tokens - self.bounded_gap) / n,
            "gap/k3_learner_sampler/token": (self.inverse_ratio - self.tokens + self.bounded_gap) / n,
            "gap/mult_prob_error/token": self.error / n,
            "gap/prob_difference/token": self.probability_difference / n,
            "tis/ratio/token": self.ratio / n,
            "tis/ess/token": self.ratio**2 / (n * self.squared_ratio) if self.squared_ratio else float("nan"),
        }


def gap_sums(gap: Gap, mask: Mask, difference: Float[np.ndarray, "B T"] | None = None) -> GapSums:
    """Sums over the valid tokens of one block; `difference` is p - q, learner minus sampler probability."""
    tokens = int(np.count_nonzero(mask))
    if not tokens:
        return GapSums(probability_difference=0.0 if difference is not None else float("nan"))
    gap = np.where(mask, gap, 0)
    size = np.abs(gap)
    masked = gap.size - tokens
    bounded = np.clip(gap, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = np.exp(bounded)
    inverse = 1 / ratio

    def total(x: Float[np.ndarray, "B T"]) -> float:
        return float(x.sum(dtype=float))

    return GapSums(
        tokens=tokens,
        gap=total(gap),
        bounded_gap=total(bounded),
        size=total(size),
        ratio=total(ratio) - masked,  # a masked ratio is 1
        squared_ratio=total(ratio * ratio) - masked,
        inverse_ratio=total(inverse) - masked,
        error=total(np.maximum(ratio, inverse)) - masked,
        probability_difference=float("nan")
        if difference is None
        else total(np.where(mask, np.abs(difference), 0)),
        small=int(np.count_nonzero(size < SMALL)) - masked,
        deep=int(np.count_nonzero(gap < DEEP)),
        lowest=float(np.where(mask, gap, np.inf).min()),
        largest=float(np.where(mask, gap, -np.inf).max()),
    )
