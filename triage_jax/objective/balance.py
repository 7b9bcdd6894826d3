"""Length-aware damping of negative advantages, with every group centred again (TRIAGE docs/METHODS.md).

On the host in float64, as the advantages themselves.
"""

import numpy as np

from triage_jax.objective.config import BalanceConfig


def balance_advantages(
    advantages: np.ndarray, lengths: np.ndarray, group_size: int, config: BalanceConfig
) -> np.ndarray:
    """Advantages `[B]` float32 of consecutive groups, each with mean zero.

    Negative ones are multiplied by clip(min(L / length, 1)^exponent, floor, 1), L being the `quantile` of the active
    lengths of the update; then the group's mean over its active responses is subtracted. The standard deviation is not
    restored. A response without a valid token (length 0) is not active: its advantage stays as it is, and it takes part
    in nothing. Unchanged where `config.enabled` is False. Raises ValueError if the shapes do not agree.
    """
    if advantages.ndim != 1 or advantages.shape != lengths.shape or group_size < 1:
        raise ValueError(
            f"advantages {advantages.shape}, lengths {lengths.shape}, group_size {group_size}; "
            "accepted: two of shape [B] and a size of at least 1"
        )
    if advantages.size % group_size:
        raise ValueError(f"{advantages.size} advantages do not divide into groups of {group_size}")
    active = lengths > 0
    if not (config.enabled and active.any()):
        return advantages.astype(np.float32)
    long = np.quantile(lengths[active], config.quantile)
    scale = np.clip(np.minimum(long / np.maximum(lengths, 1), 1.0) ** config.exponent, config.floor, 1.0)
    scaled = advantages.astype(np.float64) * np.where(active & (advantages < 0), scale, 1.0)
    grouped, members = (x.reshape(-1, group_size) for x in (scaled, active))
    count = np.maximum(members.sum(axis=1, keepdims=True), 1)
    mean = np.where(members, grouped, 0.0).sum(axis=1, keepdims=True) / count
    return np.where(members, grouped - mean, grouped).reshape(-1).astype(np.float32)
