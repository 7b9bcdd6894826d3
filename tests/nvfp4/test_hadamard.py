"""The rotation: orthogonal, its own recording, and harmless to a product."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.golden import load
from tests.nvfp4 import twin
from tests.nvfp4.test_quantize import JITTED, bf16
from triage_jax.nvfp4 import QuantSpec, unpack
from triage_jax.nvfp4.hadamard import SIGNS, rotate, rotation


def test_is_orthogonal_with_entries_of_a_quarter():
    matrix = rotation().astype(np.float64)
    np.testing.assert_array_equal(np.abs(matrix), np.full((16, 16), 0.25))
    np.testing.assert_array_equal(matrix @ matrix.T, np.eye(16))
    # Sylvester's first row and column are ones, so what is left of them is the signs.
    np.testing.assert_array_equal(matrix[:, 0] * 4, SIGNS)
    np.testing.assert_array_equal(matrix[0] * 4, np.ones(16))


@pytest.mark.parametrize("run", [rotate, jax.jit(rotate)], ids=["eager", "jit"])
@pytest.mark.parametrize("name", ["outliers", "zeros", "ties", "wide"])
def test_columns_equal_transformer_engine(name, run):
    """Rotated along tokens, then quantised. Left out: `tiny` (the reference rounds subnormals), `huge` (overflows)."""
    golden = load("nvfp4_golden.npz")
    x = bf16(golden[f"{name}/x"])
    q = JITTED(run(jnp.asarray(x.T)), QuantSpec())
    entry = f"{name}/te_colwise_rht"
    np.testing.assert_array_equal(q.scales, golden[f"{entry}/sf"])
    codes = twin.merge_zeros(np.asarray(unpack(jnp.asarray(golden[f"{entry}/packed"]))))
    np.testing.assert_array_equal(twin.merge_zeros(np.asarray(q.codes)), codes)
    np.testing.assert_array_equal(np.ravel(q.global_scale), golden[f"{entry}/dec"])


def test_is_the_bf16_product_with_the_matrix():
    x = np.random.default_rng().standard_normal((3, 48)).astype(ml_dtypes.bfloat16)
    exact = (x.astype(np.float64).reshape(3, 3, 16) @ rotation().astype(np.float64)).reshape(3, 48)
    got = np.asarray(jax.jit(rotate)(jnp.asarray(x)), np.float64)
    np.testing.assert_allclose(got, exact, rtol=2.0**-8, atol=1e-6)


def test_a_product_of_rotated_operands_is_the_product():
    a, b = (np.random.default_rng().integers(-8, 8, (5, 64)).astype(np.float32) for _ in range(2))
    turned = [np.asarray(rotate(jnp.asarray(v)), np.float64) for v in (a, b)]
    # Sums of 16 small integers over 4 are exact in BF16.
    np.testing.assert_array_equal(turned[0] @ turned[1].T, a.astype(np.float64) @ b.T)


def test_spreads_an_outlier():
    x = jnp.zeros((1, 16)).at[0, 5].set(8.0)
    np.testing.assert_array_equal(np.abs(rotate(x).astype(jnp.float32)), np.full((1, 16), 2.0))


def test_refuses_partial_runs():
    with pytest.raises(ValueError, match=r"multiple of 16, got shape \(2, 24\)"):
        rotate(jnp.zeros((2, 24)))
