"""A benchmark file that the quickstart model can read, and the command line that evaluates on it."""

import json
from pathlib import Path

from triage_jax.evaluate.records import Record, read_records
from triage_jax.tasks.arithmetic import ArithmeticConfig, ArithmeticTask

PROBLEMS, SAMPLES = 8, 3
BATCH = 4


def write_sums(directory: Path) -> Path:
    """The quickstart's own task: chains of additions whose running sums must all be right."""
    task = ArithmeticTask(ArithmeticConfig(digits=1, terms=5, show_sums=True, heldout_fraction=0.1))
    path = directory / "sums.jsonl"
    rows = ({"prompt": problem.prompt, "answer": problem.answer} for problem in task.heldout(PROBLEMS))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def arguments(out: Path, file: Path, *more: str) -> list[str]:
    return [
        *("--out", str(out), "--own.files", str(file), "--own.prompt", "{prompt}", "--own.match", "exact"),
        *("--samples", str(SAMPLES), "--max-new-tokens", "28"),
        *("--local.batch-size", str(BATCH), "--local.prompt-bucket", "10"),
        *more,
    ]


def records(out: Path) -> dict[tuple[str, int], Record]:
    """Every sample of an evaluation, once."""
    found = list(read_records(out / "samples.jsonl"))
    by_sample = {(record.problem, record.sample): record for record in found}
    assert len(by_sample) == len(found), "a sample was drawn twice"
    return by_sample
