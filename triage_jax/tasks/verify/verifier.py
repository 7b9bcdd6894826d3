"""Reward of a completion against a gold answer: extraction, exact rules, guard, then the child process."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from triage_jax.tasks.protocol import Status, Verdict
from triage_jax.tasks.verify.compare import compare, exact
from triage_jax.tasks.verify.extract import extract_answer
from triage_jax.tasks.verify.guard import MAX_CHARACTERS, refusal
from triage_jax.tasks.verify.process import Checker

_STATUS: dict[str, Status] = {"equal": "right", "different": "wrong", "timeout": "timeout", "error": "error"}


@dataclass(frozen=True, kw_only=True)
class VerifierConfig:
    """deadline: seconds one comparison may take in the child process. eos: texts at which a completion
    ends.
    """

    deadline: float = 6.0
    eos: tuple[str, ...] = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "</s>")

    def __post_init__(self) -> None:
        if not self.deadline > 0:
            raise ValueError(f"deadline must be positive seconds, got {self.deadline}")


class MathVerifier:
    """Scores completions; 1.0 for a right answer, else 0.0. Safe to use from any thread.

    The child process starts with the first answer the exact rules cannot decide; it ends with `close`,
    with the `with` block, when the verifier is collected, or with the interpreter.
    """

    def __init__(self, config: VerifierConfig | None = None) -> None:
        self.config = config or VerifierConfig()
        self.checker = Checker(self.config.deadline)

    def score(self, completion: str, gold: str) -> Verdict:
        """Verdict on one completion."""
        return self.score_batch([(completion, gold)])[0]

    def score_batch(self, pairs: Sequence[tuple[str, str]]) -> list[Verdict]:
        """Verdicts on (completion, gold) pairs; equal (answer, gold) pairs are compared once."""
        known: dict[tuple[str, str], Status] = {}
        verdicts = []
        for completion, gold in pairs:
            answer = extract_answer(completion, self.config.eos)
            if answer is None:
                verdicts.append(Verdict(0.0, None, "no_answer"))
                continue
            key = (answer, gold)
            if key not in known:
                known[key] = self._status(answer, gold)
            verdicts.append(Verdict(float(known[key] == "right"), answer, known[key]))
        return verdicts

    def close(self) -> None:
        self.checker.close()

    def __enter__(self) -> "MathVerifier":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _status(self, answer: str, gold: str) -> Status:
        gold = gold.strip()
        if answer == gold:
            return "right"
        if len(answer) > MAX_CHARACTERS:
            return "guarded"
        decided = compare(gold, answer, exact)
        if decided is not None:
            return "right" if decided else "wrong"
        if refusal(answer) or refusal(gold):
            return "guarded"
        return _STATUS[self.checker.ask(gold, answer)]
