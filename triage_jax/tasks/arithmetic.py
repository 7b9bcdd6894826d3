"""Sums and products that need no download: `37+45=` with the answer `82`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import count as naturals
from itertools import product
from typing import Literal

from triage_jax.tasks.protocol import Problem, Verdict, cut_at_eos, is_heldout, stable_hash

Operation = Literal["+", "-", "*"]
CHAT_TEMPLATE = "What is {expression}? Answer with only the number."
ENUMERABLE = 10_000
_NUMBER = re.compile(r"(?:(?<![\w.)])-)?[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?")


@dataclass(frozen=True, kw_only=True)
class ArithmeticConfig:
    """Which problems are drawn, how they are written, how an answer is matched.

    digits: operands are 0 ... 10^digits - 1; zero_pad writes all of them with that many digits.
    terms: operands per problem. operations: drawn evenly; `*` binds tighter than `+` and `-`.
    show_sums: the answer is worked term by term, `3+4+5=` -> `7+5=12`; needs operations `+` and `-` only.
    prompt: must contain `{expression}`; CHAT_TEMPLATE suits instruction-tuned models.
    match: "exact" compares the whole stripped completion, "last_number" the last number in it (`025` is 25
    either way).
    heldout_fraction: share of all problem texts kept from training, decided by a hash of the text.
    One-digit sums of two terms are only 100 problems, so that the default keeps about 20 of them from
    training.
    eos: texts at which a completion ends.
    """

    digits: int = 1
    terms: int = 2
    operations: tuple[Operation, ...] = ("+",)
    zero_pad: bool = False
    show_sums: bool = False
    prompt: str = "{expression}="
    match: Literal["exact", "last_number"] = "exact"
    heldout_fraction: float = 0.2
    seed: int = 0
    eos: tuple[str, ...] = ("<|im_end|>", "<|endoftext|>", "</s>")

    def __post_init__(self) -> None:
        if self.digits < 1 or self.terms < 2:
            raise ValueError(
                f"digits must be >= 1 and terms >= 2, got digits={self.digits}, terms={self.terms}"
            )
        if not self.operations or not set(self.operations) <= {"+", "-", "*"}:
            raise ValueError(f"operations must be one or more of '+', '-', '*', got {self.operations}")
        if self.show_sums and "*" in self.operations:
            raise ValueError("show_sums works from left to right: operations must be '+' and '-' only")
        if "{expression}" not in self.prompt:
            raise ValueError(f"prompt must contain '{{expression}}', got {self.prompt!r}")
        if not 0 <= self.heldout_fraction < 1:
            raise ValueError(f"heldout_fraction must be in [0, 1), got {self.heldout_fraction}")


class ArithmeticTask:
    """Endless arithmetic; training and held-out problems are disjoint by the hash of their expression."""

    def __init__(self, config: ArithmeticConfig) -> None:
        self.config = config
        self._space = (10**config.digits) ** config.terms * len(config.operations) ** (config.terms - 1)
        self._training: list[Problem] | None = None
        self._heldout: list[Problem] | None = None
        if self._space <= ENUMERABLE:
            self._training, self._heldout = self._enumerate()
            if not self._training:
                raise ValueError(
                    f"heldout_fraction={config.heldout_fraction} leaves none of {self._space} to train on"
                )

    @property
    def epoch_size(self) -> int | None:
        return None if self._training is None else len(self._training)

    def problem(self, index: int) -> Problem:
        """Drawn independently and evenly from the training problems, so an epoch's worth holds repeats."""
        if index < 0:
            raise ValueError(f"problem index must be >= 0, got {index}")
        if self._training is not None:
            return self._training[stable_hash("train", self.config.seed, index) % len(self._training)]
        return self._draw("train", index, heldout=False)

    def heldout(self, count: int) -> list[Problem]:
        """Up to `count` held-out problems; fewer when a small problem space has no more."""
        if self.config.heldout_fraction == 0:
            raise ValueError("heldout_fraction is 0: there are no held-out problems; set it above 0")
        if self._heldout is not None:
            return self._heldout[:count]
        found: dict[str, Problem] = {}
        for index in naturals():
            if len(found) >= count:
                break
            problem = self._draw("evaluate", index, heldout=True)
            found[problem.uid] = problem
        return list(found.values())

    def score(self, completion: str, problem: Problem) -> Verdict:
        text = cut_at_eos(completion, self.config.eos).strip()
        parsed = text or None
        if self.config.match == "last_number":
            parsed = _last_number(text)
        if parsed is None:
            return Verdict(0.0, None, "no_answer")
        gold = problem.answer if self.config.match == "exact" else _last_number(problem.answer)
        right = parsed == gold or _same_number(parsed, gold)
        return Verdict(float(right), parsed, "right" if right else "wrong")

    def score_batch(self, completions: Sequence[tuple[str, Problem]]) -> list[Verdict]:
        return [self.score(completion, problem) for completion, problem in completions]

    def _enumerate(self) -> tuple[list[Problem], list[Problem]]:
        config, sides = self.config, ([], [])
        operands = product(range(10**config.digits), repeat=config.terms)
        operations: list[tuple[Operation, ...]] = list(product(config.operations, repeat=config.terms - 1))
        for numbers in operands:
            for signs in operations:
                problem = self._problem(numbers, signs)
                sides[is_heldout(problem.uid, config.heldout_fraction, config.seed)].append(problem)
        sides[1].sort(key=lambda problem: stable_hash("order", config.seed, problem.uid))
        return sides

    def _draw(self, stream: str, index: int, *, heldout: bool) -> Problem:
        """The first of an endless line of candidates that lies on the wanted side of the split."""
        config = self.config
        candidates = (self._candidate(stream, index, attempt) for attempt in naturals())
        return next(
            problem
            for problem in candidates
            if is_heldout(problem.uid, config.heldout_fraction, config.seed) == heldout
        )

    def _candidate(self, stream: str, index: int, attempt: int) -> Problem:
        config = self.config
        words = [stable_hash(stream, config.seed, index, attempt, k) for k in range(2 * config.terms - 1)]
        numbers = tuple(word % 10**config.digits for word in words[: config.terms])
        choices = words[config.terms :]
        signs: tuple[Operation, ...] = tuple(
            config.operations[word % len(config.operations)] for word in choices
        )
        return self._problem(numbers, signs)

    def _problem(self, numbers: tuple[int, ...], signs: tuple[Operation, ...]) -> Problem:
        config = self.config
        written = [f"{n:0{config.digits}d}" if config.zero_pad else str(n) for n in numbers]
        expression = written[0] + "".join(
            sign + number for sign, number in zip(signs, written[1:], strict=True)
        )
        answer = _worked(numbers, signs, written) if config.show_sums else str(_value(numbers, signs))
        return Problem(config.prompt.replace("{expression}", expression), answer, expression)


