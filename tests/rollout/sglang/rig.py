"""An engine of the tiny model on fake servers, with short patience, and what its samples must be."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tests.rollout.sglang.fake_server import FakeServer, drawn, expected, response_length
from tests.tiny import tiny_config, tiny_params
from triage_jax.model import Numerics
from triage_jax.rollout import EngineError, Request, Sample, SamplingParams
from triage_jax.rollout.sglang import SglangConfig, SglangEngine

CONFIG = tiny_config()
WEIGHTS = [tiny_params(CONFIG, seed) for seed in range(3)]
SAMPLING = SamplingParams(max_new_tokens=12)
LONG = SamplingParams(max_new_tokens=40)
FLOAT32 = Numerics(execution="float32")


@contextmanager
def engine_on(servers: list[FakeServer], directory: Path, **settings: Any) -> Iterator[SglangEngine]:
    """An engine without weights yet."""
    patience = {
        "request_timeout": 10.0,
        "startup_timeout": 10.0,
        "connect_timeout": 2.0,
        "backoff": 0.01,
        "retries": 4,
    }
    config = SglangConfig(**({"urls": tuple(server.url for server in servers)} | patience | settings))
    engine = SglangEngine(config, CONFIG, FLOAT32, directory / "weights")
    try:
        yield engine
    finally:
        engine.close()


def requests(count: int, seed: int = 0) -> list[Request]:
    rng = np.random.default_rng(seed)
    return [
        Request(
            uid=f"r{index}",
            prompt_ids=tuple(rng.integers(2, 32, rng.integers(1, 8)).tolist()),
            seed=int(rng.integers(2**32)),
        )
        for index in range(count)
    ]


def check(
    samples: list[Sample],
    asked: list[Request],
    weights: str,
    version: int,
    sampling: SamplingParams = SAMPLING,
) -> None:
    """Every request's own sample, once, in order, drawn with these weights."""
    assert [sample.uid for sample in samples] == [request.uid for request in asked]
    for sample, request in zip(samples, asked, strict=True):
        tokens, logprobs = expected(weights, request.seed, request.prompt_ids, sampling.max_new_tokens)
        assert sample.token_ids.tolist() == tokens
        np.testing.assert_array_equal(sample.logprobs, np.array(logprobs, np.float32))
        assert sample.weight_versions.tolist() == [version] * len(tokens)
        assert sample.finish_reason == ("stop" if tokens[-1] == 1 else "length")


def check_mixed(sample: Sample, request: Request, history: dict[str, str], sampling: SamplingParams) -> None:
    """Each token drawn with the weights that its version names, versions never falling."""
    versions, seed, prompt = sample.weight_versions.tolist(), request.seed, request.prompt_ids
    assert versions == sorted(versions)
    length, stops = response_length(seed, prompt, sampling.max_new_tokens)
    assert len(versions) == length
    pairs = [
        drawn(history[f"step-{version}"], seed, prompt, i, stops and i == length - 1)
        for i, version in enumerate(versions)
    ]
    assert sample.token_ids.tolist() == [token for token, _ in pairs]
    np.testing.assert_array_equal(sample.logprobs, np.array([logprob for _, logprob in pairs], np.float32))


def in_thread(
    engine: SglangEngine, asked: list[Request], sampling: SamplingParams
) -> tuple[threading.Thread, list[Sample], list[EngineError]]:
    """A running thread, and the lists in which it leaves the samples or the error."""
    found: list[Sample] = []
    failures: list[EngineError] = []

    def run() -> None:
        try:
            found.extend(engine.generate(asked, sampling))
        except EngineError as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, found, failures


def until_busy(*servers: FakeServer, tokens: int = 0, seconds: float = 10.0) -> None:
    """Wait until each server runs a request that has drawn more than `tokens` tokens."""
    deadline = time.monotonic() + seconds
    while not all(
        any(len(one.tokens) > tokens for one in list(server.running.values())) for server in servers
    ):
        assert time.monotonic() < deadline, "no request arrived"
        time.sleep(0.005)


def until_live(engine: SglangEngine, count: int, seconds: float = 10.0) -> None:
    """Wait until so many servers take part."""
    deadline = time.monotonic() + seconds
    while engine.metrics()["engine/servers_live"] < count:
        assert time.monotonic() < deadline, "the server was not taken back"
        time.sleep(0.02)
