"""The metrics of one step, as they go to the log; keys name the mean they are."""

from typing import Any

import jax
import numpy as np

from triage_jax.learner import LearnerState, RolloutBatch, UpdateReport
from triage_jax.model import TokenScores
from triage_jax.objective import finalize
from triage_jax.rollout import Sample
from triage_jax.tasks.protocol import Verdict, count_statuses


def describe_step(
    samples: list[Sample],
    verdicts: list[Verdict],
    flat_groups: int,
    scores: TokenScores,
    batch: RolloutBatch,
    outcome: UpdateReport,
    state: LearnerState,
) -> dict[str, Any]:
    """Metrics of one step, without times; keys name the mean they are."""
    lengths = np.array([len(sample.token_ids) for sample in samples])
    rewards = np.array([verdict.reward for verdict in verdicts], np.float64)
    reasons = [sample.finish_reason for sample in samples]
    mask = np.asarray(batch.mask)
    entropy = np.asarray(scores.entropy)[mask]
    on_host = jax.device_get(finalize(outcome.metrics))
    return {
        "reward/mean/response": rewards.mean(),
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
        "rollout/weight_version": min(int(sample.weight_versions.min()) for sample in samples),
    }


def timings(
    started: float, sampled: float, learned: float, refitted: float, samples: list[Sample]
) -> dict[str, float]:
    tokens = sum(len(sample.token_ids) for sample in samples)
    return {
        "time/rollout": sampled - started,
        "time/learner": learned - sampled,
        "time/refit": refitted - learned,
        "time/step": refitted - started,
        "throughput/rollout_tokens_per_second": tokens / (sampled - started),
        "throughput/tokens_per_second": tokens / (refitted - started),
    }
