"""Settings of the TRIAGE objective. `TriageConfig()` is the configuration of the paper's reported runs."""

import math
from dataclasses import dataclass, field
from typing import Literal

Reduction = Literal["response", "token", "fixed"]


def _require(holds: bool, name: str, value: object, accepted: str) -> None:
    if not holds:
        raise ValueError(f"{name} is {value!r}; accepted: {accepted}")


def _require_weight(name: str, value: float) -> None:
    _require(
        0 <= value <= 1 and math.isclose(100 * value, round(100 * value), abs_tol=1e-9),
        name,
        value,
        "a multiple of 0.01 in [0, 1] (Gate weights are whole hundredths, so that their sums are exact)",
    )


@dataclass(frozen=True, kw_only=True)
class GateConfig:
    """Segment tiers of the Gate. Gaps are in nats, weights are multiples of 0.01."""

    enabled: bool = True
    """Damp the flagged segments of negative-advantage responses."""
    scope: Literal["q3", "whole"] = "q3"
    """Tokens of a flagged segment that are damped: those with a negative gap, or all valid ones."""
    segment: int = 64
    """Token positions per segment."""
    mean_mild: float = -0.5
    """A segment-mean gap below this gets mean_mild_weight."""
    mean_mild_weight: float = 0.3
    """Weight of the mild tier."""
    mean_severe: float = -1.5
    """A segment-mean gap below this gets mean_severe_weight."""
    mean_severe_weight: float = 0.1
    """Weight of the severe tier."""
    deep: float = -6.0
    """A token with a gap below this counts as deep."""
    deep_count: int = 2
    """Deep tokens in one segment that bring its weight down to the floor; fewer scale linearly."""
    floor: float = 0.1
    """Weight of a segment with deep_count deep tokens or more."""

    def __post_init__(self):
        _require(self.scope in ("q3", "whole"), "gate.scope", self.scope, "'q3' or 'whole'")
        _require(self.segment >= 1, "gate.segment", self.segment, "an integer of at least 1")
        _require(
            -math.inf < self.mean_severe < self.mean_mild <= 0,
            "(gate.mean_severe, gate.mean_mild)",
            (self.mean_severe, self.mean_mild),
            "finite, mean_severe < mean_mild <= 0",
        )
        _require(-math.inf < self.deep <= 0, "gate.deep", self.deep, "a finite value of at most 0")
        _require(self.deep_count >= 1, "gate.deep_count", self.deep_count, "an integer of at least 1")
        for name in ("mean_mild_weight", "mean_severe_weight", "floor"):
            _require_weight(f"gate.{name}", getattr(self, name))
        _require(
            self.mean_severe_weight <= self.mean_mild_weight,
            "gate.mean_severe_weight",
            self.mean_severe_weight,
            f"at most gate.mean_mild_weight ({self.mean_mild_weight})",
        )


@dataclass(frozen=True, kw_only=True)
class RepairConfig:
    """One-sided pseudo-Huber penalty on the mean gap of a segment."""

    enabled: bool = True
    """Add the penalty to the loss; its diagnostics are logged either way."""
    scope: Literal["adv_positive", "whole", "q2"] = "adv_positive"
    """Tokens that get gradient: segments with positive mean advantage, all, or the former's negative gaps."""
    segment: int = 128
    """Token positions per segment."""
    target: float = -0.03
    """A segment-mean gap below this (nats) is penalised."""
    beta: float = 0.0005**0.5
    """Bound of the force per segment: the penalty is quadratic below this violation (nats), linear above."""
    coefficient: float = 0.015
    """Factor of the penalty in the loss."""
    start_step: int = 0
    """First update (inclusive) at which the penalty counts."""

    def __post_init__(self):
        scopes = ("adv_positive", "whole", "q2")
        _require(self.scope in scopes, "repair.scope", self.scope, f"one of {scopes}")
        _require(self.segment >= 1, "repair.segment", self.segment, "an integer of at least 1")
        _require(-math.inf < self.target <= 0, "repair.target", self.target, "a finite value of at most 0")
        _require(0 < self.beta < math.inf, "repair.beta", self.beta, "a finite value above 0")
        _require(
            0 <= self.coefficient < math.inf, "repair.coefficient", self.coefficient, "a finite value >= 0"
        )
        _require(self.start_step >= 0, "repair.start_step", self.start_step, "an integer of at least 0")


@dataclass(frozen=True, kw_only=True)
class ClipConfig:
    """PPO clip of the ratio exp(logp - old_logp) to [1 - low, 1 + high]."""

    low: float = 0.2
    """Distance of the lower bound from 1."""
    high: float = 0.28
    """Distance of the upper bound from 1."""

    def __post_init__(self):
        _require(0 <= self.low <= 1, "clip.low", self.low, "a value in [0, 1]")
        _require(0 <= self.high < math.inf, "clip.high", self.high, "a finite value of at least 0")


@dataclass(frozen=True, kw_only=True)
class TisConfig:
    """Truncated importance sampling: every token's loss times exp(old_logp - sampler_logp) in [low, high]."""

    enabled: bool = True
    """Weight tokens by the truncated ratio of the learner to the sampler."""
    low: float = 0.0
    """Smallest weight."""
    high: float = 2.0
    """Largest weight."""

    def __post_init__(self):
        _require(
            0 <= self.low < self.high < math.inf,
            "(tis.low, tis.high)",
            (self.low, self.high),
            "finite, 0 <= low < high",
        )


@dataclass(frozen=True, kw_only=True)
class TriageConfig:
    """PPO clip + TIS + Gate + Repair."""

    gate: GateConfig = field(default_factory=GateConfig)
    """Damping of mismatch-amplifying updates."""
    repair: RepairConfig = field(default_factory=RepairConfig)
    """Bounded pull on the gap that is left."""
    clip: ClipConfig = field(default_factory=ClipConfig)
    """PPO clip."""
    tis: TisConfig = field(default_factory=TisConfig)
    """Correction of the sampler's distribution."""
    reduction: Reduction = "response"
    """Weighted mean per response, then over responses; over all tokens; or the sum over the token count."""

    def __post_init__(self):
        accepted = ("response", "token", "fixed")
        _require(self.reduction in accepted, "reduction", self.reduction, f"one of {accepted}")
