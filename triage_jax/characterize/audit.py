"""Does the diagonal sign rule tell what one update did? The same tokens, scored before and after it.

The rule predicts sign(δ c) for the movement of the gap, c being the coefficient of a token (A for vanilla GRPO);
the realised one is sign(δ Δδ) with Δδ = δ_after - δ_before. The sampler's log-probabilities stay those of generation,
so nothing is said about the gap after the sampler is refreshed. On tokens with A < 0 and δ < 0 the official study finds
agreement of 38.9 % (4B) and 33.7 % (30B): below a coin. Source: the official docs/CHARACTERIZATION.md.
"""

from dataclasses import dataclass

import numpy as np

from triage_jax.characterize.arrays import Gap, Mask

DEPTHS = (0.0, 1.0, 3.0, 6.0)


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Tokens with |δ| above `depth`; a gap that did not move agrees with nothing."""

    depth: float
    tokens: int
    agreeing: int
    unmoved: int
    weight: float
    """Σ |δ c|"""
    agreeing_weight: float

    def __add__(self, other: "Agreement") -> "Agreement":
        if self.depth != other.depth:
            raise ValueError(f"agreement beyond {self.depth} and {other.depth} nats cannot be pooled")
        return Agreement(
            depth=self.depth,
            tokens=self.tokens + other.tokens,
            agreeing=self.agreeing + other.agreeing,
            unmoved=self.unmoved + other.unmoved,
            weight=self.weight + other.weight,
            agreeing_weight=self.agreeing_weight + other.agreeing_weight,
        )

    @property
    def share(self) -> float:
        return self.agreeing / self.tokens if self.tokens else float("nan")

    @property
    def weighted_share(self) -> float:
        return self.agreeing_weight / self.weight if self.weight else float("nan")


def sign_audit(
    before: Gap,
    after: Gap,
    coefficient: Gap,
    mask: Mask,
    *,
    depths: tuple[float, ...] = DEPTHS,
) -> list[Agreement]:
    """Agreement of sign(δ c) with sign(δ Δδ) over the tokens with c < 0 and δ < 0, per depth.

    To audit other tokens, restrict `mask` and turn the signs: the rule is odd in (δ, c) together. Raises ValueError
    unless all are of one shape.
    """
    shapes = {x.shape for x in (before, after, coefficient, mask)}
    if len(shapes) != 1:
        raise ValueError(f"shapes {sorted(shapes)}; accepted: one shape [B, T] for all")
    chosen = mask & (coefficient < 0) & (before < 0)
    gap, moved, c = before[chosen].astype(float), after[chosen].astype(float), coefficient[chosen]
    moved = moved - gap
    agrees = np.sign(gap * c) == np.sign(gap * moved)
    weight = np.abs(gap * c)
    return [_beyond(depth, np.abs(gap) > depth, agrees, moved, weight) for depth in depths]


def _beyond(
    depth: float, inside: np.ndarray, agrees: np.ndarray, moved: np.ndarray, weight: np.ndarray
) -> Agreement:
    return Agreement(
        depth=depth,
        tokens=int(np.count_nonzero(inside)),
        agreeing=int(np.count_nonzero(inside & agrees)),
        unmoved=int(np.count_nonzero(inside & (moved == 0))),
        weight=float(weight[inside].sum()),
        agreeing_weight=float(weight[inside & agrees].sum()),
    )
