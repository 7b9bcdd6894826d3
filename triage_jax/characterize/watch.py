"""Reading a run's metrics while it writes them, and saying how it does."""

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from triage_jax.characterize.dumps import DumpError
from triage_jax.characterize.health import Finding, assess
from triage_jax.characterize.names import FRAMEWORKS, NAMES

METRICS = "metrics.jsonl"
LOG_HISTORY = "log_history"


def metrics_file(path: Path) -> Path:
    """The metrics of a run, or the file itself: JSONL, or the `trainer_state.json` that TRL saves.

    Raises DumpError, or FileNotFoundError.
    """
    if path.is_dir():
        for name in (METRICS, "trainer_state.json"):
            if (path / name).is_file():
                return path / name
        raise DumpError(f"{path}: neither {METRICS} nor trainer_state.json")
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or directory")
    return path


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Rows of a metrics file; a last line that is still being written is left out.

    Raises DumpError naming the line, or the field that a JSON file lacks.
    """
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".json":
        try:
            rows = json.loads(text)[LOG_HISTORY]
        except (ValueError, KeyError, TypeError):
            raise DumpError(
                f"{file}: no list `{LOG_HISTORY}`; accepted: TRL's trainer_state.json, or JSONL"
            ) from None
        return [row for row in rows if isinstance(row, dict)]
    rows = []
    for number, line in enumerate(text.split("\n")[:-1], start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            raise DumpError(f"{file}:{number}: not JSON; accepted: one object of metrics per line") from None
        if not isinstance(row, dict):
            raise DumpError(f"{file}:{number}: not an object; accepted: one object of metrics per line")
        rows.append(row)
    return rows


def watch(path: Path, interval: float, console: Console) -> bool:
    """Print the health of a run, again whenever it has logged more; once if `interval` is 0. True if all is well."""
    file = metrics_file(path)
    healthy = True
    for rows in _versions(file, interval):
        findings = assess(rows)
        healthy = all(finding.healthy for finding in findings)
        print_findings(findings, len(rows), console)
    return healthy


def _versions(file: Path, interval: float) -> Iterator[list[dict[str, Any]]]:
    seen = -1
    while True:
        rows = read_rows(file)
        if len(rows) != seen:
            seen = len(rows)
            yield rows
        if interval <= 0:
            return
        time.sleep(interval)


def print_findings(findings: Sequence[Finding], rows: int, console: Console) -> None:
    """One line per verdict, what is wrong first."""
    if not findings:
        console.print(f"{rows} rows, none with metrics of an update", markup=False)
        return
    wrong = [finding for finding in findings if not finding.healthy]
    console.print(
        f"step {findings[-1].step}: "
        + (f"{len(wrong)} of {len(findings)} checks ask for a look" if wrong else "healthy"),
        style="bold",
        markup=False,
    )
    for finding in sorted(findings, key=lambda finding: finding.healthy):
        mark = "  ok    " if finding.healthy else "  LOOK  "
        console.print(mark + finding.text, markup=False, soft_wrap=True)


def print_names(console: Console) -> None:
    """What each of our metrics is called elsewhere."""
    for key, by in NAMES.items():
        console.print(key, style="bold", markup=False)
        for framework in FRAMEWORKS:
            if framework in by:
                console.print(f"  {framework:8}{', '.join(by[framework])}", markup=False, soft_wrap=True)
