"""Problems from JSON Lines files: one object a row, with a question and a gold answer."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from triage_jax.tasks.protocol import Problem, Verdict, is_heldout, stable_hash
from triage_jax.tasks.verify.extract import last_boxed
from triage_jax.tasks.verify.verifier import MathVerifier, VerifierConfig

GSM8K_ANSWER = r"####\s*(.+)\s*$"
BOXED_INSTRUCTION = "{prompt}\nPlease reason step by step, and put your final answer within \\boxed{}."


class DataError(ValueError):
    """A data file that does not hold what its settings say; names file, line, field and what is accepted."""


@dataclass(frozen=True, kw_only=True)
class JsonlConfig:
    """Which files, and how a row becomes a problem.

    prompt_fields: joined by a space. answer_field: a string, or a list of exactly one string. prompt:
    `{prompt}` in it is replaced; other braces stay as they are.
    answer_pattern: regular expression searched in the answer field; its group 1 (or all of it) is the gold
    answer, as GSM8K_ANSWER for `#### 18`. answer_boxed: the gold answer is the last `\\boxed{...}` of the
    field.
    coerce_numbers: accept JSON numbers as answers (27.0 becomes "27").
    heldout_fraction: share of the distinct prompts kept from training, decided by a hash of the prompt and
    `seed`; 1 makes everything held out, for a test set.
    """

    files: tuple[str, ...] = ()
    prompt_fields: tuple[str, ...] = ("prompt",)
    answer_field: str = "answer"
    prompt: str = "{prompt}"
    answer_pattern: str | None = None
    answer_boxed: bool = False
    coerce_numbers: bool = False
    heldout_fraction: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.prompt_fields:
            raise ValueError("prompt_fields must name at least one field")
        if "{prompt}" not in self.prompt:
            raise ValueError(f"prompt must contain '{{prompt}}', got {self.prompt!r}")
        if not 0 <= self.heldout_fraction <= 1:
            raise ValueError(f"heldout_fraction must be in [0, 1], got {self.heldout_fraction}")
        if self.answer_pattern is not None:
            re.compile(self.answer_pattern)


class JsonlTask:
    """A file of problems, in a fresh order every epoch; scored by a `MathVerifier` unless another is given.

    Raises DataError on the first row that does not fit. Rows whose prompt was seen before are dropped and
    counted in `duplicates` (in `conflicts` too where the answers differ); the first one is kept.
    """

    def __init__(self, config: JsonlConfig, verifier: MathVerifier | None = None) -> None:
        if not config.files:
            raise ValueError("a JSONL task needs files: at least one path")
        self.config = config
        self.verifier = verifier or MathVerifier(VerifierConfig())
        self.duplicates = self.conflicts = 0
        distinct: dict[str, Problem] = {}
        for file in config.files:
            for problem in read_problems(Path(file), config):
                first = distinct.setdefault(problem.prompt, problem)
                self.duplicates += first is not problem
                self.conflicts += first.answer != problem.answer
        sides: tuple[list[Problem], list[Problem]] = ([], [])
        for problem in distinct.values():
            sides[is_heldout(problem.prompt, config.heldout_fraction, config.seed)].append(problem)
        self._training, self._heldout = sides
        self._heldout.sort(key=lambda problem: stable_hash("order", config.seed, problem.prompt))
        self._epoch: tuple[int, list[Problem]] = (-1, [])

    @property
    def epoch_size(self) -> int:
        return len(self._training)

    def problem(self, index: int) -> Problem:
        """Position `index` of endless epochs, each of which holds every training problem once."""
        if index < 0:
            raise ValueError(f"problem index must be >= 0, got {index}")
        if not self._training:
            raise ValueError(f"no training problems: heldout_fraction is {self.config.heldout_fraction}")
        epoch, position = divmod(index, len(self._training))
        held, order = self._epoch
        if held != epoch:
            order = sorted(
                self._training, key=lambda p: stable_hash("epoch", self.config.seed, epoch, p.prompt)
            )
            self._epoch = (epoch, order)
        return order[position]

    def heldout(self, count: int) -> list[Problem]:
        """Up to `count` held-out problems; fewer when the files have no more."""
        if not self._heldout:
            raise ValueError(
                f"no held-out problems with heldout_fraction={self.config.heldout_fraction}; "
                "raise it, or set it to 1 for a file that is a test set"
            )
        return self._heldout[:count]

    def score(self, completion: str, problem: Problem) -> Verdict:
        return self.verifier.score(completion, problem.answer)

    def score_batch(self, completions: Sequence[tuple[str, Problem]]) -> list[Verdict]:
        return self.verifier.score_batch(
            [(completion, problem.answer) for completion, problem in completions]
        )

    def close(self) -> None:
        self.verifier.close()

    def __enter__(self) -> "JsonlTask":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_problems(file: Path, config: JsonlConfig) -> list[Problem]:
    """All rows of one file, in its order; a problem's uid is `<file stem>:<line>`."""
    try:
        lines = file.read_bytes().decode("utf-8").split("\n")
    except FileNotFoundError:
        raise DataError(f"{file}: no such file") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: not UTF-8 text: {error}") from None
    while lines and not lines[-1].strip():
        lines.pop()
    if not lines:
        raise DataError(f"{file}: empty; expected one JSON object a line")
    return [
        _problem(line, f"{file}:{number}", f"{file.stem}:{number}", config)
        for number, line in enumerate(lines, 1)
    ]


