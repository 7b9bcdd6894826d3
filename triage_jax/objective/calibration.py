"""Thresholds of the calibrated Gate from a reference window, frozen as JSON (TRIAGE docs/CALIBRATION.md).

On the host in float64: it is done once per run. `calibrated_gate.py` applies the result.
"""

import bisect
import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from triage_jax.objective.checks import require, require_weight
from triage_jax.objective.config import CalibrationConfig, TriageConfig, require_thresholds

FORMAT = "triage_jax.gate_calibration.v1"


@dataclass(frozen=True, kw_only=True)
class GateCalibration:
    """Frozen thresholds, and where they come from. Depths are in nats, shares in [0, 1]."""

    deep: float
    """A gap below minus this counts as deep"""
    mean: float
    """Depth of a segment's mean gap at which damping starts"""
    mean_full: float
    """Depth at which it is full"""
    tail: float
    """Share of deep tokens at which damping starts"""
    tail_full: float
    """Share at which it is full"""
    floor: float
    """Weight under full damping"""
    segment: int
    """Token positions per segment"""
    updates: int
    """Updates of the reference window"""
    segments: int
    """Eligible segments in it"""
    tail_fraction: float
    """Tail that both starting thresholds cut off"""
    triggered: float
    """Share of the eligible segments of the window that either active feature would damp"""

    def __post_init__(self):
        require_thresholds("(deep, mean, mean_full, tail, tail_full)", self.thresholds)
        require_weight("floor", self.floor)
        for name in ("segment", "updates", "segments"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "an integer of at least 1")
        for name in ("tail_fraction", "triggered"):
            require(0 <= getattr(self, name) <= 1, name, getattr(self, name), "a value in [0, 1]")

    @property
    def thresholds(self) -> tuple[float, ...]:
        """What `CalibrationConfig.thresholds` holds."""
        return self.deep, self.mean, self.mean_full, self.tail, self.tail_full

    def freeze(self, config: TriageConfig) -> TriageConfig:
        """`config` with these thresholds. Raises ValueError if they were made for segments of another size."""
        accepted = f"{self.segment}, the segment of the calibration"
        require(config.gate.segment == self.segment, "gate.segment", config.gate.segment, accepted)
        calibration = replace(config.calibration, thresholds=self.thresholds, floor=self.floor)
        return replace(config, calibration=calibration)

    def to_json(self) -> str:
        """JSON text, exact: `from_json` gives back an equal calibration."""
        return json.dumps({"format": FORMAT} | dataclasses.asdict(self), indent=2, allow_nan=False) + "\n"


