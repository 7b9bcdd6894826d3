"""Stochastic rounding: the two neighbours, in the right proportion."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.nvfp4 import twin
from triage_jax.nvfp4 import QuantSpec, from_quantized, quantize, to_operand
from triage_jax.nvfp4.formats import e2m1_round
from triage_jax.nvfp4.stochastic import e2m1_round_stochastic

ROUND = jax.jit(jax.vmap(e2m1_round_stochastic, in_axes=(None, 0)))


def keys(count: int) -> jax.Array:
    return jax.random.split(jax.random.key(np.random.default_rng().integers(1 << 31)), count)


def neighbours(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Grid values around |x| ≤ 6."""
    low = np.searchsorted(twin.E2M1, np.abs(x), side="right") - 1
    return twin.E2M1[low], twin.E2M1[np.minimum(low + 1, 7)]


def test_gives_a_neighbour_and_keeps_the_sign():
    x = np.random.default_rng().uniform(-6, 6, 4096).astype(np.float32)
    low, high = neighbours(x)
    got = np.asarray(ROUND(jnp.asarray(x), keys(16)))
    assert ((np.abs(got) == low) | (np.abs(got) == high)).all()
    np.testing.assert_array_equal(np.signbit(got), np.broadcast_to(np.signbit(x), got.shape))
    assert (got != got[0]).any()


@pytest.mark.parametrize("run", [e2m1_round_stochastic, jax.jit(e2m1_round_stochastic)], ids=["eager", "jit"])
def test_leaves_the_grid_and_saturates(run):
    grid = np.concatenate([twin.E2M1, -twin.E2M1]).astype(np.float32)
    x = jnp.asarray(np.concatenate([np.repeat(grid, 64), [7, 1e30, np.inf, -6.5, -np.inf]]), jnp.float32)
    np.testing.assert_array_equal(run(x, keys(1)[0])[:-5], np.repeat(grid, 64))
    np.testing.assert_array_equal(run(x, keys(1)[0])[-5:], [6, 6, 6, -6, -6])
    assert np.isnan(run(jnp.float32(np.nan), keys(1)[0]))


def test_is_unbiased_on_multiples_of_a_256th_of_the_step():
    """Every such number: 7 steps of 256, both signs; the mean of n is within 6 σ."""
    low, high = twin.E2M1[:-1], twin.E2M1[1:]
    x = (low[:, None] + (high - low)[:, None] * np.arange(256) / 256).ravel()
    x = np.concatenate([x, -x]).astype(np.float32)
    count = 2048
    mean = np.asarray(ROUND(jnp.asarray(x), keys(count)), np.float64).mean(0)
    below, above = neighbours(x)
    up = (np.abs(x) - below) / np.where(above > below, above - below, 1)
    sigma = (above - below) * np.sqrt(up * (1 - up) / count)
    # Near the ends single events are no longer normal; a count of them is within 6 σ + 6 of its mean.
    assert (np.abs(mean - x) <= 6 * sigma + 6 * (above - below) / count).all()
    # All deviations together have the variance they should: a generator with too few bits would not.
    inner = sigma > 0
    score = (((mean - x)[inner] / sigma[inner]) ** 2).mean()
    assert abs(score - 1) < 6 * np.sqrt(2 / inner.sum()) + 0.05


def test_bias_between_those_is_below_a_256th_of_the_step():
    """¼ of 1/256 above 3: rounds down always, by the definition; nearest rounding would too, so also 3.9999."""
    x = jnp.full(4096, 3 + 1 / 1024, jnp.float32)
    np.testing.assert_array_equal(ROUND(x, keys(1))[0], np.full(4096, 3.0))
    mean = float(ROUND(jnp.full(1 << 16, 4 - 1 / 1024, jnp.float32), keys(1)).mean())
    assert 4 - 1 / 256 - 6 * np.sqrt(1 / 256 / (1 << 16)) < mean < 4


def test_quantize_and_to_operand_round_alike():
    x = jnp.asarray(np.random.default_rng().standard_normal((35, 64)), jnp.float32)
    (key,) = keys(1)
    quantise, operand = jax.jit(quantize, static_argnums=1), jax.jit(to_operand, static_argnums=1)
    for spec in (QuantSpec(), QuantSpec(tile="16x16", rule="modelopt")):
        q, nearest = quantise(x, spec, key), quantise(x, spec)
        a, b = from_quantized(q), operand(x, spec, key)
        np.testing.assert_array_equal(a.values, b.values)
        np.testing.assert_array_equal(a.scale, b.scale)
        np.testing.assert_array_equal(q.scales, nearest.scales)
        assert (np.asarray(q.codes) != np.asarray(nearest.codes)).mean() > 0.1
        other = quantise(x, spec, keys(1)[0])
        assert (np.asarray(q.codes) != np.asarray(other.codes)).any()


def test_nearest_rounding_would_fail_the_means():
    """The tests above can fail: rounding to nearest is off by up to half a step."""
    x = np.float32([0.1, 2.3, 4.9])
    assert (np.abs(np.asarray(e2m1_round(jnp.asarray(x))) - x) > 0.05).all()
