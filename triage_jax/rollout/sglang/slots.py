"""Places on the servers, given to samples first come first served."""

import asyncio
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from triage_jax.rollout.sglang.server import Server


@dataclass(eq=False, kw_only=True)
class _Waiter:
    """A sample that waits for a place."""

    place: asyncio.Future[Server]
    tried: Collection[Server]


class Slots:
    """At most `concurrency` places on each live server."""

    def __init__(self, servers: Sequence[Server], concurrency: int) -> None:
        self._servers = servers
        self._concurrency = concurrency
        self._waiting: deque[_Waiter] = deque()

    async def take(self, tried: Collection[Server], *, first: bool) -> Server:
        """A place on the least loaded server; on none of those in `tried` while another one lives.

        `first`: before all who wait, for samples that have begun. Give it back with `release`.
        """
        waiter = _Waiter(place=asyncio.get_running_loop().create_future(), tried=tried)
        if first:
            self._waiting.appendleft(waiter)
        else:
            self._waiting.append(waiter)
        self.dispatch()
        try:
            return await waiter.place
        except asyncio.CancelledError:
            if waiter.place.done() and not waiter.place.cancelled():  # it came at the same moment
                self.release(waiter.place.result())
            raise

    def release(self, server: Server) -> None:
        server.busy -= 1
        self.dispatch()

    def dispatch(self) -> None:
        """Give out what is free; to be called when a server comes or goes, too."""
        passed: list[_Waiter] = []
        while self._waiting and any(self._free(server) for server in self._servers):
            waiter = self._waiting.popleft()
            if waiter.place.done():
                continue
            if (server := self._choose(waiter.tried)) is None:
                passed.append(waiter)
            else:
                server.busy += 1
                waiter.place.set_result(server)
        self._waiting.extendleft(reversed(passed))

    def _free(self, server: Server) -> bool:
        return server.live and server.busy < self._concurrency

    def _choose(self, tried: Collection[Server]) -> Server | None:
        live = [server for server in self._servers if server.live]
        others = [server for server in live if server not in tried]
        free = [server for server in others or live if self._free(server)]
        return min(free, key=lambda server: server.busy) if free else None
