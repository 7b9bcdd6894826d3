"""The trainer's part in the calibrated Gate: collect the reference window, freeze it, keep the file."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from triage_jax.config import ConfigError
from triage_jax.learner import Learner, RolloutBatch
from triage_jax.metrics import write_atomically
from triage_jax.objective import ReferenceUpdate, calibrate, calibration_from_json


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
