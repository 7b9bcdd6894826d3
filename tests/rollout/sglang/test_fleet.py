"""Who gets which sample: bounded, balanced, first come first served; and the loop's thread."""

import asyncio
import threading
import time

import pytest

from tests.rollout.sglang.fake_server import fake_servers
from tests.rollout.sglang.rig import SAMPLING, WEIGHTS, check, engine_on, in_thread, requests
from triage_jax.rollout import EngineError
from triage_jax.rollout.sglang.loop import LoopThread


@pytest.mark.parametrize("concurrency", [1, 3])
def test_no_server_runs_more_than_it_may(tmp_path, concurrency):
    with (
        fake_servers(2, token_seconds=0.02) as servers,
        engine_on(servers, tmp_path, concurrency=concurrency) as engine,
    ):
        engine.update_weights(WEIGHTS[0], 0)
        asked = requests(24)
        check(engine.generate(asked, SAMPLING), asked, servers[0].weights, 0)
        assert [server.most_running for server in servers] == [concurrency] * 2


def test_two_callers_share_the_bound_and_keep_their_samples(tmp_path):
    with (
        fake_servers(1, token_seconds=0.02) as [server],
        engine_on([server], tmp_path, concurrency=4) as engine,
    ):
        engine.update_weights(WEIGHTS[0], 0)
        asked = [requests(15, seed=seed) for seed in (1, 2)]
        calls = [in_thread(engine, some, SAMPLING) for some in asked]
        for some, (thread, found, failures) in zip(asked, calls, strict=True):
            thread.join()
            assert failures == []
            check(found, some, server.weights, 0)
        assert server.most_running == 4


def test_work_goes_to_the_least_loaded(tmp_path):
    """Ten times slower, a server gets about a tenth."""
    with fake_servers(2) as servers, engine_on(servers, tmp_path, concurrency=2) as engine:
        engine.update_weights(WEIGHTS[0], 0)
        servers[0].token_seconds, servers[1].token_seconds = 0.05, 0.002
        for server in servers:
            server.calls.clear()
        asked = requests(40)
        check(engine.generate(asked, SAMPLING), asked, servers[0].weights, 0)
        slow, fast = (len(server.routes("/generate")) for server in servers)
        assert slow + fast == 40
        assert 2 <= slow < fast


def test_a_sample_begins_in_the_order_of_the_requests(tmp_path):
    with fake_servers(1) as [server], engine_on([server], tmp_path, concurrency=1) as engine:
        engine.update_weights(WEIGHTS[0], 0)
        server.calls.clear()
        server.fault("/generate", 503)
        asked = requests(6)
        check(engine.generate(asked, SAMPLING), asked, server.weights, 0)
        seeds = [
            body["sampling_params"]["sampling_seed"] for route, body in server.calls if route == "/generate"
        ]
        # While the refused one waits, the next begins; once it is due it goes before all that have not begun.
        order = [request.seed for request in asked]
        assert sorted(seeds) == sorted([*order, order[0]])
        assert [seed for seed in seeds if seed != order[0]] == order[1:]


async def _sleep(seconds: float, log: list[str], begun: threading.Event | None = None) -> str:
    if begun is not None:
        begun.set()
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        await asyncio.sleep(0.05)
        log.append("cleaned up")
        raise
    return "done"


def _fail(begun: threading.Event) -> None:
    begun.wait()
    raise ZeroDivisionError


async def _note(log: list[str]) -> None:
    log.append("finished")


def test_the_loop_runs_for_several_threads_and_ends(tmp_path):
    log: list[str] = []
    loop = LoopThread("test loop")
    assert loop.run(_sleep(0.01, log)) == "done"
    begun = threading.Event()
    with pytest.raises(ZeroDivisionError), loop.start(_sleep(60, log, begun)):
        _fail(begun)
    assert log == ["cleaned up"]
    begun.clear()
    job = loop.start(_sleep(60, log, begun))
    begun.wait()
    loop.close(_note(log))
    with pytest.raises(EngineError, match="cut off"):
        job.outcome.result(timeout=1)
    assert log == ["cleaned up", "cleaned up", "finished"]
    loop.close(_note(log))
    assert log[-2:] == ["cleaned up", "finished"]
    with pytest.raises(EngineError, match="the engine is closed"):
        loop.run(_sleep(0, log))
    assert "test loop" not in {thread.name for thread in threading.enumerate()}


def test_a_call_from_the_loop_itself_is_refused_instead_of_waiting_for_ever():
    loop = LoopThread("test loop")
    log: list[str] = []

    async def nested() -> None:
        loop.run(_sleep(0, log))

    started = time.monotonic()
    with pytest.raises(EngineError, match="own thread"):
        loop.run(nested())
    assert time.monotonic() - started < 5
    loop.close(_note(log))
