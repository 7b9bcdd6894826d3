"""Samples one by one from an engine that takes calls from several threads."""

import threading
from itertools import chain

import numpy as np
import pytest

from triage_jax.evaluate.draw import draw_at_once, draw_in_batches
from triage_jax.rollout import Capabilities, EngineError, Request, Sample, SamplingParams

SAMPLING = SamplingParams(max_new_tokens=4)


class Stub:
    """An engine but for `generate`."""

    capabilities = Capabilities(
        logprobs_follow_temperature=True, deterministic=True, overlaps=True, description="a stub"
    )
    weight_version = 0

    def update_weights(self, params, version): ...

    def metrics(self):
        return {}

    def close(self): ...


class Waiting(Stub):
    """Answers a request when its gate opens; fails on those it is told to."""

    def __init__(self, failing=()):
        self.gates = {}
        self.failing = set(failing)
        self.most = self.running = 0
        self.begun = []
        self.lock = threading.Lock()
        self.open = threading.Event()

    def generate(self, requests, sampling, progress=None):
        with self.lock:
            self.running += len(requests)
            self.most = max(self.most, self.running)
            self.begun += [request.uid for request in requests]
        for request in requests:
            assert self.gates.get(request.uid, self.open).wait(20)
        with self.lock:
            self.running -= len(requests)
        if any(request.uid in self.failing for request in requests):
            raise EngineError(f"{requests[0].uid} failed")
        return [sample(request.uid) for request in requests]


def sample(uid):
    return Sample(
        uid=uid,
        token_ids=np.zeros(1, np.int32),
        logprobs=np.zeros(1, np.float32),
        finish_reason="stop",
        weight_versions=np.zeros(1, np.int32),
    )


def requests(count):
    return [Request(uid=f"r{n}", prompt_ids=(1,), seed=n) for n in range(count)]


def one_by_one(groups):
    return chain.from_iterable(groups)


def nothing():
    pass


def test_a_slow_response_holds_up_nothing():
    engine = Waiting()
    engine.gates["r0"] = threading.Event()
    engine.open.set()
    found = []
    for drawn in one_by_one(draw_at_once(engine, requests(20), SAMPLING, 3, nothing)):
        found.append(drawn.uid)
        if len(found) == 19:
            assert "r0" not in found
            engine.gates["r0"].set()
    assert sorted(found) == sorted(f"r{n}" for n in range(20))
    assert engine.most <= 3


def test_requests_are_read_as_places_become_free():
    engine = Waiting()
    taken = []

    def source():
        for request in requests(100):
            taken.append(request.uid)
            yield request

    engine.open.set()
    drawn = draw_at_once(engine, source(), SAMPLING, 4, nothing)
    next(drawn)
    drawn.close()
    assert len(taken) <= 100
    assert len(set(engine.begun)) == len(engine.begun)


def test_after_a_failure_what_is_in_flight_is_still_handed_over():
    engine = Waiting(failing={"r1"})
    engine.gates |= {"r0": threading.Event(), "r2": threading.Event()}
    engine.open.set()
    found = []
    timer = threading.Timer(0.3, lambda: [gate.set() for gate in engine.gates.values()])
    timer.start()
    with pytest.raises(EngineError, match="r1 failed"):
        found.extend(s.uid for s in one_by_one(draw_at_once(engine, requests(50), SAMPLING, 3, nothing)))
    timer.join()
    assert {"r0", "r2"} == set(engine.begun) - {"r1"}, "nothing new was begun"


def test_other_errors_become_engine_errors():
    class Broken(Stub):
        def generate(self, requests, sampling, progress=None):
            raise KeyError("x")

    with pytest.raises(EngineError, match="KeyError"):
        list(draw_at_once(Broken(), requests(3), SAMPLING, 2, nothing))


@pytest.mark.parametrize("draw", [draw_at_once, draw_in_batches])
def test_the_check_ends_it(draw):
    engine = Waiting()
    engine.open.set()

    class Ended(Exception):
        pass

    found = []

    def check():
        if len(found) >= 4:
            raise Ended

    def draw_all():
        for drawn in one_by_one(draw(engine, requests(50), SAMPLING, 2, check)):
            found.append(drawn.uid)

    with pytest.raises(Ended):
        draw_all()
    assert 4 <= len(found) <= 6


def test_batches():
    engine = Waiting()
    engine.open.set()
    groups = list(draw_in_batches(engine, requests(7), SAMPLING, 3, nothing))
    assert [len(group) for group in groups] == [3, 3, 1]
    found = [drawn.uid for drawn in one_by_one(groups)]
    assert found == [f"r{n}" for n in range(7)]
    assert engine.most == 3
