"""What is computed from a trial's updates and over its seeds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

REWARD, PASSED, UPDATES = 0.10, 0.3125, 3
"""Trigger of the official 4B run: so many updates in a row with no more reward and share of solved prompts"""

# Two-sided 97.5 % quantiles of Student's t for 1 to 12 degrees of freedom.
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179)


@dataclass(frozen=True, kw_only=True)
class Interval:
    """Mean over seeds with its 95 % confidence interval; without bounds for a single seed."""

    mean: float
    half: float | None
    count: int

    def __str__(self) -> str:
        return f"{self.mean:.3f}" if self.half is None else f"{self.mean:.3f} ± {self.half:.3f}"


def interval(values: Sequence[float]) -> Interval:
    """Student's t interval. Raises ValueError without values or for more than 13."""
    count = len(values)
    if not 1 <= count <= len(T_QUANTILES) + 1:
        raise ValueError(f"{count} values; accepted: 1 to {len(T_QUANTILES) + 1}")
    half = None
    if count > 1:
        half = T_QUANTILES[count - 2] * float(np.std(values, ddof=1)) / math.sqrt(count)
    return Interval(mean=float(np.mean(values)), half=half, count=count)


def collapse_step(
    rewards: Sequence[float | None],
    passed: Sequence[float | None],
    grad_norms: Sequence[float | None],
) -> int | None:
    """The update, from 1, at which a run has collapsed; None if it has not.

    That is the third update in a row with reward <= 0.10 and pass@16 <= 0.3125, or the first gradient norm that is not
    finite (logged as None): the triggers of the official 4B and 30B runs.
    """
    row = 0
    for step, (reward, share, norm) in enumerate(zip(rewards, passed, grad_norms, strict=True), start=1):
        if norm is None or not math.isfinite(norm):
            return step
        low = reward is not None and share is not None and reward <= REWARD and share <= PASSED
        row = row + 1 if low else 0
        if row == UPDATES:
            return step
    return None


def window_means(values: Sequence[float | None], width: int) -> list[float]:
    """Means of consecutive windows, of the finite values; NaN where a window has none."""
    blocks = [values[start : start + width] for start in range(0, len(values), width)]
    return [_mean([x for x in block if x is not None and math.isfinite(x)]) for block in blocks]


def last_mean(values: Sequence[float | None], width: int) -> float:
    """Mean of the last finite values."""
    return window_means(values[-width:], width)[-1]


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else math.nan


@dataclass(frozen=True, kw_only=True)
class Signs:
    """Windows, from 1, at which something is first seen; None if it is not."""

    rho_asym: int | None
    """rho_asym of 1.5 or more, where the official runs were drifting"""
    concentration: int | None
    """C_tok above the 97.5 % quantile of its permutation null"""
    tail: int | None
    """5 % quantile of δ at least twice as deep as in the first window"""
    gap: int | None
    """Mean abs δ at least twice that of the first window"""
    reward: int | None
    """Reward at most 0.7 times that of the best window before"""


def signs(record: dict[str, Any]) -> Signs:
    """When the precursors of a collapse appear in a trial, and when the reward falls."""
    windows, curves = record["windows"], record["curves"]
    gaps = window_means(curves["gap"], windows["width"])
    rewards = window_means(curves["reward"], windows["width"])
    best = np.maximum.accumulate(rewards)
    depth = [-x if x is not None else math.nan for x in windows["q05"]]
    pairs = zip(windows["C_tok"], windows["C_tok_null_high"], strict=True)
    return Signs(
        rho_asym=_first([_at_least(x, 1.5) for x in windows["rho_asym"]]),
        concentration=_first([x is not None and y is not None and x > y for x, y in pairs]),
        tail=_first([_at_least(x, 2 * depth[0]) for x in depth]) if depth[0] > 0 else None,
        gap=_first([_at_least(x, 2 * gaps[0]) for x in gaps]),
        reward=_first([x <= 0.7 * y for x, y in zip(rewards, best, strict=True)]),
    )


def _at_least(value: float | None, limit: float) -> bool:
    return value is not None and value >= limit


def _first(flags: Sequence[bool]) -> int | None:
    return next((index for index, flag in enumerate(flags, start=1) if flag), None)
