"""The metrics of one step, as they go to the log; keys name the mean they are."""

from typing import Any

import jax
import numpy as np

from triage_jax.learner import LearnerState, RolloutBatch, UpdateReport
from triage_jax.model import TokenScores
from triage_jax.objective import TriageConfig, Variant, finalize, objective_by_name
from triage_jax.pipeline import Rollout
from triage_jax.rollout import Sample
from triage_jax.tasks.protocol import Verdict, count_statuses


def describe_step(
    samples: list[Sample],
    verdicts: list[Verdict],
    rewards: np.ndarray,
    flat_groups: int,
    scores: TokenScores,
    batch: RolloutBatch,
    outcome: UpdateReport,
    state: LearnerState,
) -> dict[str, Any]:
    """Metrics of one step, without times; keys name the mean they are."""
    lengths = np.array([len(sample.token_ids) for sample in samples])
    rewards = rewards[np.isfinite(rewards)]
    reasons = [sample.finish_reason for sample in samples]
    mask = np.asarray(batch.mask)
    entropy = np.asarray(scores.entropy)[mask]
    on_host = jax.device_get(finalize(outcome.metrics))
    return {
        "reward/mean/response": rewards.mean() if rewards.size else None,
        "reward/flat_groups": flat_groups,
        **{f"verdict/{status}": count for status, count in count_statuses(verdicts).items()},
        "response/length_mean": lengths.mean(),
        "response/length_max": int(lengths.max()),
        "response/truncated": reasons.count("length"),
        "response/aborted": reasons.count("abort"),
        "entropy/token": entropy.mean() if entropy.size else None,
        **on_host,
        "optimizer/grad_norm": float(outcome.grad_norm),
        "optimizer/update_norm": float(outcome.update_norm),
        "optimizer/param_norm": float(outcome.param_norm),
        "optimizer/applied": int(outcome.applied),
        "optimizer/skipped": int(state.skipped),
        "rollout/weight_version": min(
            (int(sample.weight_versions.min()) for sample in samples if sample.weight_versions.size),
            default=None,
        ),
    }


def parts_in_force(config: TriageConfig) -> dict[str, int]:
    """Flags of the objective's parts, as the official loss logs them: 1 where a part acts on the update."""
    objective = objective_by_name(config.name)
    own = objective.settings(config) if isinstance(objective, Variant) else config
    return {
        "gate/enabled": int(own.gate.enabled),
        "gate/calibrated": int(config.name == "triage_calibrated" and not config.awaits_calibration),
        "gate/whole_scope": int(own.gate.scope == "whole"),
        "repair/enabled": int(own.repair.enabled),
        "repair/start_step": own.repair.start_step,
        "tis/enabled": int(own.tis.enabled),
    }


def gap_split(now: np.ndarray, at_draw: np.ndarray, batch: RolloutBatch) -> dict[str, Any]:
    """The gap as a sum: (now - at_draw), older weights, plus (at_draw - sampler), other numerics of the same weights.

    `now` and `at_draw` are the learner's log-probabilities `[B, N]` under its present weights and under those that
    drew each token.
    """
    mask = np.asarray(batch.mask)
    parts = {"staleness": now - at_draw, "numerics": at_draw - np.asarray(batch.sampler_logp)}
    return {
        f"gap/{name}_abs_mean/token": np.abs(part[mask]).mean() if mask.any() else None
        for name, part in parts.items()
    }


def label_residual(row: dict[str, Any]) -> dict[str, Any]:
    """The same row for a learner that followed the sampler's experts: its gap lacks what routing would add."""
    return {f"residual_{key}" if key.startswith("gap/") else key: value for key, value in row.items()}


def timings(
    started: float, sampled: float, learned: float, refitted: float, rollout: Rollout
) -> dict[str, float]:
    """Seconds by purpose. `time/rollout` is the engine's own time, of which `time/wait` was waited for."""
    tokens = sum(len(sample.token_ids) for sample in rollout.samples)
    return {
        "time/rollout": rollout.seconds,
        "time/wait": sampled - started,
        "time/learner": learned - sampled,
        "time/refit": refitted - learned,
        "time/step": refitted - started,
        "throughput/rollout_tokens_per_second": tokens / rollout.seconds,
        "throughput/tokens_per_second": tokens / (refitted - started),
    }
