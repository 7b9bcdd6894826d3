"""Samples on disk: one JSON object per line, appended as each is finished, read back as a stream."""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from triage_jax.rollout import FinishReason
from triage_jax.tasks.protocol import STATUSES, Status


class RecordError(ValueError):
    """A file of samples that cannot be trusted; names file and line."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """One finished sample and its verdict."""

    problem: str
    """`<benchmark>:<line>`"""
    sample: int
    seed: int
    finish: FinishReason
    tokens: int
    status: Status
    answer: str | None
    """What was read from the response"""
    response: str | None
    """Its text, if it is kept"""

    @property
    def benchmark(self) -> str:
        return self.problem.rpartition(":")[0]

    @property
    def right(self) -> bool:
        return self.status == "right"


class RecordFile:
    """Appends records; each is on disk when `append` returns, in one write.

    Opening repairs what a crash left: a last line without its end is cut off. Raises RecordError for any other line
    that is no record.
    """

    def __init__(self, path: Path, seen: Callable[[Record], None]) -> None:
        """`seen` is told every record that is there already, in order; none is kept."""
        self.repaired = 0
        """Bytes of the half-written line that was cut off"""
        if path.exists():
            whole = 0
            for record, end in _records(path):
                seen(record)
                whole = end
            self.repaired = path.stat().st_size - whole
            if self.repaired:
                os.truncate(path, whole)
        self._file = path.open("ab", buffering=0)

    def append(self, record: Record) -> None:
        line = (
            json.dumps(asdict(record), ensure_ascii=False, allow_nan=False).encode("utf-8", "replace") + b"\n"
        )
        view = memoryview(line)
        while view:  # a raw write may be partial, on a disk that fills up
            view = view[self._file.write(view) :]
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_records(path: Path) -> Iterator[Record]:
    """Every whole line, one at a time; raises RecordError naming file and line."""
    return (record for record, _ in _records(path))


def rewrite(path: Path, change: Callable[[Record], Record]) -> None:
    """Replace every record; a crash leaves the old file or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8", errors="replace") as file:
        for record in read_records(path):
            file.write(json.dumps(asdict(change(record)), ensure_ascii=False, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


_FIELDS = {item.name for item in fields(Record)}


def _records(path: Path) -> Iterator[tuple[Record, int]]:
    """Each record of a whole line, and the file's length up to its end."""
    end = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            end += len(line)
            yield _parse(line, f"{path}:{number}"), end


def _parse(line: bytes, place: str) -> Record:
    try:
        row = json.loads(line)
    except ValueError:
        raise RecordError(f"{place}: not JSON; a sample per line is expected") from None
    if not isinstance(row, dict) or row.keys() != _FIELDS:
        raise RecordError(f"{place}: not a sample; expected an object with {', '.join(sorted(_FIELDS))}")
    if row["status"] not in STATUSES:
        raise RecordError(f"{place}: status {row['status']!r}; accepted: {', '.join(STATUSES)}")
    return Record(**row)
