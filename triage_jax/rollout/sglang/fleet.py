"""Several servers as one sampler: nothing lost, nothing twice, and no sample of weights that were not asked for."""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, retry_if_result, stop_after_attempt

from triage_jax.rollout.protocol import EngineError, Progress, Request, Sample, SamplingParams
from triage_jax.rollout.sglang.client import Client, new_rid
from triage_jax.rollout.sglang.config import SglangConfig
from triage_jax.rollout.sglang.errors import (
    BadResponse,
    RefitFailed,
    ServerBusy,
    ServerFailed,
    ServerGone,
    SglangError,
    StaleServer,
)
from triage_jax.rollout.sglang.server import Server, Target
from triage_jax.rollout.sglang.slots import Slots
from triage_jax.rollout.sglang.wire import Limits, check_request

COUNTS = ("retries", "aborted_resubmitted", "bad_responses", "servers_returned")
ABORT_SECONDS = 5.0
LONGEST_WAIT = 30.0
REVIVAL_SECONDS = 10.0
"""Longest time between two looks at a server that is out"""

logger = logging.getLogger(__name__)


@dataclass(eq=False, kw_only=True)
class _Ticket:
    """One sample to draw."""

    request: Request
    sampling: SamplingParams
    deadline: asyncio.Timeout
    tried: set[Server] = field(default_factory=set)
    """Servers that failed on it"""
    last: Server | None = None


