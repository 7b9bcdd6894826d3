"""Gradients of the three backwards against float64 products of the operands they stand for."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.nvfp4 import twin
from tests.nvfp4.test_dot import DOT, bf16, exact, inputs
from triage_jax.nvfp4 import DotRecipe, QuantSpec, from_quantized, quantize, quantized_dot, to_operand
from triage_jax.nvfp4.hadamard import rotation

SPECS = {
    "learner": DotRecipe(weight=QuantSpec(tile="16x16"), activation=QuantSpec()),
    "rows": DotRecipe(weight=QuantSpec(scope="row"), activation=QuantSpec(scope="row")),
    "static": DotRecipe(
        weight=QuantSpec(rule="modelopt"), activation=QuantSpec(scope="static", static_amax=4.0)
    ),
    "4over6": DotRecipe(
        weight=QuantSpec(four_over_six="mse", bound=256), activation=QuantSpec(scope="shard", shards=3)
    ),
}
NVFP4 = ("emulated", "scaled_matmul")


def with_backward(name: str, backward: str, **changes: bool) -> DotRecipe:
    return dataclasses.replace(SPECS[name], backward=backward, **changes)


@partial(jax.jit, static_argnums=(3, 4))
def gradients(x, w, g, recipe, execution, key=None):
    def loss(x, w):
        return (quantized_dot(x, w, recipe, execution, key).astype(jnp.float32) * g).sum()

    return jax.grad(loss, argnums=(0, 1))(x, w)


def output_gradient(lead=(3, 5), n=24) -> np.ndarray:
    return np.random.default_rng().standard_normal((*lead, n)).astype(np.float32)


def dequantised(x: np.ndarray, spec: QuantSpec) -> np.ndarray:
    """Values of the independent quantiser, in float64."""
    q = twin.quantize(x, **dataclasses.asdict(spec))
    return q.values() * q.global_scale.astype(np.float64)


def assert_close(got, expected: np.ndarray, bound: np.ndarray, dtype=np.float32) -> None:
    """Within what float32 accumulation, the scale's rounding and the cast to `dtype` may err."""
    assert got.dtype == dtype
    rounding = 2.0**-8 if dtype == ml_dtypes.bfloat16 else 2.0**-21
    assert (np.abs(np.asarray(got, np.float64) - expected) <= bound + np.abs(expected) * rounding).all()


@pytest.mark.parametrize("execution", NVFP4)
@pytest.mark.parametrize("name", SPECS)
def test_dequantized_multiplies_the_forward_operands(name, execution):
    recipe = with_backward(name, "dequantized")
    x, w = inputs()
    g = output_gradient()
    dx, dw = gradients(x, w, g, recipe, execution)
    left, right = (
        bf16(dequantised(v, spec).astype(np.float32))
        for v, spec in ((x, recipe.activation), (w, recipe.weight))
    )
    assert_close(dx, *exact(bf16(g), right.T))
    assert_close(dw, *exact(bf16(g).reshape(-1, 24).T, left.reshape(-1, 64).T))


