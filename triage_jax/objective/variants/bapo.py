"""BAPO: clip bounds that follow the balance of positive and negative advantage over the whole update."""

from functools import partial

from jaxtyping import Array, Float

from triage_jax.objective.batch import Response, Totals
from triage_jax.objective.config import TriageConfig
from triage_jax.objective.policy import TokenLoss, TokenLosses, clipped
from triage_jax.objective.ratios import ratio
from triage_jax.objective.signed_mass import chosen_bounds
from triage_jax.objective.variants.base import Variant


def bapo(
    logp: Float[Array, " T"],
    response: Response,
    config: TriageConfig,
    *,
    bounds: tuple[float | Float[Array, ""], float | Float[Array, ""]] | None = None,
) -> TokenLosses:
    """max(-A q, -A clip(q, low, high)) with q = exp(logp - sampler_logp) and the bounds of the update.

    From `rivals.bapo` low and high rise, first low, then high, a step at a time until
    Σ_{A>0} min(q, high) A >= target · Σ_{A<0} max(q, low) abs(A) over the update, or to their maxima. BAPO (arXiv
    2510.18927; WooooDyy/BAPO recipe/bapo/policy_loss.py). The sums are over q before the update, where logp is
    old_logp, so that the bounds do not depend on how the update is split. Without `bounds`, the first ones.
    """
    low, high = bounds or (config.rivals.bapo.low, config.rivals.bapo.high)
    return clipped(ratio(logp - response.sampler_logp), response.advantage, low, high)


class BapoVariant(Variant):
    """`bapo` with the bounds that the update's totals call for."""

    def bind(self, config: TriageConfig, totals: Totals) -> TokenLoss:
        """The token loss for one update. Raises ValueError for totals made for another objective."""
        if totals.signed_mass is None:
            raise ValueError(
                "totals.signed_mass is None; bapo needs totals made by update_totals with config.name 'bapo'"
            )
        bounds = chosen_bounds(totals.signed_mass, config.rivals.bapo)
        return partial(bapo, config=config, bounds=bounds)
