"""Expert products against one dense product per expert."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from triage_jax.nvfp4 import DotRecipe, QuantSpec, quantized_dot, to_operand
from triage_jax.nvfp4.grouped import grouped_dot, stacked_operand
from triage_jax.nvfp4.stacked import stacked_nvfp4_gradients

SIZES = np.array([5, 0, 11, 3, 13])
E, M, N, K = len(SIZES), int(SIZES.sum()), 24, 32
EXPERT = np.repeat(np.arange(E), SIZES)
ROWS = DotRecipe(weight=QuantSpec(tile="16x16"), activation=QuantSpec(scope="row"))
MULTIPLIED = DotRecipe(
    weight=QuantSpec(scope="row"), activation=QuantSpec(scope="row"), backward="dequantized"
)
CASES = [("float32", None), ("bf16", None), ("emulated", ROWS), ("emulated", MULTIPLIED)]


def _inputs(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(int(np.random.default_rng().integers(2**31))), 3)
    shapes = ((M, K), (E, N, K), (M, N))
    return tuple(jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True))


def _one_by_one(x, w, recipe, execution):
    """Per-row scales do not see other experts' rows, so that each expert can be computed alone."""
    parts = [quantized_dot(x[e == EXPERT], w[e], recipe, execution) for e in range(E) if SIZES[e]]
    return jnp.concatenate(parts)


@pytest.mark.parametrize(("execution", "recipe"), CASES)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_values_and_gradients_are_those_of_every_expert_alone(execution, recipe, wrap):
    x, w, g = _inputs()

    def grouped(x, w):
        return grouped_dot(x, w, jnp.asarray(SIZES), recipe, execution)

    y, pull = jax.vjp(wrap(grouped), x, w)
    expected, expected_pull = jax.vjp(lambda x, w: _one_by_one(x, w, recipe, execution), x, w)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(pull(g), expected_pull(g), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-4)
    assert not np.any(pull(g)[1][1]), "an expert without rows gets no gradient"


def test_float32_is_the_float64_product():
    x, w, _ = _inputs()
    exact = np.einsum("mk,mnk->mn", np.asarray(x, np.float64), np.asarray(w, np.float64)[EXPERT])
    np.testing.assert_allclose(
        grouped_dot(x, w, jnp.asarray(SIZES), None, "float32"), exact, rtol=2e-6, atol=2e-5
    )


def test_all_experts_share_the_tensor_scope_of_the_activations():
    x, w, _ = _inputs()
    x = x.at[0].multiply(1000.0)  # of expert 0: it coarsens the blocks of every other
    recipe = DotRecipe(weight=QuantSpec(), activation=QuantSpec(scope="tensor"))
    left = to_operand(x, recipe.activation)
    right = [to_operand(w[e], recipe.weight) for e in range(E)]
    expected = [
        (np.asarray(left.values[m], np.float64) @ np.asarray(right[EXPERT[m]].values, np.float64).T)
        * float(left.scale * right[EXPERT[m]].scale)
        for m in range(M)
    ]
    y = grouped_dot(x, w, jnp.asarray(SIZES), recipe, "emulated")
    np.testing.assert_allclose(y, np.stack(expected), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("recipe", [ROWS, MULTIPLIED], ids=["tensor scale", "row scales"])
def test_prequantised_weights_give_the_same_and_have_no_gradient(recipe):
    x, w, g = _inputs(jnp.bfloat16)
    operand = stacked_operand(w, recipe)
    y, pull = jax.vjp(lambda x: grouped_dot(x, operand, jnp.asarray(SIZES), recipe, "emulated"), x)
    np.testing.assert_array_equal(y, grouped_dot(x, w, jnp.asarray(SIZES), recipe, "emulated"))
    scale = np.asarray(operand.scale, np.float64).reshape(E, -1, 1)
    dequantised = np.asarray(operand.values, np.float64) * scale
    exact = np.einsum("mn,mnk->mk", np.asarray(g, np.float64), dequantised[EXPERT])
    np.testing.assert_allclose(np.asarray(pull(g)[0], np.float64), exact, rtol=2e-2, atol=0.1)


def test_refusals():
    x, w, _ = _inputs()
    sizes = jnp.asarray(SIZES)
    with pytest.raises(ValueError, match="must agree"):
        grouped_dot(x, stacked_operand(w[..., :16], ROWS), sizes, ROWS, "emulated")
    with pytest.raises(ValueError, match="accepted: float32, bf16, emulated"):
        grouped_dot(x, w, sizes, ROWS, "te")
    with pytest.raises(ValueError, match="needs a DotRecipe"):
        grouped_dot(x, w, sizes, None, "emulated")


NVFP4 = DotRecipe(
    weight=QuantSpec(tile="16x16"), activation=QuantSpec(), backward="nvfp4", stochastic_rounding=False
)


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("gradient", [QuantSpec(), QuantSpec(scope="row")], ids=["tensor", "row"])
def test_nvfp4_gradients_are_those_of_a_stack_of_equal_experts(hadamard, gradient):
    """Every expert in a buffer of 16 rows, of which the native layout's gradients are known to be right."""
    recipe = replace(NVFP4, hadamard=hadamard, gradient=gradient)
    x, w, g = _inputs(jnp.bfloat16)
    _, pull = jax.vjp(jax.jit(lambda x, w: grouped_dot(x, w, jnp.asarray(SIZES), recipe, "emulated")), x, w)
    at = np.concatenate([e * 16 + np.arange(size) for e, size in enumerate(SIZES)])

    def stacked(rows):
        return jnp.zeros((E * 16, rows.shape[1]), rows.dtype).at[at].set(rows).reshape(E, 16, -1)

    dx, dw = stacked_nvfp4_gradients(stacked(x), w, stacked(g), recipe, "emulated", None)
    ours = pull(g)
    pairs = [(ours[0], dx.reshape(E * 16, K)[at]), (ours[1], dw)]
    for a, b in pairs if gradient.scope == "tensor" else pairs[:1]:
        b = np.asarray(b, np.float64)
        difference = np.abs(np.asarray(a, np.float64) - b)
        assert np.all(difference <= 2.0**-8 * np.abs(b) + 1e-5 * np.abs(b).max())
    assert not np.any(ours[1][1]), "an expert without rows gets no gradient"


def test_stochastic_rounding_is_unbiased():
    x, w, g = _inputs()
    exact = np.zeros((E, N, K))
    for m in range(M):
        exact[EXPERT[m]] += np.outer(np.asarray(g[m], np.float64), np.asarray(x[m], np.float64))
    recipe = replace(NVFP4, stochastic_rounding=True)

    def draw(key):
        _, pull = jax.vjp(lambda w: grouped_dot(x, w, jnp.asarray(SIZES), recipe, "emulated", key), w)
        return pull(g)[0]

    keys = jax.random.split(jax.random.key(int(np.random.default_rng().integers(2**31))), 64)
    draws = jax.jit(lambda keys: jax.lax.map(draw, keys))(keys)
    assert np.std(draws, axis=0).max() > 0
    # x is rounded to nearest, of which the bias is; the error of one draw is larger.
    error = np.linalg.norm(np.mean(draws, axis=0) - exact) / np.linalg.norm(exact)
    assert error < np.linalg.norm(draws[0] - exact) / np.linalg.norm(exact)
    with pytest.raises(ValueError, match="needs a key"):
        jax.grad(lambda x: grouped_dot(x, w, jnp.asarray(SIZES), recipe, "emulated").sum())(x)
