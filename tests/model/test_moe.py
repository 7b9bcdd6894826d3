"""Experts: the mixture against a loop in float64, routes, replay, and what the sampler serves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.tiny import tiny_config, tiny_params
from triage_jax.model import KVCache, ModelError, Numerics, forward, forward_cached, serving_params
from triage_jax.model.forward import forward_routed
from triage_jax.model.load import load_model
from triage_jax.model.moe import moe_mlp, route
from triage_jax.model.save import save_model
from triage_jax.nvfp4 import Operand, QuantSpec

CONFIG = tiny_config(
    architecture="qwen3_moe", num_experts=4, experts_per_token=2, norm_topk_prob=True, intermediate_size=48
)
FLOAT32 = Numerics(execution="float32")
EMULATED = Numerics(activation=QuantSpec(scope="row"))


@pytest.fixture
def inputs():
    rng = np.random.default_rng()
    params = tiny_params(CONFIG, int(rng.integers(2**31)))
    tokens = jnp.asarray(rng.integers(0, CONFIG.vocab_size, (3, 10)), jnp.int32)
    return params, tokens, jnp.ones(tokens.shape, bool)


def _layer(params, index=0):
    return jax.tree.map(lambda leaf: leaf[index], params.layers)


def _by_hand(x, layer, norm: bool) -> tuple[np.ndarray, np.ndarray]:
    """One token after the other, one expert after the other, in float64."""
    rows = np.asarray(x, np.float64).reshape(-1, x.shape[-1])
    router, gate, up, down = (
        np.asarray(getattr(layer, name), np.float64) for name in ("router", "gate", "up", "down")
    )
    out, routes = np.zeros_like(rows), []
    for m, row in enumerate(rows):
        logits = router @ row
        probability = np.exp(logits - logits.max())
        probability /= probability.sum()
        best = np.argsort(-logits)[: CONFIG.experts_per_token]
        routes.append(best)
        total = probability[best].sum() if norm else 1.0
        for e in best:
            wide = gate[e] @ row
            out[m] += probability[e] / total * (down[e] @ (wide / (1 + np.exp(-wide)) * (up[e] @ row)))
    return out.reshape(x.shape), np.array(routes)


@pytest.mark.parametrize("norm", [True, False])
def test_the_mixture_equals_a_loop_over_tokens_and_experts(inputs, norm):
    config = tiny_config(
        architecture="qwen3_moe",
        num_experts=4,
        experts_per_token=2,
        norm_topk_prob=norm,
        intermediate_size=48,
    )
    layer = _layer(inputs[0])
    x = jax.random.normal(jax.random.key(7), (2, 5, CONFIG.hidden_size))
    y, routes = jax.jit(lambda x: moe_mlp(x, layer, config, FLOAT32))(x)
    expected, chosen = _by_hand(x, layer, norm)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(routes.reshape(-1, 2), chosen)


def test_gradients_reach_experts_router_and_input(inputs):
    """Against central differences along a random direction of everything at once."""
    layer = _layer(inputs[0])
    x = jax.random.normal(jax.random.key(3), (2, 6, CONFIG.hidden_size))
    _, routes = moe_mlp(x, layer, CONFIG, FLOAT32)

    def loss(tree):
        x, layer = tree
        return jnp.sum(jnp.square(moe_mlp(x, layer, CONFIG, FLOAT32, routes)[0]))

    grads = jax.grad(loss)((x, layer))
    keys = iter(jax.random.split(jax.random.key(4), 64))
    step = jax.tree.map(lambda leaf: jax.random.normal(next(keys), leaf.shape), (x, layer))
    size = 1e-3
    plus, minus = (
        loss(jax.tree.map(lambda a, d, s=sign: a + s * size * d, (x, layer), step)) for sign in (1, -1)
    )
    along = sum(
        float(jnp.vdot(g, d)) for g, d in zip(jax.tree.leaves(grads), jax.tree.leaves(step), strict=True)
    )
    assert along == pytest.approx(float(plus - minus) / (2 * size), rel=2e-2)
    for name in ("router", "gate", "up", "down"):
        assert np.any(getattr(grads[1], name)), name


def test_decode_keeps_the_routes_of_every_slot(inputs):
    params, tokens, valid = inputs
    _, chosen = forward_routed(params, tokens, valid, CONFIG, FLOAT32)
    cache = KVCache.empty(CONFIG, rows=3, slots=4, dtype=jnp.dtype(jnp.float32))
    _, cache = forward_cached(params, tokens[:, :4], valid[:, :4], cache, CONFIG, FLOAT32)
    cache = cache.grown_to(10)
    for column in range(4, 10):
        at = slice(column, column + 1)
        _, cache = forward_cached(params, tokens[:, at], valid[:, at], cache, CONFIG, FLOAT32)
    np.testing.assert_array_equal(jnp.stack(cache.routes), chosen)


def test_replay_follows_the_given_experts_with_the_routers_own_weights(inputs):
    params, tokens, valid = inputs
    hidden, chosen = forward_routed(params, tokens, valid, CONFIG, FLOAT32)
    again = forward(params, tokens, valid, CONFIG, FLOAT32, routes=chosen)
    np.testing.assert_array_equal(hidden, again)
    other = (chosen + 1) % CONFIG.num_experts
    replayed, followed = forward_routed(params, tokens, valid, CONFIG, FLOAT32, routes=other)
    np.testing.assert_array_equal(followed, other)
    assert np.abs(np.asarray(replayed) - np.asarray(hidden)).max() > 1e-3

    x = jax.random.normal(jax.random.key(1), (1, 3, CONFIG.hidden_size))
    router = _layer(params).router
    weights, _ = route(x, router, CONFIG, jnp.asarray([[[3, 0], [1, 2], [2, 3]]]))
    logits = np.asarray(x, np.float64) @ np.asarray(router, np.float64).T
    pairs = np.exp(np.take_along_axis(logits, np.array([[[3, 0], [1, 2], [2, 3]]]), -1))
    np.testing.assert_allclose(weights, pairs / pairs.sum(-1, keepdims=True), rtol=1e-5)


def test_a_sampler_serves_quantised_experts_and_gets_what_the_learner_gets(inputs):
    params, tokens, valid = inputs
    served = serving_params(params, EMULATED)
    gate = served.layers[0].gate
    assert isinstance(gate, Operand)
    assert gate.values.shape == params.layers.gate.shape[1:]
    stored = params.layers.gate[0].astype(EMULATED.compute_dtype).astype(jnp.float32)
    per_expert = jnp.max(jnp.abs(stored), axis=(1, 2)) / (6 * 448)
    np.testing.assert_allclose(gate.scale, per_expert, rtol=1e-6)
    cache = KVCache.empty(CONFIG, rows=3, slots=10, dtype=EMULATED.compute_dtype)
    sampler, cache = forward_cached(served, tokens, valid, cache, CONFIG, EMULATED)
    learner, chosen = forward_routed(params, tokens, valid, CONFIG, EMULATED)
    same = np.all(np.stack(cache.routes) == chosen, axis=(0, 3))
    # Rounding flips near-ties of the router, and W4A4 amplifies it: most tokens take the same way, not all.
    assert same.mean() > 0.5
    gap = np.abs(np.asarray(sampler, np.float32) - np.asarray(learner, np.float32))[same]
    assert np.median(gap) < 0.3


def test_a_saved_mixture_is_loaded_again(tmp_path, inputs):
    save_model(tmp_path / "model", inputs[0], CONFIG, dtype=jnp.float32)
    params, config = load_model(tmp_path / "model")
    assert config == CONFIG
    for ours, theirs in zip(jax.tree.leaves(params), jax.tree.leaves(inputs[0]), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 0}, "qwen3_moe has experts"),
        ({"experts_per_token": 5}, "accepted are 1 to num_experts = 4"),
    ],
)
def test_settings_that_contradict_each_other(changes, message):
    settings = {"architecture": "qwen3_moe", "num_experts": 4, "experts_per_token": 2}
    with pytest.raises(ModelError, match=message):
        tiny_config(**(settings | changes))
