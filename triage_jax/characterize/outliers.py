"""The responses with the largest gaps: a heavy tail may be a defect (stale weights, lost routing, retokenised text)."""

from dataclasses import dataclass

import numpy as np

from triage_jax.characterize.arrays import Advantages, Gap, Mask, per_response


@dataclass(frozen=True, kw_only=True)
class Outlier:
    """One response, ranked by its mean |δ|."""

    step: int
    response: int
    tokens: int
    advantage: float
    mean_size: float
    """mean |δ|, nats"""
    times_median: float
    """over the median of the update's responses"""
    worst_gap: float
    worst_position: int
    share: float
    """of the update's Σ |δ|"""


def outliers(gap: Gap, advantages: Advantages, mask: Mask, *, step: int = 0, count: int = 5) -> list[Outlier]:
    """The `count` worst responses of an update, worst first; those without a valid token take no part."""
    size = np.abs(np.where(mask, gap, 0))
    tokens, total = mask.sum(axis=1), size.sum(axis=1, dtype=float)
    mean = np.where(tokens > 0, total / np.maximum(tokens, 1), -1.0)
    if not (tokens > 0).any():
        return []
    middle = float(np.median(mean[tokens > 0]))
    advantage, everything = per_response(advantages, mask), float(total.sum())
    found = []
    for i in np.argsort(-mean, kind="stable")[: min(count, np.count_nonzero(tokens))].tolist():
        place = int(size[i].argmax())
        found.append(
            Outlier(
                step=step,
                response=i,
                tokens=int(tokens[i]),
                advantage=float(advantage[i]),
                mean_size=float(mean[i]),
                times_median=float(mean[i]) / middle if middle else float("nan"),
                worst_gap=float(gap[i, place]),
                worst_position=place,
                share=float(total[i]) / everything if everything else float("nan"),
            )
        )
    return found
