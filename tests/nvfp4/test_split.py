"""Split-K: by hand, then bit for bit against float32 additions of exact partial sums."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.nvfp4 import twin
from tests.nvfp4.test_quantize import settings_of
from triage_jax.nvfp4 import DotRecipe, QuantSpec, quantized_dot, to_operand
from triage_jax.nvfp4.grouped import grouped_dot
from triage_jax.nvfp4.split import chunks
from triage_jax.nvfp4.stacked import stacked_dot

E, M, N, K = 3, 8, 5, 96
BLOCKS = K // 16
STATIC = ("recipe", "execution")
DOT = jax.jit(quantized_dot, static_argnums=(2, 3))
STACKED = jax.jit(stacked_dot, static_argnums=(2, 3))
GROUPED = jax.jit(grouped_dot, static_argnums=(3, 4))


def recipe(split_k: int) -> DotRecipe:
    return DotRecipe(weight=QuantSpec(scope="row"), activation=QuantSpec(scope="row"), split_k=split_k)


@pytest.mark.parametrize(
    ("inputs", "split_k", "stops"),
    [
        (64, 1, [64]),
        (64, 2, [32, 64]),
        (80, 2, [48, 80]),  # five blocks: three and two
        (64, 8, [16, 32, 48, 64]),  # no run is less than a block
        (576, 8, [80, 160, 240, 320, 400, 480, 560, 576]),  # 36 blocks: seven runs of five and one of one
        (40, 2, [32, 40]),  # BF16 needs no whole blocks
    ],
)
def test_runs_end_between_blocks(inputs, split_k, stops):
    found = chunks(inputs, split_k)
    assert [run.stop for run in found] == stops
    assert [run.start for run in found] == [0, *stops[:-1]]


@pytest.mark.parametrize("execution", ["bf16", "emulated"])
def test_the_order_of_additions_by_hand(execution):
    """Blocks that sum to 9·2²², 1, 1 and 2, where float32 has multiples of 4 and ties go to the even one."""
    x, w = np.zeros((1, 4, 16), np.float32), np.zeros((1, 4, 16), np.float32)
    x[0, 0], w[0, 0] = 1536, 1536  # 16 · 1536²
    # Sixes make the block scales 1, and meet zeros.
    x[0, 1:, 0], w[0, 1:, 15] = 6, 6
    x[0, 1:, 1], w[0, 1:, 1] = (1, 1, 2), 1
    one = QuantSpec(scope="static", static_amax=2688.0)  # a global scale of 1

    def y(split_k: int) -> float:
        settings = DotRecipe(weight=one, activation=one, split_k=split_k)
        return float(
            DOT(jnp.asarray(x.reshape(1, 64)), jnp.asarray(w.reshape(1, 64)), settings, execution)[0, 0]
        )

    assert y(2) == 9 * 2**22 + 4, "+ 1 is lost, + 3 is not"
    assert y(4) == 9 * 2**22, "+ 1, + 1 and + 2 are lost"


def added_in_order(partial: np.ndarray, split_k: int) -> np.ndarray:
    """Blocks' exact sums `[..., blocks]` by run in float64, which must be exact, then one float32 after the other."""
    runs = [
        partial[..., at.start // 16 : at.stop // 16].sum(-1) for at in chunks(16 * partial.shape[-1], split_k)
    ]
    assert all((run == run.astype(np.float32)).all() for run in runs)
    total = runs[0].astype(np.float32)
    for run in runs[1:]:
        total = total + run.astype(np.float32)
    return total


def integers(rng, *shape) -> np.ndarray:
    """BF16 whose products are exact in float32 within a run of two blocks, and not beyond."""
    whole = rng.integers(-63, 64, shape).astype(np.float32)
    size = 2.0 ** rng.integers(-12, 13, (*shape[:-1], K // 32))
    return whole * np.repeat(size, 32, axis=-1).astype(np.float32)


def in_blocks(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    x, w = (np.asarray(v, np.float64).reshape(*v.shape[:-1], -1, 16) for v in (x, w))
    return np.einsum("...mbi,...nbi->...mnb", x, w)


def test_bf16_products_add_runs_in_float32():
    rng = np.random.default_rng()
    x, w = integers(rng, E, M, K), integers(rng, E, N, K)
    expected = added_in_order(in_blocks(x, w), 3)
    left, right = jnp.asarray(x), jnp.asarray(w)
    np.testing.assert_array_equal(STACKED(left, right, recipe(3), "bf16"), expected)
    np.testing.assert_array_equal(DOT(left[0], right[0], recipe(3), "bf16"), expected[0])
    np.testing.assert_array_equal(quantized_dot(left[0], right[0], recipe(3), "bf16"), expected[0])
    y = GROUPED(left.reshape(E * M, K), right, jnp.full(E, M), recipe(3), "bf16")
    np.testing.assert_array_equal(y.reshape(E, M, N), expected)


def test_emulated_products_add_blocks_in_float32():
    """A block's sum of E2M1·E4M3 products is exact in float32, whatever the operands; that of all blocks is not."""
    rng = np.random.default_rng()
    x, w = (
        (
            rng.standard_normal((E, n, K))
            * np.repeat(2.0 ** rng.integers(-8, 1, (E, n, BLOCKS)), 16, axis=-1)
        ).astype(np.float32)
        for n in (M, N)
    )
    row = settings_of(QuantSpec(scope="row"))
    left, right = (twin.quantize(v, **row) for v in (x, w))
    sums = added_in_order(in_blocks(left.values(), right.values()), BLOCKS)
    expected = sums * (left.global_scale * np.swapaxes(right.global_scale, 1, 2))
    a, b, split = jnp.asarray(x), jnp.asarray(w), recipe(BLOCKS)
    np.testing.assert_array_equal(STACKED(a, b, split, "emulated"), expected)
    np.testing.assert_array_equal(DOT(a[0], b[0], split, "emulated"), expected[0])
    served = to_operand(b[0], split.weight)
    np.testing.assert_array_equal(DOT(a[0], served, split, "emulated"), expected[0])
    y = GROUPED(a.reshape(E * M, K), b, jnp.full(E, M), split, "emulated")
    np.testing.assert_array_equal(y.reshape(E, M, N), expected)


@pytest.mark.parametrize("execution", ["bf16", "emulated"])
def test_one_run_is_one_product_and_gradients_are_not_split(execution):
    x, w = jnp.ones((M, K)), jnp.ones((N, K))

    def products(split_k: int, gradient: bool) -> int:
        def f(x, w):
            return quantized_dot(x, w, recipe(split_k), execution).sum()

        return str(jax.make_jaxpr(jax.grad(f, (0, 1)) if gradient else f)(x, w)).count("dot_general")

    assert products(1, False) == 1
    assert products(3, False) == 3
    assert products(3, True) - products(1, True) == 2
    gradients = [
        jax.grad(lambda x, split=split: quantized_dot(x, w, recipe(split), execution).sum())(x)
        for split in (1, 3)
    ]
    np.testing.assert_array_equal(*gradients)


def test_the_result_is_rounded_once():
    x = np.zeros((1, 32), ml_dtypes.bfloat16)
    w = np.ones((1, 32), ml_dtypes.bfloat16)
    x[0, [0, 16, 17]] = 256, 1, 2**-7
    # 256 + 1 is halfway between BF16 256 and 258; with 2⁻⁷ more it goes up, which two roundings would not.
    assert DOT(jnp.asarray(x), jnp.asarray(w), recipe(2), "bf16") == 258


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("execution", ["float32", "scaled_matmul", "te"])
def test_other_executions_refuse(execution):
    x, w = jnp.ones((2, 32)), jnp.ones((3, 32))
    message = f"split_k is 2 with execution '{execution}', which sums in an order of its own"
    with pytest.raises(ValueError, match=message):
        quantized_dot(x, w, recipe(2), execution)
    with pytest.raises(ValueError, match=message):
        stacked_dot(x[None], w[None], recipe(2), execution)
    with pytest.raises(ValueError, match=r"DotRecipe\.split_k is 0; accepted: 1 or more"):
        recipe(0)
