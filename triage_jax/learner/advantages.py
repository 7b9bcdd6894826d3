"""Group-relative advantages (GRPO), on the host in float64: groups are small and rewards come from Python."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupAdvantages:
    """Advantages `[B]` float32, and what was noticed on the way."""

    advantages: np.ndarray
    usable: np.ndarray
    """bool `[B]`: False where the reward was not finite; such a sample is left out of its group and of the loss"""
    flat_groups: int
    """Groups whose rewards are all equal: their advantages are exactly zero"""


def group_advantages(rewards: np.ndarray, group_size: int, *, divide_by_std: bool = True) -> GroupAdvantages:
    """A_i = (R_i - mean) / (std + 1e-6) within consecutive groups of `group_size` (objective.md §2.3).

    A group whose rewards are all equal gets exact zeros: the residue of a mean in floating point divided by a standard
    deviation of the same residue would be of order one. Raises ValueError if the rewards do not divide into groups.
    """
    if rewards.ndim != 1 or group_size < 1 or rewards.size % group_size:
        raise ValueError(f"rewards of shape {rewards.shape} do not divide into groups of {group_size}")
    grouped = rewards.astype(np.float64).reshape(-1, group_size)
    usable = np.isfinite(grouped)
    count = np.maximum(usable.sum(axis=1, keepdims=True), 1)
    clean = np.where(usable, grouped, 0.0)
    mean = clean.sum(axis=1, keepdims=True) / count
    centred = np.where(usable, clean - mean, 0.0)
    lowest = np.where(usable, grouped, np.inf).min(axis=1)
    highest = np.where(usable, grouped, -np.inf).max(axis=1)
    flat = highest <= lowest
    if divide_by_std:
        centred /= np.sqrt(np.square(centred).sum(axis=1, keepdims=True) / count) + 1e-6
    centred[flat] = 0.0
    return GroupAdvantages(
        advantages=centred.reshape(-1).astype(np.float32),
        usable=usable.reshape(-1),
        flat_groups=int(flat.sum()),
    )
