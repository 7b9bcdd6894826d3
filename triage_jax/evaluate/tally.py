"""Counts per problem, from records as they come; what all scores are made of."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from triage_jax.evaluate.benchmarks import Benchmark
from triage_jax.evaluate.records import Record, RecordError
from triage_jax.tasks.protocol import STATUSES


@dataclass
class ProblemTally:
    """What became of one problem's samples."""

    statuses: Counter[str] = field(default_factory=Counter[str])
    tokens: int = 0
    truncated: int = 0
    seen: set[int] = field(default_factory=set[int])
    """Numbers of its samples"""

    @property
    def samples(self) -> int:
        return len(self.seen)

    @property
    def right(self) -> int:
        return self.statuses["right"]


class Tally:
    """One evaluation's counts. Memory grows with the problems, not with the samples' texts."""

    def __init__(self, benchmarks: Sequence[Benchmark], samples: int) -> None:
        self.samples = samples
        self.problems: dict[str, dict[str, ProblemTally]] = {
            benchmark.name: {problem.uid: ProblemTally() for problem in benchmark.problems}
            for benchmark in benchmarks
        }

    @property
    def finished(self) -> int:
        return sum(found.samples for problems in self.problems.values() for found in problems.values())

    def has(self, uid: str, sample: int) -> bool:
        return sample in self._of(uid).seen

    def add(self, record: Record) -> None:
        """Raises RecordError for a sample that was not asked for, or is there already."""
        place = f"sample {record.problem}/{record.sample}"
        if record.problem not in self.problems.get(record.benchmark, {}) or not (
            0 <= record.sample < self.samples
        ):
            raise RecordError(f"{place}: not a part of this evaluation")
        found = self._of(record.problem)
        if record.sample in found.seen:
            raise RecordError(f"{place}: is there twice")
        found.seen.add(record.sample)
        found.statuses[record.status] += 1
        found.tokens += record.tokens
        found.truncated += record.finish == "length"

    def add_all(self, records: Iterable[Record]) -> None:
        for record in records:
            self.add(record)

    def _of(self, uid: str) -> ProblemTally:
        return self.problems[uid.rpartition(":")[0]][uid]


def status_counts(problems: Iterable[ProblemTally]) -> dict[str, int]:
    """Verdicts of all samples by status, zeros included."""
    total: Counter[str] = Counter()
    for found in problems:
        total.update(found.statuses)
    return {status: total[status] for status in STATUSES}
