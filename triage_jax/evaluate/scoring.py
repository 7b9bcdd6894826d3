"""Verdicts of an evaluation: the trainer's verifier, or the arithmetic task's matching for files that ask for it."""

from collections.abc import Sequence

from triage_jax.evaluate.benchmarks import Benchmark
from triage_jax.tasks.arithmetic import ArithmeticConfig, ArithmeticTask
from triage_jax.tasks.protocol import Problem, Verdict
from triage_jax.tasks.verify import MathVerifier


class Scorer:
    """Scores responses to the problems of some benchmarks."""

    def __init__(self, benchmarks: Sequence[Benchmark]) -> None:
        self._verifier = MathVerifier()
        self._problems: dict[str, Problem] = {}
        self._arithmetic: dict[str, ArithmeticTask] = {}
        """By problem, where a file asks for such matching"""
        for benchmark in benchmarks:
            self._problems |= {problem.uid: problem for problem in benchmark.problems}
            if benchmark.matching != "math":
                task = ArithmeticTask(ArithmeticConfig(match=benchmark.matching))
                self._arithmetic |= dict.fromkeys((problem.uid for problem in benchmark.problems), task)

    def score(self, uid: str, response: str) -> Verdict:
        """Verdict on a response to the problem of this uid."""
        problem = self._problems[uid]
        task = self._arithmetic.get(uid)
        return task.score(response, problem) if task else self._verifier.score(response, problem.answer)

    def close(self) -> None:
        self._verifier.close()
