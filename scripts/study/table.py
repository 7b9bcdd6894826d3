"""Tables in Markdown from the records, and their place between markers in a page."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from scripts.study.arms import REGIMES, Arm, Group, belongs
from scripts.study.records import Records, of_arm
from scripts.study.statistics import Signs, interval, last_mean, signs, window_means
from scripts.study.trial import Record
from triage_jax.metrics import write_atomically

LAST = 20
"""Updates over which a figure of the start or the end is averaged"""
HEADER = (
    "| arm | seeds | reward, first and last 20 updates | mean abs gap, last 20 | rho_asym, last 20 | collapsed at "
    "update | held out at the end |"
)
SIGN_TITLES = {
    "rho_asym": "rho_asym at least 1.5",
    "concentration": "C_tok above its null's 97.5 %",
    "tail": "5 % quantile twice as deep as at first",
    "gap": "mean abs gap twice that at first",
    "reward": "reward at most 0.7 of the best before",
}
RULE = "| --- " * 7 + "|"


@dataclass(frozen=True, kw_only=True)
class Block:
    """A table's place in a page: between `<!-- NAME:begin -->` and `<!-- NAME:end -->`."""

    name: str
    regime: str
    groups: tuple[Group, ...]

    @property
    def begin(self) -> str:
        return f"<!-- {self.name}:begin -->"

    @property
    def end(self) -> str:
        return f"<!-- {self.name}:end -->"


MAIN: tuple[Group, ...] = ("ablation", "rivals")
BLOCKS = (
    Block(name="study", regime="falling", groups=MAIN),
    Block(name="study-learning", regime="learning", groups=MAIN),
    Block(name="study-sources", regime="falling", groups=("sources",)),
    Block(name="study-variants", regime="falling", groups=("variants",)),
)
SIGNS = Block(name="study-signs", regime="falling", groups=())
SIGNS_OF = ("naive", "tis", "gate", "triage")
"""Arms whose precursors are listed"""


def render(block: Block, records: Records) -> str:
    """The table of a block; an arm without a finished trial has a line that says so, never a number."""
    if block == SIGNS:
        return render_signs(records)
    arms = [arm for arm in records.arms if arm.group in block.groups and belongs(arm, block.regime)]
    lines = [_line(arm, of_arm(records, block.regime, arm.name)) for arm in arms]
    return "\n".join([HEADER, RULE, *lines])


def render_signs(records: Records) -> str:
    """In which window of updates each sign is first seen, a line per trial."""
    names = [item.name for item in fields(Signs)]
    titles = [SIGN_TITLES[name] for name in names]
    lines = ["| regime, arm, seed | " + " | ".join(titles) + " |", "| --- " * (len(names) + 1) + "|"]
    for regime in REGIMES:
        for arm in SIGNS_OF:
            for trial in of_arm(records, regime, arm):
                found, width = signs(trial), trial["windows"]["width"]
                seen = [getattr(found, name) for name in names]
                cells = [
                    "none" if index is None else f"{(index - 1) * width + 1} to {index * width}"
                    for index in seen
                ]
                lines.append(f"| {regime}, `{arm}`, {trial['seed']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def finished(records: Records) -> str:
    """A table per regime of every arm with a finished trial."""
    tables = []
    for regime in REGIMES:
        pairs = [(arm, of_arm(records, regime, arm.name)) for arm in records.arms]
        lines = [_line(arm, trials) for arm, trials in pairs if trials]
        if lines:
            tables.append("\n".join([f"{regime}:", "", HEADER, RULE, *lines]))
    return "\n\n".join(tables) or "no finished trial"


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
    for block in (*BLOCKS, SIGNS):
        after = replaced(after, block, render(block, records))
    if after != before:
        write_atomically(path, after)
    return after != before
