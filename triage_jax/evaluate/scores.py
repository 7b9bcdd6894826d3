"""From counts to scores, per-problem rows and the table that goes into a text."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from triage_jax.evaluate.benchmarks import Benchmark
from triage_jax.evaluate.stats import Estimate, mean_of, pass_at_k, share_over_problems
from triage_jax.evaluate.tally import ProblemTally, Tally, status_counts


@dataclass(frozen=True, kw_only=True)
class Score:
    """One benchmark's result; only problems with all their samples count."""

    name: str
    problems: int
    of: int
    """Problems in the file"""
    samples: int
    accuracy: Estimate
    """Mean over problems of the share of right samples"""
    pass_at: dict[int, Estimate]
    statuses: dict[str, int]
    truncated: int
    """Samples that reached the token limit"""
    mean_tokens: float


@dataclass(frozen=True, kw_only=True)
class Result:
    """All benchmarks, and their unweighted mean once each is complete."""

    scores: Sequence[Score]
    mean: Estimate | None
    missing: int
    """Samples that are still to be drawn"""


def make_result(benchmarks: Sequence[Benchmark], tally: Tally) -> Result:
    """Scores of what is there; a benchmark without a single complete problem has none."""
    scores = []
    missing = 0
    for benchmark in benchmarks:
        found = tally.problems[benchmark.name]
        missing += sum(tally.samples - problem.samples for problem in found.values())
        complete = [problem for problem in found.values() if problem.samples == tally.samples]
        if complete:
            scores.append(_score(benchmark, complete, tally.samples))
    whole = missing == 0 and len(scores) > 1
    return Result(
        scores=scores, mean=mean_of([s.accuracy for s in scores]) if whole else None, missing=missing
    )


def _score(benchmark: Benchmark, complete: Sequence[ProblemTally], samples: int) -> Score:
    total = samples * len(complete)

    def passed(k: int) -> Estimate:
        return share_over_problems([pass_at_k(samples, p.right, k) for p in complete], total / k)

    return Score(
        name=benchmark.name,
        problems=len(complete),
        of=benchmark.rows,
        samples=samples,
        accuracy=passed(1),
        pass_at={k: passed(k) for k in range(1, samples + 1)},
        statuses=status_counts(complete),
        truncated=sum(problem.truncated for problem in complete),
        mean_tokens=sum(problem.tokens for problem in complete) / total,
    )


def problem_rows(benchmarks: Sequence[Benchmark], tally: Tally) -> Iterator[str]:
    """A JSON line per problem: what was asked for is in the data, so only its name, gold answer and counts."""
    for benchmark in benchmarks:
        for problem in benchmark.problems:
            found = tally.problems[benchmark.name][problem.uid]
            row = {
                "problem": problem.uid,
                "gold": problem.answer,
                "samples": found.samples,
                "right": found.right,
                "accuracy": found.right / found.samples if found.samples else None,
                "statuses": dict(sorted(found.statuses.items())),
                "truncated": found.truncated,
                "mean_tokens": found.tokens / found.samples if found.samples else None,
            }
            yield json.dumps(row, ensure_ascii=False) + "\n"


def to_json(result: Result) -> str:
    return json.dumps(asdict(result), indent=1, allow_nan=False) + "\n"


def markdown(result: Result) -> str:
    """The table, ready to paste; accuracies in per cent with their 95 % intervals, then the counts behind them."""
    k = max((score.samples for score in result.scores), default=1)
    last = [f"pass@{k}"] if k > 1 else []
    titles = ["benchmark", "problems", "samples", "accuracy (95 %)", *last]
    titles += ["no answer", "truncated", "guarded", "timeouts", "errors", "tokens"]
    lines = [titles, ["---", *["---:"] * (len(titles) - 1)]]
    lines += [_row(score, k) for score in result.scores]
    if result.mean is not None:
        lines.append(["**mean**", "", "", _percent(result.mean), *[""] * (len(titles) - 4)])
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    if result.missing:
        text += f"\nIncomplete: {result.missing} samples are missing; problems that lack any are left out.\n"
    return text


def _row(score: Score, k: int) -> list[str]:
    counts = score.statuses
    problems = str(score.problems) if score.problems == score.of else f"{score.problems} of {score.of}"
    return [
        score.name,
        problems,
        str(score.problems * score.samples),
        _percent(score.accuracy),
        *([_percent(score.pass_at[k])] if k > 1 else []),
        str(counts["no_answer"]),
        str(score.truncated),
        *(str(counts[status]) for status in ("guarded", "timeout", "error")),
        f"{score.mean_tokens:,.0f}",
    ]


def _percent(estimate: Estimate) -> str:
    return f"{100 * estimate.value:.2f} ({100 * estimate.low:.1f}–{100 * estimate.high:.1f})"
