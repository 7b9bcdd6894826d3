"""The windows of a study: so many updates ending at a quarter, half, three quarters and the end of the horizon.

Where a run collapses these are the official study's healthy, drift, pre-terminal and terminal stages; where it does
not, they are only four times to look. Numerators and denominators of a window are pooled before they are divided.
"""

from collections.abc import Sequence
from dataclasses import dataclass

WINDOW = 25
QUARTERS = 4


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Some consecutive updates of a run."""

    name: str
    steps: tuple[int, ...]

    @property
    def title(self) -> str:
        first, last = self.steps[0], self.steps[-1]
        return f"{self.name}: step {first}" if first == last else f"{self.name}: steps {first} to {last}"


def stages(steps: Sequence[int], window: int = WINDOW) -> list[Stage]:
    """Up to four stages that do not overlap; fewer updates than four make one stage of all.

    The window shrinks to a quarter of the updates. Raises ValueError without an update, or for a window below 1.
    """
    if window < 1 or not steps:
        raise ValueError(f"{len(steps)} updates, windows of {window}; accepted: at least one of each")
    count = len(steps)
    if count < QUARTERS:
        return [Stage(name="all", steps=tuple(steps))]
    found = []
    for quarter in range(1, QUARTERS + 1):
        end = quarter * count // QUARTERS
        begin = max((quarter - 1) * count // QUARTERS, end - window)
        found.append(Stage(name=f"{100 * quarter // QUARTERS} %", steps=tuple(steps[begin:end])))
    return found
