"""A stack of experts against one product per expert, in the emulation and on the native primitive."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.nvfp4 import twin
from tests.nvfp4.test_quantize import settings_of
from triage_jax.nvfp4 import DotRecipe, QuantSpec, quantized_dot
from triage_jax.nvfp4.hadamard import rotate
from triage_jax.nvfp4.stacked import stacked_dot

E, M, N, K = 3, 32, 24, 48
ROW = QuantSpec(scope="row")
TILES = DotRecipe(weight=QuantSpec(tile="16x16"), activation=ROW)
MULTIPLIED = DotRecipe(weight=ROW, activation=ROW, backward="dequantized")
NVFP4 = DotRecipe(
    weight=QuantSpec(tile="16x16"),
    activation=ROW,
    gradient=ROW,
    backward="nvfp4",
    stochastic_rounding=False,
)
CASES = [
    ("float32", None),
    ("bf16", None),
    *((execution, recipe) for execution in ("emulated", "scaled_matmul") for recipe in (TILES, MULTIPLIED)),
]
STATIC = ("execution", "recipe")


def _value_and_gradient(x, w, g, key=None, *, execution, recipe):
    y, pull = jax.vjp(lambda x, w: stacked_dot(x, w, recipe, execution, key), x, w)
    return y, *pull(g)


def _one_by_one(x, w, g, *, execution, recipe):
    def alone(x, w):
        return jnp.stack([quantized_dot(x[e], w[e], recipe, execution) for e in range(E)])

    y, pull = jax.vjp(alone, x, w)
    return y, *pull(g)


STACKED = jax.jit(_value_and_gradient, static_argnames=STATIC)
ALONE = jax.jit(_one_by_one, static_argnames=STATIC)


def _inputs(dtype=jnp.float32):
    rng = np.random.default_rng()
    # Experts of different size, so that a scale on the wrong one shows.
    size = 2.0 ** np.arange(E).reshape(E, 1, 1)
    return tuple(
        jnp.asarray(rng.standard_normal(shape) * size, dtype) for shape in ((E, M, K), (E, N, K), (E, M, N))
    )


def _assert_close(ours, theirs):
    """To the rounding of float32 sums, relative to each expert's largest number."""
    for a, b in zip(ours, theirs, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        size = np.abs(b).max(axis=(1, 2), keepdims=True)
        assert np.all(np.abs(a - b) <= 1e-5 * size)


@pytest.mark.parametrize(("execution", "recipe"), CASES)
def test_values_and_gradients_are_those_of_every_expert_alone(execution, recipe):
    """Scales per row do not see other experts' rows, so that each can be computed alone."""
    args = _inputs()
    _assert_close(
        STACKED(*args, execution=execution, recipe=recipe), ALONE(*args, execution=execution, recipe=recipe)
    )


def test_eager_equals_jit():
    x, w, g = _inputs()
    y, _, _ = STACKED(x, w, g, execution="scaled_matmul", recipe=MULTIPLIED)
    np.testing.assert_allclose(stacked_dot(x, w, MULTIPLIED, "scaled_matmul"), y, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("execution", ["emulated", "scaled_matmul"])
@pytest.mark.parametrize("hadamard", [False, True])
def test_nvfp4_gradients_are_the_float64_products_of_the_quantised_operands(execution, hadamard):
    """Quantised by an independent implementation: g by output, wᵀ by output, gᵀ and xᵀ by token."""
    recipe = replace(NVFP4, hadamard=hadamard, gradient=QuantSpec())
    x, w, g = _inputs(jnp.bfloat16)
    _, dx, dw = STACKED(x, w, g, execution=execution, recipe=recipe)
    x, w, g = (np.asarray(array, np.float32) for array in (x, w, g))
    tensor = settings_of(QuantSpec())

    def value(array, settings=tensor):
        q = twin.quantize(array, **settings)
        return q.values() * q.global_scale

    def turned(array):
        array = np.swapaxes(array, 1, 2)
        if not hadamard:
            return array
        return np.asarray(rotate(jnp.asarray(array)), np.float32)

    tile = settings_of(QuantSpec(tile="16x16"))
    filled = np.pad(g, ((0, 0), (0, 0), (0, -N % 16)))
    columns = np.pad(np.swapaxes(w, 1, 2), ((0, 0), (0, 0), (0, -N % 16)))
    right = np.stack([value(columns[e], tile) for e in range(E)])
    exact_dx = np.einsum("emn,ekn->emk", value(filled), right)
    exact_dw = np.einsum("enm,ekm->enk", value(turned(g)), value(turned(x)))
    for ours, exact in ((dx, exact_dx), (dw, exact_dw)):
        # The result is rounded to BF16.
        size = np.abs(exact).max(axis=(1, 2), keepdims=True)
        assert np.all(np.abs(np.asarray(ours, np.float64) - exact) <= 2.0**-8 * np.abs(exact) + 1e-5 * size)


def test_empty_rows_change_nothing():
    """What a buffer has room for beyond its rows."""
    x, w, g = _inputs()
    recipe = replace(NVFP4, activation=QuantSpec(), gradient=QuantSpec())
    more = [jnp.pad(array, ((0, 0), (0, 32), (0, 0))) for array in (x, g)]
    y, dx, dw = STACKED(x, w, g, execution="scaled_matmul", recipe=recipe)
    wide_y, wide_dx, wide_dw = STACKED(more[0], w, more[1], execution="scaled_matmul", recipe=recipe)
    _assert_close((wide_y[:, :M], wide_dx[:, :M], wide_dw), (y, dx, dw))
    assert not np.any(wide_y[:, M:])


def test_stochastic_rounding_is_unbiased_and_follows_its_key():
    x, w, g = _inputs()
    recipe = replace(NVFP4, stochastic_rounding=True)
    keys = jax.random.split(jax.random.key(int(np.random.default_rng().integers(2**31))), 64)
    run = jax.jit(
        jax.vmap(lambda key: _value_and_gradient(x, w, g, key, execution="emulated", recipe=recipe)[1:])
    )
    draws = run(keys)
    nearest = STACKED(x, w, g, execution="emulated", recipe=NVFP4)[1:]
    for drawn, rounded in zip(draws, nearest, strict=True):
        assert not np.array_equal(drawn[0], drawn[1])
        mean, spread = np.mean(drawn, axis=0), np.std(drawn, axis=0)
        size = np.abs(rounded).max(axis=(1, 2), keepdims=True)
        assert np.abs(mean - rounded).max() < np.max(spread) + 0.1 * size.max()
    with pytest.raises(ValueError, match="needs a key"):
        jax.grad(lambda x: stacked_dot(x, w, recipe, "emulated").sum())(x)


@pytest.mark.usefixtures("unchecked")
def test_refusals():
    x, w, _ = _inputs()
    with pytest.raises(ValueError, match="must agree"):
        stacked_dot(x, w[..., :16], TILES, "emulated")
    with pytest.raises(ValueError, match="needs a DotRecipe"):
        stacked_dot(x, w, None, "scaled_matmul")
    shards = replace(TILES, activation=QuantSpec(scope="shard", shards=2))
    with pytest.raises(ValueError, match="accepted with experts: tensor, row, static"):
        stacked_dot(x, w, shards, "emulated")
