"""The TRIAGE objective on arrays: log-probabilities, advantages and a mask in; loss and metrics out.

Knows no model, no engine and no file. Per-update sums (`update_totals`) and Gate weights (`gate_weights`) are
computed once; `triage_loss` then gives the same loss and gradient for any split of the batch.
"""

from triage_jax.objective.batch import TokenBatch, Totals, update_totals
from triage_jax.objective.config import (
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
from triage_jax.objective.repair import repair_loss

__all__ = [
    "ClipConfig",
    "EffectiveSize",
    "GateConfig",
    "Max",
    "Mean",
    "Metrics",
    "Min",
    "Reduction",
    "RepairConfig",
    "Sum",
    "TisConfig",
    "TokenBatch",
    "Totals",
    "TriageConfig",
    "all_reduce",
    "collapse",
    "finalize",
    "gate_weights",
    "merge",
    "mismatch_metrics",
    "repair_loss",
    "triage_loss",
    "update_totals",
]
