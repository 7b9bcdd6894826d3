"""Early warning from a run's metrics: what peers call healthy, what the official study saw before a collapse.

`check` takes rows of metrics under our names or a peer's and returns what is wrong, in words. The limits of peers were
set for their models and numerics: they are yardsticks, no promise.

| limit | whose |
| --- | --- |
| mean |p - q| < 0.01; ratio in [0.5, 2]; ESS > 0.3; |k1| < 0.1 | verl, documentation of rollout correction |
| mean exp |δ| < 1.05; KL(sampler, learner) < 0.03; JS < 0.007 | NeMo-RL, guide and W4A4 checks |
| KL < 0.015 over 20 steps | prime-rl, acceptance of a model |
| mean |δ| < 0.03 | miles, its tests |
| rho_asym < 1.5 | official study: 1.50 drifting, 1.85 to 2.32 before collapse, 1.02 to 1.34 healthy |
| |δ| < 0.05 on 80 % | official study: 83 % and 92 % before collapse |
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from triage_jax.characterize.names import our_names

type Row = Mapping[str, Any]
WINDOW = 20
RECENT = 200
"""Updates that a watch keeps, its healthy window among them"""
JUMP = 5.0
GROWTH = 3.0
REWARD_FLOOR = 0.10


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One verdict on the last window of a run."""

    name: str
    healthy: bool
    value: float
    step: int
    text: str


@dataclass(frozen=True, kw_only=True)
class Limit:
    """An interval that the mean of a metric over the last window should stay in."""

    key: str
    label: str
    whose: str
    low: float = -math.inf
    high: float = math.inf

    def judge(self, rows: Sequence[Row]) -> Finding | None:
        values = _values(rows[-WINDOW:], self.key)
        if not values:
            return None
        value = sum(values) / len(values)
        healthy = self.low < value < self.high
        text = f"{self.label} is {value:.4g}, mean of {len(values)} steps; {self.whose} {self._accepts()}"
        return Finding(
            name=f"{self.key} ({self.whose})", healthy=healthy, value=value, step=_step(rows[-1]), text=text
        )

    def _accepts(self) -> str:
        if self.low == -math.inf:
            return f"accepts less than {self.high:g}"
        if self.high == math.inf:
            return f"accepts more than {self.low:g}"
        return f"accepts {self.low:g} to {self.high:g}"


LIMITS = (
    Limit(key="gap/abs_mean/token", label="mean |gap|, nats,", whose="miles", high=0.03),
    Limit(key="gap/prob_difference/token", label="mean probability difference", whose="verl", high=0.01),
    Limit(key="gap/mult_prob_error/token", label="mean exp |gap|", whose="NeMo-RL", high=1.05),
    Limit(
        key="gap/k3_sampler_learner/token", label="KL(sampler, learner), nats,", whose="prime-rl", high=0.015
    ),
    Limit(
        key="gap/k3_sampler_learner/token", label="KL(sampler, learner), nats,", whose="NeMo-RL", high=0.03
    ),
    Limit(key="gap/js/token", label="Jensen-Shannon divergence, nats,", whose="NeMo-RL", high=0.007),
    Limit(key="gap/k1/token", label="mean of -gap, nats,", whose="verl", low=-0.1, high=0.1),
    Limit(key="tis/ratio/token", label="mean importance ratio", whose="verl", low=0.5, high=2.0),
    Limit(key="tis/ess/token", label="effective sample size, share,", whose="verl", low=0.3),
    Limit(
        key="gap/within_0.05/token", label="share of tokens with |gap| < 0.05", whose="triage_jax", low=0.8
    ),
)


def assess(rows: Sequence[Row]) -> list[Finding]:
    """Every verdict that the rows allow, healthy ones included."""
    rows = [our_names(row) for row in rows]
    rows = [row for row in rows if _is_update(row)]
    if not rows:
        return []
    judges: list[Callable[[Sequence[Row]], Finding | None]] = [limit.judge for limit in LIMITS]
    judges += [_asymmetry, _jump, _growth, _reward, _broken]
    return [finding for judge in judges if (finding := judge(rows)) is not None]


def check(rows: Sequence[Row]) -> list[Finding]:
    """What is wrong over the last 20 updates, most urgent kinds last; nothing for no rows. Cheap enough for every step.

    rows: metrics of updates in order, all of them or at least the last 40, which the rules that compare need.
    """
    return [finding for finding in assess(rows) if not finding.healthy]


