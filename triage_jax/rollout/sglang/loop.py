"""An event loop in a thread of its own, so that blocking calls work in a notebook whose thread already runs one."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future, wait
from types import TracebackType

from triage_jax.rollout.protocol import EngineError

GRACE_SECONDS = 10.0
"""How long an interrupted caller waits for the clean-up of its work"""


class Job[T]:
    """Work that runs on the loop. Leaving the `with` block before its end cancels it and waits for its clean-up."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        work: Coroutine[object, object, T],
        running: set[asyncio.Task[object]],
    ) -> None:
        self.outcome: Future[T] = Future()
        self._loop = loop
        self._work = work
        self._running = running
        self._task: asyncio.Task[T] | None = None
        loop.call_soon_threadsafe(self._start)

    def __enter__(self) -> "Job[T]":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.outcome.done():
            self._loop.call_soon_threadsafe(self._cancel)
            wait([self.outcome], timeout=GRACE_SECONDS)

    def _start(self) -> None:
        self._task = self._loop.create_task(self._work)
        self._running.add(self._task)
        self._task.add_done_callback(self._running.discard)
        self._task.add_done_callback(self._finish)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _finish(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self.outcome.set_exception(
                EngineError("the engine was closed, or the call cut off, before it ended")
            )
        elif (error := task.exception()) is not None:
            self.outcome.set_exception(error)
        else:
            self.outcome.set_result(task.result())


class LoopThread:
    """Runs coroutines for callers in other threads, several at once; `close` cancels what still runs."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[object]] = set()
        """Only touched on the loop"""
        self._closing = threading.Lock()
        self._open = True
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def open(self) -> bool:
        return self._open

    def start[T](self, work: Coroutine[object, object, T]) -> Job[T]:
        """Begin; raises EngineError after `close`, or on the loop's own thread, which would wait for itself."""
        with self._closing:
            if not self._open or threading.current_thread() is self._thread:
                work.close()
                raise EngineError(
                    "the engine is closed" if not self._open else "called from the engine's own thread"
                )
            return Job(self._loop, work, self._tasks)

    def run[T](self, work: Coroutine[object, object, T]) -> T:
        """The result; an interrupt of the waiting thread cancels the work."""
        with self.start(work) as job:
            return job.outcome.result()

    def close(self, finish: Coroutine[object, object, None]) -> None:
        """Cancel everything, wait for its clean-up, run `finish`, end the thread. A second call does nothing."""
        with self._closing:
            if not self._open:
                finish.close()
                return
            last: Job[None] = Job(self._loop, _end(self._tasks, finish), set())
            self._open = False
        wait([last.outcome], timeout=GRACE_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _end(tasks: set[asyncio.Task[object]], last: Coroutine[object, object, None]) -> None:
    """Cancel the outermost tasks only: each knows best how to end those it started."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await last
