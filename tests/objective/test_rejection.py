"""Bounds of every rule, on the token losses of one response; the denominator of rejections."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from triage_jax.objective import OBJECTIVES, RivalConfig, TokenBatch, TriageConfig, update_inputs
from triage_jax.objective.batch import response_of
from triage_jax.objective.rival_config import (
    BapoConfig,
    CispoConfig,
    DppoConfig,
    GeoRejectionConfig,
    IcepopConfig,
    K3RejectionConfig,
    OpsmConfig,
    TisSequenceConfig,
)


def token_losses(name, old, sampler, advantage, mask=None, live=None, **rivals):
    """Losses and removed tokens of one response, where live = old unless given."""
    old, sampler = (jnp.asarray(x, jnp.float32) for x in (old, sampler))
    mask = jnp.ones(old.shape, bool) if mask is None else jnp.asarray(mask, bool)
    response = response_of(TokenBatch(old, sampler, jnp.asarray(advantage, old.dtype), mask), old.dtype)
    live = response.old_logp if live is None else jnp.asarray(live, jnp.float32)
    config = OBJECTIVES[name].settings(TriageConfig(rivals=RivalConfig(**rivals)))
    losses, removed = OBJECTIVES[name].token_loss(live, response, config)
    return np.asarray(losses), list(np.asarray(removed))


@pytest.mark.parametrize(("gaps", "removed"), [
    ([0.0, 0.7, 1.0], [False, False, True]),
    ([0.0, -0.001, 0.001], [False, True, False]),
])  # fmt: skip
def test_icepop_keeps_its_bounds(gaps, removed):
    losses, got = token_losses("icepop", gaps, [0, 0, 0], 1.0, icepop=IcepopConfig(low=1.0, high=2.5))
    assert got == removed
    np.testing.assert_allclose(losses, -np.exp(gaps) * ~np.asarray(removed), rtol=1e-6)


@pytest.mark.parametrize(("band", "kept"), [((1.0, 1.1), True), ((0.9, 1.0), True), ((1.01, 1.1), False)])
def test_geometric_mean_keeps_its_bounds(band, kept):
    """Gaps 1 and -1 have geometric mean 1; a masked token counts for nothing."""
    band = GeoRejectionConfig(low=band[0], high=band[1])
    losses, removed = token_losses("geo_rejection", [1, -1, 9], [0, 0, 0], 1.0, [1, 1, 0], geo_rejection=band)
    assert removed == [not kept] * 3
    np.testing.assert_allclose(losses[:2], -np.exp([1, -1]) * kept, rtol=1e-6)


@pytest.mark.parametrize(("threshold", "kept"), [(0.36, True), (0.35, False), (0.0, False)])
def test_k3_is_the_mean_over_valid_tokens(threshold, kept):
    """e - 1 - 1 = .718 and 0: mean .359."""
    limit = K3RejectionConfig(threshold=threshold)
    losses, removed = token_losses("k3_rejection", [1, 0, 9], [0, 0, 0], 1.0, [1, 1, 0], k3_rejection=limit)
    assert removed == [not kept] * 3
    np.testing.assert_allclose(losses[:2], [-1.0 * kept] * 2)


def test_identical_sides_are_kept_by_the_strictest_bounds():
    gaps = [-0.5, -1.5]
    for name, rivals in {
        "k3_rejection": {"k3_rejection": K3RejectionConfig(threshold=0.0)},
        "opsm": {"opsm": OpsmConfig(threshold=0.0)},
        "dppo_tv": {"dppo": DppoConfig(tv_low=0.0, tv_high=0.0)},
        "dppo_kl": {"dppo": DppoConfig(kl_low=0.0, kl_high=0.0)},
    }.items():
        for advantage in (1.0, -1.0):
            assert token_losses(name, gaps, gaps, advantage, **rivals)[1] == [False, False], name


@pytest.mark.parametrize(("advantage", "mean_gap", "dropped"), [
    (-1.0, -0.26, True), (-1.0, -0.25, False), (1.0, -9.0, False), (0.0, -9.0, False), (-1.0, 9.0, False),
    ([-3.0, 1.0], -0.26, True), ([3.0, -1.0], -0.26, False),
])  # fmt: skip
def test_opsm_reads_the_response_as_a_whole(advantage, mean_gap, dropped):
    gaps = [mean_gap - 2, mean_gap + 2]
    assert token_losses("opsm", gaps, [0, 0], advantage, opsm=OpsmConfig(threshold=0.25))[1] == [dropped] * 2


def test_opsm_reads_the_live_gap():
    limit = OpsmConfig(threshold=0.25)
    assert token_losses("opsm", [0, 0], [0, 0], -1.0, live=[-0.3, -0.3], opsm=limit)[1] == [True, True]


def test_dppo_by_hand():
    """Probabilities .5 -> .6, .75 and -> .4, .25; only moves in the advantage's own direction are masked."""
    live, sampler = np.log([0.6, 0.75, 0.4, 0.25]), np.log([0.5] * 4)
    for name, rivals in {
        "dppo_tv": DppoConfig(tv_low=0.2, tv_high=0.2, ratio_max=1.4),
        # .5 log(.5 / p) + .5 log(.5 / (1 - p)): .0204 and .1438
        "dppo_kl": DppoConfig(kl_low=0.1, kl_high=0.1, ratio_max=1.4),
    }.items():
        weights = np.asarray([1.2, 1.4, 0.8, 0.5])
        losses, removed = token_losses(name, live, sampler, 1.0, dppo=rivals)
        assert removed == [False, True, False, False]
        np.testing.assert_allclose(losses, -weights * live * [1, 0, 1, 1], rtol=1e-5)
        losses, removed = token_losses(name, live, sampler, -1.0, dppo=rivals)
        assert removed == [False, False, False, True]
        np.testing.assert_allclose(losses, weights * live * [1, 1, 1, 0], rtol=1e-5)


