"""Repair: hand-worked penalty and force, scopes, schedule."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.objective.inputs import one_row
from triage_jax.objective import RepairConfig, TokenBatch, TriageConfig, repair_loss, triage_loss

ON = TriageConfig()
PENALTY, FORCE = 1.70820e-4, 0.0149071  # of a mean gap of -0.05: q = 0.02


def scoped(scope, **settings):
    return TriageConfig(repair=RepairConfig(scope=scope, **settings))


_value_and_grad = jax.jit(jax.value_and_grad(repair_loss), static_argnums=2)


def value_and_grad(batch, config=ON, live=None):
    return _value_and_grad(batch.old_logp if live is None else live, batch, config)


def test_hand_worked_penalty_and_force():
    value, gradient = value_and_grad(one_row([-0.2, 0.1], advantage=1.0))
    np.testing.assert_allclose(value, PENALTY, rtol=1e-5)
    np.testing.assert_allclose(gradient, [[-FORCE / 2] * 2], rtol=1e-5)


def test_unselected_segments_stay_in_the_denominator():
    zeros = jnp.zeros((2, 2))
    gap = jnp.asarray([[-0.2, 0.1], [-0.4, 0.2]])
    batch = TokenBatch(gap, zeros, jnp.asarray([1.0, -1.0]), zeros == 0)
    value, gradient = value_and_grad(batch)
    np.testing.assert_allclose(value, PENALTY / 2, rtol=1e-5)
    np.testing.assert_allclose(gradient, [[-FORCE / 4] * 2, [0, 0]], rtol=1e-5)


def test_empty_segments_do_not_count():
    mask = [1, 1] + [0] * 300
    value, _ = value_and_grad(one_row([-0.2, 0.1] + [jnp.nan] * 300, 1.0, mask))
    np.testing.assert_allclose(value, PENALTY, rtol=1e-5)


def test_scopes_share_the_statistic_but_not_the_gradient():
    batch = one_row([-0.2, 0.1], advantage=1.0)
    for scope, gradient in {
        "whole": [-FORCE / 2, -FORCE / 2],
        "adv_positive": [-FORCE / 2, -FORCE / 2],
        "q2": [-FORCE / 2, 0],
    }.items():
        value, got = value_and_grad(batch, scoped(scope))
        np.testing.assert_allclose(value, PENALTY, rtol=1e-5)
        np.testing.assert_allclose(got, [gradient], rtol=1e-5)


@pytest.mark.parametrize(("advantage", "scope", "active"), [
    (-1.0, "whole", True), (-1.0, "adv_positive", False), (-1.0, "q2", False),
    (0.0, "whole", True), (0.0, "adv_positive", False), (0.0, "q2", False),
])  # fmt: skip
def test_scope_by_sign_of_the_advantage(advantage, scope, active):
    value, gradient = value_and_grad(one_row([-0.2, 0.1], advantage), scoped(scope))
    assert (value > 0) == active
    assert bool(jnp.any(gradient != 0)) == active


def test_the_live_gap_counts_and_not_the_old_one():
    batch = one_row([-9.0, -9.0], advantage=1.0)
    value, gradient = value_and_grad(batch, live=jnp.asarray([[0.0, -0.06]]))  # mean exactly at the target
    assert value == 0
    np.testing.assert_array_equal(gradient, 0)


@pytest.mark.parametrize("mean", [-0.031, -0.1, -0.5, -2.0, -50.0])
def test_force_is_bounded_but_never_vanishes(mean):
    _, gradient = value_and_grad(one_row([mean] * 128, advantage=1.0))
    force = -float(gradient.sum())
    q = -0.03 - mean
    assert 0 < force <= 5e-4**0.5 * (1 + 1e-6)
    np.testing.assert_allclose(force, q / (1 + q * q / 5e-4) ** 0.5, rtol=2e-4)


def test_coefficient_ratio_of_repair_to_policy():
    """Severe drift pulls a token with 3.35e-4 of the force of a unit-advantage token's policy gradient."""
    batch = one_row([-2.0] * 128, advantage=1.0)
    off = TriageConfig(repair=RepairConfig(enabled=False))
    with jax.enable_x64(True):
        batch = jax.tree.map(lambda x: x.astype(jnp.float64) if x.dtype != bool else x, batch)
        gradient = jax.jit(jax.grad(lambda *args: triage_loss(*args)[0]), static_argnums=2)
        both, policy = (gradient(batch.old_logp, batch, config) for config in (ON, off))
        np.testing.assert_allclose((policy - both) * 128, 3.354e-4, rtol=1e-3)


def test_start_step_is_inclusive():
    config = scoped("adv_positive", start_step=300)
    batch = one_row([-0.2, 0.1], advantage=1.0)
    run = jax.jit(lambda step: triage_loss(batch.old_logp, batch, config, step=step)[1])
    for step, coefficient in {299: 0.0, 300: 0.015, 301: 0.015}.items():
        metrics = run(step)
        np.testing.assert_allclose(metrics["repair/coefficient"].value(), coefficient, rtol=1e-6)
        np.testing.assert_allclose(metrics["loss/repair"].value(), coefficient * PENALTY, rtol=1e-5)
        np.testing.assert_allclose(metrics["repair/loss"].value(), PENALTY, rtol=1e-5)
    with pytest.raises(ValueError, match="start_step is 300"):
        triage_loss(batch.old_logp, batch, config)
