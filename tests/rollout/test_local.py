"""The in-process engine: log-probabilities, stops, seeds, buckets, refit, refusals."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests.tiny import tiny_config, tiny_params
from triage_jax.learner import MeshConfig, make_mesh
from triage_jax.model import Numerics, forward, head_of, token_logprobs
from triage_jax.nvfp4 import QuantSpec
from triage_jax.rollout import LocalEngine, LocalEngineConfig, Request, SamplingParams, local

CONFIG = tiny_config()
PARAMS = tiny_params(CONFIG)
SAMPLING = SamplingParams(max_new_tokens=12)
NUMERICS = {
    "float32": Numerics(execution="float32"),
    "bf16": Numerics(execution="bf16"),
    "emulated": Numerics(activation=QuantSpec(scope="row")),
}


def _engine(execution: str = "float32", batch_size: int = 8, version: int = 0) -> LocalEngine:
    engine = LocalEngine(
        CONFIG, NUMERICS[execution], LocalEngineConfig(batch_size=batch_size, prompt_bucket=4)
    )
    engine.update_weights(PARAMS, version)
    return engine


def _requests(count: int, seed: int = 0) -> list[Request]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 8, count)
    return [
        Request(uid=f"r{i}", prompt_ids=tuple(rng.integers(2, 32, n).tolist()), seed=int(rng.integers(2**32)))
        for i, n in enumerate(lengths)
    ]


@partial(jax.jit, static_argnames=("numerics", "temperature"))
def _score(tokens, valid, numerics: Numerics, temperature: float):
    hidden = forward(PARAMS, tokens, valid, CONFIG, numerics)
    return token_logprobs(hidden[:, :-1], head_of(PARAMS), tokens[:, 1:], temperature=temperature).logp


def _teacher_forced(request: Request, drawn: np.ndarray, numerics: Numerics, temperature: float = 1.0):
    """Log-probabilities of `drawn` by one pass over the whole sequence, in rows of fixed width."""
    ids = [*request.prompt_ids, *drawn.tolist()]
    tokens = np.zeros((1, 24), np.int32)
    tokens[0, : len(ids)] = ids
    valid = np.arange(24)[None] < len(ids)
    logp = np.asarray(_score(jnp.asarray(tokens), jnp.asarray(valid), numerics, temperature))[0]
    start = len(request.prompt_ids) - 1
    return logp[start : start + len(drawn)]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_whole_forward(temperature):
    requests = _requests(6)
    sampling = SamplingParams(max_new_tokens=12, temperature=temperature)
    for request, sample in zip(requests, _engine().generate(requests, sampling), strict=True):
        expected = _teacher_forced(request, sample.token_ids, NUMERICS["float32"], temperature)
        np.testing.assert_allclose(sample.logprobs, expected, atol=2e-4)


def test_emulated_numerics_leave_a_gap_of_the_size_of_quantisation():
    requests = _requests(8)
    gaps = {}
    for execution in ("bf16", "emulated"):
        samples = _engine(execution).generate(requests, SAMPLING)
        gaps[execution] = np.concatenate(
            [
                _teacher_forced(request, sample.token_ids, NUMERICS["float32"]) - sample.logprobs
                for request, sample in zip(requests, samples, strict=True)
            ]
        )
    assert np.abs(gaps["bf16"]).mean() < 0.03
    assert 0.03 < np.abs(gaps["emulated"]).mean() < 1.0


def test_samples_end_at_a_stop_token_or_say_that_they_do_not():
    samples = _engine().generate(_requests(40), SAMPLING)
    reasons = {sample.finish_reason for sample in samples}
    assert reasons == {"stop", "length"}
    for sample in samples:
        assert 1 <= len(sample.token_ids) == len(sample.logprobs) <= 12
        assert (sample.token_ids[:-1] != 1).all()
        assert (sample.token_ids[-1] == 1) == (sample.finish_reason == "stop")
        assert sample.finish_reason == "stop" or len(sample.token_ids) == 12
        assert (sample.logprobs <= 0).all()


def test_a_sample_depends_on_its_own_seed_and_not_on_its_neighbours():
    requests = _requests(11)
    engine = _engine("emulated")
    together = engine.generate(requests, SAMPLING)
    assert [sample.uid for sample in together] == [request.uid for request in requests]
    for index in (0, 8, 10):
        alone = engine.generate([requests[index]], SAMPLING)[0]
        # The same bucket, so the same program: per-row scales make rows independent to the bit.
        if -(-len(requests[index].prompt_ids) // 4) == 2:
            np.testing.assert_array_equal(alone.token_ids, together[index].token_ids)
            np.testing.assert_array_equal(alone.logprobs, together[index].logprobs)
    again = engine.generate(requests, SAMPLING)
    for one, other in zip(together, again, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
    request = requests[0]
    other_seed = Request(uid="x", prompt_ids=request.prompt_ids, seed=request.seed + 1)
    assert not np.array_equal(engine.generate([other_seed], SAMPLING)[0].token_ids, together[0].token_ids)


@pytest.mark.parametrize("execution", ["bf16", "emulated"])
def test_batches_at_once_give_the_bits_of_batches_in_turn(execution):
    seen, requests = [], _requests(21, seed=int(np.random.default_rng().integers(2**31)))
    settings = LocalEngineConfig(batch_size=4, prompt_bucket=8, parallel_batches=3)
    at_once = LocalEngine(CONFIG, NUMERICS[execution], settings)
    at_once.update_weights(PARAMS, 0)
    in_turn = LocalEngine(CONFIG, NUMERICS[execution], replace(settings, parallel_batches=1))
    in_turn.update_weights(PARAMS, 0)
    samples = at_once.generate(requests, SAMPLING, lambda *counts: seen.append(counts))
    for one, other in zip(samples, in_turn.generate(requests, SAMPLING), strict=True):
        assert one.uid == other.uid
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
    assert [count for count, _ in seen] == [4, 8, 12, 16, 20, 21]


def test_batches_are_decoded_in_turn_with_weights_on_several_devices(monkeypatch):
    pools = []
    monkeypatch.setattr(
        local, "ThreadPoolExecutor", lambda count: pools.append(count) or ThreadPoolExecutor(count)
    )
    engine = LocalEngine(
        CONFIG, NUMERICS["bf16"], LocalEngineConfig(batch_size=8, prompt_bucket=8, parallel_batches=2)
    )
    everywhere = NamedSharding(make_mesh(MeshConfig(data=8)), PartitionSpec())
    for params, expected in ((jax.device_put(PARAMS, everywhere), []), (PARAMS, [2])):
        engine.update_weights(params, 0)
        assert len(engine.generate(_requests(10), SAMPLING)) == 10
        assert pools == expected
    with pytest.raises(ValueError, match="parallel_batches is 0; accepted: at least 1"):
        LocalEngineConfig(parallel_batches=0)


def test_greedy_is_the_argmax():
    sampling = SamplingParams(max_new_tokens=5, temperature=0.0)
    request = _requests(1)[0]
    sample = _engine().generate([request], sampling)[0]
    best = SamplingParams(max_new_tokens=5)
    others = [Request(uid="o", prompt_ids=request.prompt_ids, seed=seed) for seed in range(8)]
    expected = _teacher_forced(request, sample.token_ids, NUMERICS["float32"])
    np.testing.assert_allclose(sample.logprobs, expected, atol=2e-4)
    for other in _engine().generate(others, best):
        assert other.logprobs[0] <= sample.logprobs[0]


def test_custom_stop_ids():
    request = _requests(1)[0]
    free = _engine().generate([request], SamplingParams(max_new_tokens=6))[0]
    stop = int(free.token_ids[2])
    if stop in free.token_ids[:2]:
        pytest.fail("choose another request: the stop token must first occur at place 2")
    stopped = _engine().generate([request], SamplingParams(max_new_tokens=6, stop_ids=(stop,)))[0]
    np.testing.assert_array_equal(stopped.token_ids, free.token_ids[:3])
    assert stopped.finish_reason == "stop"


def test_each_bucket_compiles_once():
    sampling = SamplingParams(max_new_tokens=7)
    prompts = [(2, 3), (2, 3, 4, 5), (2,) * 5]
    before = local._generate._cache_size()
    for _ in range(2):
        engine = _engine()
        for ids in prompts:
            engine.generate([Request(uid="a", prompt_ids=ids, seed=0)], sampling)
    assert local._generate._cache_size() - before == 2


def test_refit_replaces_the_weights_and_survives_the_learners_donation():
    engine = _engine(version=0)
    request = _requests(1)
    before = engine.generate(request, SAMPLING)[0]
    learner_params = tiny_params(CONFIG, seed=5)
    engine.update_weights(learner_params, 1)
    jax.jit(lambda p: jax.tree.map(lambda x: x + 1, p), donate_argnums=0)(learner_params)
    after = engine.generate(request, SAMPLING)[0]
    assert (set(before.weight_versions.tolist()), set(after.weight_versions.tolist())) == ({0}, {1})
    assert engine.weight_version == 1
    assert not np.array_equal(before.logprobs, after.logprobs[: len(before.logprobs)])


def test_progress_counts_samples_and_tokens():
    seen = []
    samples = _engine(batch_size=4).generate(_requests(10), SAMPLING, lambda *counts: seen.append(counts))
    assert [count for count, _ in seen] == [4, 8, 10]
    assert seen[-1][1] == sum(len(sample.token_ids) for sample in samples)


@pytest.mark.parametrize(
    ("request_", "sampling", "message"),
    [
        (Request(uid="r7", prompt_ids=(), seed=0), SAMPLING, "r7: the prompt is empty"),
        (
            Request(uid="r7", prompt_ids=(2, 32), seed=0),
            SAMPLING,
            "token ids from 2 to 32; accepted: 0 to 31",
        ),
        (Request(uid="r7", prompt_ids=(2,) * 60, seed=0), SAMPLING, "60 prompt tokens .* holds 64"),
        (
            Request(uid="r7", prompt_ids=(2,), seed=0),
            SamplingParams(max_new_tokens=4, top_p=0.9),
            "top_p=0.9.*accepted: top_p=1.0",
        ),
        (
            Request(uid="r7", prompt_ids=(2,), seed=0),
            SamplingParams(max_new_tokens=4, top_k=40),
            "top_k=40",
        ),
    ],
)
def test_refusals_say_what_is_accepted(request_, sampling, message):
    with pytest.raises(ValueError, match=message):
        _engine().generate([request_], sampling)


def test_no_weights_yet():
    engine = LocalEngine(CONFIG, NUMERICS["bf16"])
    with pytest.raises(RuntimeError, match="update_weights first"):
        engine.generate(_requests(1), SAMPLING)


@pytest.mark.parametrize("bad", [{"max_new_tokens": 0}, {"max_new_tokens": 1, "temperature": -1.0}])
def test_sampling_parameters_are_checked(bad):
    with pytest.raises(ValueError, match="accepted"):
        SamplingParams(**bad)
