"""quantized_dot: values against float64 sums and recorded products, gradients against their definition."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.golden import load
from tests.nvfp4 import twin
from tests.nvfp4.test_quantize import settings_of
from triage_jax.nvfp4 import (
    DotRecipe,
    Operand,
    QuantSpec,
    from_quantized,
    quantize,
    quantized_dot,
    to_operand,
)

RECIPES = {
    "learner": DotRecipe(weight=QuantSpec(tile="16x16"), activation=QuantSpec()),
    "rows": DotRecipe(weight=QuantSpec(scope="row"), activation=QuantSpec(scope="row")),
    "sampler": DotRecipe(
        weight=QuantSpec(rule="modelopt"), activation=QuantSpec(scope="static", static_amax=4.0)
    ),
}
OPERAND = jax.jit(to_operand, static_argnums=1)
DOT = jax.jit(quantized_dot, static_argnums=(2, 3))


def inputs(dtype=np.float32, lead=(3, 5), n=24, k=64):
    rng = np.random.default_rng()
    return rng.standard_normal((*lead, k)).astype(dtype), rng.standard_normal((n, k)).astype(dtype)


def bf16(x) -> np.ndarray:
    """Rounded to BF16, in float64."""
    return np.asarray(x).astype(ml_dtypes.bfloat16).astype(np.float64)


def exact(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """a·bᵀ in float64 and the largest error float32 accumulation may make, one rounding per term."""
    return a @ b.T, (np.abs(a) @ np.abs(b).T) * a.shape[-1] * 2.0**-24


@pytest.mark.parametrize("name", RECIPES)
def test_emulated_is_the_product_of_the_quantised_operands(name):
    recipe = RECIPES[name]
    x, w = inputs()
    left, right = (
        twin.quantize(x, **settings_of(recipe.activation)),
        twin.quantize(w, **settings_of(recipe.weight)),
    )
    y, bound = exact(left.values(), right.values())
    scale = left.global_scale.astype(np.float64) * np.ravel(right.global_scale)
    got = np.asarray(DOT(jnp.asarray(x), jnp.asarray(w), recipe, "emulated"), np.float64)
    assert got.shape == (3, 5, 24)
    assert (np.abs(got - y * scale) <= (bound + np.abs(y) * 2.0**-22) * scale).all()


def test_unscaled_product_meets_the_recorded_exact_sums():
    golden = load("nvfp4_golden.npz")
    x, w = (jnp.asarray(golden[key].view(ml_dtypes.bfloat16)) for key in ("outliers/x", "w"))
    left, right = OPERAND(x, QuantSpec()), OPERAND(w, QuantSpec())
    one = Operand(values=right.values, scale=jnp.float32(1))
    y = np.asarray(DOT(left.values.astype(jnp.float32), one, None, "bf16"), np.float64)
    terms = np.abs(np.asarray(left.values, np.float64)) @ np.abs(np.asarray(right.values, np.float64)).T
    # A block of 16 sums exactly in float32, so only the K/16 partial sums round.
    assert (np.abs(y - golden["gemm/exact_f64_unscaled_w1d"]) <= terms * (64 / 16) * 2.0**-24).all()


@pytest.mark.parametrize(("name", "tile"), [("w1d", "1x16"), ("w2d", "16x16")])
def test_equals_the_recorded_product_of_transformer_engine(name, tile):
    golden = load("nvfp4_golden.npz")
    x, w = (jnp.asarray(golden[key].view(ml_dtypes.bfloat16)) for key in ("outliers/x", "w"))
    recipe = DotRecipe(weight=QuantSpec(tile=tile), activation=QuantSpec())
    y = np.asarray(DOT(x, w, recipe, "emulated"))
    recorded = golden[f"gemm/te_ref_{name}_bf16"]
    recorded = recorded.view(ml_dtypes.bfloat16) if recorded.dtype == np.uint16 else recorded
    np.testing.assert_allclose(y.astype(np.float64), recorded.astype(np.float64), rtol=2.0**-8, atol=0)
    y = np.asarray(DOT(x.astype(jnp.float32), w, recipe, "emulated"))
    full = golden[f"gemm/te_ref_{name}_f32"]
    np.testing.assert_allclose(y, full, rtol=1e-5, atol=1e-6 * np.abs(full).max())


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_bf16_product(dtype):
    x, w = inputs(dtype)
    y, bound = exact(bf16(x), bf16(w))
    got = DOT(jnp.asarray(x), jnp.asarray(w), None, "bf16")
    assert got.dtype == dtype
    rounding = 2.0**-8 if dtype == ml_dtypes.bfloat16 else 2.0**-23
    assert (np.abs(np.asarray(got, np.float64) - y) <= bound + np.abs(y) * rounding).all()


def test_float32_product_and_its_float64_version():
    x, w = inputs()
    y, bound = exact(x.astype(np.float64), w.astype(np.float64))
    assert (
        np.abs(np.asarray(DOT(jnp.asarray(x), jnp.asarray(w), None, "float32"), np.float64) - y) <= 2 * bound
    ).all()
    with jax.enable_x64(True):
        got = quantized_dot(jnp.asarray(x, jnp.float64), jnp.asarray(w, jnp.float64), None, "float32")
        assert got.dtype == jnp.float64
        np.testing.assert_allclose(got, y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", RECIPES)
def test_a_prequantised_weight_gives_the_same_bits(name):
    recipe = RECIPES[name]
    x, w = (jnp.asarray(v) for v in inputs())
    y = DOT(x, w, recipe, "emulated")
    np.testing.assert_array_equal(DOT(x, OPERAND(w, recipe.weight), recipe, "emulated"), y)
    np.testing.assert_array_equal(
        DOT(x, from_quantized(jax.jit(quantize, static_argnums=1)(w, recipe.weight)), recipe, "emulated"), y
    )


@pytest.mark.parametrize("execution", ["bf16", "float32"])
@pytest.mark.parametrize("scope", ["tensor", "row"])
def test_unquantised_activations_meet_a_quantised_weight(execution, scope):
    """What a server without FP4 tensor cores computes (W4A16)."""
    x, w = inputs()
    weight = OPERAND(jnp.asarray(w), QuantSpec(scope=scope))
    dense = np.asarray(weight.values, np.float64) * np.asarray(weight.scale, np.float64)
    y, bound = exact(bf16(x) if execution == "bf16" else x.astype(np.float64), dense)
    got = np.asarray(DOT(jnp.asarray(x), weight, None, execution), np.float64)
    assert (np.abs(got - y) <= 2 * bound + np.abs(y) * 2.0**-22).all()


def gradients(x, w, recipe, execution, g):
    def loss(x, w):
        return (quantized_dot(x, w, recipe, execution).astype(jnp.float32) * g).sum()

    return jax.jit(jax.grad(loss, argnums=(0, 1)))(x, w)


@pytest.mark.parametrize("execution", ["bf16", "emulated"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_gradient_is_straight_through_in_bf16(execution, dtype):
    x, w = inputs(dtype)
    g = np.random.default_rng().standard_normal((3, 5, 24)).astype(np.float32)
    dx, dw = gradients(jnp.asarray(x), jnp.asarray(w), RECIPES["learner"], execution, g)
    assert (dx.dtype, dw.dtype) == (dtype, dtype)
    expected_dx, dx_bound = exact(bf16(g), bf16(w).T)
    expected_dw, dw_bound = exact(bf16(g).reshape(-1, 24).T, bf16(x).reshape(-1, 64).T)
    rounding = 2.0**-8 if dtype == ml_dtypes.bfloat16 else 2.0**-23
    assert (
        np.abs(np.asarray(dx, np.float64) - expected_dx) <= dx_bound + np.abs(expected_dx) * rounding
    ).all()
    assert (
        np.abs(np.asarray(dw, np.float64) - expected_dw) <= dw_bound + np.abs(expected_dw) * rounding
    ).all()


@pytest.mark.parametrize("execution", ["bf16", "emulated"])
@pytest.mark.parametrize("scope", ["tensor", "row"])
def test_gradient_through_a_prequantised_weight(execution, scope):
    x, w = inputs()
    weight = OPERAND(jnp.asarray(w), QuantSpec(scope=scope))
    g = np.random.default_rng().standard_normal((3, 5, 24)).astype(np.float32)
    dx, nothing = gradients(jnp.asarray(x), weight, RECIPES["rows"], execution, g)
    scale = np.asarray(weight.scale, np.float64)
    values = np.asarray(weight.values, np.float64)
    if scope == "tensor":
        expected, bound = exact(bf16(g), (values * scale).T)
    else:
        expected, bound = exact(bf16(g * np.ravel(weight.scale)), values.T)
    assert (np.abs(np.asarray(dx, np.float64) - expected) <= bound + np.abs(expected) * 2.0**-22).all()
    assert isinstance(nothing, Operand)
    assert not any(np.asarray(leaf, np.float32).any() for leaf in jax.tree.leaves(nothing))


def test_float32_gradient_is_the_exact_one():
    x, w = inputs()
    g = np.random.default_rng().standard_normal((3, 5, 24)).astype(np.float32)
    dx, dw = gradients(jnp.asarray(x), jnp.asarray(w), None, "float32", g)
    np.testing.assert_allclose(dx, g.astype(np.float64) @ w, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(
        dw, g.reshape(-1, 24).T.astype(np.float64) @ x.reshape(-1, 64), rtol=1e-4, atol=1e-4
    )


def test_parameters_that_mix_arrays_and_operands_train():
    x, w = (jnp.asarray(v) for v in inputs(k=16, n=16))
    params = {"a": w, "b": to_operand(w, QuantSpec())}

    def loss(params, x):
        hidden = quantized_dot(x, params["a"], RECIPES["rows"], "emulated")
        return (quantized_dot(hidden, params["b"], RECIPES["rows"], "emulated") ** 2).sum()

    gradient = jax.jit(jax.grad(loss))(params, x)
    assert jax.tree.structure(gradient) == jax.tree.structure(params)
    assert np.abs(gradient["a"]).sum() > 0
    assert jax.tree.map(lambda leaf: leaf.shape, params) == jax.tree.map(lambda leaf: leaf.shape, gradient)


def test_scan_over_layers_with_remat_equals_a_loop():
    """Layers stacked on a leading axis, weights quantised one layer at a time, forward and gradient."""
    rng = np.random.default_rng()
    x = jnp.asarray(rng.standard_normal((7, 32)), jnp.float32)
    w = jnp.asarray(rng.standard_normal((3, 32, 32)) / 6, jnp.float32)

    def step(h, layer):
        return jnp.tanh(quantized_dot(h, layer, RECIPES["learner"], "emulated")), None

    def scanned(w):
        return (jax.lax.scan(jax.checkpoint(step), x, w)[0] ** 2).sum()

    def looped(w):
        h = x
        for layer in w:
            h = step(h, layer)[0]
        return (h**2).sum()

    value, gradient = jax.jit(jax.value_and_grad(scanned))(w)
    expected, expected_gradient = jax.jit(jax.value_and_grad(looped))(w)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-2, atol=1e-3)


def test_vmap_over_experts_equals_a_loop():
    rng = np.random.default_rng()
    x = jnp.asarray(rng.standard_normal((4, 6, 32)), jnp.float32)
    w = jnp.asarray(rng.standard_normal((4, 8, 32)), jnp.float32)
    for recipe in (RECIPES["learner"], RECIPES["rows"]):

        def dot(x, w, recipe=recipe):
            return quantized_dot(x, w, recipe, "emulated")

        loop = jnp.stack([DOT(a, b, recipe, "emulated") for a, b in zip(x, w, strict=True)])
        np.testing.assert_allclose(jax.jit(jax.vmap(dot))(x, w), loop, rtol=1e-6, atol=1e-6)
        operands = jax.vmap(lambda v, r=recipe: to_operand(v, r.weight))(w)
        np.testing.assert_allclose(jax.jit(jax.vmap(dot))(x, operands), loop, rtol=1e-6, atol=1e-6)


def test_one_vector():
    x, w = inputs(lead=())
    y = DOT(jnp.asarray(x), jnp.asarray(w), RECIPES["rows"], "emulated")
    np.testing.assert_array_equal(
        y, DOT(jnp.asarray(x[None]), jnp.asarray(w), RECIPES["rows"], "emulated")[0]
    )


def test_refuses_an_unknown_execution(unchecked):
    with pytest.raises(ValueError, match="'fp4'; accepted: float32, bf16, emulated"):
        quantized_dot(jnp.zeros((2, 16)), jnp.zeros((3, 16)), None, "fp4")


def test_refuses_emulation_without_a_recipe():
    with pytest.raises(ValueError, match="needs a DotRecipe"):
        quantized_dot(jnp.zeros((2, 16)), jnp.zeros((3, 16)), None, "emulated")


def test_refuses_shapes_that_do_not_contract(unchecked):
    with pytest.raises(ValueError, match=r"must share K; got \(2, 16\) and \(16, 3\)"):
        quantized_dot(jnp.zeros((2, 16)), jnp.zeros((16, 3)), None, "bf16")