def test_dppo_kl_with_certain_tokens():
    """Log-probability 0, or a rounding above it, has a finite divergence."""
    losses, removed = token_losses("dppo_kl", [0.0, 1e-7, -2.0], [-2.0, 0.0, 0.0], 1.0)
    assert np.isfinite(losses).all()
    assert removed == [True, False, False]


def test_weights_of_sequences_and_ratios():
    losses, _ = token_losses(
        "tis_sequence", [0.5, 0.3], [0, 0], -1.0, tis_sequence=TisSequenceConfig(high=2.0)
    )
    np.testing.assert_allclose(losses, [2.0, 2.0])
    losses, _ = token_losses("tis_sequence", [0.5, -0.3], [0, 0], -1.0)
    np.testing.assert_allclose(losses, [np.exp(0.2)] * 2, rtol=1e-6)
    live = np.asarray([-1.0, -2.0])
    losses, removed = token_losses(
        "cispo", live - [1.0, -1.0], [0, 0], 1.0, live=live, cispo=CispoConfig(low=0.5, high=2.0)
    )
    np.testing.assert_allclose(losses, -np.asarray([2.0, 0.5]) * live)
    assert removed == [False, False]


def test_gspo_clips_the_response():
    """Log ratios .002 and -.001: s = exp(.0005) is above 1.0004, although one token's ratio is below."""
    for advantage, expected, removed in ((1.0, -1.0004, True), (-1.0, np.exp(0.0005), False)):
        losses, got = token_losses("gspo", [-1, -1], [0, 0], advantage, live=[-0.998, -1.001])
        np.testing.assert_allclose(losses, [expected] * 2, rtol=1e-6)
        assert got == [removed] * 2


def test_bapo_without_an_update_has_its_first_bounds():
    losses, removed = token_losses("bapo", np.log([0.5, 1.5]), [0, 0], 1.0, bapo=BapoConfig())
    np.testing.assert_allclose(losses, [-0.5, -1.2], rtol=1e-6)
    assert removed == [False, True]


@pytest.mark.parametrize(("reduction", "fixed", "renormalised"), [
    ("response", (-1 / 2 - 1 - 0) / 3, (-1 - 1) / 2), ("token", -3 / 6, -3 / 3), ("fixed", -3 / 6, -3 / 6),
])  # fmt: skip
def test_denominator_of_rejected_tokens(reduction, fixed, renormalised):
    """Responses of two tokens, ρ = 1 inside the band and e³ outside: one rejected, none, both."""
    gap = jnp.asarray([[0.0, 3.0], [0.0, 0.0], [3.0, 3.0]])
    batch = TokenBatch(gap, jnp.zeros_like(gap), jnp.ones(3), gap == gap)
    objective = OBJECTIVES["icepop"]
    for renormalise, expected in ((False, fixed), (True, renormalised)):
        config = TriageConfig(name="icepop", reduction=reduction, rivals=RivalConfig(renormalise=renormalise))

        @jax.jit
        def loss(logp, config=config):
            weights, totals = update_inputs(batch, config)
            alone = objective(logp, batch, config)[0]
            return alone, objective(logp, batch, config, totals, weights=weights)[0]

        np.testing.assert_allclose(loss(gap), [expected] * 2, rtol=1e-6)
