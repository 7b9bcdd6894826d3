"""When an update's responses are drawn: right before it, or one step ahead while the learner works."""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

from triage_jax.collect import Prompts, make_requests, sampling, take_prompts
from triage_jax.rollout import EngineError, Progress, Request, Sample
from triage_jax.run import Run


@dataclass(frozen=True, kw_only=True, eq=False)
class Rollout:
    """The responses of one update."""

    prompts: Prompts
    requests: list[Request]
    samples: list[Sample]
    seconds: float
    """That the engine took, whether or not somebody waited"""


class Pipeline:
    """Draws the rollouts of consecutive steps.

    An engine that cannot sample while the learner computes draws the next rollout at `start` instead, so that what is
    trained on is the same and only the time is not saved.
    """

    def __init__(self, run: Run, progress: Progress) -> None:
        self._run, self._progress = run, progress
        self._pool = ThreadPoolExecutor(1) if run.engine.capabilities.overlaps else None
        self._next: dict[int, Future[Rollout]] = {}

    def start(self, step: int, cursor: int) -> None:
        """Begin to draw for `step`, its prompts from `cursor` on."""
        prompts = take_prompts(self._run, cursor)
        draw = partial(
            _draw, self._run, prompts, make_requests(prompts, self._run.config, step), self._progress
        )
        if self._pool is not None:
            self._next[step] = self._pool.submit(draw)
            return
        future: Future[Rollout] = Future()
        future.set_result(draw())
        self._next[step] = future

    def take(self, step: int, cursor: int) -> Rollout:
        """The responses of `step`, begun now unless they were before.

        Raises EngineError where the engine gave up or returned tokens older than `rollout.max_staleness` allows.
        """
        if step not in self._next:
            self.start(step, cursor)
        rollout = self._next.pop(step).result()
        oldest = step - self._run.config.rollout.max_staleness
        for sample in rollout.samples:
            versions = sample.weight_versions
            if versions.size and not oldest <= versions.min() <= versions.max() <= step:
                raise EngineError(
                    f"sample {sample.uid} was drawn with weights {versions.min()} to {versions.max()}; "
                    f"step {step} accepts {oldest} to {step} (rollout.max_staleness)"
                )
        return rollout

    def close(self) -> None:
        """Forget what was begun; the engine's own `close` ends what still runs there."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def _draw(run: Run, prompts: Prompts, requests: list[Request], progress: Progress) -> Rollout:
    started = time.perf_counter()
    samples = run.engine.generate(requests, sampling(run.config), progress)
    return Rollout(prompts=prompts, requests=requests, samples=samples, seconds=time.perf_counter() - started)


def drawn_before(step: int, samples: list[Sample], width: int) -> np.ndarray:
    """bool `[B, width]`: response tokens drawn with weights older than those of `step`."""
    stale = np.zeros((len(samples), width), bool)
    for row, sample in enumerate(samples):
        stale[row, : len(sample.weight_versions)] = sample.weight_versions < step
    return stale
