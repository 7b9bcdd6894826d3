"""One SGLang server: each method is one exchange, answered with what it means or an error of errors.py."""

import asyncio
import json
import ssl
import uuid
from collections.abc import Callable, Generator
from functools import cache
from pathlib import Path
from typing import Literal

import httpx
import numpy as np
from tenacity import (
    AsyncRetrying,
    retry_if_exception_type,
    stop_after_attempt,
    stop_after_delay,
    wait_exponential,
    wait_random,
)

from triage_jax.rollout.protocol import Request, Sample, SamplingParams
from triage_jax.rollout.sglang.config import PauseMode, SglangConfig, read_keys
from triage_jax.rollout.sglang.errors import (
    BadResponse,
    RefitFailed,
    RequestRefused,
    ServerBusy,
    ServerFailed,
    SglangError,
)
from triage_jax.rollout.sglang.facts import ServerFacts, read_facts
from triage_jax.rollout.sglang.reply import read_sample, read_scores, read_spread
from triage_jax.rollout.sglang.status import Fields, classify
from triage_jax.rollout.sglang.wire import (
    Limits,
    check_ids,
    check_request,
    generate_payload,
    parse_label,
    score_payload,
    spread_payload,
)

type Method = Literal["GET", "POST"]

# The server closes idle connections after 5 s; one reused at that moment would look like a server that died.
_KEEPALIVE_SECONDS = 2.0
_PROBE_SECONDS = 5.0