@pytest.mark.parametrize("backward", ["bf16", "dequantized", "nvfp4"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_gradients_have_their_arguments_dtypes(backward, dtype):
    x, _ = inputs(dtype)
    _, w = inputs(np.float32)
    recipe = with_backward("learner", backward)
    dx, dw = gradients(x, w, output_gradient(), recipe, "emulated", jax.random.key(0))
    assert (dx.dtype, dw.dtype) == (dtype, np.float32)


def pad(x: np.ndarray) -> np.ndarray:
    return np.pad(x, ((0, 0), (0, -x.shape[1] % 16)))


def rotated(x: np.ndarray) -> np.ndarray:
    """BF16 of each run of 16 times the rotation, by float32 sums."""
    runs = x.astype(ml_dtypes.bfloat16).astype(np.float64).reshape(len(x), -1, 16)
    return (
        (runs @ rotation().astype(np.float64)).reshape(x.shape).astype(ml_dtypes.bfloat16).astype(np.float32)
    )


@pytest.mark.parametrize("execution", NVFP4)
@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("name", ["learner", "4over6"])
def test_nvfp4_quantises_both_operands_of_both_gradients(name, hadamard, execution):
    """15 tokens and 24 outputs: both contractions are filled up with zeros."""
    recipe = with_backward(name, "nvfp4", stochastic_rounding=False, hadamard=hadamard)
    # Quarters below 8: sums of 16 of them are exact in float32 and in this test's float64, whatever the order.
    rng = np.random.default_rng()
    x, w, g = (
        rng.integers(-31, 32, shape).astype(np.float32) / 4 for shape in ((3, 5, 64), (24, 64), (3, 5, 24))
    )
    dx, dw = gradients(x, w, g, recipe, execution)
    weight, activation = (
        dataclasses.replace(spec, scope="tensor", shards=None) for spec in (recipe.weight, recipe.activation)
    )
    rows = g.reshape(-1, 24)
    expected, bound = exact(dequantised(pad(rows), QuantSpec()), dequantised(pad(w.T), weight))
    assert_close(dx, expected.reshape(3, 5, 64), bound.reshape(3, 5, 64))
    turn = rotated if hadamard else lambda v: v
    left, right = (turn(pad(v)) for v in (rows.T, x.reshape(-1, 64).T))
    assert_close(dw, *exact(dequantised(left, QuantSpec()), dequantised(right, activation)))


def test_filling_up_adds_zero_rows_only():
    """15 tokens and a sixteenth of zeros have the same gradient."""
    x, w = inputs(lead=(15,))
    g = output_gradient((15,))
    recipe = with_backward("learner", "nvfp4", stochastic_rounding=False)
    dx, dw = gradients(x, w, g, recipe, "emulated")
    filled = [np.concatenate([v, np.zeros((1, v.shape[1]), np.float32)]) for v in (x, g)]
    dx16, dw16 = gradients(filled[0], w, filled[1], recipe, "emulated")
    np.testing.assert_array_equal(dw, dw16)
    np.testing.assert_array_equal(dx, dx16[:15])


def test_nothing_is_lost_where_nothing_rounds():
    """Operands on the grid, largest 6 in every block, in whole tiles: all three backwards are the exact gradient."""
    rng = np.random.default_rng()
    x, w, g = (
        rng.choice(np.concatenate([twin.E2M1, -twin.E2M1]), shape) for shape in ((32, 64), (48, 64), (32, 48))
    )
    for v in (x, w, g):
        v[::16] = v[:, ::16] = 6  # along rows and columns
    x, w, g = (v.astype(np.float32) for v in (x, w, g))
    for backward in ("bf16", "dequantized", "nvfp4"):
        recipe = with_backward("learner", backward, hadamard=False)
        dx, dw = gradients(x, w, g, recipe, "emulated", jax.random.key(rng.integers(1 << 31)))
        np.testing.assert_allclose(dx, g.astype(np.float64) @ w, rtol=1e-6)
        np.testing.assert_allclose(dw, g.T.astype(np.float64) @ x, rtol=1e-6)


def test_stochastic_rounding_is_unbiased():
    """The mean gradient over many keys is that of g itself; rounding to nearest is further off."""
    rng = np.random.default_rng()
    x, w = inputs(lead=(32,), n=32)
    # The largest of every run of 16, along rows and columns, is 6: block scales are exact, nothing saturates.
    g = (rng.integers(-5 * 64, 5 * 64, (32, 32)) / 64).astype(np.float32)
    g[np.arange(32), np.arange(32) % 16] = g[np.arange(32), 16 + np.arange(32) % 16] = 6
    recipe = with_backward("learner", "nvfp4", hadamard=False)

    def dx_dw(key):
        _, pull = jax.vjp(
            lambda x, w: quantized_dot(x, w, recipe, "emulated", key), jnp.asarray(x), jnp.asarray(w)
        )
        return pull(jnp.asarray(g))

    count = 1024
    keys = jax.random.split(jax.random.key(rng.integers(1 << 31)), count)
    samples = [np.asarray(v, np.float64) for v in jax.jit(jax.vmap(dx_dw))(keys)]
    weight, activation = dequantised(w.T, recipe.weight), dequantised(x.T, recipe.activation)
    for sample, exact_mean in zip(
        samples, (g.astype(np.float64) @ weight.T, g.T.astype(np.float64) @ activation.T), strict=True
    ):
        sigma = sample.std(0) / np.sqrt(count)
        assert (sigma > 0).all()
        assert (np.abs(sample.mean(0) - exact_mean) <= 6 * sigma + 1e-4).all()
    nearest = gradients(
        x, w, g, with_backward("learner", "nvfp4", hadamard=False, stochastic_rounding=False), "emulated"
    )
    assert (
        np.abs(np.asarray(nearest[0]) - g.astype(np.float64) @ weight.T).max()
        > np.abs(samples[0].mean(0) - g.astype(np.float64) @ weight.T).max()
    )


def test_a_key_fixes_the_gradient_and_the_two_uses_of_g_differ():
    x, w = inputs(lead=(16,), n=16, k=16)
    g = output_gradient((16,), 16)
    recipe = with_backward("learner", "nvfp4", hadamard=False)
    first, again, other = (gradients(x, w, g, recipe, "emulated", jax.random.key(k)) for k in (1, 1, 2))
    for a, b, c in zip(first, again, other, strict=True):
        np.testing.assert_array_equal(a, b)
        assert (np.asarray(a) != np.asarray(c)).any()
    # With the identity for x and w, dx is g and dw is gᵀ as they were rounded.
    eye = np.eye(16, dtype=np.float32) * 6
    dx, dw = (np.asarray(v) for v in gradients(eye, eye, g, recipe, "emulated", jax.random.key(1)))
    assert (dx != dw.T).mean() > 0.1


@pytest.mark.parametrize(
    ("name", "backward"),
    [("learner", "nvfp4"), ("static", "nvfp4"), ("rows", "dequantized"), ("4over6", "bf16")],
)
def test_native_execution_equals_the_emulation(name, backward):
    """Forward and backward, to the order of accumulation."""
    x, w = inputs(lead=(2, 9))
    g = output_gradient((2, 9))
    recipe = with_backward(name, backward)

    def run(execution):
        def loss(x, w):
            y = quantized_dot(x, w, recipe, execution, jax.random.key(3))
            return (y * g).sum(), y

        return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(jnp.asarray(x), jnp.asarray(w))

    (dx, dw), y = run("emulated")
    (native_dx, native_dw), native_y = run("scaled_matmul")
    for a, b in ((y, native_y), (dx, native_dx), (dw, native_dw)):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-5 * float(jnp.abs(a).max()))


@pytest.mark.parametrize(
    ("scope", "backward", "quantiser", "execution"),
    [
        ("tensor", "dequantized", to_operand, "emulated"),
        ("row", "nvfp4", to_operand, "emulated"),
        ("row", "dequantized", quantize, "emulated"),
        ("tensor", "nvfp4", quantize, "scaled_matmul"),
        ("row", "bf16", quantize, "scaled_matmul"),
    ],
)
def test_a_quantised_weight_enters_dx_dequantised(scope, backward, quantiser, execution):
    recipe = dataclasses.replace(SPECS["rows"], backward=backward)
    x, w = inputs()
    g = output_gradient()
    weight = jax.jit(quantiser, static_argnums=1)(jnp.asarray(w), QuantSpec(scope=scope))

    def pull(x, weight):
        return jax.vjp(lambda x, w: quantized_dot(x, w, recipe, execution), x, weight)[1](jnp.asarray(g))

    dx, dw = jax.jit(pull)(jnp.asarray(x), weight)
    dense = dequantised(w, QuantSpec(scope=scope))
    expected, bound = exact(bf16(g), dense.T)
    # A scale per output enters the sum with g, in BF16.
    slack = 2.0**-8 * (np.abs(bf16(g)) @ np.abs(dense)) if scope == "row" else 0
    assert (
        np.abs(np.asarray(dx, np.float64) - expected) <= bound + slack + np.abs(expected) * 2.0**-21
    ).all()
    leaves = [leaf for leaf in jax.tree.leaves(dw) if leaf.dtype != jax.dtypes.float0]
    assert not any(np.asarray(leaf, np.float32).any() for leaf in leaves)


def test_native_execution_takes_a_quantised_weight_and_refuses_an_operand():
    recipe = SPECS["learner"]
    x, w = (jnp.asarray(v) for v in inputs())
    weight = jax.jit(quantize, static_argnums=1)(w, recipe.weight)
    np.testing.assert_array_equal(DOT(x, weight, recipe, "scaled_matmul"), DOT(x, w, recipe, "scaled_matmul"))
    with pytest.raises(ValueError, match="needs w as a QuantizedTensor"):
        DOT(x, from_quantized(weight), recipe, "scaled_matmul")


def test_scan_with_remat_and_vmap():
    """Weights with keys of their own: a scan over checkpointed steps and vmap both equal one call each."""
    rng = np.random.default_rng()
    recipe = with_backward("learner", "nvfp4")
    x = jnp.asarray(rng.standard_normal((16, 32)), jnp.float32)
    w = jnp.asarray(rng.standard_normal((3, 32, 32)), jnp.float32)
    g = output_gradient((16,), 32)
    keys = jax.random.split(jax.random.key(rng.integers(1 << 31)), 3)

    def loss(weight, key):
        return (quantized_dot(x, weight, recipe, "emulated", key) * g).sum()

    def scanned(w):
        def step(total, layer):
            return total + loss(*layer), None

        return jax.lax.scan(jax.checkpoint(step), 0.0, (w, keys))[0]

    in_scan = jax.jit(jax.grad(scanned))(w)
    mapped = jax.jit(jax.vmap(jax.grad(loss)))(w, keys)
    for i in range(3):
        _, alone = gradients(x, w[i], g, recipe, "emulated", keys[i])
        np.testing.assert_allclose(in_scan[i], alone, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(mapped[i], alone, rtol=1e-5, atol=1e-5)


def test_refuses_random_rounding_without_a_key_only_for_a_gradient():
    recipe = with_backward("learner", "nvfp4")
    x, w = (jnp.asarray(v) for v in inputs())
    DOT(x, w, recipe, "emulated")
    with pytest.raises(ValueError, match="stochastic_rounding needs a key"):
        gradients(x, w, jnp.ones((3, 5, 24)), recipe, "emulated")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"backward": "fp8"}, "accepted: bf16, dequantized, nvfp4"),
        ({"gradient": QuantSpec(scope="static", static_amax=1.0)}, "scope 'tensor' or 'row'"),
        ({"gradient": QuantSpec(four_over_six="mae")}, "no four_over_six"),
    ],
)
def test_recipe_refuses(fields, message, unchecked):
    with pytest.raises(ValueError, match=message):
        DotRecipe(weight=QuantSpec(), activation=QuantSpec(), **fields)


def test_a_quantised_weight_keeps_nothing_of_x():
    """Its gradient needs the weight alone."""
    recipe = SPECS["learner"]
    weight = from_quantized(jax.jit(quantize, static_argnums=1)(jnp.ones((16, 16)), recipe.weight))
    _, pull = jax.vjp(lambda x: DOT(x, weight, recipe, "emulated"), jnp.ones((1024, 16)))
    assert sum(leaf.size for leaf in jax.tree.leaves(pull) if hasattr(leaf, "size")) < 1024 * 16
