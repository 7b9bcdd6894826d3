"""Every switch of `Numerics` against what it says, by hand where a hand reaches."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.tiny import tiny_config, tiny_params
from triage_jax.model import KVCache, Numerics, forward, forward_cached, serving_params
from triage_jax.model.forward import _dots
from triage_jax.model.moe import moe_mlp
from triage_jax.model.numerics import fused_weight
from triage_jax.model.presets import PRESETS
from triage_jax.nvfp4 import Operand, QuantSpec, dequantize, quantize
from triage_jax.nvfp4.product import dense

CONFIG = tiny_config()
MOE = tiny_config(architecture="qwen3_moe", num_experts=4, experts_per_token=2, norm_topk_prob=True)
ROWS = Numerics(activation=QuantSpec(scope="row"))


@pytest.fixture
def params():
    return tiny_params(CONFIG, int(np.random.default_rng().integers(2**31)))


@pytest.fixture
def tokens():
    return jnp.asarray(np.random.default_rng().integers(0, CONFIG.vocab_size, (3, 12)), jnp.int32)


@partial(jax.jit, static_argnames=("numerics", "config"))
def _learner(params, tokens, numerics, config=CONFIG, key=None):
    return forward(params, tokens, jnp.ones(tokens.shape, bool), config, numerics, key=key)


@partial(jax.jit, static_argnames=("numerics", "config"))
def _sampler(params, tokens, numerics, config=CONFIG):
    served = serving_params(params, numerics)
    cache = KVCache.empty(config, len(tokens), tokens.shape[1], numerics.compute_dtype)
    return forward_cached(served, tokens, jnp.ones(tokens.shape, bool), cache, config, numerics)


@partial(jax.jit, static_argnames="numerics")
def _gradient(params, tokens, numerics, key=None):
    return jax.grad(lambda p: jnp.sum(jnp.square(_learner(p, tokens, numerics, key=key))))(params)


def _gap(a, b) -> float:
    return float(np.abs(np.asarray(a, np.float32) - np.asarray(b, np.float32)).mean())


def test_fused_shards_share_the_larger_scale(params, tokens):
    loud = replace(params.layers, up=params.layers.up * 8)
    params = replace(params, layers=loud)
    fused = replace(ROWS, fused_shards=True, layers="linear")
    layer = serving_params(params, fused).layers[0]
    assert (
        float(layer.gate.scale)
        == float(layer.up.scale)
        == float(serving_params(params, ROWS).layers[0].up.scale)
    )
    assert float(layer.gate.scale) > float(serving_params(params, ROWS).layers[0].gate.scale)
    assert float(layer.q.scale) == float(layer.k.scale) == float(layer.v.scale)
    both = jnp.concatenate([params.layers.gate[0], params.layers.up[0]]).astype(jnp.bfloat16)
    expected = dequantize(quantize(both, fused.weight))[: CONFIG.intermediate_size]
    np.testing.assert_array_equal(layer.gate.values.astype(jnp.float32) * layer.gate.scale, expected)
    # The learner multiplies the joined matrix, the sampler its parts: the same numbers.
    x = jax.random.normal(jax.random.key(5), (2, 7, CONFIG.hidden_size), jnp.bfloat16)
    learner = _dots(jax.tree.map(lambda leaf: leaf[0], params.layers), fused)
    for group in (("q", "k", "v"), ("gate", "up")):
        for ours, theirs in zip(learner(x, *group), _dots(layer, fused)(x, *group), strict=True):
            np.testing.assert_allclose(
                ours.astype(jnp.float32), theirs.astype(jnp.float32), rtol=2**-7, atol=1e-3
            )
    assert _gap(_learner(params, tokens, fused), _learner(params, tokens, ROWS)) > 1e-3


def test_every_weight_has_a_gradient_where_shards_are_fused(params, tokens):
    """With equal largest weights a shared scale is everybody's own: the same forward pass, the same gradients."""
    names = ("q", "k", "v", "gate", "up")
    equal = {
        name: leaf / jnp.max(jnp.abs(leaf), axis=(1, 2), keepdims=True)
        for name in names
        for leaf in [getattr(params.layers, name)]
    }
    params = replace(params, layers=replace(params.layers, **equal))

    alone = replace(ROWS, layers="linear")
    ours = _gradient(params, tokens, replace(alone, fused_shards=True))
    plain = _gradient(params, tokens, alone)
    for name in (*names, "o", "down"):
        a, b = (np.asarray(getattr(grads.layers, name), np.float64) for grads in (ours, plain))
        assert np.linalg.norm(a - b) < 0.1 * np.linalg.norm(b), name


def test_the_last_layers_stay_in_bf16(params, tokens):
    half, none = replace(ROWS, high_precision_layers=1), replace(ROWS, high_precision_layers=2)
    layers = serving_params(params, half).layers
    assert [isinstance(layer.gate, Operand) for layer in layers] == [True, False]
    bf16 = _learner(params, tokens, Numerics(execution="bf16"))
    np.testing.assert_array_equal(_learner(params, tokens, none), bf16)
    mixed = _learner(params, tokens, half)
    assert _gap(mixed, bf16) > 1e-3
    assert _gap(mixed, _learner(params, tokens, ROWS)) > 1e-3
    with pytest.raises(ValueError, match="high_precision_layers is -1"):
        replace(ROWS, high_precision_layers=-1)


