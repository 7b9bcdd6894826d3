"""One server over a real socket: keys, attempts, patience, and calls whose answers are measured."""

import asyncio
import json
import logging
import math
import re
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pytest_httpserver import HTTPServer
from werkzeug import Request as Received
from werkzeug import Response

from tests.rollout.sglang import captures
from tests.rollout.sglang.captures import LIMITS, capture, hang_up, quick, use
from triage_jax.rollout import Request, SamplingParams
from triage_jax.rollout.sglang.client import Client, new_rid
from triage_jax.rollout.sglang.errors import (
    BadResponse,
    RefitFailed,
    RequestRefused,
    ServerBusy,
    ServerFailed,
    ServerGone,
    SglangError,
    StaleServer,
    Unauthorized,
)

KEY, ADMIN = "sk-user-5f2c", "sk-admin-91ab"
REQUEST = Request(uid="problem/0", prompt_ids=(5, 17, 42, 99, 260), seed=3)
SAMPLING = SamplingParams(max_new_tokens=6, temperature=0.0)


def draw(client: Client) -> Awaitable[Any]:
    return client.generate(REQUEST, SAMPLING, lambda label: captures.ANY_VERSION)


def answer_everything(server: HTTPServer, handler: Callable[[Received], Response]) -> str:
    server.expect_request(re.compile(".*")).respond_with_handler(handler)
    return server.url_for("").rstrip("/")


def recorded_answer(name: str) -> Callable[[Received], Response]:
    recorded = capture(name)

    def answer(received: Received) -> Response:
        given = received.get_json(silent=True, force=True) or {}
        return Response(recorded.body(given.get("rid")), content_type="application/json")

    return answer


CONTROLS: dict[str, Callable[[Client], Awaitable[object]]] = {
    "/pause_generation": lambda client: client.pause("retract"),
    "/continue_generation": lambda client: client.resume(),
    "/flush_cache": lambda client: client.flush(),
    "/abort_request": lambda client: client.abort(),
    "/update_weights_from_disk": lambda client: client.update_from_disk(Path("w"), "step-1"),
    "/weights_checker": lambda client: client.checksum(),
}
USER: dict[str, Callable[[Client], Awaitable[object]]] = {
    "/generate": draw,
    "/model_info": lambda client: client.model_info(),
    "/server_info": lambda client: client.server_info(),
    "/v1/loads": lambda client: client.loads(),
}


