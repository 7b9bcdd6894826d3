"""Where a run's numbers go: one JSON object per line, always; TensorBoard and Weights & Biases beside it."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

type Row = dict[str, Any]
UNREPEATABLE = ("time/", "throughput/")
"""Prefixes of what differs between two runs of the same seed"""


@runtime_checkable
class Tracker(Protocol):
    """A sink beside the JSONL file."""

    def log(self, row: Row, step: int) -> None: ...

    def close(self) -> None: ...


class MetricLog:
    """Appends rows to `metrics.jsonl` and hands them to trackers.

    A row is flushed to disk before `log` returns. Opening with `keep_steps` drops the rows of later steps (and a line
    that a crash cut short), so that a resumed run has each step once.
    """

    def __init__(self, path: Path, trackers: list[Tracker], *, keep_steps: int | None = None) -> None:
        self._trackers = trackers
        self._kept: list[Row] = []
        if keep_steps is not None and path.exists():
            self._kept = [row for row in read_metrics(path) if row["step"] <= keep_steps]
            write_atomically(path, "".join(_line(row) for row in self._kept))
        self._file = path.open("a", encoding="utf-8")

    def log(self, row: Mapping[str, Any], step: int) -> None:
        """Write one row; NaN and infinities become null, which JSON has and NaN is not."""
        clean: Row = {"step": step} | {key: _plain(value) for key, value in row.items()}
        self._file.write(_line(clean))
        self._file.flush()
        os.fsync(self._file.fileno())
        for tracker in self._trackers:
            tracker.log(clean, step)

    def has(self, key: str, step: int) -> bool:
        """Whether a row kept from before the resume holds `key` at `step`: it need not be measured again."""
        return any(row["step"] == step and key in row for row in self._kept)

    def close(self) -> None:
        self._file.close()
        for tracker in self._trackers:
            tracker.close()


class TensorBoard:
    """Scalars for TensorBoard; `resume_at` hides what an earlier process logged after the checkpoint."""

    def __init__(self, directory: Path, resume_at: int | None = None) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(directory), purge_step=resume_at)

    def log(self, row: Row, step: int) -> None:
        for key, value in row.items():
            if isinstance(value, int | float) and key != "step":
                self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """Needs the `wandb` extra; raises ImportError naming it."""

    def __init__(self, project: str, directory: Path, config: Mapping[str, Any]) -> None:
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise ImportError(
                "track.wandb_project is set, and wandb is not installed: pip install 'triage-jax[wandb]'"
            ) from None
        self._run = wandb.init(project=project, dir=str(directory), config=dict(config), resume="allow")

    def log(self, row: Row, step: int) -> None:
        self._run.log({key: value for key, value in row.items() if value is not None}, step=step)

    def close(self) -> None:
        self._run.finish()


def read_metrics(path: Path) -> list[Row]:
    """Rows of a metrics file; a last line without its newline is left out: a crash cut it short.

    Raises ValueError naming file and line for any other line that is not a JSON object with a step.
    """
    rows: list[Row] = []
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines[:-1], start=1):
        try:
            row = json.loads(line)
            int(row["step"])
        except (ValueError, TypeError, KeyError):
            raise ValueError(f"{path}:{number}: not a metrics row (a JSON object with a step)") from None
        rows.append(row)
    return rows


def repeatable(row: Row) -> Row:
    """A row without wall-clock figures: equal, bit for bit, in runs of the same seed on one device."""
    return {key: value for key, value in row.items() if not key.startswith(UNREPEATABLE)}


def _plain(value: Any) -> float | int | str | None:
    if isinstance(value, str | bool | int) or value is None:
        return value
    number = float(value)
    return number if math.isfinite(number) else None


def _line(row: Row) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


def write_atomically(path: Path, text: str) -> None:
    """Write a small file so that a crash leaves the old one or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