def _value(numbers: tuple[int, ...], signs: tuple[Operation, ...]) -> int:
    """Value under the usual precedence: a sum of signed products."""
    total, factor = 0, numbers[0]
    for sign, number in zip(signs, numbers[1:], strict=True):
        if sign == "*":
            factor *= number
        else:
            total += factor
            factor = number if sign == "+" else -number
    return total + factor


def _worked(numbers: tuple[int, ...], signs: tuple[Operation, ...], written: list[str]) -> str:
    """`3+4+5` worked from left to right: `7+5=12`."""
    running = [_value(numbers[: k + 1], signs[:k]) for k in range(1, len(numbers))]
    rest = [sign + number for sign, number in zip(signs, written[1:], strict=True)]
    steps = [str(value) + "".join(rest[k + 1 :]) for k, value in enumerate(running)]
    return "=".join(steps)


def _last_number(text: str) -> str | None:
    found = _NUMBER.findall(text)
    return found[-1].replace(",", "") if found else None


def _same_number(left: str, right: str | None) -> bool:
    plain = re.compile(r"-?[0-9]{1,1000}(?:\.[0-9]{1,100})?")
    if right is None or not (plain.fullmatch(left) and plain.fullmatch(right)):
        return False
    return Fraction(left) == Fraction(right)
