"""SGLang servers with the weights they were started with: sampled from, never changed."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt, wait_exponential, wait_random

from triage_jax.model import ModelConfig, Params
from triage_jax.rollout import Capabilities, EngineError, Progress, Request, Sample, SamplingParams
from triage_jax.rollout.sglang import SglangConfig, SglangError
from triage_jax.rollout.sglang.client import Client, new_rid
from triage_jax.rollout.sglang.errors import BadResponse, ServerGone, StaleServer, Unsupported
from triage_jax.rollout.sglang.loop import LoopThread
from triage_jax.rollout.sglang.wire import Limits

CONTROL_SECONDS = 60.0
ABORT_SECONDS = 5.0
LONGEST_WAIT = 30.0
LOOK_SECONDS = 0.5
"""Between two looks at a server that starts"""
AWAY_SECONDS = 10.0
"""For which a server that was gone is not asked while there is another"""


@dataclass(frozen=True, kw_only=True)
class Served:
    """What a server says it serves. Two servers, or one before and after a restart, must say the same."""

    model_path: str
    weight_version: str
    description: str
    checksum: str | None
    """Of the weights in its memory; None where the server does not tell"""


class _Server:
    def __init__(self, client: Client) -> None:
        self.client = client
        self.limits: Limits | None = None
        self.busy = 0
        self.suspect = False
        """It was gone: it must say anew what it serves before it is believed"""
        self.away_until = 0.0
        """Time of the loop before which others are preferred"""
        self.meeting: asyncio.Task[None] | None = None


class ServedEngine:
    """Samples from servers as they are. Calls may come from several threads.

    Raises EngineError where servers differ in what they serve, or one comes back with something else.
    """

    def __init__(self, config: SglangConfig, model: ModelConfig) -> None:
        self._config = config
        self._limits = Limits(vocab_size=model.vocab_size, context=model.max_position_embeddings)
        self._servers = [_Server(Client(url, config, self._limits)) for url in config.urls]
        self._loop = LoopThread("served")
        self._model_type = model.architecture
        self._retries = 0
        self._served: Served | None = None

    @property
    def served(self) -> Served:
        """What the servers serve; asks them the first time, waiting until they are ready."""
        if self._served is None:
            self._loop.run(self._meet_all())
        assert self._served is not None
        return self._served

    @property
    def context(self) -> int:
        """Tokens of prompt and response together that every server takes."""
        _ = self.served
        return min(server.limits.context for server in self._servers if server.limits is not None)

    @property
    def capabilities(self) -> Capabilities:
        described = self._served.description if self._served else "SGLang, not contacted yet"
        return Capabilities(
            logprobs_follow_temperature=True,
            deterministic="deterministic" in described,
            overlaps=True,
            description=f"{len(self._servers)} server(s): {described}",
        )

    @property
    def weight_version(self) -> int:
        return 0

    def update_weights(self, params: Params, version: int) -> None:
        raise EngineError("these servers keep the weights they were started with; use weights = push")

    def generate(
        self, requests: Sequence[Request], sampling: SamplingParams, progress: Progress | None = None
    ) -> list[Sample]:
        """One sample per request, drawn elsewhere if a server loses it; raises EngineError rather than return fewer."""
        _ = self.served
        samples: list[Sample] = []
        with self._loop.start(self._draw_all(requests, sampling)) as job:
            samples = job.outcome.result()
        if progress is not None:
            progress(len(samples), sum(len(sample.token_ids) for sample in samples))
        return samples

    def metrics(self) -> dict[str, float]:
        return {"engine/retries": float(self._retries)}

    def close(self) -> None:
        """End what runs, there and here."""
        self._loop.close(self._close())

    async def _close(self) -> None:
        for server in self._servers:
            await server.client.close()

    async def _meet_all(self) -> None:
        for server in self._servers:
            await self._meet(server, self._config.startup_timeout)

    async def _meet(self, server: _Server, patience: float) -> None:
        """Wait until the server is ready, and check that it serves what the others do."""
        client = server.client
        try:
            async with asyncio.timeout(patience):
                while not await client.ready():
                    await asyncio.sleep(LOOK_SECONDS)
        except TimeoutError:
            raise ServerGone(f"not ready within {patience:g} s", url=client.url) from None
        facts, info = await client.facts(), await client.model_info()
        if info.get("model_type") != self._model_type:
            what = f"serves a model of type {info.get('model_type')!r:.40}, model.path holds {self._model_type!r}"
            raise Unsupported(what, url=client.url)
        found = Served(
            model_path=str(info.get("model_path")),
            weight_version=str(info.get("weight_version")),
            description=facts.description,
            checksum=await _checksum(client),
        )
        if self._served is None:
            self._served = found
        elif found != self._served:
            raise Unsupported(f"serves {found}; the others, or it before, {self._served}", url=client.url)
        server.limits, server.suspect = facts.within(self._limits), False

    async def _meet_again(self, server: _Server) -> None:
        """All who wait for a server that was gone wait for one meeting; patient only where there is no other server.

        Raises ServerGone where another server may be asked instead, EngineError where there is none.
        """
        alone = all(other.suspect for other in self._servers)
        if server.meeting is None or server.meeting.done():
            patience = self._config.startup_timeout if alone else LOOK_SECONDS
            server.meeting = asyncio.create_task(self._meet(server, patience))
        try:
            await asyncio.shield(server.meeting)
        except ServerGone as error:
            self._send_away(server)
            if alone:
                raise EngineError(f"no server is left to sample from: {error}") from None
            raise

    def _send_away(self, server: _Server) -> None:
        server.suspect, server.away_until = True, asyncio.get_running_loop().time() + AWAY_SECONDS

    def _version_of(self, label: str) -> int | None:
        return 0 if self._served is not None and label == self._served.weight_version else None

    async def _draw_all(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Sample]:
        return list(await asyncio.gather(*(self._draw(request, sampling) for request in requests)))

    async def _draw(self, request: Request, sampling: SamplingParams) -> Sample:
        retrying = AsyncRetrying(
            retry=retry_if_exception(_worth_another_try),
            stop=stop_after_attempt(self._config.retries + 1),
            wait=wait_exponential(multiplier=self._config.backoff, max=LONGEST_WAIT)
            + wait_random(0.0, self._config.backoff),
            reraise=True,
        )
        tried: set[_Server] = set()
        async for attempt in retrying:
            with attempt:
                self._retries += attempt.retry_state.attempt_number > 1
                return await self._attempt(request, sampling, tried)
        raise AssertionError("retrying ends by returning or raising")

    async def _attempt(self, request: Request, sampling: SamplingParams, tried: set[_Server]) -> Sample:
        now = asyncio.get_running_loop().time()
        server = min(self._servers, key=lambda one: (one in tried, now < one.away_until, one.busy))
        rid = new_rid()
        server.busy += 1
        try:
            if server.suspect:
                await self._meet_again(server)
            sample = await server.client.generate(request, sampling, self._version_of, rid=rid)
        except SglangError as error:
            tried.add(server)
            if isinstance(error, ServerGone | StaleServer):
                self._send_away(server)
            raise
        except asyncio.CancelledError:
            with suppress(SglangError, TimeoutError):
                async with asyncio.timeout(ABORT_SECONDS):
                    await server.client.abort(rid)
            raise
        finally:
            server.busy -= 1
        if sample.finish_reason == "abort":
            raise BadResponse("cut off by the server", url=server.client.url, rid=request.uid)
        return sample


async def _checksum(client: Client) -> str | None:
    """None where the key is not allowed to ask, or the server has no such route."""
    try:
        async with asyncio.timeout(CONTROL_SECONDS):
            return await client.checksum()
    except (SglangError, TimeoutError):
        return None


def _worth_another_try(error: BaseException) -> bool:
    return isinstance(error, SglangError) and (error.retryable or isinstance(error, BadResponse))
