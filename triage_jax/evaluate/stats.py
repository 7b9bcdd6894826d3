"""Estimates from right or wrong samples: pass@k, accuracy, and how far they can be trusted."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

Z95 = 1.959963984540054
"""Two-sided 95 % quantile of the normal distribution"""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A share with its 95 % interval."""

    value: float
    low: float
    high: float


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Probability that at least one of k samples drawn without replacement is right: 1 - C(n-c, k) / C(n, k).

    Unbiased for k independent samples (Chen et al. 2021, arXiv 2107.03374, eq. 1). Raises ValueError unless
    1 <= k <= samples and 0 <= right <= samples.
    """
    if not 1 <= k <= samples or not 0 <= right <= samples:
        raise ValueError(f"{right} right of {samples}, k = {k}; accepted: k from 1 to the samples")
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def wilson(share: float, count: float, z: float = Z95) -> Estimate:
    """Wilson's score interval of a binomial share; `count` trials may be a fraction (an effective number).

    Raises ValueError without trials.
    """
    if count <= 0 or not 0.0 <= share <= 1.0:
        raise ValueError(f"share {share} of {count} trials; accepted: a share of more than 0 trials")
    scale = 1.0 + z * z / count
    centre = (share + z * z / (2 * count)) / scale
    half = z / scale * math.sqrt(share * (1.0 - share) / count + z * z / (4 * count * count))
    # Rounding must not put the share outside: at 0 and 1 the ends are exact.
    low, high = max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))
    return Estimate(value=share, low=low, high=high)


def share_over_problems(means: Sequence[float], trials: float) -> Estimate:
    """Mean of one share per problem, with Wilson's interval at the effective sample size.

    `trials` is their number in all, were they independent. Samples of one problem are not, so that an interval over
    all of them would be too narrow: see `effective_size`. Raises ValueError without problems.
    """
    if not len(means) or trials < len(means):
        raise ValueError(
            f"{len(means)} problems, {trials:g} trials; accepted: at least one of each per problem"
        )
    values = np.asarray(means, np.float64)
    # Clipped, since the mean of ones may round to more than one.
    return wilson(float(np.clip(values.mean(), 0.0, 1.0)), effective_size(values, trials))


def effective_size(means: Float[np.ndarray, "P"], trials: float) -> float:
    """Independent trials that would give the mean of these shares the variance it has between problems.

    p (1 - p) / Var(mean), held between the number of problems (trials of a problem all alike) and `trials` (all
    independent); where p is 0 or 1, or there is one problem, nothing is known of it and it is the number of problems.
    Intervals of this kind are compared by Franco, Little, Louis & Slud 2019 (J. Surv. Stat. Meth. 7:334).
    """
    problems, share = len(means), float(means.mean())
    binomial = share * (1.0 - share)
    if problems < 2 or binomial <= 0.0:
        return float(problems)
    variance = float(means.var(ddof=1)) / problems
    return float(np.clip(binomial / variance, problems, trials)) if variance > 0.0 else trials


def mean_of(parts: Sequence[Estimate]) -> Estimate:
    """Mean of independent estimates; its interval by MOVER: the distances to the parts' ends add up in squares.

    Zou & Donner 2008 (Statist. Med. 27:1693). Raises ValueError without parts.
    """
    if not parts:
        raise ValueError("accepted: at least one estimate")
    value = sum(part.value for part in parts) / len(parts)
    below = math.sqrt(sum((part.value - part.low) ** 2 for part in parts)) / len(parts)
    above = math.sqrt(sum((part.high - part.value) ** 2 for part in parts)) / len(parts)
    return Estimate(value=value, low=value - below, high=value + above)
