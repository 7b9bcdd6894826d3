"""Figures of the study: every seed of every arm is a line of its own."""

import math
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scripts.study.arms import REGIMES, Arm, Group
from scripts.study.records import Records, of_arm
from scripts.study.trial import Record

BLUE, ORANGE, RED, GREY = "#0072B2", "#E69F00", "#D55E00", "#999999"
SMOOTH = 10
PRECURSORS = (
    ("reward", "reward"),
    ("rho_asym", "rho_asym"),
    ("C_tok", "C_tok − null"),
    ("q05", "5 % quantile of δ"),
    ("gap", "mean |δ|, nats"),
)


def smooth(values: Sequence[float | None], width: int = SMOOTH) -> np.ndarray:
    """Mean of the last `width` updates, of fewer at the start."""
    x = np.array([math.nan if value is None else value for value in values], float)
    return np.array([np.nanmean(x[max(0, end - width) : end]) for end in range(1, len(x) + 1)])


def reward_panels(
    records: Records, regime: str, groups: tuple[Group, ...], reference: Sequence[str]
) -> Figure:
    """Reward against updates, a panel per arm, with the reference arms' seeds in grey behind."""
    arms = [arm for arm in records.arms if arm.group in groups and of_arm(records, regime, arm.name)]
    columns = 4
    rows = max(1, -(-len(arms) // columns))
    figure, axes = plt.subplots(
        rows, columns, figsize=(11, 2.3 * rows), sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    for axis, arm in zip(axes.flat, arms, strict=False):
        for name in reference:
            for trial in of_arm(records, regime, name):
                axis.plot(smooth(trial["curves"]["reward"]), color=GREY, linewidth=0.6, alpha=0.6)
        _seeds(axis, arm, of_arm(records, regime, arm.name))
    for axis in axes.flat[len(arms) :]:
        axis.set_visible(False)
    figure.supxlabel("update")
    figure.supylabel(f"reward, mean of {SMOOTH} updates", fontsize=9)
    return figure


def _seeds(axis: Axes, arm: Arm, trials: Sequence[Record]) -> None:
    for trial in trials:
        axis.plot(smooth(trial["curves"]["reward"]), color=BLUE, linewidth=1)
        if trial["collapse_step"]:
            axis.axvline(trial["collapse_step"], color=RED, linewidth=0.8, linestyle=":")
    axis.set_title(fill(f"{arm.title} ({len(trials)})", 34), fontsize=9)
    axis.set_ylim(0, 1)


def precursor_panels(records: Records, regime: str, names: Sequence[str]) -> Figure:
    """What comes before a collapse: statistics of windows of updates, a column per arm."""
    found = [arm for arm in records.arms if arm.name in names and of_arm(records, regime, arm.name)]
    figure, axes = plt.subplots(
        len(PRECURSORS),
        max(1, len(found)),
        figsize=(2.8 * max(1, len(found)), 9),
        sharex=True,
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    for column, arm in enumerate(found):
        axes[0, column].set_title(arm.title, fontsize=9)
        for trial in of_arm(records, regime, arm.name):
            for axis, (key, _) in zip(axes[:, column], PRECURSORS, strict=True):
                _precursor(axis, trial, key)
    axes[0, 0].set_ylim(0, 1)
    for axis, (_, label) in zip(axes[:, 0], PRECURSORS, strict=True):
        axis.set_ylabel(label, fontsize=9)
    figure.supxlabel("update")
    return figure


def _precursor(axis: Axes, trial: Record, key: str) -> None:
    windows = trial["windows"]
    if key in trial["curves"] and key != "rho_asym":
        axis.plot(smooth(trial["curves"][key]), color=BLUE, linewidth=1)
        return
    ends = [(index + 1) * windows["width"] for index in range(len(windows["rho_asym"]))]
    values = [math.nan if x is None else x for x in windows[key]]
    if key == "C_tok":
        null = [math.nan if x is None else x for x in windows["C_tok_null"]]
        values = [x - y for x, y in zip(values, null, strict=True)]
        axis.axhline(0, color=GREY, linewidth=0.6)
    if key == "rho_asym":
        axis.axhline(1, color=GREY, linewidth=0.6)
    axis.plot(ends, values, color=BLUE, linewidth=1)


def write_figures(records: Records, folder: Path) -> list[Path]:
    """All figures as PNG; those without a finished trial are left out."""
    main: tuple[Group, ...] = ("ablation", "rivals")
    shown = ("bf16", "naive", "tis", "gate", "triage")
    figures: dict[str, Figure] = {}
    for regime in REGIMES:
        figures[f"rewards_{regime}"] = reward_panels(records, regime, main, ("bf16", "naive"))
        figures[f"precursors_{regime}"] = precursor_panels(records, regime, shown)
    figures["sources"] = reward_panels(records, "falling", ("sources",), ("bf16", "naive"))
    figures["variants"] = reward_panels(records, "falling", ("variants",), ("naive", "triage"))
    paths = []
    for name, figure in figures.items():
        if any(axis.lines for axis in figure.axes):
            paths.append(folder / f"{name}.png")
            figure.savefig(paths[-1], dpi=110)
        plt.close(figure)
    return paths
