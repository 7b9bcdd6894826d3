"""Everything that is measured of an update, as sums: updates are read one at a time and added up."""

from dataclasses import dataclass, replace
from functools import reduce
from operator import add

import numpy as np

from triage_jax.characterize.arrays import Gap, gap_of, in_threads, per_token, row_blocks
from triage_jax.characterize.audit import Agreement, sign_audit
from triage_jax.characterize.dilution import Dilution, dilution
from triage_jax.characterize.dumps import Dump
from triage_jax.characterize.gaps import GapSums, gap_sums
from triage_jax.characterize.localize import (
    DRAWS,
    HEAVY,
    TOP_SHARE,
    NullCounts,
    localization,
    order_test,
    permutation_null,
)
from triage_jax.characterize.outliers import Outlier, outliers
from triage_jax.characterize.regions import WEIGHINGS, Regions, regions
from triage_jax.characterize.remedies import RemedySums, remedy_sums
from triage_jax.characterize.sketch import GapSketch, gap_sketch
from triage_jax.characterize.tails import SEGMENT, Segments, tail_segments

type Numbers = dict[str, int | float]
QUANTILES = (0.001, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)


@dataclass(frozen=True, kw_only=True)
class Measures:
    """What a tail, a segment and the null are."""

    threshold: float
    """A tail token has δ below this, in nats"""
    segment: int = SEGMENT
    heavy: float = HEAVY
    top_share: float = TOP_SHARE
    draws: int = DRAWS
    seed: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Pool:
    """Sums over one update or several; constant in size but for the segments, four bytes each."""

    updates: int
    responses: int
    regions: Regions
    gaps: GapSums
    sketch: GapSketch
    segments: Segments
    dilution: Dilution
    remedies: RemedySums
    null: NullCounts | None = None
    audit: tuple[Agreement, ...] = ()
    """Empty if an update lacks the log-probabilities after it"""

    def __add__(self, other: "Pool") -> "Pool":
        sums = {
            name: getattr(self, name) + getattr(other, name)
            for name in self.__annotations__
            if name not in ("null", "audit")
        }
        null = self.null + other.null if self.null is not None and other.null is not None else None
        audit = tuple(a + b for a, b in zip(self.audit, other.audit, strict=False))
        return Pool(**sums, null=null, audit=audit)

    def row(self, measures: Measures) -> Numbers:
        """The numbers to print and to plot, divided here. NaN where undefined."""
        local = localization(self.segments, heavy=measures.heavy, top_share=measures.top_share)
        order = order_test(self.segments, heavy=measures.heavy)
        row: Numbers = {"updates": self.updates, "responses": self.responses, "tokens": self.gaps.tokens}
        row |= {f"rho_asym/{name}": self.regions.rho_asym(name) for name in WEIGHINGS}
        row |= {
            "amplifying_share": self.regions.amplifying_share(),
            "without_advantage/token": self.regions.without_advantage / max(self.regions.tokens, 1),
        }
        row |= self.gaps.means()
        quantiles = self.sketch.quantiles(list(QUANTILES))
        row |= {f"gap/q{share:g}": value for share, value in zip(QUANTILES, quantiles, strict=True)}
        row |= {
            "r_amp": local.r_amp,
            "H_seg": local.heavy_share,
            "C_tok": local.concentration,
            "P_adj": local.adjacency,
            "segments": local.segments,
            "tail_tokens": local.tail_tokens,
            "order/enrichment": order.enrichment,
            "order/z": order.z,
        }
        return (
            row | self.dilution.shares() | (_null_row(self.null, measures) if self.null is not None else {})
        )


def _null_row(null: NullCounts, measures: Measures) -> Numbers:
    draws = {
        "C_tok": null.concentration(measures.top_share),
        "H_seg": null.heavy_share(measures.heavy),
        "P_adj": null.adjacency(),
    }
    row: Numbers = {}
    for name, values in draws.items():
        finite = values[np.isfinite(values)]
        low, high = np.quantile(finite, [0.025, 0.975]) if finite.size else (float("nan"),) * 2
        row |= {
            f"{name}/null_mean": float(finite.mean()) if finite.size else float("nan"),
            f"{name}/null_low": float(low),
            f"{name}/null_high": float(high),
        }
    return row


def measure(dump: Dump, measures: Measures, *, null: bool = False) -> Pool:
    """Measure one update, in blocks of responses on all cores; with the permutation null if asked for."""

    def block(rows: slice) -> Pool:
        mask, advantages = dump.mask[rows], dump.advantages[rows]
        learner, sampler = (np.where(mask, x[rows], 0) for x in (dump.learner_logp, dump.sampler_logp))
        gap, difference = learner - sampler, np.exp(learner) - np.exp(sampler)
        at = {"threshold": measures.threshold}
        return Pool(
            updates=0,
            responses=int(np.count_nonzero(mask.any(axis=1))),
            regions=regions(gap, advantages, mask),
            gaps=gap_sums(gap, mask, difference),
            sketch=gap_sketch(gap, advantages, mask),
            segments=tail_segments(gap, advantages, mask, segment=measures.segment, **at),
            dilution=dilution(gap, advantages, mask, segment=measures.segment, heavy=measures.heavy, **at),
            remedies=remedy_sums(gap, advantages, mask, difference, **at),
            audit=_audit(dump, rows, gap, sampler),
        )

    pool = reduce(add, in_threads(block, list(row_blocks(*dump.mask.shape))))
    found = (
        permutation_null(
            pool.segments, draws=measures.draws, seed=measures.seed, stream=dump.step, heavy=measures.heavy
        )
        if null
        else None
    )
    return replace(pool, updates=1, null=found)


def _audit(dump: Dump, rows: slice, gap: Gap, sampler: Gap) -> tuple[Agreement, ...]:
    if dump.learner_logp_after is None:
        return ()
    mask, coefficient = dump.mask[rows], per_token(dump.advantages[rows])
    after = np.where(mask, dump.learner_logp_after[rows], 0) - sampler
    return tuple(sign_audit(gap, after, np.broadcast_to(coefficient, gap.shape), mask))


def worst_responses(dump: Dump, count: int = 5) -> list[Outlier]:
    """The outliers of one update."""
    gap = gap_of(dump.learner_logp, dump.sampler_logp, dump.mask)
    return outliers(gap, dump.advantages, dump.mask, step=dump.step, count=count)
