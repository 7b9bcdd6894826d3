"""The native product: equal to the float64 sum, under every batching, scale shape, transform and sharding."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.nvfp4 import twin
from tests.nvfp4.test_quantize import JITTED as quantize
from tests.nvfp4.test_quantize import settings_of
from triage_jax.nvfp4 import DotRecipe, QuantizedTensor, QuantSpec, quantized_dot
from triage_jax.nvfp4.formats import e2m1_decode, e4m3_decode
from triage_jax.nvfp4.native import block_scaled_product, e2m1_array, e4m3_array

JITTED = jax.jit(block_scaled_product)
MODES = pytest.mark.parametrize("run", [block_scaled_product, JITTED], ids=["eager", "jit"])
ROW, TENSOR = QuantSpec(scope="row"), QuantSpec()


def draw(*shape: int) -> np.ndarray:
    """Rows of very different size, so that a scale on the wrong row shows."""
    rng = np.random.default_rng()
    return (rng.standard_normal(shape) * 2.0 ** rng.integers(-6, 7, (*shape[:-1], 1))).astype(np.float32)


def assert_is_the_float64_product(
    y, x: np.ndarray, w: np.ndarray, specs: tuple[QuantSpec, QuantSpec]
) -> None:
    """y against codes, scales and sums of the independent quantiser, which shares nothing with the package."""
    left, right = (twin.quantize(m, **settings_of(s)) for m, s in zip((x, w), specs, strict=True))
    a, b = left.values(), right.values()
    pairs = "...mk,nk->...mn" if w.ndim == 2 else "...mk,...nk->...mn"
    g = left.global_scale * np.swapaxes(right.global_scale, -1, -2) if right.global_scale.ndim else None
    g = left.global_scale * right.global_scale if g is None else g
    exact, size = np.einsum(pairs, a, b) * g, np.einsum(pairs, np.abs(a), np.abs(b)) * g
    assert y.dtype == jnp.float32
    assert y.shape == exact.shape
    # The sum over K/16 blocks, then the product of the global scales and the product with it.
    assert np.all(np.abs(np.asarray(y, np.float64) - exact) <= (x.shape[-1] / 16 + 2) * 2.0**-24 * size)


@MODES
@pytest.mark.parametrize("specs", [(ROW, TENSOR), (TENSOR, ROW), (TENSOR, QuantSpec(tile="16x16"))], ids=str)
@pytest.mark.parametrize("shapes", [((5, 64), (7, 64)), ((2, 3, 16), (5, 16)), ((1, 4096), (33, 4096))])
def test_product_is_the_float64_sum(run, specs, shapes):
    x, w = draw(*shapes[0]), draw(*shapes[1])
    y = run(quantize(jnp.asarray(x), specs[0]), quantize(jnp.asarray(w), specs[1]))
    assert_is_the_float64_product(y, x, w, specs)


@pytest.mark.parametrize("specs", [(ROW, TENSOR), (ROW, ROW)], ids=str)
def test_experts_are_paired_along_leading_axes(specs):
    x, w = draw(3, 5, 64), draw(3, 7, 64)
    y = JITTED(quantize(jnp.asarray(x), specs[0]), quantize(jnp.asarray(w), specs[1]))
    assert_is_the_float64_product(y, x, w, specs)


def test_one_global_scale_per_expert_as_vmap_leaves_it():
    """vmap of a per-tensor quantiser gives global scales [E]: the product must read them as one per expert."""
    x, w = draw(4, 5, 32), draw(4, 6, 32)
    left, right = (jax.vmap(lambda m: quantize(m, TENSOR))(jnp.asarray(m)) for m in (x, w))
    assert left.global_scale.shape == (4,)
    y = JITTED(left, right)
    for e in range(4):
        assert_is_the_float64_product(y[e], x[e], w[e], (TENSOR, TENSOR))


def test_a_single_vector():
    """[K] · [N, K], with the scale of a vector, [1], and of a tensor, ()."""
    x, w = draw(48), draw(5, 48)
    for spec in (ROW, TENSOR):
        y = block_scaled_product(quantize(jnp.asarray(x), spec), quantize(jnp.asarray(w), TENSOR))
        assert y.shape == (5,)
        assert_is_the_float64_product(y[None], x[None], w, (spec, TENSOR))


def test_vmap_equals_the_batched_call():
    left, right = (quantize(jnp.asarray(draw(3, rows, 64)), ROW) for rows in (5, 7))
    np.testing.assert_array_equal(
        jax.vmap(block_scaled_product)(left, right), block_scaled_product(left, right)
    )


def test_equals_the_emulated_product():
    """Two executions of one definition: same operands, so only the order of addition may differ."""
    x, w = jnp.asarray(draw(9, 256)), jnp.asarray(draw(12, 256))
    recipe = DotRecipe(activation=ROW, weight=TENSOR)
    emulated = quantized_dot(x, w, recipe, "emulated")
    y = block_scaled_product(quantize(x, ROW), quantize(w, TENSOR))
    size = jnp.abs(x) @ jnp.abs(w).T
    assert jnp.all(jnp.abs(y - emulated) <= 2.0**-18 * size)


def test_every_code_and_every_scale_reaches_the_primitive():
    """Bits, not casts: an E4M3 cast would make NaN of 464 and more, an E2M1 cast would lose −0."""
    codes, bits = jnp.arange(16, dtype=jnp.uint8), jnp.arange(256, dtype=jnp.uint8)
    assert e2m1_array(codes).dtype == jnp.float4_e2m1fn
    values = np.asarray(jax.jit(lambda c: e2m1_array(c).astype(jnp.float32))(codes))
    np.testing.assert_array_equal(
        values,
        np.arange(16, dtype=np.uint8)
        .astype(ml_dtypes.uint4)
        .view(ml_dtypes.float4_e2m1fn)
        .astype(np.float32),
    )
    np.testing.assert_array_equal(values, e2m1_decode(codes))
    assert np.signbit(values[8])
    np.testing.assert_array_equal(e4m3_array(bits).astype(jnp.float32), e4m3_decode(bits))


def test_largest_and_smallest_scales():
    """By hand: 6·448 · 6·448 · 16 terms = 115 605 504, and 0.5·2⁻⁹ · 0.5·2⁻⁹ · 16 = 2⁻¹⁶."""

    def constant(code: int, scale: int) -> QuantizedTensor:
        return QuantizedTensor(
            codes=jnp.full((1, 16), code, jnp.uint8),
            scales=jnp.full((1, 1), scale, jnp.uint8),
            global_scale=jnp.float32(1),
        )

    largest, smallest = constant(7, 0x7E), constant(1, 1)
    assert block_scaled_product(largest, largest) == 115_605_504.0
    assert block_scaled_product(smallest, smallest) == 2.0**-16
    assert block_scaled_product(constant(9, 1), smallest) == -(2.0**-16)


def test_no_gradient():
    q = quantize(jnp.asarray(draw(4, 32)), TENSOR)

    def total(scale):
        return block_scaled_product(q.replace(global_scale=scale), q).sum()

    assert jax.grad(total)(q.global_scale) == 0


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (P("d", None), P(None, None)),
        (P("d", None), P("d", None)),
        (P(None, "d"), P(None, "d")),
        (P(), P("d", None)),
    ],
    ids=["rows", "rows and outputs", "contraction", "outputs"],
)
def test_sharded_equals_unsharded(left, right):
    mesh = Mesh(np.asarray(jax.devices()[:4]), ("d",))
    x, w = quantize(jnp.asarray(draw(8, 256)), ROW), quantize(jnp.asarray(draw(12, 256)), TENSOR)
    expected = block_scaled_product(x, w)
    size = block_scaled_product(x.replace(codes=x.codes & 7), w.replace(codes=w.codes & 7))

    def place(q: QuantizedTensor, spec: P) -> QuantizedTensor:
        split = NamedSharding(mesh, spec)
        return q.replace(codes=jax.device_put(q.codes, split), scales=jax.device_put(q.scales, split))

    y = JITTED(place(x, left), place(w, right))
    assert jnp.all(jnp.abs(y - expected) <= 256 / 16 * 2.0**-24 * size)


def test_sharded_over_experts():
    mesh = Mesh(np.asarray(jax.devices()), ("e",))
    x, w = (quantize(jnp.asarray(draw(8, rows, 64)), ROW) for rows in (4, 6))
    split = NamedSharding(mesh, P("e"))
    y = JITTED(*jax.tree.map(lambda leaf: jax.device_put(leaf, split), (x, w)))
    assert y.sharding.spec[0] == "e"
    np.testing.assert_array_equal(y, block_scaled_product(x, w))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"codes": jnp.zeros((4, 48), jnp.uint8)}, r"got \(4, 48\) and \(5, 32\)"),
        ({"codes": jnp.zeros((2, 4, 32), jnp.uint8)}, r"a has codes \(2, 4, 32\) and scales \(4, 2\)"),
        (
            {"global_scale": jnp.zeros((4,))},
            r"global scale of shape \(4,\); accepted: \(\), \(\) or one that",
        ),
        ({"global_scale": jnp.zeros((3, 1))}, r"broadcasts to \(4, 1\)"),
    ],
)
def test_what_does_not_contract_is_refused(change, message):
    a, b = quantize(jnp.ones((4, 32)), TENSOR), quantize(jnp.ones((5, 32)), TENSOR)
    with pytest.raises(ValueError, match=message):
        block_scaled_product(a.replace(**change), b)
    experts = quantize(jnp.ones((2, 5, 32)), TENSOR)
    with pytest.raises(ValueError, match="over the same leading axes"):
        block_scaled_product(a, experts)
