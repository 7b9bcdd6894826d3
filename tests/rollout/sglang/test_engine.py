"""The engine against servers that behave: identity, refits, threads, interrupts."""

import asyncio
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.rollout.sglang.fake_server import fake_servers
from tests.rollout.sglang.rig import (
    CONFIG,
    FLOAT32,
    LONG,
    SAMPLING,
    WEIGHTS,
    check,
    check_mixed,
    engine_on,
    in_thread,
    requests,
    until_busy,
)
from triage_jax.model import forward, head_of, load_model, token_logprobs
from triage_jax.rollout import Engine, EngineError, SamplingParams
from triage_jax.rollout.sglang import RefitFailed
from triage_jax.rollout.sglang.probe import make_probe


def test_samples_are_those_of_the_pushed_weights_in_order(tmp_path):
    with fake_servers(1) as [server], engine_on([server], tmp_path) as engine:
        assert isinstance(engine, Engine)
        assert engine.weight_version == -1
        for version in (4, 5):
            engine.update_weights(WEIGHTS[version - 4], version)
            assert engine.weight_version == version
            asked = requests(30, seed=version)
            seen: list[tuple[int, int]] = []
            samples = engine.generate(asked, SAMPLING, lambda *done, seen=seen: seen.append(done))
            check(samples, asked, server.history[f"step-{version}"], version)
            assert [done for done, _ in seen] == list(range(1, 31))
            assert seen[-1][1] == sum(len(sample.token_ids) for sample in samples)
        assert server.history["step-4"] != server.history["step-5"]
        assert engine.generate([], SAMPLING) == []


def test_the_order_of_a_refit(tmp_path):
    """Nothing is sampled between the pause and the checksum; the probe comes last, for a paused server answers none."""
    with fake_servers(1) as [server], engine_on([server], tmp_path) as engine:
        engine.update_weights(WEIGHTS[0], 0)
        server.calls.clear()
        engine.update_weights(WEIGHTS[1], 1)
        steps = ("/pause_generation", "/update_weights_from_disk", "/flush_cache", "/weights_checker")
        asked = server.routes(*steps, "/continue_generation", "/generate")
        assert asked == [*steps, "/continue_generation", "/generate"]
        update = dict(server.calls)["/update_weights_from_disk"]
        assert update["model_path"] == str(tmp_path / "weights" / "step-1")
        assert update["weight_version"] == "step-1"
        assert update["abort_all_requests"] is False


def test_in_place_keeps_the_cache_that_running_requests_hold(tmp_path):
    with fake_servers(1) as [server], engine_on([server], tmp_path, pause="in_place") as engine:
        engine.update_weights(WEIGHTS[0], 0)
        assert server.routes("/flush_cache") == []
        assert dict(server.calls)["/pause_generation"] == {"mode": "in_place"}


def test_works_where_an_event_loop_runs_already(tmp_path):
    async def cell(engine, asked):
        return engine.generate(asked, SAMPLING)

    with fake_servers(1) as [server], engine_on([server], tmp_path) as engine:
        engine.update_weights(WEIGHTS[0], 0)
        asked = requests(3)
        check(asyncio.run(cell(engine, asked)), asked, server.weights, 0)


@pytest.mark.parametrize("pause", ["retract", "in_place"])
def test_a_refit_falls_into_running_samples(tmp_path, pause):
    with (
        fake_servers(1, token_seconds=0.02) as [server],
        engine_on([server], tmp_path, pause=pause) as engine,
    ):
        engine.update_weights(WEIGHTS[0], 0)
        asked = requests(12)
        thread, samples, failures = in_thread(engine, asked, LONG)
        until_busy(server, tokens=3)
        engine.update_weights(WEIGHTS[1], 1)
        thread.join()
        assert failures == []
        assert [sample.uid for sample in samples] == [request.uid for request in asked]
        mixed = 0
        for sample, request in zip(samples, asked, strict=True):
            check_mixed(sample, request, server.history, LONG)
            mixed += set(sample.weight_versions.tolist()) == {0, 1}
        assert mixed > 0
        later = requests(4, seed=9)
        check(engine.generate(later, SAMPLING), later, server.history["step-1"], 1)


