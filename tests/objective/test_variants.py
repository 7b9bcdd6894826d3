"""Rivals against the float64 loops: value, gradient, splits and masks; one compilation each."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.objective import rivals_reference as reference
from tests.objective.inputs import random_batch
from triage_jax.objective import (
    OBJECTIVES,
    CalibrationConfig,
    Objective,
    RivalConfig,
    TokenBatch,
    TriageConfig,
    triage_loss,
    update_inputs,
)
from triage_jax.objective.rival_config import (
    BapoConfig,
    DppoConfig,
    DrGrpoConfig,
    GeoRejectionConfig,
    GspoConfig,
    K3RejectionConfig,
    OpsmConfig,
)

CONSTANTS = RivalConfig(  # such that on the random batch every rule keeps something and drops something
    dr_grpo=DrGrpoConfig(max_tokens=77),
    gspo=GspoConfig(low=0.02, high=0.02),
    geo_rejection=GeoRejectionConfig(low=0.6, high=1.6),
    k3_rejection=K3RejectionConfig(threshold=0.3),
    opsm=OpsmConfig(threshold=0.2),
    dppo=DppoConfig(tv_low=0.05, tv_high=0.1, kl_low=0.01, kl_high=0.02, penalty=1e-3),
    bapo=BapoConfig(target=0.7, high_max=3.0),  # bounds (0.8, 1.45)
)
CALIBRATION = CalibrationConfig(thresholds=(1.0, 0.1, 0.9, 0.2, 0.8))
NAMES = [name for name in OBJECTIVES if name != "triage"]


def config_of(name):
    return TriageConfig(name=name, rivals=CONSTANTS, calibration=CALIBRATION)


@cache
def inputs():
    with jax.enable_x64(True):
        live, batch = random_batch(7, responses=8, tokens=60, dtype=np.float64, per_token=True)
        at_most = jnp.asarray(-1e-3, jnp.float64)  # probabilities below 1, for the binary divergence
        old, sampler = (jnp.minimum(x, at_most) for x in (batch.old_logp, batch.sampler_logp))
        return jnp.minimum(live, at_most), batch.replace(old_logp=old, sampler_logp=sampler)


@cache
def jitted(name):
    """(logp, batch, totals, weights) -> (loss, gradient); None is the default."""

    def loss(logp, batch, totals, weights):
        return OBJECTIVES[name](logp, batch, config_of(name), totals, weights=weights)[0]

    return jax.jit(jax.value_and_grad(loss))


def update_of(name, batch):
    return jax.jit(update_inputs, static_argnums=1)(batch, config_of(name))


@pytest.mark.parametrize("name", NAMES)
def test_value_splits_and_masks(name):
    with jax.enable_x64(True):
        live, batch = inputs()
        weights, totals = update_of(name, batch)
        loss, gradient = jitted(name)(live, batch, totals, weights)
        if name in reference.RIVALS:
            np.testing.assert_array_equal(weights, 1)
            expected, slopes = reference.loss_and_gradient(name, live, batch, config_of(name))
            np.testing.assert_allclose(loss, expected, rtol=1e-11)
            np.testing.assert_allclose(gradient, slopes, rtol=1e-11, atol=1e-15)
        valid = np.asarray(batch.mask & (batch.advantages != 0))
        assert np.count_nonzero(np.asarray(gradient)[valid]) > 0

        parts = []  # of the same shape: the other rows masked
        for part in np.split(np.random.default_rng(1).permutation(8), 4):
            mine = np.isin(np.arange(8), part)[:, None]
            parts.append(jitted(name)(live, batch.replace(mask=batch.mask & mine), totals, weights))
        np.testing.assert_allclose(sum(p[0] for p in parts), loss, rtol=1e-12)
        np.testing.assert_allclose(sum(p[1] for p in parts), gradient, rtol=1e-12, atol=1e-17)

        spoiled_live, spoiled = poisoned_per_token(live, batch)
        got, got_gradient = jitted(name)(spoiled_live, spoiled, *reversed(update_of(name, spoiled)))
        np.testing.assert_allclose(got, loss, rtol=1e-12)
        np.testing.assert_allclose(got_gradient, gradient, rtol=1e-12, atol=1e-17)
        np.testing.assert_array_equal(np.asarray(got_gradient)[~np.asarray(batch.mask)], 0)

        empty = batch.replace(mask=jnp.zeros_like(batch.mask))
        got, got_gradient = jitted(name)(live, empty, *reversed(update_of(name, empty)))
        assert got == 0
        np.testing.assert_array_equal(got_gradient, 0)


def poisoned_per_token(live, batch):
    """NaN and infinities wherever the mask is False."""
    poison = jnp.asarray([jnp.nan, jnp.inf, -jnp.inf], live.dtype)[jnp.arange(live.shape[1]) % 3][None]
    old, sampler, advantages, live = (
        jnp.where(batch.mask, x, jnp.roll(poison, shift))
        for shift, x in enumerate((batch.old_logp, batch.sampler_logp, batch.advantages, live))
    )
    return live, TokenBatch(old, sampler, advantages, batch.mask)


def test_the_constants_bite():
    """Every rule of the random batch keeps some tokens and removes others, or the test above says little."""
    with jax.enable_x64(True):
        live, batch = inputs()
        for name in reference.RIVALS:
            slopes = reference.loss_and_gradient(name, live, batch, config_of(name))[1]
            share = np.mean(slopes[np.asarray(batch.mask)] != 0)
            if name in ("cispo", "tis_token", "tis_sequence"):
                continue
            penalised = name.startswith("dppo")  # the penalty reaches every token
            assert (0 < share < 1) or (penalised and share == 1), (name, share)


@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_metric_keys_are_those_of_triage(name):
    live, batch = random_batch(0, tokens=8)
    shapes = {
        objective: jax.eval_shape(lambda *args, f=function: f(*args, config_of(name))[1], live, batch)
        for objective, function in {"triage_loss": triage_loss, name: OBJECTIVES[name]}.items()
    }
    assert jax.tree.structure(shapes[name]) == jax.tree.structure(shapes["triage_loss"])
    assert isinstance(OBJECTIVES[name], Objective)
