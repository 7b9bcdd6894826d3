"""Which experts share a global scale: every choice against operands that an independent quantiser made."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.nvfp4 import twin
from triage_jax.nvfp4 import DotRecipe, ExpertScopes, QuantSpec, dequantize, quantize
from triage_jax.nvfp4.experts import buffers_amax, sorted_amax, stacked_operand
from triage_jax.nvfp4.grouped import grouped_dot
from triage_jax.nvfp4.stacked import stacked_dot
from triage_jax.nvfp4.te import check_recipe

E, N, K = 4, 24, 48
SIZES = np.array([5, 0, 7, 4])
ROOM = 8
EXPERT = np.repeat(np.arange(E), SIZES)
SLOT = np.concatenate([np.arange(size) for size in SIZES])
CALIBRATED = (2.0, 3.0, 5.0, 0.25)
TENSOR, STATIC = QuantSpec(), QuantSpec(scope="static", static_amax=3.5)
STACKED = jax.jit(stacked_dot, static_argnums=(2, 3))
GROUPED = jax.jit(grouped_dot, static_argnums=(3, 4))

CASES = {
    "as always": (TENSOR, ExpertScopes()),
    "all rows": (TENSOR, ExpertScopes(activation="layer")),
    "own rows": (TENSOR, ExpertScopes(activation="expert")),
    "one weight scale": (TENSOR, ExpertScopes(weight="layer")),
    "one for all": (STATIC, ExpertScopes(activation="layer")),
    "calibrated, the largest": (STATIC, ExpertScopes(static_amax=CALIBRATED)),
    "calibrated, own": (STATIC, ExpertScopes(activation="expert", static_amax=CALIBRATED)),
    "both": (TENSOR, ExpertScopes(weight="layer", activation="expert")),
}


def recipe(name: str, **changes) -> DotRecipe:
    activation, scopes = CASES[name]
    weight = QuantSpec(tile="16x16")
    return DotRecipe(weight=weight, activation=activation, experts=scopes, backward="dequantized", **changes)


def inputs() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sorted rows, the same in buffers, and weights; experts of very different size."""
    rng = np.random.default_rng()
    size = 2.0 ** np.array([0, 3, -4, 1])
    x = (rng.standard_normal((len(EXPERT), K)) * size[EXPERT][:, None]).astype(np.float32)
    w = (rng.standard_normal((E, N, K)) * size[::-1].reshape(E, 1, 1)).astype(np.float32)
    buffers = np.zeros((E, ROOM, K), np.float32)
    buffers[EXPERT, SLOT] = x
    return x, buffers, w


def value(x: np.ndarray, amax: float, tile: str = "1x16") -> np.ndarray:
    """The numbers that a range of `amax` leaves of x."""
    q = twin.quantize(x, tile=tile, scope="static", static_amax=amax)
    return q.values() * float(q.global_scale)


def expected(x: np.ndarray, w: np.ndarray, name: str) -> np.ndarray:
    """Every row's product, in float64, with the scopes written out."""
    activation, scopes = CASES[name]
    own_rows = scopes.activation == "expert"
    y = np.zeros((len(x), N))
    for e in range(E):
        rows = np.flatnonzero(e == EXPERT)
        if not rows.size:
            continue
        mine = np.abs(x[rows] if own_rows else x).max()
        if activation.scope == "static":
            calibrated = scopes.static_amax or (activation.static_amax,)
            mine = calibrated[e] if own_rows else max(calibrated)
        wide = np.abs(w if scopes.weight == "layer" else w[e]).max()
        y[rows] = value(x[rows], mine) @ value(w[e], wide, "16x16").T
    return y


def assert_close(ours, exact: np.ndarray) -> None:
    """Row by row, to the rounding of float32 sums: a code of another scale is a thousand times farther off."""
    size = np.abs(exact).max(axis=-1, keepdims=True)
    assert np.all(np.abs(np.asarray(ours, np.float64) - exact) <= 1e-5 * size)


@pytest.mark.parametrize(
    "name", ["own rows", "one weight scale", "calibrated, the largest", "calibrated, own"]
)
def test_both_layouts_and_executions_follow_the_scopes(name):
    x, buffers, w = inputs()
    exact = expected(x, w, name)
    sizes = jnp.asarray(SIZES)
    # Two rows more than there are pairs: nobody's, and in nobody's scale.
    more = np.concatenate([x, np.full((2, K), 1e4, np.float32)]) if name == "own rows" else x
    y = GROUPED(jnp.asarray(more), jnp.asarray(w), sizes, recipe(name), "emulated")
    assert_close(y[: len(x)], exact)
    served = stacked_operand(jnp.asarray(w), recipe(name))
    assert served.scale.shape == (E,)
    assert (len(set(np.asarray(served.scale).tolist())) == 1) == (CASES[name][1].weight == "layer")
    assert_close(GROUPED(jnp.asarray(x), served, sizes, recipe(name), "emulated"), exact)
    for execution in ("emulated", "scaled_matmul"):
        y = STACKED(jnp.asarray(buffers), jnp.asarray(w), recipe(name), execution)
        assert_close(np.asarray(y)[EXPERT, SLOT], exact)


def test_every_switch_changes_the_product():
    x, _, w = inputs()
    assert len({expected(x, w, name).tobytes() for name in CASES}) == len(CASES) - 1, (
        "one case is another's name"
    )
    np.testing.assert_array_equal(expected(x, w, "as always"), expected(x, w, "all rows"))


