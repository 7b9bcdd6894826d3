"""Which tokens pull learner and sampler apart, and the balance of the two regions that do.

With gap δ and advantage A, one gradient step moves δ_t along A_t (the diagonal of the first-order expansion): tokens
with sign A = sign δ are *amplifying*, with opposite signs *contracting*, the rest neutral.

| | A > 0 | A < 0 |
| --- | --- | --- |
| δ > 0 | Q1, amplifying | Q4, contracting |
| δ < 0 | Q2, contracting | Q3, amplifying |

rho_asym = mass of Q3 / mass of Q1. The mass of a token is |A| (raw), |A| over the valid tokens of its response
(length-normalised), or |A| min(e^δ, 2), what token-level TIS leaves of it (effective). Sums of several updates are
added before they are divided. Source: the official docs/CHARACTERIZATION.md.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float, Int

from triage_jax.characterize.arrays import Advantages, Gap, Mask, check_shapes, count_rows, per_token

TIS_HIGH = 2.0
type Weighing = Literal["raw", "length_normalised", "effective"]
WEIGHINGS: tuple[Weighing, ...] = ("raw", "length_normalised", "effective")


@dataclass(frozen=True, kw_only=True, eq=False)
class Regions:
    """Sums over tokens, in the order Q1, Q2, Q3, Q4."""

    count: Int[np.ndarray, "4"]
    raw: Float[np.ndarray, "4"]
    length_normalised: Float[np.ndarray, "4"]
    effective: Float[np.ndarray, "4"]
    tokens: int
    without_advantage: int
    """Valid tokens with A = 0: they carry no mass"""

    def __add__(self, other: "Regions") -> "Regions":
        return Regions(**{name: getattr(self, name) + getattr(other, name) for name in self.__annotations__})

    def rho_asym(self, weighing: Weighing = "raw") -> float:
        """Mass of Q3 over mass of Q1; NaN where Q1 has none."""
        mass = getattr(self, weighing)
        return float(mass[2] / mass[0]) if mass[0] else float("nan")

    def amplifying_share(self, weighing: Weighing = "raw") -> float:
        """Share of the mass in Q1 and Q3; NaN without mass."""
        mass = getattr(self, weighing)
        return float((mass[0] + mass[2]) / mass.sum()) if mass.any() else float("nan")


def regions(gap: Gap, advantages: Advantages, mask: Mask) -> Regions:
    """Counts and masses of the four regions over the valid tokens. Raises ValueError on shapes that do not agree."""
    check_shapes(gap, advantages, mask)
    length = np.maximum(count_rows(mask), 1).astype(float)
    tis = np.minimum(np.exp(np.minimum(gap, 1.0)), TIS_HIGH)  # e > TIS_HIGH: the bound loses nothing
    advantages = per_token(advantages)
    without = int(np.count_nonzero(mask & (advantages == 0)))
    found = [_of_sign(gap > 0, gap < 0, tis, advantages, mask, sign) for sign in (1, -1)]
    (q1, q2), (q4, q3) = found
    count, raw, effective = (np.stack([q[i] for q in (q1, q2, q3, q4)]) for i in range(3))
    return Regions(
        count=count.sum(axis=1),
        raw=raw.sum(axis=1),
        length_normalised=(raw / length).sum(axis=1),
        effective=effective.sum(axis=1),
        tokens=int(np.count_nonzero(mask)),
        without_advantage=without,
    )


type _Sums = tuple[Int[np.ndarray, " B"], Float[np.ndarray, " B"], Float[np.ndarray, " B"]]


def _of_sign(
    above: Mask, below: Mask, tis: Gap, advantages: Float[np.ndarray, "B _"], mask: Mask, sign: int
) -> tuple[_Sums, _Sums]:
    """Per response: count, mass and effective mass of the tokens with this sign of A, for δ > 0 and δ < 0."""
    size = np.abs(advantages).astype(float)
    chosen = np.sign(advantages) == sign

    def sums(side: Mask) -> _Sums:
        if advantages.shape[1] == 1:  # one advantage per response: count first, multiply once
            inside = side & mask
            count = np.where(chosen[:, 0], count_rows(inside), 0)
            effective = np.where(chosen[:, 0], (tis * inside).sum(axis=1, dtype=float) * size[:, 0], 0.0)
            return count, count * size[:, 0], effective
        inside = side & mask & chosen
        return (
            count_rows(inside),
            np.where(inside, size, 0).sum(axis=1),
            np.where(inside, size * tis, 0).sum(axis=1),
        )

    return sums(above), sums(below)
