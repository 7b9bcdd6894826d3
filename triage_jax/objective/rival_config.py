"""Constants of the objectives that TRIAGE is compared with; the objectives are in `variants/`."""

import math
from dataclasses import dataclass, field

from triage_jax.objective.checks import require, require_band, require_finite


@dataclass(frozen=True, kw_only=True)
class DrGrpoConfig:
    """Dr. GRPO."""

    max_tokens: int = 0
    """Tokens that every response's sum is divided by; 0: the width of the arrays"""

    def __post_init__(self):
        require(self.max_tokens >= 0, "rivals.dr_grpo.max_tokens", self.max_tokens, "an integer >= 0")


@dataclass(frozen=True, kw_only=True)
class GspoConfig:
    """GSPO: clip of the sequence's geometric-mean ratio to [1 - low, 1 + high]."""

    low: float = 3e-4
    """Distance of the lower bound from 1"""
    high: float = 4e-4
    """Distance of the upper bound from 1"""

    def __post_init__(self):
        require(0 <= self.low <= 1, "rivals.gspo.low", self.low, "a value in [0, 1]")
        require_finite("rivals.gspo.high", self.high)


@dataclass(frozen=True, kw_only=True)
class CispoConfig:
    """CISPO: truncation of the ratio that weighs a token."""

    low: float = 0.0
    """Smallest ratio; 0: no lower bound, as published"""
    high: float = 5.0
    """Largest ratio (ScaleRL's)"""

    def __post_init__(self):
        require_band("rivals.cispo", self.low, self.high)


@dataclass(frozen=True, kw_only=True)
class TisSequenceConfig:
    """Truncated importance sampling of whole responses."""

    high: float = 2.0
    """Largest weight; 2 to 10 are in use"""

    def __post_init__(self):
        require(0 < self.high < math.inf, "rivals.tis_sequence.high", self.high, "a finite value above 0")


@dataclass(frozen=True, kw_only=True)
class IcepopConfig:
    """IcePop, or masked importance sampling by token (slime: 0.5 and 2)."""

    low: float = 0.5
    """Tokens with a smaller ratio of learner to sampler are dropped"""
    high: float = 5.0
    """Tokens with a larger ratio are dropped"""

    def __post_init__(self):
        require_band("rivals.icepop", self.low, self.high)


@dataclass(frozen=True, kw_only=True)
class GeoRejectionConfig:
    """Rejection of responses by geometric mean of the ratio of learner to sampler."""

    low: float = 0.999
    """Smallest geometric mean kept"""
    high: float = 1.002
    """Largest geometric mean kept"""

    def __post_init__(self):
        require_band("rivals.geo_rejection", self.low, self.high)


@dataclass(frozen=True, kw_only=True)
class K3RejectionConfig:
    """Rejection of responses by an estimate of KL(sampler, learner)."""

    threshold: float = 0.01
    """Largest mean of ρ - 1 - log ρ (nats) kept"""

    def __post_init__(self):
        require_finite("rivals.k3_rejection.threshold", self.threshold)


@dataclass(frozen=True, kw_only=True)
class DppoConfig:
    """DPPO: masks by divergence from the sampler in probability space."""

    tv_low: float = 0.2
    """Fall of the token's probability beyond which a negative advantage is masked"""
    tv_high: float = 0.2
    """Rise of the token's probability beyond which a positive advantage is masked"""
    kl_low: float = 0.05
    """Binary KL (nats) beyond which a negative advantage is masked where the probability fell"""
    kl_high: float = 0.05
    """Binary KL (nats) beyond which a positive advantage is masked where the probability rose"""
    ratio_max: float = 20.0
    """Largest weight"""
    penalty: float = 0.0
    """Coefficient of (log ratio)² on all tokens; prime-rl has 1e-3"""

    def __post_init__(self):
        for name in ("tv_low", "tv_high", "kl_low", "kl_high", "penalty"):
            require_finite(f"rivals.dppo.{name}", getattr(self, name))
        require(0 < self.ratio_max < math.inf, "rivals.dppo.ratio_max", self.ratio_max, "finite and above 0")


@dataclass(frozen=True, kw_only=True)
class OpsmConfig:
    """Off-policy sequence masking."""

    threshold: float = 0.1
    """Negative responses whose mean gap (nats) is below minus this are dropped; slime 1e-4, Trinity 0.05 to 0.2"""

    def __post_init__(self):
        require_finite("rivals.opsm.threshold", self.threshold)


@dataclass(frozen=True, kw_only=True)
class BapoConfig:
    """BAPO: clip bounds that move until positive advantages carry their share (the recipe's constants)."""

    target: float = 1.0
    """Positive over negative mass at which the bounds stop moving"""
    low: float = 0.6
    """Lower bound of the ratio, at first"""
    low_max: float = 0.8
    """Lower bound, at most"""
    high: float = 1.2
    """Upper bound of the ratio, at first"""
    high_max: float = 2.0
    """Upper bound, at most"""
    step: float = 0.05
    """By how much a bound moves at a time"""

    def __post_init__(self):
        require_finite("rivals.bapo.target", self.target)
        bounds = (self.low, self.low_max, self.high, self.high_max)
        names = "rivals.bapo.(low, low_max, high, high_max)"
        ordered = 0 <= self.low <= self.low_max <= self.high <= self.high_max < math.inf
        require(ordered, names, bounds, "finite, 0 <= low <= low_max <= high <= high_max")
        require(0.001 <= self.step < math.inf, "rivals.bapo.step", self.step, "a finite value >= 0.001")


@dataclass(frozen=True, kw_only=True)
class RivalConfig:
    """One section per objective that has constants beyond `clip` and `tis`."""

    renormalise: bool = False
    """Tokens that icepop, geo_rejection or k3_rejection reject leave the denominator as well"""
    dr_grpo: DrGrpoConfig = field(default_factory=DrGrpoConfig)
    gspo: GspoConfig = field(default_factory=GspoConfig)
    cispo: CispoConfig = field(default_factory=CispoConfig)
    tis_sequence: TisSequenceConfig = field(default_factory=TisSequenceConfig)
    icepop: IcepopConfig = field(default_factory=IcepopConfig)
    geo_rejection: GeoRejectionConfig = field(default_factory=GeoRejectionConfig)
    k3_rejection: K3RejectionConfig = field(default_factory=K3RejectionConfig)
    dppo: DppoConfig = field(default_factory=DppoConfig)
    opsm: OpsmConfig = field(default_factory=OpsmConfig)
    bapo: BapoConfig = field(default_factory=BapoConfig)
