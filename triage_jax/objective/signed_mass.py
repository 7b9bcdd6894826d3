"""How much positive and how much negative advantage an update carries under each clip bound that BAPO may take."""

import math
from typing import no_type_check

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from triage_jax.objective.rival_config import BapoConfig


@no_type_check  # fields may also hold shapes, dtypes or PartitionSpecs of the same tree
@struct.dataclass
class SignedMass:
    """Sums over tokens, additive over parts of an update: one per upper and one per lower bound."""

    positive: Float[Array, " highs"]
    negative: Float[Array, " lows"]


def _grid(start: float, stop: float, step: float) -> list[float]:
    steps = math.ceil(round((stop - start) / step, 9))
    return [min(start + k * step, stop) for k in range(steps + 1)]


def bound_grids(config: BapoConfig) -> tuple[list[float], list[float]]:
    """Lower and upper bounds in the order in which BAPO tries them."""
    return _grid(config.low, config.low_max, config.step), _grid(config.high, config.high_max, config.step)


def signed_mass(
    sampler_ratio: Float[Array, " T"], advantage: Float[Array, " T"], config: BapoConfig
) -> SignedMass:
    """Σ_{A>0} min(r, high) A for every upper bound, Σ_{A<0} max(r, low) abs(A) for every lower one.

    r is the ratio of learner to sampler before the update; masked advantages are zero.
    """
    lows, highs = bound_grids(config)
    gain, loss = jnp.maximum(advantage, 0), jnp.maximum(-advantage, 0)
    return SignedMass(
        positive=jnp.stack([(jnp.minimum(sampler_ratio, high) * gain).sum() for high in highs]),
        negative=jnp.stack([(jnp.maximum(sampler_ratio, low) * loss).sum() for low in lows]),
    )


def chosen_bounds(mass: SignedMass, config: BapoConfig) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The first (low, high) at which positive mass >= target · negative mass; the last if none is.

    The lower bound rises first, to its maximum; then the upper one.
    """
    lows, highs = bound_grids(config)
    dtype = mass.positive.dtype
    tried_low = jnp.asarray(lows + [lows[-1]] * (len(highs) - 1), dtype)
    tried_high = jnp.asarray([highs[0]] * len(lows) + highs[1:], dtype)
    negative = jnp.concatenate([mass.negative, jnp.broadcast_to(mass.negative[-1:], (len(highs) - 1,))])
    positive = jnp.concatenate([jnp.broadcast_to(mass.positive[:1], (len(lows),)), mass.positive[1:]])
    met = (positive >= config.target * negative).at[-1].set(True)
    first = jnp.argmax(met)
    return tried_low[first], tried_high[first]