def test_samples_cut_off_by_a_refit_are_drawn_again(tmp_path):
    with (
        fake_servers(1, token_seconds=0.02) as [server],
        engine_on([server], tmp_path, pause="abort") as engine,
    ):
        engine.update_weights(WEIGHTS[0], 0)
        asked = requests(6)
        thread, samples, failures = in_thread(engine, asked, LONG)
        until_busy(server, tokens=3)
        engine.metrics()
        engine.update_weights(WEIGHTS[1], 1)
        thread.join()
        assert failures == []
        again = [sample for sample in samples if sample.weight_versions[0] == 1]
        assert len(again) == engine.metrics()["engine/aborted_resubmitted"] > 0
        where = {request.uid: request for request in asked}
        check(again, [where[sample.uid] for sample in again], server.history["step-1"], 1, LONG)


def test_a_sample_cut_off_for_good_comes_back_as_aborted(tmp_path):
    def cut(reply):
        reply["meta_info"]["finish_reason"] = {"type": "abort", "message": "Aborted", "status_code": None}
        return reply

    with fake_servers(1) as [server], engine_on([server], tmp_path, retries=2) as engine:
        engine.update_weights(WEIGHTS[0], 0)
        server.fault("/generate", cut, times=3)
        [sample] = engine.generate(requests(1), SAMPLING)
        assert sample.finish_reason == "abort"
        assert engine.metrics()["engine/aborted_resubmitted"] == 2


def test_an_interrupt_aborts_what_runs_and_leaves_the_engine_usable(tmp_path):
    def interrupt(samples, tokens):
        raise KeyboardInterrupt

    with fake_servers(1, token_seconds=0.05) as [server], engine_on([server], tmp_path) as engine:
        engine.update_weights(WEIGHTS[0], 0)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(requests(20), LONG, interrupt)
        aborted = {body["rid"] for route, body in server.calls if route == "/abort_request"}
        sent = [
            body["rid"] for route, body in server.calls if route == "/generate" and body["rid"] in aborted
        ]
        assert len(sent) == len(aborted) > 1
        deadline = time.monotonic() + 5
        while server.running and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not server.running
        asked = requests(3, seed=5)
        check(engine.generate(asked, SAMPLING), asked, server.weights, 0)


def test_close_ends_a_call_that_waits_with_an_error(tmp_path):
    with fake_servers(1, token_seconds=0.05) as [server], engine_on([server], tmp_path) as engine:
        engine.update_weights(WEIGHTS[0], 0)
        thread, found, failures = in_thread(engine, requests(5), LONG)
        until_busy(server)
        engine.close()
        thread.join()
        assert found == []
        assert [str(failure) for failure in failures] == [
            "the engine was closed, or the call cut off, before it ended"
        ]
        assert server.routes("/abort_request")
        with pytest.raises(EngineError, match="the engine is closed"):
            engine.generate(requests(1), SAMPLING)
    assert not any(thread.name == "sglang engine" for thread in threading.enumerate())


def test_what_is_refused_before_a_server_sees_it(tmp_path):
    with fake_servers(1) as [server], engine_on([server], tmp_path) as engine:
        with pytest.raises(EngineError, match="no weights yet"):
            engine.generate(requests(1), SAMPLING)
        engine.update_weights(WEIGHTS[0], 0)
        server.calls.clear()
        with pytest.raises(EngineError, match=r"request r1: its uid occurs twice"):
            engine.generate([*requests(2), requests(2)[1]], SAMPLING)
        # The server was started for 62 tokens; the model has room for 64.
        with pytest.raises(EngineError, match=r"request r0.* context holds 62"):
            engine.generate(requests(1), SamplingParams(max_new_tokens=62))
        assert server.calls == []


