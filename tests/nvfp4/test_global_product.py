"""The two forms of the global scales' product, bit for bit against NumPy's float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.nvfp4 import twin
from triage_jax.nvfp4 import DotRecipe, Operand, QuantSpec, quantize, quantized_dot, to_operand
from triage_jax.nvfp4.global_product import factor, joined
from triage_jax.nvfp4.grouped import grouped_dot
from triage_jax.nvfp4.stacked import stacked_dot

F32 = np.float32
DOT = jax.jit(quantized_dot, static_argnums=(2, 3))
STACKED = jax.jit(stacked_dot, static_argnums=(2, 3))
GROUPED = jax.jit(grouped_dot, static_argnums=(3, 4))
JOINED = jax.jit(joined, static_argnums=2)
ENCODE_S = {"te": lambda a: F32(2688) / a, "compressed_tensors": lambda a: F32(2688) * (F32(1) / a)}
DECODE_S = {
    "te": lambda a: a / F32(2688),
    "compressed_tensors": lambda a: F32(1) / ENCODE_S["compressed_tensors"](a),
}


def recipe(form: str, rule: str = "te", scope: str = "tensor") -> DotRecipe:
    spec = QuantSpec(rule=rule, scope=scope)
    return DotRecipe(weight=spec, activation=spec, global_product=form)


def one_product(rng, *lead: int) -> tuple[np.ndarray, np.ndarray]:
    """x and w whose only element of a row is a scope's largest, so that y is its code product, 36·448², times s."""
    x, w = np.zeros((*lead, 1, 16), F32), np.zeros((*lead, 1, 16), F32)
    x[..., 0], w[..., 0] = rng.uniform(0.5, 8, (*lead, 1)), rng.uniform(0.01, 0.5, (*lead, 1))
    return x, w


def by_hand(x: np.ndarray, w: np.ndarray, form: str, rule: str) -> np.ndarray:
    ax, aw = x[..., 0], w[..., 0]
    if form == "decode":
        scale = DECODE_S[rule](ax) * DECODE_S[rule](aw)
    else:
        scale = F32(1) / (ENCODE_S[rule](ax) * ENCODE_S[rule](aw))
    return F32(36 * 448 * 448) * scale


@pytest.mark.parametrize("rule", ["te", "compressed_tensors"])
@pytest.mark.parametrize("execution", ["emulated", "scaled_matmul"])
def test_bits_of_a_product_of_scales(execution, rule):
    rng = np.random.default_rng()
    x, w = one_product(rng, 256)
    found = {}
    for form in ("decode", "encode"):
        settings = recipe(form, rule)
        dot = jax.jit(jax.vmap(lambda x, w, r=settings: quantized_dot(x, w, r, execution)))
        found[form] = np.asarray(dot(jnp.asarray(x), jnp.asarray(w)))[..., 0]
        np.testing.assert_array_equal(found[form], by_hand(x, w, form, rule))
    different = found["decode"] != found["encode"]
    assert different.any(), "the switch does something"
    np.testing.assert_allclose(found["decode"], found["encode"], rtol=2.0**-21)


@pytest.mark.parametrize("execution", ["emulated", "scaled_matmul"])
def test_experts_and_rows_have_it_too(execution):
    rng = np.random.default_rng()
    x, w = one_product(rng, 64)
    spec = recipe("encode", scope="row")
    expected = by_hand(x, w, "encode", "te")
    y = STACKED(jnp.asarray(x), jnp.asarray(w), spec, execution)
    np.testing.assert_array_equal(y[..., 0], expected)
    if execution == "emulated":
        y = GROUPED(jnp.asarray(x[:, 0]), jnp.asarray(w), jnp.ones(64, jnp.int32), spec, execution)
        np.testing.assert_array_equal(y, expected)
    left, right = x[:, 0], w[:, 0]
    y = DOT(jnp.asarray(left), jnp.asarray(right), spec, execution)
    outer = F32(1) / (ENCODE_S["te"](left[:, :1]) * ENCODE_S["te"](right[:, :1]).T)
    np.testing.assert_array_equal(y, F32(36 * 448 * 448) * outer)


def test_a_served_weight_keeps_its_encode_scale():
    """1/(A/2688) is not always 2688/A: what was quantised with S has S, what was stored with D alone has 1/D."""
    rng = np.random.default_rng()
    x, w = one_product(rng, 512)
    keep = jax.jit(jax.vmap(lambda w: to_operand(w, QuantSpec(), keep_encode=True)))(jnp.asarray(w))
    amax = w[:, 0, 0]
    np.testing.assert_array_equal(keep.encode, F32(2688) / amax)
    stored = Operand(values=keep.values, scale=keep.scale)
    np.testing.assert_array_equal(factor(stored, "encode"), F32(1) / (amax / F32(2688)))
    assert np.any(factor(stored, "encode") != keep.encode)
    assert factor(stored, "decode") is stored.scale
    whole = jax.jit(jax.vmap(lambda x, w: quantized_dot(x, w, recipe("encode"), "emulated")))
    np.testing.assert_array_equal(whole(jnp.asarray(x), keep), whole(jnp.asarray(x), jnp.asarray(w)))


def test_forms_alone_and_where_the_product_leaves_float32():
    rng = np.random.default_rng()
    a, b = (np.exp2(rng.uniform(-60, 60, 1000)).astype(F32) for _ in range(2))
    np.testing.assert_array_equal(JOINED(a, b, "decode"), a * b)
    np.testing.assert_array_equal(JOINED(a, b, "encode"), F32(1) / (a * b))
    assert JOINED(F32(1e30), F32(1e30), "encode") == 0
    zero = jnp.zeros((2, 16))
    for form in ("decode", "encode"):
        assert not np.any(DOT(zero, jnp.ones((3, 16)), recipe(form), "emulated"))


def test_values_stay_those_of_the_twin():
    rng = np.random.default_rng()
    x, w = rng.standard_normal((6, 64)).astype(F32), rng.standard_normal((5, 64)).astype(F32)
    left, right = twin.quantize(x), twin.quantize(w)
    exact = left.values() @ right.values().T * float(left.global_scale) * float(right.global_scale)
    y = DOT(jnp.asarray(x), jnp.asarray(w), recipe("encode"), "emulated")
    np.testing.assert_allclose(y, exact, rtol=1e-5, atol=1e-5 * np.abs(exact).max())
    q = jax.jit(quantize, static_argnums=1)(jnp.asarray(x), QuantSpec())
    assert q.encode_scale is None


def test_an_unknown_form_is_refused(unchecked):
    with pytest.raises(ValueError, match=r"DotRecipe\.global_product is 'divide'; accepted: decode, encode"):
        recipe("divide")
