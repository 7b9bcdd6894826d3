"""Checks shared by the settings of the objective."""

import math


def require(holds: bool, name: str, value: object, accepted: str) -> None:
    """Raise ValueError saying that `name` is `value`, and what is `accepted`, unless the condition `holds`."""
    if not holds:
        raise ValueError(f"{name} is {value!r}; accepted: {accepted}")


def require_weight(name: str, value: float) -> None:
    """Raise ValueError unless `value` is a Gate weight."""
    require(
        0 <= value <= 1 and math.isclose(100 * value, round(100 * value), abs_tol=1e-9),
        name,
        value,
        "a multiple of 0.01 in [0, 1] (Gate weights are whole hundredths, so that their sums are exact)",
    )


def require_band(name: str, low: float, high: float) -> None:
    """Raise ValueError unless [low, high] are bounds of a ratio."""
    accepted = "finite, 0 <= low < high"
    require(0 <= low < high < math.inf, f"({name}.low, {name}.high)", (low, high), accepted)


def require_finite(name: str, value: float, *, least: float = 0.0) -> None:
    """Raise ValueError unless `value` is finite and at least `least`."""
    require(least <= value < math.inf, name, value, f"a finite value >= {least:g}")