def test_one_version_names_one_set_of_weights(tmp_path):
    with fake_servers(1) as [server], engine_on([server], tmp_path) as engine:
        engine.update_weights(WEIGHTS[0], 0)
        server.calls.clear()
        engine.update_weights(WEIGHTS[0], 0)
        assert server.routes("/update_weights_from_disk") == []
        with pytest.raises(EngineError, match="version 0 names other weights already"):
            engine.update_weights(WEIGHTS[1], 0)
        asked = requests(2)
        check(engine.generate(asked, SAMPLING), asked, server.history["step-0"], 0)


@jax.jit
def _logprobs(params, tokens):
    hidden = forward(params, tokens, jnp.ones(tokens.shape, bool), CONFIG, FLOAT32)
    return token_logprobs(hidden[:, :-1], head_of(params), tokens[:, 1:]).logp[0]


def _score(path, ids):
    """What a server of the float32 model would answer."""
    return _logprobs(load_model(path)[0], jnp.asarray([ids], jnp.int32)).tolist()


def test_the_probe_measures_the_gap_of_rounding(tmp_path):
    with fake_servers(1) as [server], engine_on([server], tmp_path, max_probe_gap=0.1) as engine:
        server.score = _score
        engine.update_weights(WEIGHTS[0], 0)
        metrics = engine.metrics()
        probe = make_probe(WEIGHTS[0], CONFIG, FLOAT32, 32)
        gap = np.abs(probe.logprobs - np.array(_score(server.path, list(probe.ids))))
        assert metrics["engine/probe_gap_mean"] == pytest.approx(gap.mean(), rel=1e-4)
        assert metrics["engine/probe_gap_max"] == pytest.approx(gap.max(), rel=1e-4)
        # BF16 keeps 8 bits of a weight; the logits are of order one.
        assert 1e-4 < gap.mean() < 0.05
        assert metrics["engine/servers_live"] == 1
        assert metrics["engine/servers_left_out"] == 0
        assert metrics["engine/refit_seconds"] > 0
        assert metrics["engine/refit_bytes"] == 2 * sum(leaf.size for leaf in _leaves(WEIGHTS[0]))


def _leaves(params):
    return [
        leaf for leaf in (params.embed, params.final_norm, *vars(params.layers).values()) if leaf is not None
    ]


def test_a_probe_above_the_limit_stops_the_run(tmp_path):
    with fake_servers(1) as [server], engine_on([server], tmp_path, max_probe_gap=0.1) as engine:
        server.score = lambda path, ids: [logp - 0.2 for logp in _score(path, ids)]
        with pytest.raises(
            RefitFailed, match=r"probe of step-0: mean \|learner - server\| is 0\.\d+ nats.* 0\.1"
        ):
            engine.update_weights(WEIGHTS[0], 0)
        assert not server.paused


def test_old_versions_are_removed(tmp_path):
    with fake_servers(1) as [server], engine_on([server], tmp_path, keep_versions=2) as engine:
        for version in range(4):
            engine.update_weights(WEIGHTS[version % 2], version)
        assert sorted(path.name for path in (tmp_path / "weights").glob("step-*")) == ["step-2", "step-3"]


def test_capabilities_come_from_the_servers(tmp_path):
    with fake_servers(2) as servers, engine_on(servers, tmp_path) as engine:
        assert "not contacted yet" in engine.capabilities.description
        servers[0].server_info["enable_deterministic_inference"] = True
        engine.update_weights(WEIGHTS[0], 0)
        assert not engine.capabilities.deterministic
        servers[1].server_info["enable_deterministic_inference"] = True
        engine.update_weights(WEIGHTS[1], 1)
        assert engine.capabilities.deterministic
        assert engine.capabilities.overlaps
        assert "0.5.23" in engine.capabilities.description
