"""Samples in groups, as they finish: batch by batch from an engine that computes here, one by one from servers."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import batched
from queue import Empty, SimpleQueue
from threading import Lock, Thread

from triage_jax.rollout import Engine, EngineError, Request, Sample, SamplingParams

LOOK_SECONDS = 0.2
"""Between two looks at the stop signal while nothing finishes"""


def draw_in_batches(
    engine: Engine,
    requests: Iterable[Request],
    sampling: SamplingParams,
    size: int,
    check: Callable[[], None],
) -> Iterator[Sequence[Sample]]:
    """For an engine that decodes `size` rows together. `check` may raise, between batches."""
    for batch in batched(requests, size):
        check()
        yield engine.generate(batch, sampling)


def draw_at_once(
    engine: Engine,
    requests: Iterable[Request],
    sampling: SamplingParams,
    width: int,
    check: Callable[[], None],
) -> Iterator[Sequence[Sample]]:
    """For an engine that takes calls from several threads: `width` requests in flight, each sample once it is there.

    A batch would wait for its longest response, and a kill would lose all of it. `requests` is read as places become
    free. Where a request fails, those in flight are waited for and handed over before the first EngineError is raised.
    `check` may raise; the caller then closes the engine, which ends what is in flight.
    """
    source, lock = iter(requests), Lock()
    done: SimpleQueue[Sample | EngineError | None] = SimpleQueue()
    stopped = False

    def take() -> Request | None:
        with lock:
            return None if stopped else next(source, None)

    def work() -> None:
        try:
            while (request := take()) is not None:
                done.put(engine.generate([request], sampling)[0])
        except EngineError as error:
            done.put(error)
        except BaseException as error:
            done.put(EngineError(f"{type(error).__name__}: {error}"))
        finally:
            done.put(None)

    threads = [Thread(target=work, daemon=True, name=f"draw {index}") for index in range(width)]
    failure: EngineError | None = None
    try:
        for thread in threads:
            thread.start()
        running = len(threads)
        while running:
            check()
            try:
                item = done.get(timeout=LOOK_SECONDS)
            except Empty:
                continue
            if item is None:
                running -= 1
            elif isinstance(item, EngineError):
                failure, stopped = failure or item, True
            else:
                yield (item,)
    finally:
        stopped = True
    if failure is not None:
        raise failure
