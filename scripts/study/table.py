"""Tables in Markdown from the records, and their place between markers in a page."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.study.arms import Arm, Group
from scripts.study.records import Records, of_arm
from scripts.study.statistics import interval, last_mean, window_means
from scripts.study.trial import Record
from triage_jax.metrics import write_atomically

LAST = 20
"""Updates over which a figure of the start or the end is averaged"""
HEADER = (
    "| arm | seeds | reward, first and last 20 updates | mean abs gap, last 20 | rho_asym, last 20 | collapsed at "
    "update | held out at the end |"
)
RULE = "| --- " * 7 + "|"


@dataclass(frozen=True, kw_only=True)
class Block:
    """A table's place in a page: between `<!-- NAME:begin -->` and `<!-- NAME:end -->`."""

    name: str
    groups: tuple[Group, ...]

    @property
    def begin(self) -> str:
        return f"<!-- {self.name}:begin -->"

    @property
    def end(self) -> str:
        return f"<!-- {self.name}:end -->"


BLOCKS = (
    Block(name="study", groups=("ablation", "rivals")),
    Block(name="study-sources", groups=("sources",)),
    Block(name="study-variants", groups=("variants",)),
)


def render(block: Block, records: Records) -> str:
    """The table of a block; an arm without a finished trial has a line that says so, never a number."""
    lines = [_line(arm, of_arm(records, arm.name)) for arm in records.arms if arm.group in block.groups]
    return "\n".join([HEADER, RULE, *lines])


def finished(records: Records) -> str:
    """One table of every arm with a finished trial."""
    lines = [_line(arm, trials) for arm in records.arms if (trials := of_arm(records, arm.name))]
    return "\n".join([HEADER, RULE, *lines])


def _line(arm: Arm, trials: Sequence[Record]) -> str:
    title = f"{arm.title} (`{arm.name}`)"
    if not trials:
        return f"| {title} | 0 | not run yet | | | | |"
    curves = [trial["curves"] for trial in trials]
    cells = [
        title,
        str(len(trials)),
        f"{_over(window_means(c['reward'], LAST)[0] for c in curves)} → "
        f"{_over(last_mean(c['reward'], LAST) for c in curves)}",
        _over(last_mean(c["gap"], LAST) for c in curves),
        _over(last_mean(c["rho_asym"], LAST) for c in curves),
        _collapses([trial["collapse_step"] for trial in trials]),
        _over(trial["heldout"]["after"] for trial in trials),
    ]
    return "| " + " | ".join(cells) + " |"


def _over(values: Iterable[float | None]) -> str:
    """Mean and interval over the seeds that have a value; how many, where some have none."""
    every = list(values)
    known = [value for value in every if value is not None and math.isfinite(value)]
    if not known:
        return "none"
    return str(interval(known)) + (f" ({len(known)} of {len(every)})" if len(known) < len(every) else "")


def _collapses(steps: Sequence[int | None]) -> str:
    """Every seed's own update, in the order of the seeds."""
    if not any(steps):
        return "none"
    return ", ".join("none" if step is None else str(step) for step in steps)


def replaced(page: str, block: Block, table: str) -> str:
    """The page with the table between the block's markers; as it is where it has none.

    Raises ValueError for a begin without its end.
    """
    if block.begin not in page:
        return page
    head, rest = page.split(block.begin, 1)
    if block.end not in rest:
        raise ValueError(f"{block.begin} has no {block.end} after it")
    return f"{head}{block.begin}\n{table}\n{block.end}{rest.split(block.end, 1)[1]}"


def update_page(path: Path, records: Records) -> bool:
    """Rewrite the tables of a page; returns whether it changed."""
    before = after = path.read_text(encoding="utf-8")
    for block in BLOCKS:
        after = replaced(after, block, render(block, records))
    if after != before:
        write_atomically(path, after)
    return after != before
