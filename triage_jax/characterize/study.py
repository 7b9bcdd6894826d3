"""A whole run characterised: read once for the tail's threshold, once for everything else, one update in memory."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from heapq import nlargest
from typing import Any, Protocol, runtime_checkable

import numpy as np

from triage_jax.characterize.arrays import gap_of
from triage_jax.characterize.dumps import Dump, DumpError
from triage_jax.characterize.outliers import Outlier
from triage_jax.characterize.remedies import CLASSES, REMEDIES
from triage_jax.characterize.sketch import GapSketch, empty_sketch, gap_sketch
from triage_jax.characterize.stages import WINDOW, Stage, stages
from triage_jax.characterize.stream import Measures, Numbers, Pool, measure, worst_responses
from triage_jax.characterize.tails import QUANTILE

type Series = list[Numbers]
OUTLIERS = 10


@runtime_checkable
class Source(Protocol):
    """Updates in the order of their steps, which can be read more than once."""

    def steps(self) -> list[int]:
        """Every update's number."""
        ...

    def dumps(self, steps: frozenset[int] | None = None) -> Iterable[Dump]:
        """The updates, or those with these numbers, one at a time."""
        ...


@dataclass(frozen=True, kw_only=True)
class StudyConfig:
    """How a run is studied."""

    threshold: float | None = None
    """A tail token has a gap below this, in nats; by default the 5 % quantile of the first window"""
    segment: int = 64
    """Tokens of a segment"""
    window: int = WINDOW
    """Updates of a stage; at most a quarter of all"""
    draws: int = 499
    """Draws of the permutation null"""
    seed: int = 0
    """Of the permutation null"""

    def __post_init__(self) -> None:
        for name, least in (("segment", 1), ("window", 1), ("draws", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; accepted: at least {least}")


@dataclass(frozen=True, kw_only=True, eq=False)
class Study:
    """What was found."""

    measures: Measures
    stages: Sequence[Stage]
    pools: Sequence[Pool]
    series: Series
    """One row per update"""
    outliers: Sequence[Outlier]

    def rows(self) -> Series:
        """One row per stage."""
        return [pool.row(self.measures) for pool in self.pools]

    def to_json(self) -> dict[str, Any]:
        """Plain values; what is undefined is None."""
        stages = [
            {
                "name": stage.name,
                "steps": list(stage.steps),
                "remedies": _remedies(pool),
                "audit": _audit(pool),
            }
            | row
            for stage, pool, row in zip(self.stages, self.pools, self.rows(), strict=True)
        ]
        found = {
            "measures": asdict(self.measures),
            "stages": stages,
            "updates": self.series,
            "outliers": [asdict(outlier) for outlier in self.outliers],
        }
        return _plain(found)


def study(
    source: Source, config: StudyConfig | None = None, progress: Callable[[int], None] | None = None
) -> Study:
    """Characterise every update of a source and its stages; `progress` is told the updates that are done.

    Raises DumpError if there is no update, or no valid token to take the threshold from.
    """
    config = config or StudyConfig()
    steps = source.steps()
    if not steps:
        raise DumpError("no update found")
    found = stages(steps, config.window)
    threshold = config.threshold
    if threshold is None:
        threshold = frozen_threshold(source.dumps(frozenset(found[0].steps)))
    measures = Measures(threshold=threshold, segment=config.segment, draws=config.draws, seed=config.seed)
    stage_of = {step: index for index, stage in enumerate(found) for step in stage.steps}
    pools: list[Pool | None] = [None] * len(found)
    series: Series = []
    worst: list[Outlier] = []
    for done, dump in enumerate(source.dumps(), start=1):
        index = stage_of.get(dump.step)
        pool = measure(dump, measures, null=index is not None)
        series.append({"step": dump.step} | replace(pool, null=None).row(measures))
        worst = nlargest(OUTLIERS, [*worst, *worst_responses(dump)], key=lambda outlier: outlier.mean_size)
        if index is not None:
            before = pools[index]
            pools[index] = pool if before is None else before + pool
        if progress:
            progress(done)
    return Study(
        measures=measures,
        stages=[stage for stage, pool in zip(found, pools, strict=True) if pool is not None],
        pools=[pool for pool in pools if pool is not None],
        series=series,
        outliers=worst,
    )


def frozen_threshold(dumps: Iterable[Dump], quantile: float = QUANTILE) -> float:
    """The quantile of δ over all valid tokens of these updates, read off a sketch: within 1/128 of its value.

    Raises DumpError over no tokens.
    """
    sketch: GapSketch = empty_sketch()
    for dump in dumps:
        gap = gap_of(dump.learner_logp, dump.sampler_logp, dump.mask)
        sketch = sketch + gap_sketch(gap, np.zeros(len(gap), np.float32), dump.mask)
    (threshold,) = sketch.quantiles([quantile])
    if math.isnan(threshold):
        raise DumpError("the first window has no valid token to take the tail's threshold from")
    return threshold


def _audit(pool: Pool) -> list[dict[str, int | float]]:
    return [
        {
            "depth": found.depth,
            "tokens": found.tokens,
            "unmoved": found.unmoved,
            "share": found.share,
            "weighted_share": found.weighted_share,
        }
        for found in pool.audit
    ]


def _remedies(pool: Pool) -> dict[str, dict[str, float]]:
    return {
        name: dict(zip(CLASSES, map(float, weights), strict=True))
        for name, weights in zip(REMEDIES, pool.remedies.mean_weights(), strict=True)
    }


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value
