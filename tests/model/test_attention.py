"""Attention in blocks of queries is attention at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from triage_jax.model.attention import causal_attention

B, T, H, K, D = 2, 21, 4, 2, 8


def _attention(q, k, v, valid):
    """One query after the other, in float64."""
    q, k, v = (np.asarray(array, np.float64) for array in (q, k, v))
    out = np.zeros_like(q)
    for b in range(B):
        for t in range(T):
            seen = np.flatnonzero(valid[b, : t + 1])
            for h in range(H) if len(seen) else ():
                scores = k[b, seen, h // (H // K)] @ q[b, t, h] / np.sqrt(D)
                weight = np.exp(scores - scores.max())
                out[b, t, h] = weight / weight.sum() @ v[b, seen, h // (H // K)]
    return out


def _inputs():
    rng = np.random.default_rng()
    shapes = ((B, T, H, D), (B, T, K, D), (B, T, K, D), (B, T, H, D))
    arrays = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]
    valid = np.ones((B, T), bool)
    valid[0, :5] = False
    valid[1, 17:] = False
    return arrays, valid


@pytest.mark.parametrize("longest_whole", [T, T - 1], ids=["whole", "blocks"])
def test_every_token_attends_to_the_valid_ones_before_it(longest_whole):
    """Blocks of 8 in 21 tokens: the last is filled up."""
    (q, k, v, _), valid = _inputs()
    y = causal_attention(jnp.asarray(valid), longest_whole=longest_whole, block=8)(q, k, v)
    expected = _attention(q, k, v, valid)
    np.testing.assert_allclose(np.asarray(y)[valid], expected[valid], rtol=1e-4, atol=1e-5)
    assert np.all(np.isfinite(y))


def test_gradients_of_blocks_are_those_of_the_whole():
    arrays, valid = _inputs()
    *args, g = arrays
    g = g * valid[:, :, None, None]

    def gradients(longest_whole):
        attend = causal_attention(jnp.asarray(valid), longest_whole=longest_whole, block=8)
        return jax.jit(lambda q, k, v: jax.vjp(attend, q, k, v)[1](g))(*args)

    for blocks, whole in zip(gradients(0), gradients(T), strict=True):
        np.testing.assert_allclose(blocks, whole, rtol=1e-4, atol=1e-5)


def test_key_gradients_are_summed_in_float32():
    """A key that 4096 queries of BF16 share alike: a sum of BF16 would stop growing at 256 times a term."""
    length = 4096
    ones = jnp.ones((1, length, 1, 16), jnp.bfloat16)
    attend = causal_attention(jnp.ones((1, length), bool), longest_whole=0, block=8)
    _, pull = jax.vjp(lambda v: attend(jnp.zeros_like(ones), ones, v), ones)
    # Query t gives every value up to its own 1/(t+1): the first gets the harmonic number of 4096.
    first = np.asarray(pull(ones)[0], np.float64)[0, 0, 0, 0]
    assert first == pytest.approx(np.sum(1 / np.arange(1, length + 1)), rel=1e-2)