def calibration_from_json(text: str, source: str = "calibration") -> GateCalibration:
    """The calibration of a text by `to_json`. Raises ValueError naming `source`, the field and what is accepted."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{source}: not valid JSON: {error}") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f"{source}: not a Gate calibration; accepted: a JSON object with format {FORMAT!r}")
    del data["format"]
    kinds = {item.name: item.type for item in dataclasses.fields(GateCalibration)}
    if data.keys() != kinds.keys():
        raise ValueError(f"{source}: fields {sorted(data.keys() ^ kinds.keys())} are missing or unknown")
    values: dict[str, Any] = {}
    for name, kind in kinds.items():
        value, whole = data[name], kind is int
        if type(value) not in ((int,) if whole else (int, float)) or not math.isfinite(value):
            accepted = "an integer" if whole else "a finite number"
            raise ValueError(f"{source}: {name} is {value!r}; accepted: {accepted}")
        values[name] = value if whole else float(value)
    try:
        return GateCalibration(**values)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


class ReferenceUpdate(NamedTuple):
    """One update of the window: gaps `[B, T]` (nats), advantages `[B]` or `[B, T]`, mask `[B, T]`."""

    gap: np.ndarray
    advantages: np.ndarray
    mask: np.ndarray


def calibrate(window: Sequence[ReferenceUpdate], config: TriageConfig) -> GateCalibration:
    """Thresholds from a window of updates that were made with Gate and Repair off.

    1. deep: `deep_quantile` of {-gap : gap < 0} over all valid tokens.
    2. For every segment with mean advantage < 0: depth x1 = -mean(gap), share x2 = mean(gap < -deep).
    3. The largest tail fraction u such that at most `trigger_rate` of these segments have x1 > mean or x2 > tail, both
       being the 1 - u quantiles of their feature.
    4. mean_full and tail_full: `full_quantile` of each feature. A feature with full <= start takes no part.

    Quantiles are empirical, the higher neighbour. Raises ValueError for shapes that do not agree, values that are not
    finite, and a window too small or too uniform to have thresholds.
    """
    settings = config.calibration
    gaps, responses = _responses(window)
    depths = -gaps[gaps < 0]
    if not depths.size:
        raise ValueError("calibration: the reference window has no negative gap")
    deep = float(np.quantile(depths, settings.deep_quantile, method="higher"))
    features = np.asarray(
        [feature for response in responses for feature in _features(*response, config.gate.segment, deep)]
    ).reshape(-1, 2)
    if not features.size:
        raise ValueError("calibration: the reference window has no segment with a negative mean advantage")

    tail_fraction, starts = _shared_tail(features, settings)
    full = np.quantile(features, settings.full_quantile, axis=0, method="higher")
    active = full > starts
    if not active.any():
        raise ValueError(
            f"calibration: no feature of the {len(features)} eligible segments has a tail: thresholds "
            f"{starts.tolist()}, full {full.tolist()}; a longer reference window (calibration.updates) is needed"
        )
    return GateCalibration(
        deep=deep,
        mean=float(starts[0]),
        mean_full=float(full[0]),
        tail=float(starts[1]),
        tail_full=float(full[1]),
        floor=settings.floor,
        segment=config.gate.segment,
        updates=len(window),
        segments=len(features),
        tail_fraction=tail_fraction,
        triggered=float(((features > starts) & active).any(axis=1).mean()),
    )


def _responses(
    window: Sequence[ReferenceUpdate],
) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray, np.ndarray]]]:
    """All valid gaps, and (gap, advantage, mask) of every response, in float64."""
    gaps, responses = [np.zeros(0)], []
    for index, update in enumerate(window):
        mask = np.asarray(update.mask) != 0
        gap = np.asarray(update.gap, np.float64)
        advantages = np.asarray(update.advantages, np.float64)
        if advantages.ndim == 1:
            advantages = advantages[:, None]
        if gap.ndim != 2 or gap.shape != mask.shape or advantages.shape not in (gap.shape, (len(gap), 1)):
            raise ValueError(
                f"calibration: update {index} has gap {gap.shape}, mask {mask.shape} and advantages "
                f"{np.shape(update.advantages)}; accepted: [B, T], [B, T] and [B] or [B, T]"
            )
        advantages = np.broadcast_to(advantages, gap.shape)
        if not (np.isfinite(gap[mask]).all() and np.isfinite(advantages[mask]).all()):
            raise ValueError(f"calibration: update {index} has a NaN or inf in a valid position")
        gaps.append(gap[mask])
        responses += zip(gap, advantages, mask, strict=True)
    return np.concatenate(gaps), responses


def _features(
    gap: np.ndarray, advantage: np.ndarray, mask: np.ndarray, size: int, deep: float
) -> Iterator[tuple[float, float]]:
    """Depth and share of deep tokens of every eligible segment of one response."""
    for start in range(0, len(gap), size):
        valid = mask[start : start + size]
        if valid.any() and advantage[start : start + size][valid].sum() < 0:
            inside = gap[start : start + size][valid]
            yield float(-inside.mean()), float((inside < -deep).mean())


def _shared_tail(features: np.ndarray, settings: CalibrationConfig) -> tuple[float, np.ndarray]:
    """The largest tail fraction k / n whose thresholds trigger seldom enough, and these thresholds."""
    ordered, n = np.sort(features, axis=0), len(features)

    def starts(k: int) -> np.ndarray:
        return ordered[-(-(n - k) * (n - 1) // n)]  # the higher neighbour of quantile 1 - k / n

    def rate(k: int) -> float:
        return float((features > starts(k)).any(axis=1).mean())

    # The rate does not fall as the tail grows; with no tail at all nothing lies above the largest value.
    k = bisect.bisect_right(range(n + 1), settings.trigger_rate + 1e-12, key=rate) - 1
    return k / n, starts(k)
