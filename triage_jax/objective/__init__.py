"""The TRIAGE objective on arrays: log-probabilities, advantages and a mask in; loss and metrics out.

Knows no model, no engine and no file. Per-update sums (`update_totals`) and Gate weights (`gate_weights`) are
computed once; `triage_loss` then gives the same loss and gradient for any split of the batch. `OBJECTIVES` has its
variants and rivals in the same signature; `update_inputs` makes weights and totals for the one that the
configuration names.
"""

from triage_jax.objective.balance import balance_advantages
from triage_jax.objective.batch import Response, TokenBatch, Totals, update_totals
from triage_jax.objective.calibrated_gate import calibrated_gate_weights
from triage_jax.objective.calibration import (
    GateCalibration,
    ReferenceUpdate,
    calibrate,
    calibration_from_json,
)
from triage_jax.objective.config import (
    BalanceConfig,
    CalibrationConfig,
    ClipConfig,
    GateConfig,
    Reduction,
    RepairConfig,
    TisConfig,
    TriageConfig,
)
from triage_jax.objective.gate import gate_weights
from triage_jax.objective.loss import triage_loss
from triage_jax.objective.metrics import (
    EffectiveSize,
    Max,
    Mean,
    Metrics,
    Min,
    Sum,
    all_reduce,
    collapse,
    finalize,
    merge,
)
from triage_jax.objective.mismatch import mismatch_metrics
from triage_jax.objective.policy import TokenLosses
from triage_jax.objective.registry import OBJECTIVES, objective_by_name, update_inputs
from triage_jax.objective.repair import repair_loss
from triage_jax.objective.rival_config import RivalConfig
from triage_jax.objective.variants import Objective, Variant

__all__ = [
    "OBJECTIVES",
    "BalanceConfig",
    "CalibrationConfig",
    "ClipConfig",
    "EffectiveSize",
    "GateCalibration",
    "GateConfig",
    "Max",
    "Mean",
    "Metrics",
    "Min",
    "Objective",
    "Reduction",
    "ReferenceUpdate",
    "RepairConfig",
    "Response",
    "RivalConfig",
    "Sum",
    "TisConfig",
    "TokenBatch",
    "TokenLosses",
    "Totals",
    "TriageConfig",
    "Variant",
    "all_reduce",
    "balance_advantages",
    "calibrate",
    "calibrated_gate_weights",
    "calibration_from_json",
    "collapse",
    "finalize",
    "gate_weights",
    "merge",
    "mismatch_metrics",
    "objective_by_name",
    "repair_loss",
    "triage_loss",
    "update_inputs",
    "update_totals",
]
