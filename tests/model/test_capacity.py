"""Experts with a buffer each: the mixture of sorted rows again, until one is full."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.tiny import tiny_config, tiny_params
from triage_jax.model import Numerics, serving_params
from triage_jax.model.capacity import (
    assign,
    expert_rows,
    experts_to_pairs,
    pairs_to_experts,
    rows_to_experts,
)
from triage_jax.model.moe import NO_ROOM, moe_mlp
from triage_jax.nvfp4 import QuantSpec

CONFIG = tiny_config(
    architecture="qwen3_moe", num_experts=4, experts_per_token=2, norm_topk_prob=True, intermediate_size=48
)
E, k = CONFIG.num_experts, CONFIG.experts_per_token
FLOAT32 = Numerics(execution="float32")
W4A4 = Numerics(activation=QuantSpec(scope="row"), fused_shards=True, backward="dequantized")
ROOMY = {"expert_capacity": 4.0}


@pytest.mark.parametrize(
    ("rows", "factor", "expected"),
    # 1000 tokens, 128 experts, 8 each: 62.5 rows an expert. Never more than all tokens; in steps of 128.
    [(1000, None, 1024), (1000, 1.0, 128), (1000, 4.0, 256), (1000, 1e9, 1024), (30, 2.0, 128)],
)
def test_room(rows, factor, expected):
    assert expert_rows(rows, 128, 8, factor) == expected


def _assigned(rng, rows=20, groups=2, capacity=6):
    chosen = np.stack([[rng.permutation(E)[:k] for _ in range(rows)] for _ in range(groups)])
    valid = rng.random((groups, rows)) < 0.8
    return chosen, valid, assign(jnp.asarray(chosen, jnp.int32), jnp.asarray(valid), E, capacity)


def test_slots_are_filled_first_come_first_served():
    chosen, valid, slots = _assigned(np.random.default_rng())
    dropped = 0
    for g in range(2):
        filled = np.zeros(E, int)
        for row in range(20):
            for j, e in enumerate(chosen[g, row]):
                room = valid[g, row] and filled[e] < 6
                assert bool(slots.kept[g, row, j]) == room
                dropped += bool(valid[g, row]) and not room
                if room:
                    at = e * 6 + filled[e]
                    assert slots.slot[g, row, j] == at
                    assert slots.filled[g, at]
                    assert slots.pair[g, at] == row * k + j
                    filled[e] += 1
        assert int(slots.filled[g].sum()) == filled.sum()
    assert dropped > 0


def test_gathers_are_each_others_gradient():
    """<A x, y> = <x, Aᵀ y> for the three of them, and what JAX derives from the forward alone."""
    rng = np.random.default_rng()
    _, _, slots = _assigned(rng)
    x, pairs, y = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32)
        for shape in ((2, 20, 3), (2, 20, k, 3), (E, 12, 3))
    )
    for function, argument, cotangent in (
        (rows_to_experts, x, y),
        (pairs_to_experts, pairs, y),
        (experts_to_pairs, y, pairs),
    ):
        _, pull = jax.vjp(lambda a, f=function: f(a, slots), argument)
        _, own = jax.vjp(lambda a, f=function: f.__wrapped__(a, slots), argument)
        np.testing.assert_allclose(pull(cotangent)[0], own(cotangent)[0], rtol=1e-5, atol=1e-6)


def _inputs(rows=3, columns=20):
    rng = np.random.default_rng()
    params = tiny_params(CONFIG, int(rng.integers(2**31)))
    x = jnp.asarray(rng.standard_normal((rows, columns, CONFIG.hidden_size)), jnp.float32)
    return jax.tree.map(lambda leaf: leaf[0], params.layers), x


@partial(jax.jit, static_argnums=2)
def _mixture(layer, x, numerics, valid=None, routes=None):
    """y, the routes, and the gradient of a sum of y with random signs."""

    def total(x, layer):
        y, chosen = moe_mlp(x, layer, CONFIG, numerics, routes, valid=valid)
        return jnp.sum(jnp.sin(jnp.arange(y.size).reshape(y.shape)) * y.astype(jnp.float32)), (y, chosen)

    grads, (y, chosen) = jax.grad(total, (0, 1), has_aux=True)(x.astype(numerics.compute_dtype), layer)
    return y, chosen, grads


@pytest.mark.parametrize("numerics", [FLOAT32, W4A4], ids=["float32", "W4A4"])
def test_with_room_for_all_it_is_the_mixture_of_sorted_rows(numerics):
    layer, x = _inputs()
    y, routes, grads = _mixture(layer, x, numerics)
    others = [replace(numerics, **ROOMY)]
    if numerics is W4A4:
        others.append(replace(numerics, execution="scaled_matmul"))
    for other in others:
        ours, chosen, own = _mixture(layer, x, other)
        np.testing.assert_array_equal(chosen, routes)
        # The same operands; float32 sums in another order, which may round a hidden state, and so flip its code.
        bound = 0.02 if numerics is W4A4 else 1e-5
        for a, b in zip(jax.tree.leaves((ours, own)), jax.tree.leaves((y, grads)), strict=True):
            a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
            assert np.linalg.norm(a - b) <= bound * np.linalg.norm(b)


def test_an_expert_weight_before_the_projection_is_its_row_s_own():
    layer, x = _inputs()
    numerics = replace(FLOAT32, expert_weighting="before")
    y, _, grads = _mixture(layer, x, numerics)
    ours, _, own = _mixture(layer, x, replace(numerics, **ROOMY))
    np.testing.assert_allclose(ours, y, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(own[1].router, grads[1].router, rtol=1e-3, atol=1e-4)


def test_a_full_expert_adds_nothing_and_says_so():
    """All tokens to experts 0 and 1, of which each has room for 128."""
    layer, x = _inputs(rows=2, columns=100)
    routes = jnp.broadcast_to(jnp.arange(k), (2, 100, k))
    y, chosen, grads = _mixture(layer, x, replace(FLOAT32, expert_capacity=1.0), None, routes)
    full, all_chosen, _ = _mixture(layer, x, FLOAT32, None, routes)
    flat = np.asarray(chosen).reshape(-1, k)
    np.testing.assert_array_equal(flat[:128], np.broadcast_to(np.arange(k), (128, k)))
    np.testing.assert_array_equal(flat[128:], NO_ROOM)
    rows, expected = np.asarray(y).reshape(200, -1), np.asarray(full).reshape(200, -1)
    np.testing.assert_allclose(rows[:128], expected[:128], rtol=1e-4, atol=1e-5)
    assert not np.any(rows[128:])
    assert np.any(expected[128:])
    assert not np.any(np.asarray(grads[0]).reshape(200, -1)[128:]), "nothing came of these rows"
    assert np.all(np.asarray(all_chosen) >= 0)


def test_padding_takes_no_room_and_shares_no_scale():
    layer, x = _inputs(rows=2, columns=100)
    valid = jnp.arange(100)[None] >= jnp.asarray([[36], [0]])
    numerics = replace(W4A4, execution="scaled_matmul", activation=QuantSpec(), expert_capacity=2.0)
    routes = jnp.broadcast_to(jnp.arange(k), (2, 100, k))
    y, chosen, _ = _mixture(layer, x, numerics, valid, routes)
    assert np.all(np.asarray(chosen)[~np.asarray(valid)] == NO_ROOM)
    assert not np.any(np.asarray(chosen)[np.asarray(valid)] == NO_ROOM), "164 valid rows, room for 256"
    large = jnp.where(valid[..., None], x, 1e4)
    again, _, _ = _mixture(layer, large, numerics, valid, routes)
    np.testing.assert_array_equal(np.asarray(again)[np.asarray(valid)], np.asarray(y)[np.asarray(valid)])


def test_refusals():
    with pytest.raises(ValueError, match=r"expert_capacity is 0.5; accepted: null, or 1 and more"):
        Numerics(expert_capacity=0.5)
    with pytest.raises(ValueError, match="the local sampler's experts have no limit"):
        serving_params(tiny_params(CONFIG), Numerics(expert_capacity=2.0))