def test_w4a16_is_bf16_on_dequantised_weights(params, tokens):
    w4a16 = replace(ROWS, quantize_activations=False)
    dequantised = {
        name: jax.vmap(lambda w: dequantize(quantize(w, ROWS.weight), jnp.bfloat16))(
            getattr(params.layers, name).astype(jnp.bfloat16)
        ).astype(jnp.float32)
        for name in ("gate", "up", "down")
    }
    by_hand = replace(params, layers=replace(params.layers, **dequantised))
    expected = _learner(by_hand, tokens, Numerics(execution="bf16"))
    np.testing.assert_array_equal(_learner(params, tokens, w4a16), expected)
    assert _gap(_sampler(params, tokens, w4a16)[0], expected) < 5e-2
    grads = _gradient(params, tokens, w4a16)
    assert all(np.any(getattr(grads.layers, name)) for name in ("gate", "up", "down"))


def test_fused_shards_share_a_scale_in_w4a16_too(params, tokens):
    """What the learner multiplies is what the sampler holds, bit for bit."""
    loud = replace(params, layers=replace(params.layers, up=params.layers.up * 8))
    fused = replace(ROWS, quantize_activations=False, fused_shards=True, layers="linear")
    held = serving_params(loud, fused).layers[0]
    first = jax.tree.map(lambda leaf: leaf[0], loud.layers)
    for group in (("q", "k", "v"), ("gate", "up")):
        ours = fused_weight([getattr(first, name) for name in group], group[0], fused)
        theirs = jnp.concatenate([dense(getattr(held, name)).astype(jnp.bfloat16) for name in group])
        np.testing.assert_array_equal(ours, theirs)
        assert fused_weight([getattr(held, name) for name in group], group[0], fused) is None
    assert (
        _gap(_learner(loud, tokens, fused), _learner(loud, tokens, replace(fused, fused_shards=False))) > 1e-3
    )
    assert _gap(_sampler(loud, tokens, fused)[0], _learner(loud, tokens, fused)) < 5e-2
    assert np.any(_gradient(loud, tokens, fused).layers.gate)


def test_masters_or_their_bf16_rounding_are_quantised(params):
    master = params.layers.down[1]
    for source, dtype in (("float32", jnp.float32), ("bf16", jnp.bfloat16)):
        operand = serving_params(params, replace(ROWS, weight_source=source)).layers[1].down
        expected = dequantize(quantize(master.astype(dtype), ROWS.weight))
        np.testing.assert_array_equal(operand.values.astype(jnp.float32) * operand.scale, expected)


def test_the_cache_holds_fp8(params, tokens):
    fp8 = Numerics(execution="bf16", kv_cache="fp8_e4m3")
    hidden, cache = _sampler(params, tokens, fp8)
    for stored in (*cache.keys, *cache.values):
        np.testing.assert_array_equal(stored, stored.astype(jnp.float8_e4m3fn).astype(stored.dtype))
    exact, _ = _sampler(params, tokens, Numerics(execution="bf16"))
    assert _gap(hidden, exact) > 1e-3
    assert _gap(hidden, _learner(params, tokens, fp8)) < 5e-2
    grads = _gradient(params, tokens, fp8)
    assert np.any(grads.layers.k)
    assert np.any(grads.layers.v)


def test_switches_of_the_mixture():
    layer = jax.tree.map(lambda leaf: leaf[0], tiny_params(MOE, 3).layers)
    x = jax.random.normal(jax.random.key(2), (2, 16, MOE.hidden_size), jnp.bfloat16)
    exact = Numerics(execution="float32")
    wide = x.astype(jnp.float32)
    after, _ = moe_mlp(wide, layer, MOE, exact)
    before, _ = moe_mlp(wide, layer, MOE, replace(exact, expert_weighting="before"))
    np.testing.assert_allclose(before, after, rtol=1e-4, atol=1e-5)

    plain, routes = moe_mlp(x, layer, MOE, ROWS)
    for change in ({"expert_weighting": "before"}, {"hidden_rounding": "none"}, {"router": "bf16"}):
        other, _ = moe_mlp(x, layer, MOE, replace(ROWS, **change), routes)
        assert 0 < _gap(plain, other) < 0.5, change


def test_unrounded_hidden_states_reach_the_quantiser(params, tokens):
    assert (
        _gap(_learner(params, tokens, replace(ROWS, hidden_rounding="none")), _learner(params, tokens, ROWS))
        > 0
    )


def test_stochastic_rounding_needs_a_key_and_follows_it(params, tokens):
    numerics = replace(ROWS, backward="nvfp4")
    with pytest.raises(ValueError, match="needs a key"):
        _gradient(params, tokens, numerics)
    first, again, other = (_gradient(params, tokens, numerics, jax.random.key(seed)) for seed in (1, 1, 2))
    for name in ("gate", "up", "down", "q"):
        a, b, c = (getattr(grads.layers, name) for grads in (first, again, other))
        np.testing.assert_array_equal(a, b)
        assert np.any(a != c)


def test_parity_closes_most_of_the_gap(params, tokens):
    """Learner against sampler, by preset: equal recipes leave rounding and accumulation, which W4A4 amplifies."""

    def gap(learner: str, sampler: str) -> float:
        numerics = replace(PRESETS[learner], backward="bf16")
        return _gap(_learner(params, tokens, numerics), _sampler(params, tokens, PRESETS[sampler])[0])

    apart = gap("te_default", "modelopt_static")
    assert gap("parity", "parity") < apart / 2


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_runs_and_describes_itself(name, params, tokens):
    numerics = PRESETS[name]
    assert np.isfinite(_learner(params, tokens, numerics, key=jax.random.key(0))).all()
    assert ("NVFP4" in numerics.describe()) == (name != "bf16")
