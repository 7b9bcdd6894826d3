"""The public benchmarks: which file, which fields, and the bytes that are known to be right."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from triage_jax.tasks.jsonl import BOXED_INSTRUCTION, GSM8K_ANSWER, DataError, JsonlConfig, read_problems
from triage_jax.tasks.protocol import Problem

type BenchmarkName = Literal[
    "aime24", "aime25", "math500", "amc23", "gsm8k", "minerva_math", "olympiadbench", "svamp"
]
type Matching = Literal["math", "exact", "last_number"]


@dataclass(frozen=True, kw_only=True)
class Format:
    """One public benchmark: `<name>_test.jsonl` with these fields. sha256: of the copy the docs name."""

    fields: JsonlConfig
    rows: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """Problems in the order of their file; a problem's uid is `<name>:<line>`, whatever the file is called."""

    name: str
    file: Path
    problems: Sequence[Problem]
    rows: int
    """Of the file, before any limit"""
    sha256: str
    matching: Matching

    @property
    def known(self) -> bool | None:
        """Whether the file has the bytes it should have; None where nothing is known of it."""
        return self.sha256 == FORMATS[self.name].sha256 if self.name in FORMATS else None


def _format(rows: int, sha256: str, **fields: Any) -> Format:
    config = JsonlConfig(prompt=BOXED_INSTRUCTION, heldout_fraction=1.0, **fields)
    return Format(fields=config, rows=rows, sha256=sha256)


FORMATS: dict[str, Format] = {
    "aime24": _format(
        30,
        "af2b8bd2aa911b6333ad0df32f3ca05c7ae8ed10f1731f4372c8ae26990bf7ac",
        prompt_fields=("problem",),
    ),
    "aime25": _format(
        30,
        "b672f9c6660b68dd42f5fc705b17405f24eaa9991c98991d63463c6b683468a8",
        prompt_fields=("problem",),
        answer_field="expected_answer",
    ),
    "math500": _format(
        500,
        "35dc41080a3680858b27fa7e0533d2d547825316fc5dafe5d316f4ccc5a06132",
        prompt_fields=("problem",),
    ),
    "amc23": _format(
        40,
        "43707e1ca784602d8479de24ee8ce36609dbebc46dd152b0b12a46611aa898a4",
        prompt_fields=("problem",),
        coerce_numbers=True,
    ),
    "gsm8k": _format(
        1319,
        "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
        prompt_fields=("question",),
        answer_pattern=GSM8K_ANSWER,
    ),
    "minerva_math": _format(
        272,
        "0e656b430d3a0a1dab6aa853f453ba3805e28e2cabe4fc72486a897cc09d8ba2",
        prompt_fields=("problem",),
        answer_field="solution",
        answer_boxed=True,
    ),
    "olympiadbench": _format(
        675,
        "bb8c1e38a16ea9eacb77530315a674d883f267fbff79183effc53681b4fcc416",
        prompt_fields=("question",),
        answer_field="final_answer",
    ),
    "svamp": _format(
        1000,
        "d0826ff1264f3860e46fc4e71db9e31d2d188960db87090e22677f9493e67a0d",
        prompt_fields=("Body", "Question"),
        answer_field="Answer",
        coerce_numbers=True,
    ),
}
REPORTED: tuple[BenchmarkName, ...] = ("aime24", "aime25", "math500", "amc23", "gsm8k")
"""Those of the reported runs, in their order"""


def load_benchmark(name: str, directory: Path, *, limit: int | None = None) -> Benchmark:
    """A public benchmark from `<name>_test.jsonl` in the directory; raises DataError naming file and line."""
    file = directory / f"{name}_test.jsonl"
    return read_benchmark(name, file, FORMATS[name].fields, "math", limit=limit)


def read_benchmark(
    name: str, file: Path, fields: JsonlConfig, matching: Matching, *, limit: int | None = None
) -> Benchmark:
    """Every row of a file, repeated ones too, or the first `limit` of them; raises DataError."""
    problems = read_problems(file, fields)
    named = [replace(problem, uid=f"{name}:{line}") for line, problem in enumerate(problems[:limit], start=1)]
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return Benchmark(
        name=name, file=file, problems=named, rows=len(problems), sha256=digest, matching=matching
    )


def check_distinct(benchmarks: Sequence[Benchmark]) -> None:
    """Raise DataError where two benchmarks have one name: their samples could not be told apart."""
    seen: dict[str, Path] = {}
    for benchmark in benchmarks:
        if benchmark.name in seen:
            raise DataError(
                f"{benchmark.file}: its benchmark is called {benchmark.name!r}, as that of "
                f"{seen[benchmark.name]}; rename one of the files"
            )
        seen[benchmark.name] = benchmark.file
