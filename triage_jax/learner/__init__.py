"""One update of the policy: advantages, batch, gradient, optimiser step, mesh, checkpoint."""

from triage_jax.learner.advantages import GroupAdvantages, group_advantages
from triage_jax.learner.batch import RolloutBatch, pack_batch
from triage_jax.learner.checkpoint import CheckpointError, Checkpoints
from triage_jax.learner.optimizer import OptimizerConfig, make_optimizer
from triage_jax.learner.sharding import (
    MeshConfig,
    batch_sharding,
    make_mesh,
    parameter_shardings,
    replicated,
)
from triage_jax.learner.update import (
    Learner,
    LearnerConfig,
    LearnerState,
    UpdateReport,
    init_state,
    score,
    update,
)

__all__ = [
    "CheckpointError",
    "Checkpoints",
    "GroupAdvantages",
    "Learner",
    "LearnerConfig",
    "LearnerState",
    "MeshConfig",
    "OptimizerConfig",
    "RolloutBatch",
    "UpdateReport",
    "batch_sharding",
    "group_advantages",
    "init_state",
    "make_mesh",
    "make_optimizer",
    "pack_batch",
    "parameter_shardings",
    "replicated",
    "score",
    "update",
]
