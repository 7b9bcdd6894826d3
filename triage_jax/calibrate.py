"""Thresholds of the calibrated Gate: collected by the trainer from a run's first updates, or from dumps.

`python -m triage_jax.calibrate RUN_OR_DUMP...` is the second way.
"""

import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
import yaml
from rich.console import Console

from triage_jax.characterize.files import open_source
from triage_jax.config import ConfigError
from triage_jax.learner import Learner, RolloutBatch
from triage_jax.metrics import write_atomically
from triage_jax.objective import (
    CalibrationConfig,
    GateCalibration,
    ReferenceUpdate,
    TriageConfig,
    calibrate,
    calibration_from_json,
)

DESCRIPTION = """Thresholds of the calibrated Gate from dumps of a run that was made with Gate and Repair off.

Reads what `python -m triage_jax.characterize` reads, the earliest updates first. Writes the frozen thresholds as JSON
and, beside it, a YAML file that the trainer takes: python -m triage_jax.train --config YOURS --config FILE.yaml"""


class GateCalibrator:
    """Learner with the thresholds of `path`, or of the first `calibration.updates` updates that `see` is shown.

    Without effect unless the objective is `triage_calibrated`. A window that a restart interrupts begins anew.
    Raises ConfigError for a file that does not belong to this configuration.
    """

    def __init__(self, learner: Learner, path: Path) -> None:
        self.learner = learner
        self._path = path
        self._window: list[ReferenceUpdate] = []
        if learner.objective.awaits_calibration and path.exists():
            try:
                calibration = calibration_from_json(path.read_text(encoding="utf-8"), str(path))
                self.learner = replace(learner, objective=calibration.freeze(learner.objective))
            except ValueError as error:
                raise ConfigError(str(error)) from None

    def see(self, learner_logp: np.ndarray, batch: RolloutBatch) -> None:
        """Add an update to the window; with the last one, freeze the thresholds and write them."""
        objective = self.learner.objective
        if not objective.awaits_calibration:
            return
        gap = learner_logp - batch.sampler_logp
        self._window.append(ReferenceUpdate(gap, np.asarray(batch.advantages), np.asarray(batch.mask)))
        if len(self._window) < objective.calibration.updates:
            return
        calibration = calibrate(self._window, objective)
        write_atomically(self._path, calibration.to_json())
        self.learner = replace(self.learner, objective=calibration.freeze(objective))
        self._window.clear()


def from_dumps(paths: Sequence[Path], config: TriageConfig) -> GateCalibration:
    """Thresholds from the first `calibration.updates` updates in files that `open_source` knows.

    Raises ValueError where there are fewer, where a file cannot be used, and as `calibrate` does.
    """
    wanted = config.calibration.updates
    dumps = itertools.islice(open_source(list(paths)).dumps(), wanted)
    window = [ReferenceUpdate(d.learner_logp - d.sampler_logp, d.advantages, d.mask) for d in dumps]
    if len(window) < wanted:
        raise ValueError(f"{len(window)} updates in the dumps; calibration.updates asks for {wanted}")
    return calibrate(window, config)


@dataclass(frozen=True, kw_only=True)
class _Command:
    sources: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN_OR_DUMP")]
    """Runs, directories of dumps, or files"""
    out: Path = Path("gate_calibration.json")
    """File for the thresholds; the trainer's YAML lies beside it"""
    segment: int = TriageConfig().gate.segment
    """Token positions per segment (objective.gate.segment)"""
    window: Annotated[CalibrationConfig, tyro.conf.arg(name="")] = field(default_factory=CalibrationConfig)


def _overlay(calibration: GateCalibration) -> str:
    """The calibration as the trainer's configuration."""
    settings = {"thresholds": list(calibration.thresholds), "floor": calibration.floor}
    gate = {"segment": calibration.segment}
    return yaml.safe_dump(
        {"objective": {"name": "triage_calibrated", "gate": gate, "calibration": settings}}, sort_keys=False
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    command = tyro.cli(
        _Command, prog="python -m triage_jax.calibrate", description=DESCRIPTION, args=arguments
    )
    console = Console()
    if command.window.thresholds:
        print("calibrate: --thresholds is what this command finds; it takes none", file=sys.stderr)
        return 2
    base = TriageConfig(name="triage_calibrated", calibration=command.window)
    try:
        config = replace(base, gate=replace(base.gate, segment=command.segment))
        calibration = from_dumps(command.sources, config)
        write_atomically(command.out, calibration.to_json())
        write_atomically(command.out.with_suffix(".yaml"), _overlay(calibration))
    except (ValueError, OSError) as error:
        print(f"calibrate: {error}", file=sys.stderr)
        return 2
    console.print_json(json.dumps(json.loads(calibration.to_json())))
    console.print(
        f"written: {command.out} and {command.out.with_suffix('.yaml')}", soft_wrap=True, markup=False
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