def _problem(line: str, place: str, uid: str, config: JsonlConfig) -> Problem:
    if not line.strip():
        raise DataError(f"{place}: empty line; expected a JSON object (blank lines may only end the file)")
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{place}: not JSON ({error}); expected one object a line") from None
    if not isinstance(row, dict):
        raise DataError(f"{place}: a JSON {type(row).__name__}; expected an object with {_expected(config)}")
    questions = [_text(row, field, place, config, numbers=False) for field in config.prompt_fields]
    answer = _gold(
        _text(row, config.answer_field, place, config, numbers=config.coerce_numbers), place, config
    )
    return Problem(config.prompt.replace("{prompt}", " ".join(questions)), answer, uid)


def _text(row: dict, field: str, place: str, config: JsonlConfig, *, numbers: bool) -> str:
    if field not in row:
        raise DataError(f"{place}: no field {field!r}; found {sorted(row)}, expected {_expected(config)}")
    value = row[field]
    if isinstance(value, list) and len(value) == 1 and field == config.answer_field:
        value = value[0]
    if isinstance(value, int | float) and not isinstance(value, bool):
        if numbers:
            return str(int(value)) if value == int(value) else repr(value)
        hint = "; set coerce_numbers=true to accept numbers" if field == config.answer_field else ""
        raise DataError(f"{place}: field {field!r} is the number {value!r}, expected a string{hint}")
    if not isinstance(value, str):
        raise DataError(f"{place}: field {field!r} is a JSON {type(value).__name__}, expected a string")
    if not value.strip():
        raise DataError(f"{place}: field {field!r} is blank, expected text")
    return value.strip()


def _gold(text: str, place: str, config: JsonlConfig) -> str:
    gold: str | None = text
    if config.answer_pattern is not None:
        found = re.search(config.answer_pattern, text)
        gold = found.group(1 if found.re.groups else 0) if found else None
        if not gold:
            shown = repr(text[-80:])
            raise DataError(
                f"{place}: answer_pattern {config.answer_pattern!r} does not match "
                f"field {config.answer_field!r}, which ends in {shown}"
            )
    elif config.answer_boxed:
        gold = last_boxed(text)
        if not gold:
            raise DataError(f"{place}: no complete \\boxed{{...}} in field {config.answer_field!r}")
    return gold.strip()


def _expected(config: JsonlConfig) -> str:
    return f"prompt_fields={list(config.prompt_fields)} and answer_field={config.answer_field!r}"
