"""Settings of the TRIAGE objective. `TriageConfig()` is the configuration of the paper's reported runs."""

import math
from dataclasses import dataclass, field
from typing import Literal

from triage_jax.objective.checks import require, require_band, require_weight
from triage_jax.objective.rival_config import RivalConfig

Reduction = Literal["response", "token", "fixed"]


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
        require(self.scope in ("q3", "whole"), "gate.scope", self.scope, "'q3' or 'whole'")
        require(self.segment >= 1, "gate.segment", self.segment, "an integer of at least 1")
        require(
            -math.inf < self.mean_severe < self.mean_mild <= 0,
            "(gate.mean_severe, gate.mean_mild)",
            (self.mean_severe, self.mean_mild),
            "finite, mean_severe < mean_mild <= 0",
        )
        require(-math.inf < self.deep <= 0, "gate.deep", self.deep, "a finite value of at most 0")
        require(self.deep_count >= 1, "gate.deep_count", self.deep_count, "an integer of at least 1")
        for name in ("mean_mild_weight", "mean_severe_weight", "floor"):
            require_weight(f"gate.{name}", getattr(self, name))
        require(
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
        require(self.scope in scopes, "repair.scope", self.scope, f"one of {scopes}")
        require(self.segment >= 1, "repair.segment", self.segment, "an integer of at least 1")
        require(-math.inf < self.target <= 0, "repair.target", self.target, "a finite value of at most 0")
        require(0 < self.beta < math.inf, "repair.beta", self.beta, "a finite value above 0")
        require(
            0 <= self.coefficient < math.inf, "repair.coefficient", self.coefficient, "a finite value >= 0"
        )
        require(self.start_step >= 0, "repair.start_step", self.start_step, "an integer of at least 0")


@dataclass(frozen=True, kw_only=True)
class ClipConfig:
    """PPO clip of the ratio exp(logp - old_logp) to [1 - low, 1 + high]."""

    low: float = 0.2
    """Distance of the lower bound from 1."""
    high: float = 0.28
    """Distance of the upper bound from 1."""

    def __post_init__(self):
        require(0 <= self.low <= 1, "clip.low", self.low, "a value in [0, 1]")
        require(0 <= self.high < math.inf, "clip.high", self.high, "a finite value of at least 0")


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
        require_band("tis", self.low, self.high)


@dataclass(frozen=True, kw_only=True)
class CalibrationConfig:
    """Gate thresholds taken from the run's own first updates, then frozen; read by `triage_calibrated` only."""

    updates: int = 20
    """Updates of the reference window, made with Gate and Repair off"""
    deep_quantile: float = 0.99
    """A gap below this quantile of the reference's negative gaps, by depth, counts as deep"""
    trigger_rate: float = 0.05
    """Largest share of the reference's eligible segments above either threshold"""
    full_quantile: float = 0.999
    """Quantile of the reference at which a segment gets the floor"""
    floor: float = 0.1
    """Smallest weight"""
    thresholds: tuple[float, ...] = ()
    """Frozen deep, mean, mean_full, tail, tail_full; empty during the reference window"""

    def __post_init__(self):
        require(self.updates >= 1, "calibration.updates", self.updates, "an integer of at least 1")
        for name in ("deep_quantile", "trigger_rate", "full_quantile"):
            value = getattr(self, name)
            require(0 < value < 1, f"calibration.{name}", value, "a value in (0, 1)")
        require_weight("calibration.floor", self.floor)
        if self.thresholds:
            require_thresholds("calibration.thresholds", self.thresholds)


def require_thresholds(name: str, values: tuple[float, ...]) -> None:
    """Raise ValueError unless these are the five thresholds of a calibrated Gate, one feature active."""
    good = len(values) == 5 and all(map(math.isfinite, values)) and values[0] > 0
    accepted = "five finite values (deep, mean, mean_full, tail, tail_full) with deep > 0"
    require(good, name, values, accepted)
    _, mean, mean_full, tail, tail_full = values
    require(mean_full > mean or tail_full > tail, name, values, "mean_full > mean or tail_full > tail")


@dataclass(frozen=True, kw_only=True)
class BalanceConfig:
    """Damping of long negative responses in the advantages; off in the reported runs."""

    enabled: bool = False
    """Scale negative advantages of long responses, then centre every group again"""
    quantile: float = 0.7
    """Quantile of the update's response lengths beyond which a response is long"""
    exponent: float = 0.25
    """Power of (quantile / length) in the scale"""
    floor: float = 0.7
    """Smallest scale"""

    def __post_init__(self):
        require(0 <= self.quantile <= 1, "balance.quantile", self.quantile, "a value in [0, 1]")
        require(0 <= self.exponent < math.inf, "balance.exponent", self.exponent, "a finite value >= 0")
        require(0 < self.floor <= 1, "balance.floor", self.floor, "a value in (0, 1]")


@dataclass(frozen=True, kw_only=True)
class TriageConfig:
    """PPO clip + TIS + Gate + Repair, or by `name` one of the rivals."""

    name: str = "triage"
    """Objective: triage, a variant or rival by name, or your own as `package.module:function`"""
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
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    """Thresholds of the calibrated Gate."""
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    """Length-aware advantages."""
    rivals: RivalConfig = field(default_factory=RivalConfig)
    """Constants of the other objectives."""

    def __post_init__(self):
        accepted = ("response", "token", "fixed")
        require(self.reduction in accepted, "reduction", self.reduction, f"one of {accepted}")
        require(bool(self.name), "name", self.name, "an objective's name or package.module:function")

    @property
    def awaits_calibration(self) -> bool:
        """Whether the objective is in its reference window: `calibrate` and `GateCalibration.freeze` end it."""
        return self.name == "triage_calibrated" and not self.calibration.thresholds
