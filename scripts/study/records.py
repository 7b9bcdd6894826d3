"""The records of finished trials, read and checked."""

import json
from dataclasses import dataclass
from pathlib import Path

from scripts.study.arms import ARMS, REGIMES, Arm, fingerprint, regime_path
from scripts.study.trial import FORMAT, Record

RESULTS = Path("docs/study/results")


@dataclass(frozen=True, kw_only=True)
class Records:
    """All trials of a study."""

    arms: tuple[Arm, ...]
    trials: tuple[Record, ...]


def read_records(results: Path = RESULTS) -> Records:
    """Every record of the folder, which has a folder per regime.

    Raises ValueError for one that is not a record, is named after another trial, or belongs to another configuration.
    """
    trials = [_read(path) for path in sorted(results.glob("*/*.json"))]
    return Records(arms=tuple(ARMS.values()), trials=tuple(trials))


def of_arm(records: Records, regime: str, arm: str) -> list[Record]:
    """The trials of an arm in a regime, in the order of their seeds."""
    found = [trial for trial in records.trials if (trial["regime"], trial["arm"]) == (regime, arm)]
    return sorted(found, key=lambda trial: trial["seed"])


def _read(path: Path) -> Record:
    record = json.loads(path.read_text(encoding="utf-8"))
    if record.get("format") != FORMAT:
        raise ValueError(f"{path}: format is {record.get('format')!r}; accepted: {FORMAT!r}")
    regime, arm, seed = record["regime"], record["arm"], record["seed"]
    if (path.parent.name, path.stem) != (regime, f"{arm}-{seed}") or regime not in REGIMES or arm not in ARMS:
        raise ValueError(f"{path}: holds regime {regime!r}, arm {arm!r}, seed {seed}")
    if record["fingerprint"] != (wanted := fingerprint(ARMS[arm], regime_path(regime))):
        raise ValueError(
            f"{path}: made with configuration {record['fingerprint']}; the arm's is {wanted} now"
        )
    return record
