"""The fast path: equal to quantise-then-decode bit for bit, under every transform and sharding."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.golden import load
from tests.nvfp4 import twin
from tests.nvfp4.test_quantize import JITTED as quantize_jitted
from tests.nvfp4.test_quantize import REFERENCES, SPECS, settings_of
from triage_jax.nvfp4 import Operand, QuantSpec, dequantize, from_quantized, to_operand

JITTED = jax.jit(to_operand, static_argnums=1)
MODES = pytest.mark.parametrize("run", [to_operand, JITTED], ids=["eager", "jit"])


def bits(x) -> np.ndarray:
    """Bits of a BF16 or float32 array with −0 as 0, so that equality means bit equality, NaN included."""
    x = np.asarray(x)
    return np.where(x == 0, 0, x.view(np.uint16 if x.dtype == ml_dtypes.bfloat16 else np.uint32))


def assert_same(a: Operand, b: Operand) -> None:
    np.testing.assert_array_equal(bits(a.values), bits(b.values))
    np.testing.assert_array_equal(bits(a.scale), bits(b.scale))


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_equals_quantize_then_decode(spec, dtype):
    rng = np.random.default_rng()
    x = (rng.standard_normal((35, 64)) * 10.0 ** rng.uniform(-3, 3, (35, 1))).astype(dtype)
    x[0] = 0
    x[1, :32] = -0.0
    x[2] *= 1e-8
    operand = JITTED(jnp.asarray(x), spec)
    assert_same(operand, from_quantized(quantize_jitted(jnp.asarray(x), spec)))
    np.testing.assert_array_equal(
        np.asarray(operand.values, np.float64), twin.quantize(x, **settings_of(spec)).values()
    )
    assert not np.signbit(np.asarray(operand.values)[1, :32]).any()


@pytest.mark.parametrize("nan", ["six", "minus_zero"])
def test_equals_quantize_then_decode_where_a_nan_has_a_code(nan):
    rng = np.random.default_rng()
    x = np.where(rng.random((8, 64)) < 0.1, np.nan, rng.standard_normal((8, 64)))
    x = jnp.asarray(x, jnp.bfloat16)
    for spec in (QuantSpec(nan=nan), QuantSpec(tile="16x16", rule="modelopt", nan=nan)):
        assert_same(JITTED(x, spec), from_quantized(quantize_jitted(x, spec)))
        assert np.isfinite(np.asarray(JITTED(x, spec).values, np.float32)).all()


@MODES
@pytest.mark.parametrize("name", ["outliers", "zeros", "tiny", "huge", "ties", "wide"])
def test_equals_quantize_then_decode_on_the_recorded_inputs(name, run):
    x = jnp.asarray(load("nvfp4_golden.npz")[f"{name}/x"].view(ml_dtypes.bfloat16))
    for spec in REFERENCES.values():
        assert_same(run(x, spec), from_quantized(quantize_jitted(x, spec)))


@MODES
def test_ties_round_to_even(run):
    """Largest 6 with A = 2688: S = 1, s = 1, e = 1, so x meets E2M1 as it is: ties and what follows them."""
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
    x = np.concatenate([[6.0], ties, np.nextafter(ties, 9), [0]]).astype(np.float32)
    operand = run(jnp.asarray(np.concatenate([x, -x])), QuantSpec(scope="static", static_amax=2688.0))
    expected = [6, 0, 1, 1, 2, 2, 4, 4, 0.5, 1, 1.5, 2, 3, 4, 6, 0]
    np.testing.assert_array_equal(operand.values.astype(np.float32), expected + [-v for v in expected])


def test_products_near_a_tie_are_rounded_before_they_are_compared():
    """A contraction of x·e and the rounding's addition into one FMA would show here."""
    rng = np.random.default_rng()
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
    x = rng.choice(ties, (1024, 64)) * rng.uniform(0.5, 1.5, (1024, 1)).astype(np.float32)
    x[:, ::16] = 6 * rng.uniform(0.5, 1.5, (1024, 1))
    x = np.nextafter(x.astype(np.float32), rng.choice([-9, 9], x.shape).astype(np.float32))
    for spec in (QuantSpec(), QuantSpec(scope="row"), QuantSpec(rule="modelopt")):
        expected = twin.quantize(x, **settings_of(spec))
        np.testing.assert_array_equal(
            np.asarray(JITTED(jnp.asarray(x), spec).values, np.float64), expected.values()
        )


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_bad_numbers_go_where_quantize_puts_them(bad):
    x = jnp.ones((35, 64)).at[4, 20].set(bad).at[5, 3].set(-0.2)
    for spec in SPECS:
        operand, q = JITTED(x, spec), quantize_jitted(x, spec)
        expected = np.asarray(dequantize(q))
        np.testing.assert_array_equal(operand.values.astype(np.float32) * operand.scale, expected)
        if np.isnan(bad):
            assert np.isnan(expected[4, 16:32]).all()


def test_vmap_and_scan_equal_a_loop():
    x = jax.random.normal(jax.random.key(np.random.randint(1 << 30)), (3, 35, 64))
    for spec in (*REFERENCES.values(), QuantSpec(scope="static", static_amax=3.0)):
        loop = [JITTED(v, spec) for v in x]
        stacked = jax.tree.map(lambda *v: jnp.stack(v), *loop)
        assert_same(jax.vmap(lambda v, s=spec: to_operand(v, s))(x), stacked)
        assert_same(jax.lax.scan(lambda c, v, s=spec: (c, to_operand(v, s)), None, x)[1], stacked)


@pytest.mark.parametrize(
    "partition", [P("a", None), P(None, "b"), P("a", "b"), P(("a", "b"), None), P(None, ("a", "b"))]
)
def test_sharded_equals_whole(partition):
    """(None, ("a", "b")) cuts blocks: 8 elements of K a device."""
    mesh = Mesh(np.asarray(jax.devices()).reshape(2, 4), ("a", "b"))
    x = jax.random.normal(jax.random.key(np.random.randint(1 << 30)), (32, 64), jnp.bfloat16)
    sharded = jax.device_put(x, NamedSharding(mesh, partition))
    for spec in SPECS:
        assert_same(JITTED(sharded, spec), JITTED(x, spec))


def test_works_with_x64_on():
    with jax.enable_x64(True):
        x = np.random.default_rng().standard_normal((4, 32))
        operand = to_operand(jnp.asarray(x), QuantSpec())
        assert operand.scale.dtype == jnp.float32
        expected = twin.quantize(x.astype(np.float32))
        np.testing.assert_array_equal(np.asarray(operand.values, np.float64), expected.values())


def test_carries_no_gradient():
    gradient = jax.grad(lambda x: to_operand(x, QuantSpec()).values.astype(jnp.float32).sum())(
        jnp.ones((1, 16))
    )
    np.testing.assert_array_equal(gradient, np.zeros((1, 16)))
