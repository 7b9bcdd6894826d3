"""Draws follow the distribution exactly, row by row, whatever the block size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triage_jax.rollout.sampling import draw, row_uniforms


def _inverse_distribution(probability: np.ndarray, uniform: float) -> int:
    """Float64 oracle: the first token whose cumulative probability exceeds the uniform."""
    return int(np.searchsorted(np.cumsum(probability) / probability.sum(), uniform, side="right"))


@pytest.mark.parametrize(("vocab", "block"), [(5, 2), (5, 256), (700, 256), (256, 256), (257, 16)])
def test_draw_is_the_inverse_distribution_function(vocab, block):
    rng = np.random.default_rng(vocab)
    logits = rng.normal(0, 3, (400, vocab))
    uniforms = rng.uniform(size=400)
    logp = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    drawn, scored = draw(jnp.asarray(logits.T, jnp.float32), jnp.asarray(uniforms, jnp.float32), block)
    drawn = np.asarray(drawn)
    np.testing.assert_allclose(scored, logp[np.arange(400), drawn], atol=2e-5)
    expected = [_inverse_distribution(np.exp(row), u) for row, u in zip(logp, uniforms, strict=True)]
    # A uniform within float32 rounding of a boundary may fall on either side.
    assert (drawn == expected).mean() > 0.99
    assert np.abs(drawn - expected).max() <= 1


@given(st.integers(0, 2**32 - 1), st.floats(0, 1, exclude_max=True, width=32))
@settings(max_examples=50, deadline=None)
def test_a_token_of_probability_zero_is_never_drawn(seed, uniform):
    rng = np.random.default_rng(seed)
    logp = rng.normal(0, 30, 40).astype(np.float32)
    logp[rng.uniform(size=40) < 0.7] = -np.inf
    logp[rng.integers(40)] = 0.0
    token = int(draw(jnp.asarray(logp)[:, None], jnp.asarray([uniform], jnp.float32), 8)[0][0])
    assert logp[token] > -100


@pytest.mark.parametrize("uniform", [0.0, np.float32(1) - np.float32(2**-24)])
def test_extreme_uniforms_draw_the_outermost_tokens_with_mass(uniform):
    logp = jnp.asarray([[-jnp.inf, jnp.log(0.25), jnp.log(0.75), -jnp.inf]])
    assert int(draw(logp.T, jnp.asarray([uniform], jnp.float32), 2)[0][0]) == (1 if uniform == 0 else 2)


def test_frequencies_match_probabilities():
    probability = np.array([0.5, 0.2, 0.2, 0.1, 0.0])
    rows = 40_000
    uniforms = row_uniforms(jnp.arange(rows, dtype=jnp.uint32), jnp.asarray(3))
    logp = jnp.broadcast_to(jnp.log(jnp.asarray(probability, jnp.float32)), (rows, 5))
    counts = np.bincount(np.asarray(jax.jit(draw)(logp.T, uniforms)[0]), minlength=5) / rows
    # Four standard deviations of a binomial share.
    np.testing.assert_allclose(counts, probability, atol=4 * np.sqrt(0.25 / rows))


def test_uniforms_depend_on_seed_and_step_only():
    seeds = jnp.asarray([7, 7, 8], jnp.uint32)
    first, again, later = (np.asarray(row_uniforms(seeds, jnp.asarray(step))) for step in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert first[0] == first[1] != first[2]
    assert first[0] != later[0]
