"""Tail tokens (A < 0 and δ below a frozen threshold) counted in segments of fixed length.

A response is cut by completion-token position; masked positions take up their place and are not counted, the last
short segment stays. The threshold of a study is the 5 % quantile of δ over all valid tokens of its first window.
Source: the official docs/CHARACTERIZATION.md.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int, UInt16

from triage_jax.characterize.arrays import Advantages, Gap, Mask, check_shapes, per_response

SEGMENT = 64
QUANTILE = 0.05


@dataclass(frozen=True, kw_only=True, eq=False)
class Segments:
    """Non-empty segments of responses with negative mean advantage, response after response, first to last."""

    valid: UInt16[np.ndarray, " N"]
    tail: UInt16[np.ndarray, " N"]
    follows: Bool[np.ndarray, " N"]
    """Whether the segment before it in this list is its left neighbour in the same response"""
    starts: Int[np.ndarray, " R"]
    """Index of the first segment of each response"""
    segment: int

    @property
    def ends(self) -> Int[np.ndarray, " R"]:
        return np.append(self.starts[1:], len(self.valid))[: len(self.starts)]

    def __add__(self, other: "Segments") -> "Segments":
        """Both, one after the other. Raises ValueError for segments of different length."""
        if self.segment != other.segment:
            raise ValueError(f"segments of {self.segment} and of {other.segment} tokens cannot be pooled")
        return Segments(
            valid=np.concatenate([self.valid, other.valid]),
            tail=np.concatenate([self.tail, other.tail]),
            follows=np.concatenate([self.follows, other.follows]),
            starts=np.concatenate([self.starts, other.starts + len(self.valid)]),
            segment=self.segment,
        )


def tail_threshold(gap: Gap, mask: Mask, quantile: float = QUANTILE) -> float:
    """The quantile of δ over all valid tokens; NaN over none."""
    valid = gap[mask]
    return float(np.quantile(valid, quantile)) if valid.size else float("nan")


def count_segments(flags: Mask, segment: int = SEGMENT) -> UInt16[np.ndarray, "B S"]:
    """How many flags are set in each segment."""
    rows, width = flags.shape
    whole = width - width % segment
    counts = np.empty((rows, -(-width // segment)), np.uint16)
    body = flags[:, :whole].view(np.uint8).reshape(rows, whole // segment, segment)
    np.add.reduce(body, axis=2, dtype=np.uint16, out=counts[:, : whole // segment])
    if whole < width:
        counts[:, -1] = np.count_nonzero(flags[:, whole:], axis=1)
    return counts


def tail_segments(
    gap: Gap, advantages: Advantages, mask: Mask, *, threshold: float, segment: int = SEGMENT
) -> Segments:
    """Segments of the A < 0 responses with their tail tokens, δ < threshold. Raises ValueError on shapes."""
    check_shapes(gap, advantages, mask)
    if not 1 <= segment < 2**16:
        raise ValueError(f"segment is {segment}; accepted: 1 to 65535 tokens")
    chosen = per_response(advantages, mask) < 0
    mask = mask[chosen]
    valid = count_segments(mask, segment)
    tail = count_segments((gap[chosen] < float(threshold)) & mask, segment)
    filled = valid > 0
    left = np.zeros_like(filled)
    left[:, 1:] = filled[:, :-1]
    per_row = np.count_nonzero(filled, axis=1)
    return Segments(
        valid=valid[filled],
        tail=tail[filled],
        follows=left[filled],
        starts=(np.cumsum(per_row) - per_row)[per_row > 0],
        segment=segment,
    )