class HealthWatch:
    """`check` after every update of a run, each kind of finding told once until it has healed.

    Silent for the first 20 updates, over which the limits average.
    """

    def __init__(self, rows: Sequence[Row] = ()) -> None:
        self._recent: deque[Row] = deque(filter(_is_update, rows), maxlen=RECENT)
        self._told: set[str] = set()

    def see(self, row: Row) -> list[str]:
        """What is newly wrong, in words."""
        self._recent.append(row)
        if len(self._recent) < WINDOW:
            return []
        findings = {finding.name: finding.text for finding in check(list(self._recent))}
        new = [text for name, text in findings.items() if name not in self._told]
        self._told = set(findings)
        return new


def _is_update(row: Row) -> bool:
    return any(key.startswith(("gap/", "tis/", "loss", "optimizer/", "reward/")) for key in row)


def _values(rows: Sequence[Row], key: str) -> list[float]:
    return [float(v) for row in rows if isinstance(v := row.get(key), int | float) and math.isfinite(v)]


def _step(row: Row) -> int:
    step = row.get("step", 0)
    return int(step) if isinstance(step, int | float) else 0


def _asymmetry(rows: Sequence[Row]) -> Finding | None:
    """rho_asym of the window, masses added before they are divided where the row has them."""
    window = rows[-WINDOW:]
    q3, q1 = (_values(window, f"quadrant/{name}/mass") for name in ("q3", "q1"))
    single = _values(window, "rho_asym/raw")
    if sum(q1) > 0:
        value = sum(q3) / sum(q1)
    elif single:
        value = median(single)
    else:
        return None
    text = (
        f"rho_asym, amplifying mass of A < 0 over that of A > 0, is {value:.2f} over {len(window)} steps; "
        "the official runs had 1.5 when drifting, 1.9 to 2.3 before collapse"
    )
    return Finding(name="rho_asym", healthy=value < 1.5, value=value, step=_step(rows[-1]), text=text)


def _jump(rows: Sequence[Row]) -> Finding | None:
    """A sudden gap is a defect more often than drift: weights that were not refreshed, another kernel."""
    values = _values(rows[-WINDOW - 1 :], "gap/abs_mean/token")
    if len(values) < 4:
        return None
    usual = median(values[:-1])
    times = values[-1] / usual if usual > 0 else math.inf if values[-1] > 0 else 1.0
    text = (
        f"mean |gap| of the last step is {times:.1f} times the usual {usual:.4g} nats; a jump of {JUMP:g} or more "
        "points to a sampler with old weights, or to another kernel or tokenisation"
    )
    return Finding(name="gap jump", healthy=times < JUMP, value=times, step=_step(rows[-1]), text=text)


def _growth(rows: Sequence[Row]) -> Finding | None:
    """Slow growth against the first window."""
    values = _values(rows, "gap/abs_mean/token")
    if len(values) < 2 * WINDOW:
        return None
    first, last = median(values[:WINDOW]), median(values[-WINDOW:])
    times = last / first if first > 0 else 1.0
    text = f"mean |gap| is {times:.2f} times that of the first {WINDOW} steps; {GROWTH:g} or more is drift"
    return Finding(name="gap growth", healthy=times < GROWTH, value=times, step=_step(rows[-1]), text=text)


def _reward(rows: Sequence[Row]) -> Finding | None:
    """The official study's sign of collapse on rewards in [0, 1]: at most 0.10 for three updates."""
    values = _values(rows, "reward/mean/response")
    if len(values) < 2 * WINDOW:
        return None
    best = max(
        sum(values[i : i + WINDOW]) / WINDOW for i in range(0, len(values) - WINDOW + 1, max(1, WINDOW // 2))
    )
    last = max(values[-3:])
    collapsed = last <= REWARD_FLOOR and best > 2 * REWARD_FLOOR
    text = f"reward is at most {last:.3f} over the last 3 steps, {best:.3f} in the best window"
    return Finding(name="reward", healthy=not collapsed, value=last, step=_step(rows[-1]), text=text)


def _broken(rows: Sequence[Row]) -> Finding | None:
    """Updates of the window that were not finite."""
    window = rows[-WINDOW:]
    bad = [row for row in window if row.get("optimizer/applied") in (False, 0) or _is_null(row)]
    text = f"{len(bad)} of the last {len(window)} updates had a loss or gradient that was not finite"
    return Finding(
        name="finite",
        healthy=not bad,
        value=float(len(bad)),
        step=_step(bad[-1] if bad else rows[-1]),
        text=text,
    )


def _is_null(row: Row) -> bool:
    values = [row[key] for key in ("loss", "optimizer/grad_norm") if key in row]
    return any(v is None or (isinstance(v, float) and not math.isfinite(v)) for v in values)
