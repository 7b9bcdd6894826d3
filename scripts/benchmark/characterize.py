"""Time the mismatch study at the size of the reported runs: all statistics of one update.

    python scripts/benchmark/characterize.py

Prints a table and writes the same as JSON. `all` is what a study does with an update: regions, sums, sketch, tail
segments, dilution, remedies, outliers, the permutation null with 499 draws, and the divisions. The table names parts
of it as well. The fastest of the runs counts; exit status 1 if `all` takes longer than the second that was asked for.
"""

import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from triage_jax.characterize import (
    Dump,
    Measures,
    gap_of,
    measure,
    permutation_null,
    tail_segments,
    tail_threshold,
)
from triage_jax.characterize.stream import worst_responses

ASKED_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Size of the update."""

    responses: int = 256
    """Responses of the update."""
    tokens: int = 20_480
    """Completion positions of each response."""
    repeats: int = 5
    """Runs of each part; the fastest counts."""
    output: Path = Path("characterize_benchmark.json")
    """JSON file to write."""


def make_dump(responses: int, tokens: int) -> Dump:
    """Gaps of an unhealthy run: Laplace noise, a few very deep tokens, half to all of each response filled."""
    rng = np.random.default_rng(0)
    shape = (responses, tokens)
    sampler = -rng.exponential(1.0, shape)
    gap = rng.laplace(0.0, 0.05, shape) - 7.0 * (rng.random(shape) < 0.003)
    return Dump(
        step=1,
        learner_logp=np.minimum(sampler + gap, 0.0).astype(np.float32),
        sampler_logp=sampler.astype(np.float32),
        mask=np.arange(tokens) < rng.integers(tokens // 2, tokens + 1, (responses, 1)),
        advantages=rng.normal(size=responses).astype(np.float32),
    )


def fastest(function: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def measure_parts(dump: Dump, repeats: int) -> dict[str, float]:
    gap = gap_of(dump.learner_logp, dump.sampler_logp, dump.mask)
    threshold = tail_threshold(gap, dump.mask)
    measures = Measures(threshold=threshold)
    segments = tail_segments(gap, dump.advantages, dump.mask, threshold=threshold)
    null = permutation_null(segments)

    def everything() -> None:
        measure(dump, measures, null=True).row(measures)
        worst_responses(dump)

    parts = {
        "all": everything,
        "all, without the null": lambda: measure(dump, measures).row(measures),
        "permutation null, 499 draws": lambda: permutation_null(segments),
        "C_tok of the draws": null.concentration,
        "outliers": lambda: worst_responses(dump),
        "exact 5 % quantile": lambda: tail_threshold(gap, dump.mask),
    }
    return {name: fastest(part, repeats) for name, part in parts.items()}


def main(settings: Settings) -> int:
    dump = make_dump(settings.responses, settings.tokens)
    seconds = measure_parts(dump, settings.repeats)
    cores = len(os.sched_getaffinity(0))
    table = Table(title=f"{settings.responses} × {settings.tokens}, {cores} cores")
    table.add_column("")
    table.add_column("run [s]", justify="right")
    for name, value in seconds.items():
        table.add_row(name, f"{value:.3f}")
    load = os.getloadavg()[0]
    table.caption = f"asked: all in {ASKED_S:g} s; load {load:.1f}"
    Console().print(table)
    report = {
        "responses": settings.responses,
        "tokens": settings.tokens,
        "valid_tokens": int(dump.mask.sum()),
        "cores": cores,
        "load_average": load,
        "machine": platform.machine(),
        "numpy": np.__version__,
        "asked_s": ASKED_S,
        "seconds": seconds,
    }
    settings.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0 if seconds["all"] <= ASKED_S else 1


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Settings, description=__doc__)))