def test_gradients_go_by_the_operands_that_were_multiplied():
    x, buffers, w = inputs()
    g = np.random.default_rng().standard_normal((len(x), N)).astype(np.float32)
    spread = np.zeros((E, ROOM, N), np.float32)
    spread[EXPERT, SLOT] = g
    settings = recipe("both")

    def grads(dot, rows, cotangent):
        return jax.jit(lambda x, w, g: jax.vjp(dot, x, w)[1](g))(
            jnp.asarray(rows), jnp.asarray(w), jnp.asarray(cotangent)
        )

    dx, dw = grads(lambda x, w: grouped_dot(x, w, jnp.asarray(SIZES), settings, "emulated"), x, g)
    wide = np.abs(w).max()
    for execution in ("emulated", "scaled_matmul"):
        own_dx, own_dw = grads(lambda x, w, e=execution: stacked_dot(x, w, settings, e), buffers, spread)
        for e in range(E):
            rows = np.flatnonzero(e == EXPERT)
            if not rows.size:
                assert not np.any(dw[e])
                continue
            exact = g[rows].astype(np.float64) @ value(w[e], wide, "16x16")
            exact_dw = g[rows].T.astype(np.float64) @ value(x[rows], np.abs(x[rows]).max())
            for ours in (dx[rows], own_dx[e, : len(rows)]):
                # Operands of the gradient are rounded to BF16.
                assert np.linalg.norm(ours - exact) <= 2e-2 * np.linalg.norm(exact)
            for ours in (dw[e], own_dw[e]):
                assert np.linalg.norm(ours - exact_dw) <= 2e-2 * np.linalg.norm(exact_dw)


def test_a_shared_weight_scale_is_one_quantisation_of_the_stack():
    """Tiles span no two experts although N is no multiple of 16."""
    _, _, w = inputs()
    settings = recipe("one weight scale")
    operand = jax.jit(lambda w: stacked_operand(w, settings))(jnp.asarray(w))
    ours = np.asarray(operand.values, np.float64) * np.asarray(operand.scale, np.float64).reshape(E, 1, 1)
    amax = float(np.abs(w).max())
    alone = QuantSpec(tile="16x16", scope="static", static_amax=amax)
    for e in range(E):
        np.testing.assert_allclose(ours[e], dequantize(quantize(jnp.asarray(w[e]), alone)), rtol=1e-6)


def test_a_nan_stays_with_its_own_expert():
    x, _, w = inputs()
    x[0, 0] = np.nan
    own = GROUPED(jnp.asarray(x), jnp.asarray(w), jnp.asarray(SIZES), recipe("own rows"), "emulated")
    assert np.isnan(own[: SIZES[0]]).all()
    assert np.isfinite(own[SIZES[0] :]).all()
    shared = GROUPED(jnp.asarray(x), jnp.asarray(w), jnp.asarray(SIZES), recipe("all rows"), "emulated")
    assert np.isnan(shared).all()


def test_scopes_that_mean_nothing_are_refused():
    row = QuantSpec(scope="row")
    for scopes, weight, activation, message in (
        (
            ExpertScopes(weight="layer"),
            row,
            TENSOR,
            r"weight is 'layer' with weight\.scope 'row'; accepted: 'tensor'",
        ),
        (
            ExpertScopes(static_amax=CALIBRATED),
            TENSOR,
            TENSOR,
            r"static_amax goes with activation\.scope 'static'",
        ),
        (ExpertScopes(activation="expert"), TENSOR, STATIC, "needs static_amax"),
        (ExpertScopes(activation="expert"), TENSOR, QuantSpec(tile="16x16"), "rows may be of two experts"),
    ):
        with pytest.raises(ValueError, match=message):
            DotRecipe(weight=weight, activation=activation, experts=scopes)
    for amax in ((), (1.0, 0.0), (1.0, float("inf")), (float("nan"),)):
        with pytest.raises(ValueError, match="for each expert one number"):
            ExpertScopes(static_amax=amax)


@pytest.mark.usefixtures("unchecked")
def test_executions_refuse_what_they_would_not_follow():
    with pytest.raises(ValueError, match=r"ExpertScopes\.weight is 'all'; accepted: expert, layer"):
        ExpertScopes(weight="all")
    x, buffers, w = (jnp.asarray(v) for v in inputs())
    short = replace(recipe("one for all"), experts=ExpertScopes(static_amax=(1.0, 2.0)))
    for build in (lambda: buffers_amax(short, E), lambda: sorted_amax(short, jnp.asarray(SIZES), 16)):
        with pytest.raises(ValueError, match="has 2 numbers, the model 4 experts"):
            build()
    shards = replace(recipe("own rows"), activation=QuantSpec(scope="shard", shards=2))
    with pytest.raises(ValueError, match="splits the batch and not the experts"):
        grouped_dot(x, w, jnp.asarray(SIZES), shards, "emulated")
    engine = DotRecipe(weight=TENSOR, activation=TENSOR, backward="nvfp4")
    check_recipe(replace(engine, experts=ExpertScopes(activation="expert")))
    for change, message in (
        ({"experts": ExpertScopes(weight="layer")}, "weight is 'layer' with execution 'te'"),
        ({"experts": ExpertScopes(activation="layer")}, "activation is 'layer' with execution 'te'"),
        ({"split_k": 2}, "split_k is 2 with execution 'te'"),
        ({"global_product": "encode"}, "global_product is 'encode', accepted 'decode'"),
    ):
        with pytest.raises(ValueError, match=message):
            check_recipe(replace(engine, **change))
        if "experts" in change:
            with pytest.raises(ValueError, match=message):
                stacked_dot(buffers, w, replace(engine, **change), "te")