@pytest.mark.parametrize("path", [*CONTROLS, *USER])
def test_each_route_gets_its_key(path: str, httpserver: HTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server with both keys refuses each on the other's routes."""
    monkeypatch.setenv("SGLANG_API_KEY", KEY)
    monkeypatch.setenv("SGLANG_ADMIN_KEY", ADMIN)
    name = {"/generate": "gen_ids_logprob_default", "/weights_checker": "w_checksum_after"}.get(
        path, "w_disk_good"
    )
    url = answer_everything(httpserver, recorded_answer(name))
    use(url, (CONTROLS | USER)[path])
    ((received, _),) = httpserver.log
    assert received.path == path
    assert received.headers["Authorization"] == f"Bearer {ADMIN if path in CONTROLS else KEY}"


def test_without_keys_no_header_is_sent(httpserver: HTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_API_KEY", raising=False)
    monkeypatch.delenv("SGLANG_ADMIN_KEY", raising=False)
    url = answer_everything(httpserver, recorded_answer("gen_ids_logprob_default"))
    use(url, draw)
    assert "Authorization" not in httpserver.log[0][0].headers


def echo(received: Received) -> Response:
    """The debug page of a careless proxy."""
    return Response(json.dumps({"error": {"message": str(dict(received.headers))}}), status=500)


def die(received: Received) -> Response:
    hang_up(received, partial=False)
    return Response("")


@pytest.mark.parametrize("server", ["echo", "die", "die halfway", "401", "no json", "refused", "silent"])
def test_keys_show_up_nowhere(
    server: str, httpserver: HTTPServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not in a message, a repr, an attribute, an exception behind the exception, or a log at DEBUG."""
    monkeypatch.setenv("SGLANG_API_KEY", KEY)
    monkeypatch.setenv("SGLANG_ADMIN_KEY", ADMIN)
    caplog.set_level(logging.DEBUG)
    for name in ("httpx", "httpcore", "asyncio"):
        caplog.set_level(logging.DEBUG, logger=name)

    def cut(received: Received) -> Response:
        hang_up(received, partial=True)
        return Response("")

    released = threading.Event()

    def silent(received: Received) -> Response:
        released.wait(5.0)
        return Response("")

    handlers = {
        "echo": echo,
        "die": die,
        "die halfway": cut,
        "401": lambda received: Response('{"error": "Unauthorized"}', status=401),
        "no json": lambda received: Response(str(received.headers), status=200),
        "silent": silent,
        "refused": echo,
    }
    url = answer_everything(httpserver, handlers[server])
    if server == "refused":
        url = "http://127.0.0.1:9"
    clients: list[Client] = []

    async def run() -> list[SglangError]:
        client = Client(url, quick(url, request_timeout=0.3 if server == "silent" else 30.0), LIMITS)
        clients.append(client)
        caught = []
        for call in (draw, lambda client: client.pause("abort"), lambda client: client.model_info()):
            try:
                await call(client)
            except SglangError as error:
                caught.append(error)
            if server == "silent":
                break
        await client.close()
        return caught

    caught = asyncio.run(run())
    released.set()
    assert caught
    assert caplog.records, "nothing was logged: the check would prove nothing"
    assert any(record.name.startswith("http") for record in caplog.records)
    texts = [caplog.text, *map(repr, clients), *(str(vars(client)) for client in clients)]
    for error in caught:
        assert error.__cause__ is None
        chain: BaseException | None = error
        while chain is not None:
            texts += [str(chain), repr(chain), str(vars(chain))]
            chain = chain.__context__
        assert not any(hasattr(link, "request") for link in (error, error.__context__))
    for text in texts:
        assert KEY not in text
        assert ADMIN not in text


def test_a_key_that_looks_like_data_leaves_the_data_alone(
    httpserver: HTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_API_KEY", "119")
    url = answer_everything(httpserver, recorded_answer("gen_ids_logprob_default"))
    assert use(url, draw).token_ids.tolist() == [119, 300, 121, 0, 2]


def test_environment_proxies_are_not_used(httpserver: HTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    url = answer_everything(httpserver, recorded_answer("gen_ids_logprob_default"))
    assert use(url, draw).finish_reason == "stop"


def test_one_attempt_under_a_fresh_id(httpserver: HTTPServer) -> None:
    """The fleet decides about a second attempt; it must not reuse the id."""
    url = answer_everything(httpserver, lambda received: Response("", status=503))
    for _ in range(2):
        with pytest.raises(ServerBusy):
            use(url, draw, retries=5)
    rids = [received.get_json()["rid"] for received, _ in httpserver.log]
    assert len(rids) == len(set(rids)) == 2
    assert all(re.fullmatch("[0-9a-f]{32}", rid) for rid in rids)


def test_the_answer_to_another_request_is_refused(httpserver: HTTPServer) -> None:
    body = capture("gen_ids_logprob_default").body(new_rid())
    url = answer_everything(httpserver, lambda received: Response(body))
    with pytest.raises(BadResponse, match=re.escape("meta_info.id")):
        use(url, draw)


def failing(times: int, status: int, then: Callable[[Received], Response]) -> Callable[[Received], Response]:
    left = [times]

    def answer(received: Received) -> Response:
        left[0] -= 1
        return Response("", status=status) if left[0] >= 0 else then(received)

    return answer


@pytest.mark.parametrize("status", [500, 503])
def test_control_calls_are_repeated(status: int, httpserver: HTTPServer) -> None:
    url = answer_everything(httpserver, failing(2, status, recorded_answer("w_checksum_after")))
    digest = use(url, lambda client: client.checksum(), retries=2)
    assert digest == capture("w_checksum_after").response["json"]["per_engine_checksum"]
    assert len(httpserver.log) == 3


def test_the_last_failure_is_raised_as_it_is(httpserver: HTTPServer) -> None:
    url = answer_everything(httpserver, failing(9, 500, recorded_answer("w_checksum_after")))
    with pytest.raises(ServerFailed):
        use(url, lambda client: client.resume(), retries=2)
    assert len(httpserver.log) == 3


@pytest.mark.parametrize(
    ("status", "kind"), [(400, RequestRefused), (401, Unauthorized), (404, RequestRefused)]
)
def test_what_is_refused_is_not_repeated(
    status: int, kind: type[SglangError], httpserver: HTTPServer
) -> None:
    url = answer_everything(httpserver, failing(9, status, recorded_answer("w_checksum_after")))
    with pytest.raises(kind):
        use(url, lambda client: client.resume(), retries=4)
    assert len(httpserver.log) == 1


def test_weights_are_loaded_once_or_not_at_all(httpserver: HTTPServer) -> None:
    url = answer_everything(httpserver, failing(1, 500, recorded_answer("w_disk_good")))
    with pytest.raises(ServerFailed):
        use(url, lambda client: client.update_from_disk(Path("weights/step-3"), "step-3"), retries=4)
    ((received, _),) = httpserver.log
    assert received.get_json() == {
        "model_path": "weights/step-3",
        "weight_version": "step-3",
        "flush_cache": False,
        "abort_all_requests": False,
    }


@pytest.mark.parametrize(
    "answer", ["null", "[]", '{"success": false, "message": "no space"}', '{"success": 1}', "{}"]
)
def test_a_200_that_does_not_say_success_is_a_failed_refit(answer: str, httpserver: HTTPServer) -> None:
    url = answer_everything(httpserver, lambda received: Response(answer))
    with pytest.raises(RefitFailed, match="was not loaded"):
        use(url, lambda client: client.update_from_disk(Path("w"), "step-1"))


@pytest.mark.parametrize(
    "answer", ["{}", '{"success": true}', '{"success": false, "per_engine_checksum": "ab"}']
)
def test_no_checksum_is_a_failed_refit(answer: str, httpserver: HTTPServer) -> None:
    url = answer_everything(httpserver, lambda received: Response(answer))
    with pytest.raises(RefitFailed, match="no checksum"):
        use(url, lambda client: client.checksum())


def test_silence_is_a_server_that_is_gone(httpserver: HTTPServer) -> None:
    released = threading.Event()

    def wait(received: Received) -> Response:
        released.wait(10.0)
        return Response("")

    url = answer_everything(httpserver, wait)
    begun = time.monotonic()
    with pytest.raises(ServerGone, match="no answer in time"):
        use(url, lambda client: client.generate(REQUEST, SAMPLING, timeout=0.2))
    released.set()
    assert 0.2 <= time.monotonic() - begun < 5.0


def test_not_ready_where_nobody_listens() -> None:
    assert use("http://127.0.0.1:9", lambda client: client.ready()) is False


def test_score(httpserver: HTTPServer) -> None:
    url = answer_everything(httpserver, recorded_answer("gen_score_only_max0"))
    scores = use(url, lambda client: client.score(REQUEST.prompt_ids))
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores, [-7.582442, -9.254110, -8.471916, -3.962755], rtol=1e-6)
    sent = httpserver.log[0][0].get_json()
    assert (sent["logprob_start_len"], sent["sampling_params"]["max_new_tokens"]) == (0, 0)
    with pytest.raises(StaleServer, match="expected 'step-3'"):
        use(url, lambda client: client.score(REQUEST.prompt_ids, label="step-3"))


@pytest.mark.parametrize("ids", [(), (5,), (5, 512), (5,) * 512])
def test_score_sends_nothing_deadly(ids: tuple[int, ...], httpserver: HTTPServer) -> None:
    url = answer_everything(httpserver, recorded_answer("gen_score_only_max0"))
    with pytest.raises(RequestRefused, match="not sent"):
        use(url, lambda client: client.score(ids))
    assert not httpserver.log


@pytest.mark.parametrize(
    ("logits", "divides", "expected"),
    [
        ([3.0, 1.0, 0.5, -2.0], True, True),
        ([3.0, 1.0, 0.5, -2.0], False, False),
        ([1.0, 1.0, 1.0, 1.0], True, None),
    ],
)
def test_temperature_stage_is_measured(
    logits: list[float], divides: bool, expected: bool | None, httpserver: HTTPServer
) -> None:
    """A server that computes log_softmax(logits / T), or log_softmax(logits) whatever the temperature."""

    def answer(received: Received) -> Response:
        given = received.get_json()
        scaled = [x / (given["sampling_params"]["temperature"] if divides else 1.0) for x in logits]
        norm = math.log(sum(math.exp(x) for x in scaled))
        tops = sorted(([x - norm, i, None] for i, x in enumerate(scaled)), reverse=True)
        meta = {"id": given["rid"], "output_top_logprobs": [tops[: given["top_logprobs_num"]]]}
        return Response(json.dumps({"output_ids": [0], "meta_info": meta}))

    url = answer_everything(httpserver, answer)
    assert use(url, lambda client: client.follows_temperature((5, 17))) is expected


def test_recorded_spread_reads(httpserver: HTTPServer) -> None:
    """The recorded form of the top log-probabilities; the same spread at both temperatures is a server that ignores
    the temperature."""
    url = answer_everything(httpserver, recorded_answer("gen_ids_logprob_full"))
    assert use(url, lambda client: client.follows_temperature(REQUEST.prompt_ids)) is False


def test_many_requests_at_once(httpserver: HTTPServer) -> None:
    """Each gets the answer to its own id."""
    url = answer_everything(httpserver, recorded_answer("gen_ids_logprob_default"))

    async def draw_many(client: Client) -> list[Any]:
        return await asyncio.gather(*(draw(client) for _ in range(20)))

    samples = use(url, draw_many)
    assert [sample.token_ids.tolist() for sample in samples] == [[119, 300, 121, 0, 2]] * 20
    assert len({received.get_json()["rid"] for received, _ in httpserver.log}) == 20
