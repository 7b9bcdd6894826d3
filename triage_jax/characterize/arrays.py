"""Shapes that every statistic of this package takes, and work spread over rows."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from jaxtyping import Bool, Float, Int

# A gap is 0 where masked, as `gap_of` makes it; log-probabilities may hold anything there.
type Gap = Float[np.ndarray, "B T"]
type Mask = Bool[np.ndarray, "B T"]
type Advantages = Float[np.ndarray, "B"] | Float[np.ndarray, "B T"]

BLOCK = 163_840
"""Tokens that a thread works on at a time: their temporaries stay in the second-level cache"""


def gap_of(learner_logp: Gap, sampler_logp: Gap, mask: Mask) -> Gap:
    """δ = learner - sampler log-probability, in nats; 0 where masked, whatever stands there."""
    return np.subtract(learner_logp, sampler_logp, where=mask, out=np.zeros_like(learner_logp))


def check_shapes(gap: Gap, advantages: Advantages, mask: Mask) -> None:
    """Raise ValueError unless gap and mask are [B, T] and the advantages [B] or [B, T]."""
    if gap.ndim != 2 or mask.shape != gap.shape:
        raise ValueError(f"gap has shape {gap.shape}, mask {mask.shape}; accepted: [B, T] for both")
    if advantages.shape not in (gap.shape, gap.shape[:1]):
        raise ValueError(f"advantages has shape {advantages.shape}; accepted: {gap.shape[:1]} or {gap.shape}")


def per_token(advantages: Advantages) -> Float[np.ndarray, "B _"]:
    """Advantages that broadcast against [B, T]."""
    return advantages[:, None] if advantages.ndim == 1 else advantages


def per_response(advantages: Advantages, mask: Mask) -> Float[np.ndarray, " B"]:
    """The masked mean advantage of each response; 0 for one without a valid token."""
    if advantages.ndim == 1:
        return np.where(mask.any(axis=1), advantages, 0)
    return np.where(mask, advantages, 0).sum(axis=1) / np.maximum(count_rows(mask), 1)


def count_rows(flags: Bool[np.ndarray, "B T"]) -> Int[np.ndarray, " B"]:
    """Set flags of each row; `count_nonzero` with an axis would go through integers, several times slower."""
    return np.fromiter((np.count_nonzero(row) for row in flags), np.int64, len(flags))


def row_blocks(rows: int, width: int) -> Iterator[slice]:
    """Slices of whole rows, about `BLOCK` tokens each."""
    step = max(1, BLOCK // max(width, 1))
    return (slice(start, start + step) for start in range(0, rows, step))


def in_threads[T, R](function: Callable[[T], R], items: list[T]) -> list[R]:
    """`map` on all usable cores: NumPy lets go of the interpreter lock inside its loops."""
    workers = min(len(items), len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
    if workers < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(function, items))
