"""The engine against a real SGLang 0.5.23 server on the CPU, and a training run through it. Needs .venv-sglang."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from pathlib import Path

import httpx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.rollout.sglang.conftest import KEYS, ROOT, Serving
from tests.tiny import tiny_params
from triage_jax.cli import parse
from triage_jax.learner import Learner, pack_batch, score
from triage_jax.model import Numerics, Params, load_model
from triage_jax.rollout import Request, Sample, SamplingParams
from triage_jax.rollout.sglang.client import Client, new_rid
from triage_jax.rollout.sglang.config import SglangConfig
from triage_jax.rollout.sglang.engine import SglangEngine
from triage_jax.rollout.sglang.errors import Unauthorized
from triage_jax.rollout.sglang.wire import Limits
from triage_jax.run import resolve_model
from triage_jax.tasks.arithmetic import ArithmeticTask
from triage_jax.tasks.prompts import encode_prompt
from triage_jax.tasks.tokenizer import load_tokenizer

# The server starts inside the first test's time; one process runs them all, for one server (--dist loadgroup).
pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900), pytest.mark.xdist_group("sglang")]

BF16 = Numerics(execution="bf16")
QUICKSTART = resolve_model("quickstart")
PARAMS, CONFIG = load_model(QUICKSTART)
LIMITS = Limits(vocab_size=CONFIG.vocab_size, context=CONFIG.max_position_embeddings)
SAMPLING = SamplingParams(max_new_tokens=28, stop_ids=CONFIG.eos_token_ids)
GREEDY = replace(SAMPLING, temperature=0.0)
LONG = replace(GREEDY, max_new_tokens=96)
STEP = 0.04
"""Seconds that a forward pass of a slowed server takes longer: LONG is then drawn in 4 s or more"""
BOUND = 0.02
"""Mean |learner - server| in nats that two BF16 implementations of one model must stay under"""

versions = count(1)
"""Every refit of a session needs a version of its own"""


@pytest.fixture(scope="module")
def engine(real_server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangEngine]:
    directory = tmp_path_factory.mktemp("weights")
    engine = SglangEngine(SglangConfig(urls=(real_server,)), CONFIG, BF16, directory, QUICKSTART)
    yield engine
    engine.close()


def _requests(amount: int) -> list[Request]:
    task, codec = ArithmeticTask(parse([]).config.task.arithmetic), load_tokenizer(QUICKSTART)
    prompts = [tuple(encode_prompt(task.problem(index), codec)) for index in range(amount)]
    return [Request(uid=f"r{i}", prompt_ids=ids, seed=i) for i, ids in enumerate(prompts)]


def _perturbed(scale: float, seed: int) -> Params:
    leaves, tree = jax.tree.flatten(PARAMS)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    noisy = [
        leaf + scale * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)
    ]
    return jax.tree.unflatten(tree, noisy)


def _endless(seed: int) -> Params:
    """Random weights that never stop a greedy response: the logit of the end token is 0, far from the largest."""
    params = tiny_params(CONFIG, seed)
    return replace(params, embed=params.embed.at[jnp.array(CONFIG.eos_token_ids)].set(0.0))


def _refit(engine: SglangEngine, params: Params) -> int:
    """Push weights as the next version; the probe right after must agree with the learner."""
    version = next(versions)
    engine.update_weights(params, version)
    assert engine.weight_version == version
    metrics = engine.metrics()
    assert 0.0 < metrics["engine/probe_gap_mean"] < BOUND
    return version


def _learner_gap(params: Params, requests: list[Request], samples: list[Sample]) -> np.ndarray:
    """Learner minus server at every drawn token, nats."""
    rows = len(samples)
    batch = pack_batch(
        [request.prompt_ids for request in requests],
        samples,
        np.ones(rows),
        np.ones(rows, bool),
        prompt_width=max(len(request.prompt_ids) for request in requests),
        response_width=max(len(sample.token_ids) for sample in samples),
    )
    logp = score(Learner(model=CONFIG, numerics=BF16), params, jax.tree.map(jnp.asarray, batch)).logp
    return (np.asarray(logp) - np.asarray(batch.sampler_logp))[np.asarray(batch.mask)]


def _slow_down(url: str, seconds: float | None) -> None:
    """Make every forward pass of the server sleep, so that something can happen in the middle of a response."""
    headers = {"Authorization": f"Bearer {KEYS['SGLANG_ADMIN_KEY']}"}
    answer = httpx.post(
        f"{url}/slow_down", json={"forward_sleep_time": seconds}, headers=headers, timeout=60.0
    )
    answer.raise_for_status()


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("/generate", None),
        ("/generate", "SGLANG_ADMIN_KEY"),
        ("/pause_generation", None),
        ("/pause_generation", "SGLANG_API_KEY"),
    ],
)
def test_each_key_opens_its_own_routes_only(real_server, path, key):
    headers = {"Authorization": f"Bearer {KEYS[key]}"} if key else {}
    body = {"input_ids": [3], "sampling_params": {"max_new_tokens": 1}}
    assert httpx.post(f"{real_server}{path}", json=body, headers=headers, timeout=60.0).status_code == 401


def test_a_wrong_key_is_named_as_such_and_not_shown(real_server, monkeypatch):
    monkeypatch.setenv("SGLANG_API_KEY", "not-the-key")

    async def ask() -> None:
        client = Client(real_server, SglangConfig(urls=(real_server,)), LIMITS)
        try:
            await client.generate(_requests(1)[0], SAMPLING)
        finally:
            await client.close()

    with pytest.raises(Unauthorized) as caught:
        asyncio.run(ask())
    assert real_server in str(caught.value)
    assert "not-the-key" not in str(caught.value)


def test_samples_carry_their_version_and_agree_with_the_learner(engine):
    version = _refit(engine, PARAMS)
    requests = _requests(32)
    seen = []
    samples = engine.generate(requests, SAMPLING, lambda done, tokens: seen.append((done, tokens)))
    assert [sample.uid for sample in samples] == [request.uid for request in requests]
    for sample in samples:
        assert sample.finish_reason in ("stop", "length")
        assert (sample.weight_versions == version).all()
        assert (sample.token_ids[-1] in CONFIG.eos_token_ids) == (sample.finish_reason == "stop")
    assert seen[-1] == (32, sum(len(sample.token_ids) for sample in samples))
    gap = _learner_gap(PARAMS, requests, samples)
    assert gap.size > 300
    assert np.abs(gap).mean() < BOUND


def test_logprobs_follow_the_temperature(engine):
    _refit(engine, PARAMS)
    requests = _requests(16)
    samples = engine.generate(requests, replace(SAMPLING, temperature=2.0))
    assert engine.capabilities.logprobs_follow_temperature
    # At temperature 1 the learner must disagree: the server's values are those of the flattened distribution.
    assert np.abs(_learner_gap(PARAMS, requests, samples)).mean() > 10 * BOUND


def test_greedy_output_follows_the_weights(engine):
    requests = _requests(8)

    def drawn(params: Params) -> list[list[int]]:
        _refit(engine, params)
        return [sample.token_ids.tolist() for sample in engine.generate(requests, GREEDY)]

    before, changed = drawn(PARAMS), drawn(_perturbed(0.02, seed=1))
    assert changed != before
    assert drawn(PARAMS) == before


def test_one_request_is_aborted_and_the_others_end(engine, real_server):
    _refit(engine, _endless(seed=0))
    first, second = _requests(2)

    async def run() -> tuple[Sample, Sample]:
        client = Client(real_server, SglangConfig(urls=(real_server,)), LIMITS)
        rid = new_rid()
        try:
            tasks = (
                asyncio.create_task(client.generate(first, LONG, rid=rid)),
                asyncio.create_task(client.generate(second, LONG)),
            )
            await asyncio.sleep(1.0)
            await client.abort(rid)
            cut, whole = await asyncio.gather(*tasks)
            return cut, whole
        finally:
            await client.close()

    _slow_down(real_server, STEP)
    try:
        cut, whole = asyncio.run(run())
    finally:
        _slow_down(real_server, None)
    assert cut.finish_reason == "abort"
    assert 0 < len(cut.token_ids) == len(cut.logprobs) < LONG.max_new_tokens
    assert whole.finish_reason == "length"
    assert len(whole.token_ids) == LONG.max_new_tokens


def test_a_response_aborted_by_someone_else_is_drawn_again(engine, real_server):
    _refit(engine, _endless(seed=0))
    headers = {"Authorization": f"Bearer {KEYS['SGLANG_ADMIN_KEY']}"}
    _slow_down(real_server, STEP)
    try:
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(engine.generate, _requests(2), LONG)
            while not _running(real_server):
                pass
            httpx.post(
                f"{real_server}/abort_request", json={"abort_all": True}, headers=headers, timeout=60.0
            )
            samples = running.result()
    finally:
        _slow_down(real_server, None)
    assert [len(sample.token_ids) for sample in samples] == [LONG.max_new_tokens] * 2
    assert {sample.finish_reason for sample in samples} == {"length"}
    assert engine.metrics()["engine/aborted_resubmitted"] == 2


def test_weights_pushed_into_running_responses_show_in_their_versions(engine, real_server):
    old = _refit(engine, _endless(seed=1))
    _slow_down(real_server, STEP)
    try:
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(engine.generate, _requests(4), LONG)
            while _running(real_server) < 4:
                pass
            new = _refit(engine, _endless(seed=2))
            samples = running.result()
    finally:
        _slow_down(real_server, None)
    for sample in samples:
        assert set(sample.weight_versions.tolist()) == {old, new}
        assert (np.diff(sample.weight_versions) >= 0).all()
        assert len(sample.token_ids) == LONG.max_new_tokens


def _running(url: str) -> int:
    headers = {"Authorization": f"Bearer {KEYS['SGLANG_API_KEY']}"}
    loads = httpx.get(f"{url}/v1/loads", headers=headers, timeout=60.0).json()["loads"]
    return sum(load["num_running_reqs"] for load in loads)


def test_the_comparison_of_engines_stays_under_its_bound(engine, real_server, tmp_path):
    _refit(engine, PARAMS)
    script = ROOT / "scripts" / "sglang_cpu" / "compare_logprobs.py"
    table = tmp_path / "table.json"
    command = [sys.executable, script, "--url", real_server, "--bound", str(BOUND), "--json", table]
    subprocess.run(command, check=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    found = json.loads(table.read_text())
    assert all(0.0 < row["mean_abs"] < BOUND for row in found.values())


def test_training_through_the_server(real_server, tmp_path):
    out, steps = tmp_path / "run", 4
    arguments = [
        *("--out", out, "--steps", steps, "--rollout.engine", "sglang", "--rollout.sglang.urls", real_server),
        *("--numerics.learner.execution", "bf16", "--numerics.sampler.execution", "bf16"),
        *("--rollout.prompts-per-step", 8, "--rollout.samples-per-prompt", 8, "--eval.problems", 32),
        # One improbable token moves the mean of a short probe by more than the bound.
        *("--rollout.sglang.probe-tokens", 128),
    ]
    command = [sys.executable, "-m", "triage_jax.train", *map(str, arguments)]
    subprocess.run(command, check=True, env=os.environ | {"JAX_PLATFORMS": "cpu"}, cwd=ROOT)
    rows = [row for row in _metrics(out) if "gap/abs_mean/token" in row]
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    for row in rows:
        # Sampled with the weights of the step before, which were pushed a moment ago.
        assert row["rollout/weight_version"] == row["step"] - 1
        assert 0.0 < row["gap/abs_mean/token"] < BOUND
        assert 0.0 < row["engine/probe_gap_mean"] < BOUND
        assert row["optimizer/applied"] == 1


def _metrics(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_killed_server_is_given_its_weights_when_it_is_back(
    engine: SglangEngine, serving: Serving | None, real_server: str
):
    if serving is None:
        pytest.skip("the server of TRIAGE_TEST_SGLANG_URL is not ours to kill; runs when that is unset")
    version = _refit(engine, _endless(seed=0))
    reference = engine.generate(_requests(2), LONG)
    _slow_down(real_server, STEP)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(engine.generate, _requests(2), LONG)
        while _running(real_server) < 2:
            pass
        serving.kill()
        serving.start()  # with the quickstart's weights
        samples = running.result()
    for sample, expected in zip(samples, reference, strict=True):
        assert (sample.weight_versions == version).all()
        assert sample.token_ids.tolist() == expected.token_ids.tolist()
    metrics = engine.metrics()
    assert metrics["engine/servers_returned"] == 1
    assert metrics["engine/servers_left_out"] == 0
    assert metrics["engine/retries"] >= 2
