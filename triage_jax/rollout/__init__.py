"""Engines that sample: one protocol, the in-process engine."""

from triage_jax.rollout.local import LocalEngine, LocalEngineConfig
from triage_jax.rollout.protocol import (
    Capabilities,
    Engine,
    EngineError,
    FinishReason,
    Progress,
    Request,
    Sample,
    SamplingParams,
    refuse_truncated_distribution,
)

__all__ = [
    "Capabilities",
    "Engine",
    "EngineError",
    "FinishReason",
    "LocalEngine",
    "LocalEngineConfig",
    "Progress",
    "Request",
    "Sample",
    "SamplingParams",
    "refuse_truncated_distribution",
]
