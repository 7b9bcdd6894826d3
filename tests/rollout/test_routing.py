"""Routed experts: what is refused, and that the local engine returns what its tokens went through."""

import base64

import jax.numpy as jnp
import numpy as np
import pytest

from tests.tiny import tiny_config, tiny_params
from triage_jax.learner import pack_batch
from triage_jax.model import Numerics
from triage_jax.model.forward import forward_routed
from triage_jax.rollout import LocalEngine, LocalEngineConfig, Request, Sample, SamplingParams
from triage_jax.rollout.routing import RouteShape, RoutingError, check_routes, decode_routes

SHAPE = RouteShape(layers=2, experts=4, experts_per_token=2)
GOOD = np.array([[[0, 1], [3, 2]], [[1, 0], [2, 1]], [[2, 3], [0, 3]]])
MOE = tiny_config(architecture="qwen3_moe", num_experts=4, experts_per_token=2, norm_topk_prob=True)


def _changed(index, value):
    routes = GOOD.copy()
    routes[index] = value
    return routes


def test_good_routes_pass_as_they_are():
    np.testing.assert_array_equal(check_routes(GOOD, 3, SHAPE), GOOD)
    text = base64.b64encode(GOOD.astype("<i4").tobytes()).decode()
    np.testing.assert_array_equal(decode_routes(text, 3, SHAPE), GOOD)


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        (_changed((1, 1, 0), 4), r"\(1, 1, 0\) is expert 4; accepted: 0 to 3"),
        (_changed((2, 0, 1), -1), r"\(2, 0, 1\) is expert -1"),
        (_changed((0, 0, 1), 0), r"\(0, 0\) names an expert twice: \[0, 0\]"),
        (GOOD[:2], r"\(2, 2, 2\); expected integers \(3, 2, 2\)"),
        (GOOD[..., :1], r"expected integers"),
        (GOOD.astype(float), r"float64"),
    ],
)
def test_bad_routes_are_refused(routes, message):
    with pytest.raises(RoutingError, match=message):
        check_routes(routes, 3, SHAPE)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "enable-return-routed-experts"),
        ("not base64!", "no base64"),
        (base64.b64encode(b"\0" * 44).decode(), "44 bytes; expected 48, for 3 positions"),
        (base64.b64encode(GOOD.astype("<i8").tobytes()).decode(), "96 bytes"),
    ],
)
def test_bad_text_is_refused(text, message):
    with pytest.raises(RoutingError, match=message):
        decode_routes(text, 3, SHAPE)


def test_the_local_engine_returns_the_experts_of_every_position_that_was_fed():
    params, numerics = tiny_params(MOE, seed=3), Numerics(execution="float32")
    engine = LocalEngine(MOE, numerics, LocalEngineConfig(batch_size=4, prompt_bucket=8))
    engine.update_weights(params, 0)
    rng = np.random.default_rng()
    requests = [
        Request(uid=str(n), prompt_ids=tuple(rng.integers(2, 32, n).tolist()), seed=n) for n in (3, 8, 5)
    ]
    sampling = SamplingParams(max_new_tokens=12, routed_experts=True)
    samples = engine.generate(requests, sampling)
    shape = RouteShape(layers=MOE.num_layers, experts=4, experts_per_token=2)
    for request, sample in zip(requests, samples, strict=True):
        fed = [*request.prompt_ids, *sample.token_ids.tolist()][:-1]
        check_routes(sample.routed_experts, len(fed), shape)
        tokens = jnp.asarray([fed], jnp.int32)
        _, expected = forward_routed(params, tokens, jnp.ones(tokens.shape, bool), MOE, numerics)
        np.testing.assert_array_equal(sample.routed_experts, np.moveaxis(np.asarray(expected)[:, 0], 0, 1))

    assert engine.generate(requests, SamplingParams(max_new_tokens=2))[0].routed_experts is None
    dense = LocalEngine(tiny_config(), numerics)
    dense.update_weights(tiny_params(tiny_config()), 0)
    with pytest.raises(ValueError, match="the model is dense"):
        dense.generate(requests, sampling)


def _sample(uid: str, drawn: int, routes: np.ndarray | None) -> Sample:
    return Sample(
        uid=uid,
        token_ids=np.full(drawn, 5, np.int32),
        logprobs=np.full(drawn, -1.0, np.float32),
        finish_reason="stop",
        weight_versions=np.zeros(drawn, np.int32),
        routed_experts=routes,
    )


def test_routes_lie_at_the_columns_of_their_tokens():
    sizes = {"prompt_width": 4, "response_width": 3, "replay_routing": True}
    samples = [_sample("a", 2, GOOD), _sample("b", 1, None)]
    batch = pack_batch([(7, 8), (9,)], samples, np.ones(2), np.array([True, False]), **sizes)
    assert batch.routes.shape == (2, 7, 2, 2)
    np.testing.assert_array_equal(batch.routes[0, 2:5], GOOD)
    for rest in (batch.routes[0, :2], batch.routes[0, 5:], batch.routes[1]):
        np.testing.assert_array_equal(rest, np.broadcast_to([0, 1], rest.shape))
    with pytest.raises(ValueError, match="missing, in sample b first"):
        pack_batch([(7, 8), (9,)], samples, np.ones(2), np.array([True, True]), **sizes)
