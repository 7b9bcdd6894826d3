"""The records of finished trials, read and checked."""

import json
from dataclasses import dataclass
from pathlib import Path

from scripts.study.arms import ARMS, Arm, fingerprint
from scripts.study.trial import FORMAT, Record

RESULTS = Path("docs/study/results")


@dataclass(frozen=True, kw_only=True)
class Records:
    """All trials of a study."""

    arms: tuple[Arm, ...]
    trials: tuple[Record, ...]


def read_records(results: Path = RESULTS) -> Records:
    """Every record of the folder.

    Raises ValueError for one that is not a record, is named after another trial, or belongs to another configuration.
    """
    trials = [_read(path) for path in sorted(results.glob("*.json"))]
    return Records(arms=tuple(ARMS.values()), trials=tuple(trials))


def of_arm(records: Records, arm: str) -> list[Record]:
    """The trials of an arm in the order of their seeds."""
    return sorted((trial for trial in records.trials if trial["arm"] == arm), key=lambda trial: trial["seed"])


def _read(path: Path) -> Record:
    record = json.loads(path.read_text(encoding="utf-8"))
    if record.get("format") != FORMAT:
        raise ValueError(f"{path}: format is {record.get('format')!r}; accepted: {FORMAT!r}")
    if path.stem != f"{record['arm']}-{record['seed']}" or record["arm"] not in ARMS:
        raise ValueError(f"{path}: holds arm {record['arm']!r}, seed {record['seed']}")
    if record["fingerprint"] != (wanted := fingerprint(ARMS[record["arm"]])):
        raise ValueError(
            f"{path}: made with configuration {record['fingerprint']}; the arm's is {wanted} now"
        )
    return record
