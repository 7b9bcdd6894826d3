"""Clip, truncated importance sampling and the three reductions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.objective import reference
from tests.objective.inputs import loss_and_grad, random_batch, with_metrics
from triage_jax.objective import (
    GateConfig,
    RepairConfig,
    TisConfig,
    TokenBatch,
    TriageConfig,
    finalize,
    update_totals,
)

NO_REPAIR = RepairConfig(enabled=False)


def plain(reduction="response", tis=False):
    """Clip and Gate only, or with TIS."""
    return TriageConfig(reduction=reduction, tis=TisConfig(enabled=tis), repair=NO_REPAIR)


def negative_batch(damped):
    """One A = -1 response per entry: 320 tokens, 192 gaps negative, `damped[i]` of them deep (weight 0.1)."""
    gap = np.full((len(damped), 320), 1e-3, np.float32)
    for row, count in zip(gap, damped, strict=True):
        row[:count] = -30.0
        filled = -(-count // 64) * 64  # positive gaps fill the last damped segment
        row[filled : filled + 192 - count] = -1e-3
    gap = jnp.asarray(gap)
    return TokenBatch(gap, jnp.zeros_like(gap), -jnp.ones(len(damped)), jnp.ones(gap.shape, bool))


def test_tis_truncates_and_carries_no_gradient():
    rho = jnp.asarray([[0.5, 1.9999, 4.0]])
    batch = TokenBatch(jnp.log(rho), jnp.zeros((1, 3)), jnp.ones(1), jnp.ones((1, 3), bool))
    loss, gradient = loss_and_grad(batch.old_logp, batch, plain(tis=True))
    weights = np.asarray([0.5, 1.9999, 2.0])
    np.testing.assert_allclose(loss, -weights.mean(), rtol=1e-6)
    np.testing.assert_allclose(gradient, [-weights / 3], rtol=1e-6)
    values = finalize(with_metrics(batch.old_logp, batch, plain(tis=True))[1])
    np.testing.assert_allclose(values["tis/clip_fraction/token"], 1 / 3)


def test_clip_by_sign_of_the_advantage():
    """Each token: ratio, advantage -> loss, slope with respect to its log-probability."""
    table = np.asarray([
        [1.0, 1.0, -1.0, -1.0], [1.0, -1.0, 1.0, 1.0],
        [1.5, 1.0, -1.28, 0.0], [1.5, -1.0, 1.5, 1.5],
        [0.5, 1.0, -0.5, -0.5], [0.5, -1.0, 0.8, 0.0],
        [1.5, 0.0, 0.0, 0.0],
    ])  # fmt: skip
    ratio, advantage, losses, slopes = jnp.asarray(table.T[:, None], jnp.float32)
    zeros = jnp.zeros_like(ratio)
    batch = TokenBatch(zeros, zeros, advantage, zeros == 0)
    loss, gradient = loss_and_grad(jnp.log(ratio), batch, plain())
    np.testing.assert_allclose(loss, losses.mean(), rtol=1e-5)
    np.testing.assert_allclose(gradient, slopes / 7, rtol=1e-5, atol=1e-8)
    values = finalize(with_metrics(jnp.log(ratio), batch, plain())[1])
    np.testing.assert_allclose(values["ppo/clip_fraction/token"], 2 / 7, rtol=1e-6)


def test_hundredths_of_two_responses():
    """Weights .3, .3 | 1, 1, 1, 1 and token losses 1, 3 | 2, 4, 6, 8."""
    losses = jnp.asarray([[1.0, 3, 0, 0], [2, 4, 6, 8]])
    mask = jnp.asarray([[1, 1, 0, 0], [1, 1, 1, 1]], bool)
    batch = TokenBatch(jnp.zeros((2, 4)), jnp.zeros((2, 4)), -losses, mask)
    weights = jnp.asarray([[0.3, 0.3, jnp.nan, 1], [1, 1, 1, 1]])
    totals = update_totals(batch, weights, plain())
    assert 100 * totals.weighted_whole + totals.weighted_hundredths == 460
    assert (totals.responses, totals.tokens, totals.repair_segments) == (2, 6, 2)
    for reduction, expected in {
        "token": (30 * 1 + 30 * 3 + 100 * 20) / 460,
        "response": (2 + 5) / 2,
        "fixed": (0.3 + 0.9 + 20) / 6,
    }.items():
        loss, _ = loss_and_grad(jnp.zeros((2, 4)), batch, plain(reduction), totals, weights)
        np.testing.assert_allclose(loss, expected, rtol=1e-6)


def test_response_reduction_moves_mass_from_amplifying_to_contracting():
    """Damping a share f = .15 to .1 takes the amplifying share from .6 to .538; the others grow by 1.156."""
    batch = negative_batch([48])
    amplifying = np.asarray(batch.old_logp[0]) < 0
    assert amplifying.sum() == 0.6 * 320
    _, gradient = loss_and_grad(batch.old_logp, batch, plain())
    mass = np.abs(np.asarray(gradient, float))[0]
    np.testing.assert_allclose(mass.sum(), 1, rtol=1e-6)
    np.testing.assert_allclose(mass[amplifying].sum(), (0.6 - 0.9 * 0.15) / (1 - 0.9 * 0.15), rtol=1e-5)
    np.testing.assert_allclose(mass[48:] * 320, 1 / (1 - 0.9 * 0.15), rtol=1e-5)


def test_token_reduction_shifts_mass_between_responses():
    """Two +1 and two -1 responses of equal length, f = .15 and .6 damped: net advantage 0 or +0.203."""
    negative = negative_batch([48, 192])
    batch = TokenBatch(
        jnp.concatenate([negative.old_logp, jnp.zeros((2, 320))]),
        jnp.zeros((4, 320)),
        jnp.asarray([-1.0, -1, 1, 1]),
        jnp.ones((4, 320), bool),
    )
    net, largest = {}, {}
    for reduction in ("response", "token", "fixed"):
        _, gradient = loss_and_grad(batch.old_logp, batch, plain(reduction))
        net[reduction], largest[reduction] = -float(gradient.sum()), float(jnp.abs(gradient).max())
    damped = (1 - 0.9 * 0.15) + (1 - 0.9 * 0.6)
    np.testing.assert_allclose(net["response"], 0, atol=1e-6)
    np.testing.assert_allclose(net["token"], (2 - damped) / (2 + damped), rtol=1e-4)
    np.testing.assert_allclose(net["fixed"], (2 - damped) / 4, rtol=1e-4)
    np.testing.assert_allclose(largest["fixed"], 1 / 1280, rtol=1e-6)  # pure damping: nothing grows
    assert largest["fixed"] < min(largest["response"], largest["token"])


def test_a_constant_gate_changes_nothing_in_the_response_reduction():
    live, batch = random_batch(5)
    losses = [
        loss_and_grad(live, batch, plain(), None, jnp.full(live.shape, weight))[0] for weight in (1.0, 0.1)
    ]
    np.testing.assert_allclose(*losses, rtol=1e-5)


@pytest.mark.parametrize("reduction", ["response", "token", "fixed"])
@pytest.mark.parametrize("per_token", [False, True])
def test_random_batches_against_the_loop(reduction, per_token):
    config = TriageConfig(
        reduction=reduction, gate=GateConfig(segment=48, deep_count=3), repair=RepairConfig(segment=72)
    )
    with jax.enable_x64(True):
        live, batch = random_batch(11, tokens=170, dtype=np.float64, per_token=per_token)
        arrays = [np.asarray(x) for x in (batch.old_logp, batch.sampler_logp, batch.advantages, batch.mask)]
        loss, gradient = loss_and_grad(live, batch, config)
        live = np.asarray(live)
        np.testing.assert_allclose(loss, reference.loss(live, *arrays, config), rtol=1e-11)
        direction = np.random.default_rng(0).normal(size=live.shape)
        ahead, behind = (reference.loss(live + step * direction, *arrays, config) for step in (1e-6, -1e-6))
        slope = (np.asarray(gradient) * direction).sum()
        np.testing.assert_allclose(slope, (ahead - behind) / 2e-6, rtol=1e-6)


def test_first_update_has_ratio_one_and_no_clipping():
    _, batch = random_batch(2)
    values = finalize(with_metrics(batch.old_logp, batch, TriageConfig())[1])
    assert values["ppo/ratio/token"] == 1
    assert values["ppo/clip_fraction/token"] == values["ppo/approx_kl/token"] == 0


def test_extreme_but_finite_log_probabilities_stay_finite():
    live, batch = random_batch(4)
    far = jnp.where(jnp.arange(live.shape[1]) % 2 == 0, -1e4, 0.0)[None]
    for shifts in ((1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1)):
        moved, old, sampler = (
            x + shift * far
            for x, shift in zip((live, batch.old_logp, batch.sampler_logp), shifts, strict=True)
        )
        loss, gradient = loss_and_grad(
            moved, batch.replace(old_logp=old, sampler_logp=sampler), TriageConfig()
        )
        assert np.isfinite(loss)
        assert np.isfinite(gradient).all()


def test_gradient_reaches_only_the_live_log_probabilities():
    live, batch = random_batch(4)
    config = TriageConfig()
    totals = update_totals(batch, jnp.ones_like(live), config)

    def loss(old, sampler):
        return loss_and_grad(live, batch.replace(old_logp=old, sampler_logp=sampler), config, totals)[0]

    for gradient in jax.grad(loss, argnums=(0, 1))(batch.old_logp, batch.sampler_logp):
        np.testing.assert_array_equal(gradient, 0)
