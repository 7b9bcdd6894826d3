"""token_logprobs against a float64 softmax written out in full."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from triage_jax.model.logprobs import TokenScores, token_logprobs

B, T, D, V = 3, 7, 16, 53


def inputs(seed: int = 0, dtype=jnp.float32, scale: float = 1.0, batch: int = B, vocab: int = V):
    """hidden, head, targets (both ends of the vocabulary among them) and a cotangent per token."""
    rng = np.random.default_rng(seed)
    hidden = jnp.asarray(scale * rng.normal(size=(batch, T, D)), dtype)
    head = jnp.asarray(rng.normal(size=(vocab, D)), dtype)
    targets = rng.integers(0, vocab, (batch, T))
    targets[0, :2] = 0, vocab - 1
    return hidden, head, jnp.asarray(targets), jnp.asarray(rng.normal(size=(batch, T)), dtype)


def oracle(hidden, head, targets, weights, temperature):
    """logp, entropy, and the gradients of sum(weights * logp), in float64."""
    hidden, head, weights = (np.asarray(x, np.float64) for x in (hidden, head, weights))
    logits = hidden @ head.T / temperature
    top = logits.max(-1, keepdims=True)
    log_softmax = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    softmax = np.exp(log_softmax)
    d_logits = (np.eye(len(head))[np.asarray(targets)] - softmax) * weights[..., None] / temperature
    return (
        np.take_along_axis(log_softmax, np.asarray(targets)[..., None], -1)[..., 0],
        -(softmax * log_softmax).sum(-1),
        d_logits @ head,
        np.einsum("btv,btd->vd", d_logits, hidden),
    )


def scores_and_gradients(hidden, head, targets, weights, **options):
    def loss(hidden, head):
        scores = token_logprobs(hidden, head, targets, **options)
        return (weights * scores.logp).sum(), scores

    (_, scores), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(hidden, head)
    return *scores, *gradients


jitted = jax.jit(scores_and_gradients, static_argnames=("temperature", "chunk"))


def assert_close(found, expected, tolerance: float) -> None:
    """Each array within `tolerance` of its own largest entry."""
    for name, a, b in zip(("logp", "entropy", "d_hidden", "d_head"), found, expected, strict=True):
        atol = tolerance * max(np.abs(b).max(), 1)
        np.testing.assert_allclose(np.asarray(a, np.float64), b, rtol=0, atol=atol, err_msg=name)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [None, 8, V, V - 1, 1000])
def test_float32_matches_the_oracle(chunk, temperature):
    arrays = inputs()
    found = jitted(*arrays, temperature=temperature, chunk=chunk)
    assert all(array.dtype == jnp.float32 for array in found)
    assert_close(found, oracle(*arrays, temperature), 1e-5)


def test_eager_is_the_same_as_jitted():
    arrays = inputs()
    eager = scores_and_gradients(*arrays, temperature=0.7, chunk=24)
    assert_close(eager, oracle(*arrays, 0.7), 1e-5)


@pytest.mark.parametrize("chunk", [None, 8])
def test_float64_matches_the_oracle(chunk):
    with jax.enable_x64(True):
        arrays = inputs(dtype=jnp.float64)
        found = jitted(*arrays, temperature=1.3, chunk=chunk)
        assert all(array.dtype == jnp.float64 for array in found)
        assert_close(found, oracle(*arrays, 1.3), 1e-12)


@pytest.mark.parametrize("chunk", [None, 8])
def test_bfloat16_multiplies_in_bfloat16_and_sums_in_float32(chunk):
    """The oracle sees the same BF16 operands and their products are exact in float32: scores agree as in
    float32. Gradients round d_logits to BF16 (half an ulp is 2^-9) and then d_hidden and d_head."""
    hidden, head, targets, weights = inputs(dtype=jnp.bfloat16)
    found = jitted(hidden, head, targets, weights.astype(jnp.float32), chunk=chunk)
    expected = oracle(hidden, head, targets, weights, 1.0)
    assert [array.dtype for array in found] == [jnp.float32, jnp.float32, jnp.bfloat16, jnp.bfloat16]
    assert_close((*found[:2], 0, 0), (*expected[:2], 0, 0), 1e-5)
    assert_close(found, expected, 2 * 2**-9)


def test_a_float32_head_under_bfloat16_hidden_gets_an_unrounded_gradient():
    hidden, head, targets, weights = inputs(dtype=jnp.bfloat16)
    found = scores_and_gradients(
        hidden, head.astype(jnp.float32), targets, weights.astype(jnp.float32), chunk=8
    )
    assert found[3].dtype == jnp.float32
    rounded = found[3].astype(jnp.bfloat16).astype(jnp.float32)
    assert (np.asarray(found[3]) != np.asarray(rounded)).mean() > 0.9


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    chunk=st.sampled_from([1, 16, 52]),
    scale=st.sampled_from([1e-3, 1.0, 1e3]),
)
def test_any_tiling_gives_the_same(seed, chunk, scale):
    """Tiles may sum a logit in another order: an error of some ulps of the largest logit, in every output."""
    arrays = inputs(seed, scale=scale)
    largest = np.abs(np.einsum("btd,vd->btv", arrays[0], arrays[1])).max()
    whole = jitted(*arrays, chunk=V)
    tiled = jitted(*arrays, chunk=chunk)
    tolerance = 1e-5 + 4 * np.finfo(np.float32).eps * largest
    assert_close(tiled, [np.asarray(array, np.float64) for array in whole], tolerance)


def test_two_tokens_by_hand():
    """Logits (0, ln 3): p = (1/4, 3/4), entropy = ln 4 - (3/4) ln 3; at temperature 1/2, p = (1/10, 9/10)."""
    hidden, head = jnp.ones((1, 1, 1)), jnp.asarray([[0.0], [np.log(3.0)]])
    scores = token_logprobs(hidden, head, jnp.zeros((1, 1), int), chunk=1)
    np.testing.assert_allclose(scores.logp, [[-np.log(4.0)]], rtol=1e-6)
    np.testing.assert_allclose(scores.entropy, [[np.log(4.0) - 0.75 * np.log(3.0)]], rtol=1e-6)
    scores = token_logprobs(hidden, head, jnp.ones((1, 1), int), temperature=0.5, chunk=1)
    np.testing.assert_allclose(scores.logp, [[np.log(0.9)]], rtol=1e-5)


def test_huge_logits_neither_overflow_nor_lose_the_entropy():
    """Two logits tie at 1e4 and share the mass: logp = -ln 2, entropy = ln 2; exp(1e4) would overflow."""
    head = jnp.asarray([1e4, -1e4, 1e4, 0.0])[:, None]
    arrays = jnp.ones((1, 3, 1)), head, jnp.asarray([[0, 2, 1]]), jnp.ones((1, 3))
    logp, entropy, *gradients = jitted(*arrays, chunk=1)
    np.testing.assert_allclose(logp, [[-np.log(2), -np.log(2), -2e4 - np.log(2)]], rtol=1e-6)
    np.testing.assert_allclose(entropy, np.full((1, 3), np.log(2)), rtol=1e-6)
    assert all(np.isfinite(array).all() for array in gradients)


def test_logp_is_never_positive():
    hidden, head, *_ = inputs(scale=100.0)
    likeliest = jnp.argmax(jnp.einsum("btd,vd->btv", hidden, head), -1)
    logp = token_logprobs(hidden, head, likeliest, chunk=8).logp
    assert (logp <= 0).all()
    assert (logp > -1).any()


def test_entropy_is_a_metric_without_gradient():
    hidden, head, targets, _ = inputs()
    gradients = jax.grad(lambda *x: token_logprobs(*x, targets).entropy.sum(), (0, 1))(hidden, head)
    assert not any(np.asarray(array).any() for array in gradients)


def test_a_target_outside_the_vocabulary_is_not_a_number():
    hidden, head, targets, _ = inputs()
    logp = token_logprobs(hidden, head, targets.at[1, 2].set(V).at[2, 3].set(-1), chunk=8).logp
    expected = np.zeros((B, T), bool)
    expected[1, 2] = expected[2, 3] = True
    np.testing.assert_array_equal(np.isnan(logp), expected)


@pytest.mark.parametrize(
    ("head_axes", "dtype"),
    [
        ((None, None), jnp.float32),
        ((None, "fsdp"), jnp.float32),
        ((None, "fsdp"), jnp.bfloat16),
        (("fsdp", None), jnp.float32),
    ],
)
def test_sharded_equals_unsharded_and_hidden_is_never_gathered(head_axes, dtype):
    arrays = inputs(dtype=dtype, batch=16, vocab=64)
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    shardings = (rows, NamedSharding(mesh, PartitionSpec(*head_axes)), rows, rows)
    expected = jitted(*arrays, chunk=24)
    placed = jax.device_put(arrays, shardings)
    compiled = jitted.lower(*placed, chunk=24).compile()
    found = compiled(*placed)
    # Sums over tokens are split over devices: float32 rounding, or one BF16 ulp in the rounded gradient.
    assert_close(
        found, [np.asarray(x, np.float64) for x in expected], 1e-5 if dtype == jnp.float32 else 2**-8
    )
    assert found[2].sharding.is_equivalent_to(rows, 3)
    gathered = re.findall(r"= \w+\[([\d,]+)\]\S* all-gather", compiled.as_text())
    assert bool(gathered) == (head_axes != (None, None)), "the pattern no longer finds what it looks for"
    whole_hidden = (f"{16 * T},{D}", f"{D},{16 * T}", f"16,{T},{D}")
    assert not set(gathered) & set(whole_hidden)


def test_no_array_of_all_logits_exists():
    """Peak temporary memory stays far below one [B, T, V] array, forward and backward."""
    hidden, head = jnp.zeros((8, 64, D)), jnp.zeros((20_000, D))
    targets = jnp.zeros((8, 64), int)
    compiled = jitted.lower(hidden, head, targets, jnp.ones((8, 64)), chunk=256).compile()
    plan = compiled.memory_analysis()
    assert plan.temp_size_in_bytes < 8 * 64 * 20_000 * 4 / 20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"targets": jnp.zeros((B, T + 1), int)}, r"targets \(3, 8\): need \[B,T,D\], \[V,D\], \[B,T\]"),
        ({"head": jnp.zeros((V, D + 1))}, r"head \(53, 17\)"),
        ({"temperature": 0.0}, r"temperature = 0.0: must be positive"),
        ({"chunk": 0}, "chunk = 0: must be at least 1"),
    ],
)
def test_wrong_arguments(change, message):
    hidden, head, targets, _ = inputs()
    arguments = {"hidden": hidden, "head": head, "targets": targets} | change
    unchecked = getattr(token_logprobs, "__wrapped__", token_logprobs)  # past the test suite's type checks
    with pytest.raises(ValueError, match=message):
        unchecked(**arguments)


def test_result_type():
    hidden, head, targets, _ = inputs()
    scores = token_logprobs(hidden, head, targets)
    assert isinstance(scores, TokenScores)
    assert scores.logp.shape == scores.entropy.shape == (B, T)
