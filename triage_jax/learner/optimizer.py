"""Adam as the reported runs use it (objective.md §1.8)."""

from dataclasses import dataclass

import jax
import optax

from triage_jax.model import Params


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with a constant rate after an optional linear warm-up, and global-norm clipping."""

    learning_rate: float = 1e-6
    """Peak rate; constant after the warm-up"""
    warmup_steps: int = 0
    """Updates over which the rate rises linearly from learning_rate / warmup_steps"""
    beta1: float = 0.9
    beta2: float = 0.98
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    """Decoupled; matrices only, never norm gains"""
    max_grad_norm: float = 1.0
    """Gradients with a larger global norm are scaled down to it"""

    def __post_init__(self) -> None:
        if self.learning_rate < 0 or self.warmup_steps < 0 or self.weight_decay < 0:
            raise ValueError("optimizer: learning_rate, warmup_steps and weight_decay must not be negative")
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise ValueError(f"optimizer: betas ({self.beta1}, {self.beta2}); accepted: [0, 1)")
        if self.max_grad_norm <= 0 or self.epsilon <= 0:
            raise ValueError("optimizer: max_grad_norm and epsilon must be positive")


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Clip by global norm, then AdamW with float32 moments."""
    rate = config.learning_rate
    if config.warmup_steps:
        first = rate / config.warmup_steps
        schedule = optax.linear_schedule(first, rate, max(config.warmup_steps - 1, 1))
    else:
        schedule = optax.constant_schedule(rate)
    return optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        optax.adamw(
            schedule,
            b1=config.beta1,
            b2=config.beta2,
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            mask=_is_matrix,
        ),
    )


def _is_matrix(params: Params) -> Params:
    """True for matrices. Norm gains end in `norm`; stacked over layers they have two axes, so rank does not tell."""

    def decayed(path: jax.tree_util.KeyPath, _: jax.Array) -> bool:
        return not str(path[-1]).endswith("norm")

    return jax.tree_util.tree_map_with_path(decayed, params)
