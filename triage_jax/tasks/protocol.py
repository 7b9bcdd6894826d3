"""What a task is: numbered problems, a held-out set, and a verdict on a completion."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args, runtime_checkable

Status = Literal["right", "wrong", "no_answer", "guarded", "timeout", "error"]
STATUSES: tuple[Status, ...] = get_args(Status)


@dataclass(frozen=True)
class Problem:
    """A question, its gold answer, and a name that stays the same from run to run."""

    prompt: str
    answer: str
    uid: str


@dataclass(frozen=True)
class Verdict:
    """Reward of one completion, the answer read from it, and how the reward came about.

    `no_answer`: none was stated, and `parsed` is None. `guarded`: refused as too costly to evaluate.
    `timeout`, `error`: the checker failed, not the policy; watch their share.
    """

    reward: float
    parsed: str | None
    status: Status


@runtime_checkable
class Task(Protocol):
    """An endless, reproducible stream of training problems with a held-out set beside it."""

    @property
    def epoch_size(self) -> int | None:
        """Number of distinct training problems, or None where they are too many to count."""
        ...

    def problem(self, index: int) -> Problem:
        """The training problem at position `index >= 0`; depends on the task's seed and `index` alone."""
        ...

    def heldout(self, count: int) -> list[Problem]:
        """At most `count` distinct problems, none of which `problem` ever returns; the same at every call."""
        ...

    def score(self, completion: str, problem: Problem) -> Verdict: ...

    def score_batch(self, completions: Sequence[tuple[str, Problem]]) -> list[Verdict]: ...


def count_statuses(verdicts: Sequence[Verdict]) -> dict[Status, int]:
    """How many verdicts there are of each status, zeros included, so that metric keys never vary."""
    counts = Counter(verdict.status for verdict in verdicts)
    return {status: counts[status] for status in STATUSES}


def stable_hash(*parts: str | int) -> int:
    """64-bit BLAKE2b of the parts: the same in every process, Python version and platform."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def is_heldout(prompt: str, fraction: float, seed: int) -> bool:
    """Side of the split: by the text itself, so that duplicates of a problem never straddle it."""
    return stable_hash("heldout", seed, prompt) < fraction * 2**64


def cut_at_eos(completion: str, eos: Sequence[str]) -> str:
    """The completion up to the first end-of-sequence text in it."""
    positions = [position for text in eos if (position := completion.find(text)) >= 0]
    return completion[: min(positions)] if positions else completion