class Client:
    """Talks to one server. Use from one event loop; `close` when done.

    Keys are read at construction and live in the header objects alone, whose repr hides them.
    """

    def __init__(
        self,
        url: str,
        config: SglangConfig,
        limits: Limits,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._config = config
        self._limits = limits
        keys = read_keys(config)
        self._api, self._admin = _Bearer(keys.api), _Bearer(keys.admin)
        self._http = httpx.AsyncClient(
            base_url=self.url,
            transport=transport,
            timeout=httpx.Timeout(None, connect=config.connect_timeout),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=_KEEPALIVE_SECONDS),
            verify=_tls(),
            # A proxy or a .netrc of the environment has no business between trainer and sampler.
            trust_env=False,
        )

    def __repr__(self) -> str:
        return f"Client({self.url!r})"

    async def close(self) -> None:
        await self._http.aclose()

    async def generate(
        self,
        request: Request,
        sampling: SamplingParams,
        version_of: Callable[[str], int | None] = parse_label,
        *,
        rid: str | None = None,
        timeout: float | None = None,
    ) -> Sample:
        """Draw one sample, in one attempt under a request id of its own.

        A server refuses the id of a running request and aborts by prefix, so ids are fresh and of one length. While
        the server is paused the call waits. `version_of` and what is raised: see `read_sample`; `timeout` in seconds,
        None: config.request_timeout.
        """
        check_request(request, sampling, self._limits, url=self.url)
        rid = rid or new_rid()
        body = await self._call(
            "POST", "/generate", generate_payload(request, sampling, rid), rid, timeout=timeout
        )
        return read_sample(body, request, sampling, rid, self._limits, version_of, url=self.url)

    async def score(
        self, ids: tuple[int, ...], *, label: str | None = None, timeout: float | None = None
    ) -> np.ndarray:
        """float32 `[n - 1]`: the server's log-probability of each id but the first, at temperature 1.

        Computed afresh, not read from the prefix cache. Waits while the server is paused: call it after `resume`.
        Raises StaleServer where `label` is given and the weights carry another.
        """
        check_ids(ids, self._limits, name="ids", url=self.url)
        if not 2 <= len(ids) < self._limits.context:
            what = f"not sent: {len(ids)} ids to score; accepted: 2 to {self._limits.context - 1}"
            raise RequestRefused(what, url=self.url)
        rid = new_rid()
        body = await self._call("POST", "/generate", score_payload(ids, rid), rid, timeout=timeout)
        return read_scores(body, ids, rid, vocab_size=self._limits.vocab_size, label=label, url=self.url)

    async def ready(self) -> bool:
        """Whether the server takes work now; False while it starts, drains, is paused or cannot be reached.

        Asks /ready: /health draws a token, and marks a paused server as broken.
        """
        try:
            await self._exchange("GET", "/ready", timeout=_PROBE_SECONDS)
        except SglangError:
            return False
        return True

    async def server_info(self) -> Fields:
        """Resolved launch arguments and state: version, max_req_input_len, enable_deterministic_inference, ..."""
        return await self._object("GET", "/server_info")

    async def facts(self) -> ServerFacts:
        """What of `server_info` matters; raises Unsupported for a server that cannot be trained with."""
        return read_facts(await self.server_info(), url=self.url)

    async def follows_temperature(self, ids: tuple[int, ...]) -> bool | None:
        """Whether log-probabilities are those of logits / temperature, by measurement; None: cannot be told.

        A server started with SGLANG_RETURN_ORIGINAL_LOGPROB=1 leaves the temperature out and nothing it says shows
        it. The spread of the top log-probabilities at the end of `ids` halves from temperature 1 to 2, or does not.
        """
        check_ids(ids, self._limits, name="ids", url=self.url)
        spread = {}
        for temperature in (1.0, 2.0):
            rid = new_rid()
            body = await self._call("POST", "/generate", spread_payload(ids, temperature, rid), rid)
            spread[temperature] = read_spread(body, rid, url=self.url)
        if spread[1.0] < 0.1:
            return None
        return spread[2.0] < 0.75 * spread[1.0]

    async def model_info(self) -> Fields:
        """model_path, weight_version, architectures, ..."""
        return await self._object("GET", "/model_info")

    async def loads(self) -> Fields:
        """Running and waiting requests, under `loads`, one entry per data-parallel rank."""
        return await self._object("GET", "/v1/loads")

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling; see SglangConfig.pause for what becomes of running requests. New ones wait unanswered."""
        await self._object("POST", "/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """Go on sampling; harmless where the server is not paused."""
        await self._object("POST", "/continue_generation", {})

    async def flush(self) -> None:
        """Empty the prefix cache. Raises RefitFailed where requests hold on to it: a busy server, or one paused
        in place."""
        try:
            await self._retried("POST", "/flush_cache")
        except RequestRefused as error:
            what = "the prefix cache was not emptied, it holds prefixes of older weights"
            raise RefitFailed(what, url=self.url, message=error.message) from None

    async def update_from_disk(self, path: Path, label: str, *, timeout: float | None = None) -> None:
        """Load the weights in a directory the server sees, under a new label; tried once.

        The server checks next to nothing and dies of a bad file: validate first. A server that is not paused waits
        for its running requests. Raises RefitFailed where it says no, ServerGone where it died.
        """
        payload: Fields = {
            "model_path": str(path),
            "weight_version": label,
            "flush_cache": False,
            "abort_all_requests": False,
        }
        try:
            answer = await self._call(
                "POST", "/update_weights_from_disk", payload, admin=True, timeout=timeout
            )
        except RequestRefused as error:
            raise RefitFailed(f"{path} was not loaded", url=self.url, message=error.message) from None
        if not isinstance(answer, dict) or answer.get("success") is not True:
            message = str(answer.get("message")) if isinstance(answer, dict) else repr(answer)
            raise RefitFailed(f"{path} was not loaded", url=self.url, message=message)

    async def checksum(self) -> str:
        """One digest of all weights in the server's memory, equal on servers that hold the same weights in the same
        layout. Changes with a refit; not comparable with a digest of files."""
        answer = await self._object("POST", "/weights_checker", {"action": "checksum"})
        digest = answer.get("per_engine_checksum")
        if answer.get("success") is not True or not isinstance(digest, str) or not digest:
            raise RefitFailed("no checksum of the weights", url=self.url, message=str(answer.get("message")))
        return digest

    async def abort(self, rid: str | None = None) -> None:
        """Cut off one request, or all; they come back with finish reason abort. An unknown id is no error."""
        await self._retried("POST", "/abort_request", {"rid": rid} if rid else {"abort_all": True})

    async def _object(self, method: Method, path: str, payload: Fields | None = None) -> Fields:
        answer = self._decode(await self._retried(method, path, payload))
        if not isinstance(answer, dict):
            raise BadResponse(f"{path}: a {type(answer).__name__}; expected one object", url=self.url)
        return answer

    async def _retried(self, method: Method, path: str, payload: Fields | None = None) -> bytes:
        """A control call that may be repeated without harm."""
        admin = method == "POST"
        async for attempt in _retrying(self._config):
            with attempt:
                return await self._exchange(method, path, payload, admin=admin)
        raise AssertionError("retrying ends by returning or raising")

    async def _call(
        self,
        method: Method,
        path: str,
        payload: Fields,
        rid: str | None = None,
        *,
        admin: bool = False,
        timeout: float | None = None,
    ) -> object:
        return self._decode(
            await self._exchange(method, path, payload, rid, admin=admin, timeout=timeout), rid
        )

    def _decode(self, content: bytes, rid: str | None = None) -> object:
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            message = self._without_keys(content).decode("utf-8", "replace")
        # Outside the except block: the JSON exception holds the whole body.
        raise BadResponse("body: no JSON", url=self.url, rid=rid, message=message)

    def _without_keys(self, content: bytes) -> bytes:
        """What may be quoted: a proxy or debug page may echo the headers it was sent."""
        return self._admin.hide(self._api.hide(content))

    async def _exchange(
        self,
        method: Method,
        path: str,
        payload: Fields | None = None,
        rid: str | None = None,
        *,
        admin: bool = False,
        timeout: float | None = None,
    ) -> bytes:
        """Body of the 200 response; raises what anything else means, without a trace of the HTTP objects."""
        error: Exception | None = None
        status, content = None, None
        try:
            async with asyncio.timeout(self._config.request_timeout if timeout is None else timeout):
                response = await self._http.request(
                    method, path, json=payload, auth=self._admin if admin else self._api
                )
            status, content = response.status_code, response.content
        except (httpx.HTTPError, TimeoutError) as caught:
            error = caught
        failure = classify(status, self._without_keys(content or b""), error, url=self.url, rid=rid)
        if failure is not None:
            # Raised outside the except block: the HTTP exception holds the request with its headers.
            raise failure
        return content or b""


def _retrying(config: SglangConfig) -> AsyncRetrying:
    return AsyncRetrying(
        retry=retry_if_exception_type((ServerBusy, ServerFailed)),
        stop=stop_after_attempt(config.retries + 1) | stop_after_delay(config.request_timeout),
        wait=wait_exponential(multiplier=config.backoff, max=30.0) + wait_random(0.0, config.backoff),
        reraise=True,
    )


@cache
def _tls() -> ssl.SSLContext:
    """Loading the certificates takes 50 ms; once is enough for all servers."""
    return httpx.create_ssl_context(trust_env=False)


class _Bearer(httpx.Auth):
    """Adds the key to a request; no key, no header."""

    def __init__(self, key: str | None) -> None:
        self._key = key

    def __repr__(self) -> str:
        return f"_Bearer({'set' if self._key else 'none'})"

    def hide(self, content: bytes) -> bytes:
        """The content without the key."""
        return content.replace(self._key.encode(), b"[key]") if self._key else content

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response]:
        if self._key is not None:
            request.headers["Authorization"] = f"Bearer {self._key}"
        yield request


def new_rid() -> str:
    """A request id that is nobody's prefix: 32 hexadecimal digits."""
    return uuid.uuid4().hex
