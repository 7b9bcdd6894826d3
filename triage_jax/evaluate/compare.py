"""Two evaluations, problem by problem: the difference of their accuracies, its interval, and a paired test."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

from triage_jax.config import ConfigError
from triage_jax.evaluate.directory import Directory
from triage_jax.evaluate.records import read_records

RESAMPLES = 10_000
CHUNK = 500
"""Resamples made at once"""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """B minus A on the problems that both have finished."""

    name: str
    problems: int
    left_out: int
    """Problems that lack samples in either"""
    first: float
    second: float
    low: float
    high: float
    """95 % interval of the difference: percentiles of a bootstrap over problems"""
    p_value: float
    better: int
    """Problems on which B does better"""
    worse: int

    @property
    def value(self) -> float:
        return self.second - self.first


@dataclass(frozen=True, kw_only=True)
class _Run:
    samples: int
    right: dict[str, dict[str, int]]
    """By benchmark and problem, of complete problems"""
    data: Mapping[str, str]
    total: dict[str, set[str]]


def compare_runs(first: Path, second: Path) -> list[Difference]:
    """Every benchmark that both have, then their unweighted mean.

    Raises ConfigError where they share none, or one of which they read different files.
    """
    a, b = _read(first), _read(second)
    shared = [name for name in a.right if name in b.right]
    if not shared:
        raise ConfigError(f"{first} and {second} share no benchmark: {sorted(a.right)} and {sorted(b.right)}")
    for name in shared:
        if a.data[name] != b.data[name]:
            raise ConfigError(
                f"{name}: {first} and {second} read different files "
                f"(SHA-256 {a.data[name][:12]} and {b.data[name][:12]})"
            )
    pairs = [_paired(name, a, b) for name in shared]
    if empty := [name for name, (left, _) in zip(shared, pairs, strict=True) if not len(left)]:
        raise ConfigError(f"{', '.join(empty)}: no problem is finished in both runs")
    found = [_difference(name, a, b, *pair) for name, pair in zip(shared, pairs, strict=True)]
    return [*found, _mean(found, pairs, a.samples, b.samples)] if len(found) > 1 else found


def sign_flip_p_value(differences: Int[np.ndarray, "P"]) -> float:
    """Two-sided exact p-value of sum(d) = 0 if the sign of every difference were as likely as its opposite.

    Fisher's randomisation test for pairs (The Design of Experiments, 1935, §21). Differences are integers, so that the
    distribution of the sum over all 2^P sign patterns is a convolution of P two-point distributions.
    """
    sizes = np.abs(differences[differences != 0])
    total = int(sizes.sum())
    chances = np.zeros(2 * total + 1)
    chances[total] = 1.0
    for size in sizes.tolist():
        # What is shifted out at the ends is zero: the sum of sizes so far never exceeds `total`.
        chances = (np.roll(chances, size) + np.roll(chances, -size)) / 2
    sums = np.arange(-total, total + 1)
    return min(1.0, float(chances[np.abs(sums) >= abs(int(differences.sum()))].sum()))


def bootstrap_means(values: Float[np.ndarray, "P"], seed: int = 0) -> Float[np.ndarray, "R"]:
    """Means of RESAMPLES draws of P problems with replacement (Efron 1979)."""
    rng = np.random.default_rng(seed)
    means = [
        values[rng.integers(0, len(values), (CHUNK, len(values)))].mean(axis=1)
        for _ in range(RESAMPLES // CHUNK)
    ]
    return np.concatenate(means)


def comparison_table(differences: Sequence[Difference], first: str, second: str) -> str:
    """Markdown, in percentage points."""
    lines = [
        "| benchmark | problems | A | B | B − A (95 %) | better / worse | p |\n",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |\n",
    ]
    for d in differences:
        lines.append(
            f"| {d.name} | {d.problems} | {100 * d.first:.2f} | {100 * d.second:.2f} | "
            f"{100 * d.value:+.2f} ({100 * d.low:+.1f} to {100 * d.high:+.1f}) | "
            f"{d.better} / {d.worse} | {_p_text(d.p_value)} |\n"
        )
    lines.append(f"\nA: {first}, B: {second}. p: sign flips of per-problem differences, two-sided.\n")
    if left_out := sum(d.left_out for d in differences if d.name != MEAN):
        lines.append(f"{left_out} problems that lack samples in one of the runs are left out.\n")
    return "".join(lines)


MEAN = "**mean**"


def _p_text(p: float) -> str:
    return "< 0.0001" if p < 1e-4 else f"{p:.4f}"


def _read(path: Path) -> _Run:
    directory = Directory(root=path)
    config, identity = directory.saved()
    counts: dict[str, dict[str, list[int]]] = {name: {} for name in identity["data"]}
    if directory.samples.exists():
        for record in read_records(directory.samples):
            found = counts[record.benchmark].setdefault(record.problem, [0, 0])
            found[0] += 1
            found[1] += record.right
    right = {
        name: {uid: found[1] for uid, found in problems.items() if found[0] == config.samples}
        for name, problems in counts.items()
    }
    seen = {name: set(problems) for name, problems in counts.items()}
    return _Run(samples=config.samples, right=right, data=identity["data"], total=seen)


def _paired(name: str, a: _Run, b: _Run) -> tuple[np.ndarray, np.ndarray]:
    """Right samples of A and of B, of the problems that are complete in both."""
    uids = [uid for uid in a.right[name] if uid in b.right[name]]
    left, right = ([run.right[name][uid] for uid in uids] for run in (a, b))
    return np.array(left, np.int64), np.array(right, np.int64)


def _integers(a: _Run, b: _Run, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Differences of the shares of right samples, in units in which they are integers."""
    common = math.lcm(a.samples, b.samples)
    return right * (common // b.samples) - left * (common // a.samples)


def _difference(name: str, a: _Run, b: _Run, left: np.ndarray, right: np.ndarray) -> Difference:
    steps = _integers(a, b, left, right)
    means = bootstrap_means(right / b.samples - left / a.samples)
    low, high = np.quantile(means, (0.025, 0.975))
    return Difference(
        name=name,
        problems=len(left),
        left_out=len(a.total[name] | b.total[name]) - len(left),
        first=float(left.mean()) / a.samples,
        second=float(right.mean()) / b.samples,
        low=float(low),
        high=float(high),
        p_value=sign_flip_p_value(steps),
        better=int((steps > 0).sum()),
        worse=int((steps < 0).sum()),
    )


def _mean(
    found: Sequence[Difference],
    pairs: Sequence[tuple[np.ndarray, np.ndarray]],
    samples_a: int,
    samples_b: int,
) -> Difference:
    """Of the unweighted mean over benchmarks: problems are resampled, and their signs flipped, within each."""
    parts = [right / samples_b - left / samples_a for left, right in pairs]
    means = sum((bootstrap_means(part, seed) for seed, part in enumerate(parts)), np.zeros(1)) / len(parts)
    low, high = np.quantile(means, (0.025, 0.975))
    flipped = sum((_flipped_means(part, seed) for seed, part in enumerate(parts)), np.zeros(1)) / len(parts)
    value = sum(d.value for d in found) / len(found)
    extreme = int((np.abs(flipped) >= abs(value) - 1e-12).sum())
    return Difference(
        name=MEAN,
        problems=sum(d.problems for d in found),
        left_out=sum(d.left_out for d in found),
        first=sum(d.first for d in found) / len(found),
        second=sum(d.second for d in found) / len(found),
        low=float(low),
        high=float(high),
        # The observed signs are one of the patterns: never an impossible p-value of 0.
        p_value=(1 + extreme) / (1 + len(flipped)),
        better=sum(d.better for d in found),
        worse=sum(d.worse for d in found),
    )


def _flipped_means(values: np.ndarray, seed: int) -> np.ndarray:
    """Means under RESAMPLES random sign patterns."""
    rng = np.random.default_rng(seed)
    means = [
        (values * rng.choice((-1.0, 1.0), (CHUNK, len(values)))).mean(axis=1)
        for _ in range(RESAMPLES // CHUNK)
    ]
    return np.concatenate(means)
