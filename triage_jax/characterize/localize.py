"""Is the tail concentrated in few segments, more than its rarity alone would make it?

r_amp: share of tail tokens. H_seg: share of tail-heavy segments (more than 10 % tail tokens). C_tok: share of the tail
tokens that lie in the top 5 % of the segments, ranked by tail fraction. P_adj: P(next heavy | heavy) / P(next heavy).

5 % is *not* what chance gives C_tok: with tail tokens thrown at random it is already 11 % at r_amp = 5 %, and rises as
they get rarer. So `permutation_null` shuffles the tail labels inside every response; the tails that fall into
its segments are then multivariate hypergeometric, and are drawn as such, exactly. P_adj carries no evidence beyond that
null in the official study; `order_test` asks the narrower question, given how many segments of a response are
heavy. Source: the official docs/CHARACTERIZATION.md.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int, UInt16

from triage_jax.characterize.arrays import in_threads
from triage_jax.characterize.tails import Segments

HEAVY = 0.1
TOP_SHARE = 0.05
DRAWS = 499


@dataclass(frozen=True, kw_only=True)
class Localization:
    """The four statistics, NaN where undefined, and what they rest on."""

    r_amp: float
    heavy_share: float
    """H_seg"""
    concentration: float
    """C_tok"""
    adjacency: float
    """P_adj"""
    segments: int
    tail_tokens: int


def heavy_segments(segments: Segments, heavy: float = HEAVY) -> Bool[np.ndarray, " N"]:
    """Which segments have more than that fraction of tail tokens."""
    return segments.tail / segments.valid > heavy


def localization(segments: Segments, *, heavy: float = HEAVY, top_share: float = TOP_SHARE) -> Localization:
    """The statistics of one pool of segments. The top share is rounded up; equal fractions rank by position."""
    count, tails = len(segments.valid), int(segments.tail.sum(dtype=np.int64))
    is_heavy = heavy_segments(segments, heavy)
    order = np.argsort(-(segments.tail / segments.valid), kind="stable")
    top = segments.tail[order[: top_count(count, top_share)]].sum(dtype=np.int64)
    pairs = np.array(_pairs(is_heavy, segments.follows))[:, None]
    return Localization(
        r_amp=_ratio(tails, segments.valid.sum(dtype=np.int64)),
        heavy_share=_ratio(np.count_nonzero(is_heavy), count),
        concentration=_ratio(top, tails),
        adjacency=float(_adjacency(pairs)[0]),
        segments=count,
        tail_tokens=tails,
    )


def top_count(segments: int, share: float = TOP_SHARE) -> int:
    """The number of segments in the top share, rounded up (a share of 0.05 of 100 is 5, not 6)."""
    return int(np.ceil(round(share * segments, 9)))


def _pairs(heavy: Bool[np.ndarray, " N"], follows: Bool[np.ndarray, " N"]) -> tuple[int, int, int, int]:
    """Neighbours of which both, the left, the right is heavy; and all neighbours."""
    follows = follows[1:]
    left, right = heavy[:-1] & follows, heavy[1:] & follows
    flags = (left & right, left, right, follows)
    both, left, right, everything = (int(np.count_nonzero(x)) for x in flags)
    return both, left, right, everything


def _adjacency(pairs: Int[np.ndarray, "4 D"]) -> Float[np.ndarray, " D"]:
    both, left, right, everything = pairs.astype(float)
    with np.errstate(divide="ignore", invalid="ignore"):
        return (both / left) / (right / everything)


def _ratio(numerator: int | float | np.number, denominator: int | float | np.number) -> float:
    return float(numerator) / float(denominator) if denominator else float("nan")


@dataclass(frozen=True, kw_only=True, eq=False)
class NullCounts:
    """Draws of the permutation null, as sums: those of several updates add up.

    `table[d, n * (segment + 1) + k]` counts the segments with n valid and k tail tokens in draw d.
    """

    table: Int[np.ndarray, "D K"]
    pairs: Int[np.ndarray, "4 D"]
    segment: int

    def __add__(self, other: "NullCounts") -> "NullCounts":
        return NullCounts(
            table=self.table + other.table, pairs=self.pairs + other.pairs, segment=self.segment
        )

    def concentration(self, top_share: float = TOP_SHARE) -> Float[np.ndarray, " D"]:
        """C_tok of every draw; of segments that tie at the cut, each counts for its share of the places."""
        keys = np.flatnonzero(self.table.any(axis=0))
        valid, tail = np.divmod(keys, self.segment + 1)
        levels, level = np.unique(-(tail / np.maximum(valid, 1)), return_inverse=True)
        filled = np.zeros((len(self.table), len(levels)))
        tails = np.zeros_like(filled)
        for draw, row in enumerate(self.table[:, keys]):
            filled[draw] = np.bincount(level, weights=row, minlength=len(levels))
            tails[draw] = np.bincount(level, weights=row * tail, minlength=len(levels))
        place = top_count(int(self.table[0].sum()), top_share)
        taken = np.clip(place - (np.cumsum(filled, axis=1) - filled), 0, filled)
        with np.errstate(divide="ignore", invalid="ignore"):
            inside = np.where(filled > 0, taken / filled, 0.0) * tails
            return inside.sum(axis=1) / tails.sum(axis=1)

    def heavy_share(self, heavy: float = HEAVY) -> Float[np.ndarray, " D"]:
        """H_seg of every draw."""
        valid, tail = np.divmod(np.arange(self.table.shape[1]), self.segment + 1)
        chosen = (valid > 0) & (tail / np.maximum(valid, 1) > heavy)
        total = self.table.sum(axis=1)
        return np.divide(
            self.table[:, chosen].sum(axis=1), total, where=total > 0, out=np.full(len(total), np.nan)
        )

    def adjacency(self) -> Float[np.ndarray, " D"]:
        """P_adj of every draw."""
        return _adjacency(self.pairs)


def permutation_null(
    segments: Segments, *, draws: int = DRAWS, seed: int = 0, stream: int = 0, heavy: float = HEAVY
) -> NullCounts:
    """Shuffle the tail labels inside every response, `draws` times.

    The same seed and stream (the number of the update) give the same draws, on any number of threads.

    The memory is draws * (segments + (segment + 1)²) small integers.
    """
    tail = np.empty((draws, len(segments.valid)), np.uint16)
    bounds = list(zip(segments.starts.tolist(), segments.ends.tolist(), strict=True))

    def allocate(response: int) -> None:
        begin, end = bounds[response]
        inside = slice(begin, end)
        rng = np.random.default_rng([seed, stream, response])
        tail[:, inside] = _hypergeometric(rng, segments.valid[inside], segments.tail[inside], draws)

    in_threads(allocate, list(range(len(bounds))))
    return _count_draws(tail, segments, heavy)


def _hypergeometric(
    rng: np.random.Generator, valid: UInt16[np.ndarray, " S"], tail: UInt16[np.ndarray, " S"], draws: int
) -> Int[np.ndarray, "D S"]:
    """How many of all the tails fall into each segment."""
    total, tails = int(valid.sum(dtype=np.int64)), int(tail.sum(dtype=np.int64))
    # One draw by counting swaps min(tails, rest) labels; one by marginals makes a slower draw per segment.
    by_count = min(tails, total - tails) < MARGINAL_COST * len(valid)
    return rng.multivariate_hypergeometric(
        valid.astype(np.int64), tails, size=draws, method="count" if by_count else "marginals"
    )


MARGINAL_COST = 18
"""Time of one hypergeometric draw over that of one swap"""


def _count_draws(tail: UInt16[np.ndarray, "D N"], segments: Segments, heavy: float) -> NullCounts:
    base = segments.valid.astype(np.int64) * (segments.segment + 1)
    keys = (segments.segment + 1) ** 2
    # The smallest tail that makes a segment heavy, by the very comparison that `heavy_segments` does.
    possible = np.arange(segments.segment + 1)
    sizes = np.arange(1, segments.segment + 1)
    least = np.concatenate([[0], (possible / sizes[:, None] <= heavy).sum(axis=1)]).astype(np.uint16)
    needed = least[segments.valid]
    table = np.empty((len(tail), keys), np.int32)
    pairs = np.empty((4, len(tail)), np.int64)

    def count(draw: int) -> None:
        table[draw] = np.bincount(base + tail[draw], minlength=keys)
        pairs[:, draw] = _pairs(tail[draw] >= needed, segments.follows)

    in_threads(count, list(range(len(tail))))
    return NullCounts(table=table, pairs=pairs, segment=segments.segment)


@dataclass(frozen=True, kw_only=True)
class OrderTest:
    """Neighbouring heavy pairs against heavy segments placed at random inside their response."""

    observed: int
    expected: float
    z: float
    """Standard deviations above the expectation"""

    @property
    def enrichment(self) -> float:
        return _ratio(self.observed, self.expected)


def order_test(segments: Segments, *, heavy: float = HEAVY) -> OrderTest:
    """Adjacent heavy pairs, conditional on the number h of heavy among the s segments of a response.

    h - pairs is the number of runs, which is hypergeometric: the pairs have mean h (h - 1) / s and variance
    h (h - 1) (s - h) (s - h + 1) / (s² (s - 1)). Responses with a wholly masked segment inside are left out.
    """
    is_heavy = heavy_segments(segments, heavy)
    s = segments.ends - segments.starts
    both = np.concatenate([[False], is_heavy[1:] & is_heavy[:-1]]) & segments.follows

    def per_row(flags: Bool[np.ndarray, " N"]) -> Float[np.ndarray, " R"]:
        return (
            np.add.reduceat(flags, segments.starts, dtype=np.int64).astype(float) if len(s) else np.zeros(0)
        )

    whole = per_row(segments.follows) == s - 1
    h = per_row(is_heavy)[whole]
    pairs, s = per_row(both)[whole], s[whole].astype(float)
    variance = h * (h - 1) * (s - h) * (s - h + 1) / (s**2 * np.maximum(s - 1, 1))
    observed, expected = int(pairs.sum()), float((h * (h - 1) / s).sum())
    deviation = float(np.sqrt(variance.sum()))
    return OrderTest(observed=observed, expected=expected, z=_ratio(observed - expected, deviation))
