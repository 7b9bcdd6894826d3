"""Split-K, the global scales' product and the scopes of experts as switches of a side."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from tests.tiny import tiny_config, tiny_params
from triage_jax.config import ConfigError, TrainConfig, from_dict, to_dict
from triage_jax.model import KVCache, Numerics, forward_cached, load_quantized, save_quantized, serving_params
from triage_jax.model.moe import moe_mlp
from triage_jax.nvfp4 import ExpertScopes, QuantSpec
from triage_jax.rollout import LocalEngine

DENSE = tiny_config()
MOE = tiny_config(
    architecture="qwen3_moe", num_experts=4, experts_per_token=2, norm_topk_prob=True, intermediate_size=48
)
PLAIN = Numerics()
SHARED = ExpertScopes(weight="layer")
STATIC = Numerics(activation=QuantSpec(scope="static", static_amax=4.0))
CALIBRATED = ExpertScopes(activation="expert", static_amax=(1.0, 2.0, 3.0, 0.5))
SERVING = jax.jit(serving_params, static_argnames="numerics")


@partial(jax.jit, static_argnames="numerics")
def _mixture(layer, x, numerics):
    return moe_mlp(x, layer, MOE, numerics)[0]


def test_a_mixture_follows_its_scopes_in_either_layout_and_when_served():
    params = tiny_params(MOE, int(np.random.default_rng().integers(2**31)))
    layer = jax.tree.map(lambda leaf: leaf[0], params.layers)
    x = jax.random.normal(jax.random.key(3), (2, 16, MOE.hidden_size), jnp.bfloat16)
    settings = replace(PLAIN, expert_scopes=ExpertScopes(weight="layer", activation="expert"))
    y = np.asarray(_mixture(layer, x, settings), np.float64)
    assert np.any(y != np.asarray(_mixture(layer, x, PLAIN), np.float64)), "the switches do something"
    buffers = _mixture(layer, x, replace(settings, expert_capacity=4.0))
    served = _mixture(SERVING(params, settings).layers[0], x, settings)
    for other in (buffers, served):
        # The same operands; sums in another order may round a hidden state, and so flip its code.
        assert np.linalg.norm(np.asarray(other, np.float64) - y) <= 0.02 * np.linalg.norm(y)


def test_experts_of_a_layer_share_one_scale_with_their_fused_shards():
    params = tiny_params(MOE, 3)
    layers = SERVING(params, Numerics(fused_shards=True, expert_scopes=SHARED)).layers
    for index, layer in enumerate(layers):
        masters = [
            np.asarray(leaf[index].astype(jnp.bfloat16), np.float32)
            for leaf in (params.layers.gate, params.layers.up)
        ]
        expected = np.float32(max(np.abs(master).max() for master in masters)) / np.float32(2688)
        np.testing.assert_array_equal(layer.gate.scale, np.full(4, expected))
        np.testing.assert_array_equal(layer.up.scale, layer.gate.scale)
    assert layers[0].down.scale[0] != layers[1].down.scale[0], "of each layer its own"


def test_a_checkpoint_holds_shared_scales(tmp_path):
    params = tiny_params(MOE, 4)
    numerics = Numerics(fused_shards=True, weight=QuantSpec(tile="16x16"), expert_scopes=SHARED)
    save_quantized(tmp_path / "model", params, MOE, numerics)
    loaded, _ = load_quantized(tmp_path / "model")
    for ours, theirs in zip(jax.tree.leaves(loaded), jax.tree.leaves(SERVING(params, numerics)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("execution", ["bf16", "emulated"])
def test_a_sampler_sums_in_runs_at_every_step(execution):
    """Prefill and decode multiply by the same runs; a BF16 step has a way of its own, which has none."""
    params = tiny_params(DENSE, 5)
    cache = KVCache.empty(DENSE, 2, 4, jnp.dtype(jnp.bfloat16))
    tokens = jnp.asarray([[3], [7]], jnp.int32)

    def products(split_k: int) -> int:
        numerics = Numerics(execution=execution, split_k=split_k)
        served = jax.eval_shape(partial(serving_params, numerics=numerics), params)
        step = jax.make_jaxpr(
            lambda weights: forward_cached(weights, tokens, jnp.ones((2, 1), bool), cache, DENSE, numerics)
        )(served)
        return str(step).count("dot_general")

    # Of each layer q, k, v, o, gate and up are two blocks wide, down is four.
    assert products(4) - products(1) == DENSE.num_layers * (6 * 1 + 3)


def test_a_served_weight_keeps_the_scale_that_its_product_wants():
    params = tiny_params(DENSE, 6)
    layer = SERVING(params, Numerics(fused_shards=True, global_product="encode")).layers[0]
    both = jnp.concatenate([params.layers.gate[0], params.layers.up[0]]).astype(jnp.bfloat16)
    expected = np.float32(2688) / np.asarray(jnp.abs(both).max(), np.float32)
    assert layer.gate.encode == layer.up.encode == expected
    assert SERVING(params, PLAIN).layers[0].gate.encode is None


def test_the_switches_survive_yaml_and_are_described():
    learner = {
        "split_k": 4,
        "global_product": "encode",
        "activation": {"scope": "static", "static_amax": 4.0},
        "expert_scopes": {"weight": "layer", "activation": "expert", "static_amax": [1, 2.5]},
    }
    config = from_dict(TrainConfig, {"numerics": {"learner": learner}}, "x")
    numerics = config.numerics.learner
    assert (numerics.split_k, numerics.global_product) == (4, "encode")
    assert numerics.expert_scopes == ExpertScopes(weight="layer", activation="expert", static_amax=(1.0, 2.5))
    assert from_dict(TrainConfig, yaml.safe_load(yaml.safe_dump(to_dict(config))), "x") == config
    text = numerics.describe()
    for words in ("sums in 4 runs", "1/(S·S)", "experts too", "of each expert"):
        assert words in text
        assert words not in PLAIN.describe()
    assert Numerics(execution="bf16", split_k=3).describe() == "bf16, sums in 3 runs"


@pytest.mark.parametrize(
    ("learner", "message"),
    [
        ({"split_k": 0}, r"numerics\.learner: DotRecipe\.split_k is 0; accepted: 1 or more"),
        ({"split_k": "two"}, r"numerics\.learner\.split_k: 'two' is not accepted; a value of: int"),
        ({"split_k": 2, "execution": "scaled_matmul"}, "split_k is 2 with execution 'scaled_matmul'"),
        (
            {"global_product": "both"},
            r"global_product: 'both' is not accepted; a value of: 'decode', 'encode'",
        ),
        ({"expert_scopes": {"weight": "all"}}, r"expert_scopes\.weight: 'all' is not accepted"),
        ({"expert_scopes": {"activation": "all"}}, r"expert_scopes\.activation: 'all' is not accepted"),
        (
            {"expert_scopes": {"static_amax": [0]}},
            r"numerics\.learner\.expert_scopes: .*one number, positive",
        ),
        ({"expert_scopes": {"weight": "layer"}, "execution": "te"}, "weight is 'layer' with execution 'te'"),
    ],
)
def test_what_is_not_accepted_is_refused_with_its_place(learner, message):
    with pytest.raises(ConfigError, match=message):
        from_dict(TrainConfig, {"numerics": {"learner": learner}}, "x")


def test_calibrated_scales_are_of_the_model_s_experts():
    numerics = replace(STATIC, expert_scopes=CALIBRATED)
    LocalEngine(MOE, numerics)
    with pytest.raises(ValueError, match="has 4 numbers, the model 0 experts"):
        LocalEngine(DENSE, numerics)