class Fleet:
    """The servers of one run. Everything here runs on one event loop.

    A server that fails a refit, dies or turns out to hold other weights is left out. It is looked at again and again:
    as soon as it answers, the current weights are pushed to it and it takes part once more.
    """

    def __init__(self, clients: Sequence[Client], config: SglangConfig, limits: Limits) -> None:
        self.servers = [Server(client, config, limits) for client in clients]
        self._counts: Counter[str] = Counter()
        self._config = config
        self._target: Target | None = None
        self._slots = Slots(self.servers, config.concurrency)
        self._changed = asyncio.Event()
        """Set and cleared at once whenever a server comes or goes: wakes who waits at that moment"""
        self._keepers: list[asyncio.Task[None]] = []
        self._aborting: set[asyncio.Task[None]] = set()

    @property
    def live(self) -> list[Server]:
        return [server for server in self.servers if server.live]

    def take_counts(self) -> dict[str, int]:
        """Counts since the last call; from any thread."""
        taken, self._counts = self._counts, Counter[str]()
        return {name: taken[name] for name in COUNTS}

    async def push(self, target: Target) -> None:
        """Load the weights into every server that answers, all at once; returns when one of them holds them.

        Raises RefitFailed when none does, and none will within `startup_timeout`. Then the weights before are still
        the ones asked for.
        """
        before, self._target = self._target, target
        for server in self.servers:
            server.forgive()
        if not self._keepers:
            self._keepers = [asyncio.create_task(self._keep(server)) for server in self.servers]
            for keeper in self._keepers:
                keeper.add_done_callback(lambda _: self._wake())
        try:
            await asyncio.gather(*(self._bring(server) for server in self.servers))
            await self._some_live()
        except EngineError as error:
            self._target = before
            urls = ", ".join(server.url for server in self.servers)
            raise RefitFailed(f"{target.label} was loaded nowhere: {error}", url=urls) from None
        except BaseException:
            self._target = before
            raise
        finally:
            self._wake()

    async def generate(
        self, requests: Sequence[Request], sampling: SamplingParams, report: Progress
    ) -> list[Sample]:
        """Samples in the order of the requests; `report(samples, tokens)` after each. Raises the first EngineError.

        Whatever ends this early, requests still running are aborted on their servers.
        """
        found: dict[int, Sample] = {}
        tokens = 0

        async def draw(index: int, request: Request) -> None:
            nonlocal tokens
            sample = found[index] = await self._sample(request, sampling)
            tokens += len(sample.token_ids)
            report(len(found), tokens)

        try:
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(self._watch())
                draws = [group.create_task(draw(*numbered)) for numbered in enumerate(requests)]
                if draws:
                    await asyncio.wait(draws)
                watch.cancel()
        except BaseExceptionGroup as failures:
            raise _first(failures) from None
        finally:
            await self._told()
        return [found[index] for index in range(len(requests))]

    async def close(self) -> None:
        """Leave the servers alone and close every connection; nothing else may run here any more."""
        for task in self._keepers:
            task.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await self._told()
        left = tuple(self._aborting)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        for server in self.servers:
            await server.client.close()

    # Servers come and go.

    async def _keep(self, server: Server) -> None:
        """Bring the server back whenever it is out."""
        first = max(self._config.backoff, 0.05)
        pause = first
        while True:
            if server.live or server.lock.locked() or self._target is None or server.refuses(self._target):
                pause = first
                await self._changed.wait()
            else:
                await asyncio.sleep(pause)
                pause = min(2 * pause, REVIVAL_SECONDS)
                await self._bring(server)

    async def _bring(self, server: Server) -> None:
        """Make the server hold the target's weights and take part, unless it does not answer or has refused them."""
        async with server.lock:
            target = self._target
            if target is None or server.refuses(target) or (server.live and server.target is target):
                return
            was_live, server.live = server.live, False
            try:
                if not was_live:
                    await server.rouse()
                if not await server.holds(target):
                    await server.load(target)
            except SglangError as error:
                self._leave_out(server, error)
            else:
                self._counts["servers_returned"] += not was_live and server.trouble is not None
                server.live, server.target, server.trouble = True, target, None
                logger.info("%s holds %s", server.url, target.label)
                self._wake()

    def _leave_out(self, server: Server, error: SglangError) -> None:
        if server.trouble is None or type(server.trouble) is not type(error):
            logger.warning("left out until it holds the current weights: %s", error)
        server.dismiss(error)
        self._wake()

    def _hear(self, server: Server, epoch: int, error: SglangError) -> None:
        """What a failed request says about its server."""
        self._counts["bad_responses"] += isinstance(error, BadResponse)
        if epoch != server.epoch:
            return
        if isinstance(error, StaleServer):
            self._leave_out(server, error)
        elif isinstance(error, ServerGone) and server.live:
            # Perhaps one connection only: what else runs there goes on until the server is looked at.
            server.live, server.trouble = False, error
            self._wake()

    def _wake(self) -> None:
        """After a server came or went."""
        self._changed.set()
        self._changed.clear()
        self._slots.dispatch()

    async def _watch(self) -> None:
        """Raise once no server is left and none came back in time."""
        while True:
            await self._some_live()
            await self._changed.wait()
            self._check_keepers()

    async def _some_live(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.startup_timeout):
                while not self.live and not self._hopeless():
                    await self._changed.wait()
                    self._check_keepers()
        if not self.live:
            reasons = "; ".join(
                str(server.trouble or f"{server.url}: never answered") for server in self.servers
            )
            raise EngineError(
                f"no server is left to sample from ({reasons}). Restart one: it is given the current weights as soon "
                "as it answers; a run that has ended continues with the same command and --resume"
            )

    def _check_keepers(self) -> None:
        """Raise what one of them died of, a defect of this package: nobody would bring its server back."""
        for keeper in self._keepers:
            if keeper.done() and not keeper.cancelled():
                keeper.result()

    def _hopeless(self) -> bool:
        target = self._target
        return target is not None and all(server.refuses(target) for server in self.servers)

    # Samples.

    async def _sample(self, request: Request, sampling: SamplingParams) -> Sample:
        """One sample, from whichever server gives it, within `request_timeout` of the first attempt."""
        ticket = _Ticket(request=request, sampling=sampling, deadline=asyncio.timeout(None))
        retrying = AsyncRetrying(
            retry=retry_if_exception(_worth_another_try) | retry_if_result(_aborted),
            stop=stop_after_attempt(self._config.retries + 1),
            wait=self._wait_of,
            before_sleep=self._count_retry,
            retry_error_callback=_last_outcome,
        )
        try:
            async with ticket.deadline:
                return await retrying(self._attempt, ticket)
        except TimeoutError:
            where = ticket.last.url if ticket.last else ""
            what = f"no sample within request_timeout = {self._config.request_timeout:g} s"
            raise ServerGone(what, url=where, rid=request.uid) from None

    async def _attempt(self, ticket: _Ticket) -> Sample:
        server = await self._slots.take(ticket.tried, first=ticket.last is not None)
        if ticket.deadline.when() is None:
            ticket.deadline.reschedule(asyncio.get_running_loop().time() + self._config.request_timeout)
        ticket.last, epoch = server, server.epoch
        try:
            return await self._draw(server, ticket)
        except SglangError as error:
            ticket.tried.add(server)
            self._hear(server, epoch, error)
            raise
        finally:
            self._slots.release(server)

    async def _draw(self, server: Server, ticket: _Ticket) -> Sample:
        """One attempt. Cut off by the deadline or an interrupt, it is aborted on the server, too."""
        check_request(ticket.request, ticket.sampling, server.limits, url=server.url)
        rid, since = new_rid(), server.refits
        timeout = 2 * self._config.request_timeout  # the deadline comes first
        call = asyncio.create_task(
            server.client.generate(
                ticket.request, ticket.sampling, server.version_of, rid=rid, timeout=timeout
            )
        )
        server.calls[rid] = call
        try:
            await asyncio.wait([call])
        finally:
            del server.calls[rid]
            if call.done() and not call.cancelled():
                call.exception()  # looked at, or asyncio complains where a cancellation comes first
            else:
                call.cancel()
                self._abort(server, rid, call)
        if call.cancelled():
            raise ServerGone(
                "left out while it worked on this request", url=server.url, rid=ticket.request.uid
            )
        sample = call.result()
        await server.settled(sample, since)
        return sample

    def _abort(self, server: Server, rid: str, call: asyncio.Task[Sample]) -> None:
        async def abort() -> None:
            await asyncio.wait([call])
            with suppress(SglangError):
                await server.client.abort(rid)

        task = asyncio.create_task(abort())
        self._aborting.add(task)
        task.add_done_callback(self._aborting.discard)

    async def _told(self) -> None:
        """Wait until the servers were told, but not for ever: one may be dead."""
        if self._aborting:
            await asyncio.wait(self._aborting, timeout=ABORT_SECONDS)

    def _wait_of(self, state: RetryCallState) -> float:
        """Seconds before the next try: none where another server, or this one once it is back, is the cure."""
        error = state.outcome.exception() if state.outcome else None
        if not isinstance(error, ServerBusy | ServerFailed):
            return 0.0
        return min(
            self._config.backoff * 2 ** (state.attempt_number - 1) * random.uniform(0.5, 1.5), LONGEST_WAIT
        )

    def _count_retry(self, state: RetryCallState) -> None:
        aborted = state.outcome is not None and not state.outcome.failed
        self._counts["aborted_resubmitted" if aborted else "retries"] += 1


def _worth_another_try(error: BaseException) -> bool:
    return isinstance(error, SglangError) and (error.retryable or isinstance(error, BadResponse))


def _aborted(sample: Sample) -> bool:
    return sample.finish_reason == "abort"


def _last_outcome(state: RetryCallState) -> Sample:
    """A sample that is still aborted is returned as such; an error is raised."""
    assert state.outcome is not None
    return state.outcome.result()


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that ended the group: the others follow from it."""
    error: BaseException = failures
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
