"""The figures of a study, as SVG: nothing in them is loaded from anywhere."""

import io
import re
from collections.abc import Callable, Sequence

import matplotlib
import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from triage_jax.characterize.remedies import CLASSES, REMEDIES
from triage_jax.characterize.sketch import ADVANTAGE_EDGES
from triage_jax.characterize.stages import Stage
from triage_jax.characterize.stream import QUANTILES, Pool
from triage_jax.characterize.study import Series, Study

# Okabe and Ito's palette: told apart with every common kind of colour blindness.
BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#777777"
LIGHT, LIGHTER = "#BBBBBB", "#F0F0F0"
MAP = "cividis"
_DECADES = np.logspace(-4, 2, 6 * 8 + 1)
GAP_EDGES: Float[np.ndarray, "..."] = np.concatenate([-_DECADES[::-1], _DECADES])


def svg(draw: Callable[[Figure], None], width: float, height: float) -> str:
    """A figure as an `<svg>` element with real text."""
    figure = Figure(figsize=(width, height), layout="constrained")
    draw(figure)
    out = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "triage_jax"}):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    return re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.DOTALL)


def heat_map(study: Study) -> Callable[[Figure], None]:
    """Share of the valid tokens by gap and advantage, a panel per stage, the mass of the regions in the corners."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots(1, len(study.stages), sharey=True, squeeze=False)[0]
        shares = [_shares(pool) for pool in study.pools]
        top = max(float(share.max(initial=0)) for share in shares) or 1.0
        mesh = None
        for axis, stage, pool, share in zip(axes, study.stages, study.pools, shares, strict=True):
            height = np.arange(share.shape[0] + 1)
            mesh = axis.pcolormesh(
                GAP_EDGES,
                height,
                np.ma.masked_equal(share, 0),
                norm=LogNorm(top * 1e-5, top),
                cmap=MAP,
                rasterized=True,
            )
            axis.set_xscale("symlog", linthresh=1e-4, linscale=0.4)
            axis.set_xlim(GAP_EDGES[0], GAP_EDGES[-1])
            axis.set_xticks(
                [-10, -0.1, -1e-3, 0, 1e-3, 0.1, 10], ["-10", "-0.1", "-0.001", "0", "0.001", "0.1", "10"]
            )
            axis.tick_params(axis="x", labelsize=7)
            axis.axvline(0, color=GREY, linewidth=0.8)
            axis.axvline(study.measures.threshold, color=RED, linewidth=0.9, linestyle="--")
            axis.set_title(stage.title, fontsize=10)
            axis.set_xlabel("gap δ, nats")
            _corners(axis, pool)
        axes[0].set_ylabel("advantage A")
        places, labels = _advantage_ticks()
        axes[0].set_yticks(places, labels, fontsize=8)
        if mesh is not None:
            figure.colorbar(mesh, ax=axes, label="share of the valid tokens", pad=0.01)

    return draw


def _shares(pool: Pool) -> Float[np.ndarray, "A G"]:
    return pool.sketch.rebin(GAP_EDGES) / max(pool.gaps.tokens, 1)


def _advantage_ticks() -> tuple[list[float], list[str]]:
    inner = ADVANTAGE_EDGES[1:-1]
    whole = [(i + 1, value) for i, value in enumerate(inner) if value == round(value) and value != 0]
    middle = int(np.searchsorted(ADVANTAGE_EDGES, 0.0)) - 0.5
    ticks = sorted([*((float(i), f"{value:g}") for i, value in whole), (middle, "0")])
    return [place for place, _ in ticks], [label for _, label in ticks]


def _corners(axis: Axes, pool: Pool) -> None:
    mass = pool.regions.raw
    if not mass.any():
        return
    corners = {"Q1": (0.98, 0.98), "Q2": (0.02, 0.98), "Q3": (0.02, 0.02), "Q4": (0.98, 0.02)}
    for (name, (x, y)), share in zip(corners.items(), mass / mass.sum(), strict=True):
        axis.text(
            x,
            y,
            f"{name} {share:.1%}",
            transform=axis.transAxes,
            ha="right" if x > 0.5 else "left",
            va="top" if y > 0.5 else "bottom",
            fontsize=8,
            bbox={"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 1.5},
        )


def over_time(study: Study) -> Callable[[Figure], None]:
    """rho_asym and the quantiles of the gap over the updates."""

    def draw(figure: Figure) -> None:
        asymmetry, quantiles = figure.subplots(1, 2, sharex=True)
        for key, color, label in (
            ("rho_asym/raw", BLUE, "raw, |A|"),
            ("rho_asym/length_normalised", ORANGE, "length-normalised, |A| / n"),
            ("rho_asym/effective", GREEN, "effective, |A| min(ρ, 2)"),
        ):
            _curve(asymmetry, study.series, key, color, label)
        asymmetry.axhline(1.0, color=GREY, linewidth=0.8)
        asymmetry.set(title="rho_asym: mass of Q3 over mass of Q1", xlabel="step", ylabel="ratio")
        _fan(quantiles, study.series)
        quantiles.axhline(
            study.measures.threshold, color=RED, linewidth=0.9, linestyle="--", label="tail threshold"
        )
        quantiles.set(title="Quantiles of the gap over valid tokens", xlabel="step", ylabel="gap δ, nats")
        for axis in (asymmetry, quantiles):
            _dress(axis, study.stages)
        quantiles.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))

    return draw


def _fan(axis: Axes, series: Series) -> None:
    axis.set_yscale("symlog", linthresh=1e-3)
    styles = (
        ((0.001,), RED, ":"),
        ((0.01, 0.99), ORANGE, "-"),
        ((0.05, 0.95), GREEN, "-"),
        ((0.25, 0.75), BLUE, "-"),
        ((0.5,), GREY, "-"),
    )
    for shares, color, line in styles:
        label = " and ".join(f"{share:.1%}".replace(".0%", "%") for share in shares)
        for share in shares:
            assert share in QUANTILES
            _curve(axis, series, f"gap/q{share:g}", color, label if share == shares[0] else None, line=line)


def from_metrics(rows: Series) -> Callable[[Figure], None]:
    """What a run's metrics tell without per-token dumps: rho_asym and the size of the gap, moving means of 20 steps."""

    def draw(figure: Figure) -> None:
        asymmetry, gap = figure.subplots(1, 2, sharex=True)
        for axis, curves in (
            (
                asymmetry,
                (
                    ("rho_asym/raw", BLUE, "raw"),
                    ("rho_asym/length_normalised", ORANGE, "length-normalised"),
                    ("rho_asym/effective", GREEN, "effective (TIS)"),
                ),
            ),
            (
                gap,
                (
                    ("gap/abs_mean/token", BLUE, "mean |δ|"),
                    ("gap/max_abs", ORANGE, "max |δ|"),
                    ("gap/k3_sampler_learner/token", GREEN, "KL(sampler, learner), k3"),
                ),
            ),
        ):
            for key, color, label in curves:
                _curve(axis, _smooth(rows, key), key, color, label)
            _dress(axis, ())
        asymmetry.axhline(1.0, color=GREY, linewidth=0.8)
        asymmetry.set(title="rho_asym: mass of Q3 over mass of Q1", xlabel="step", ylabel="ratio")
        gap.set(
            title="Gap: learner minus sampler log-probability", xlabel="step", ylabel="nats", yscale="log"
        )

    return draw


def _smooth(rows: Series, key: str, window: int = 20) -> Series:
    rows = [row for row in rows if key in row]
    values = [row[key] for row in rows]
    return [
        {"step": row["step"], key: float(np.mean(values[max(0, i - window + 1) : i + 1]))}
        for i, row in enumerate(rows)
    ]


def localisation(study: Study) -> Callable[[Figure], None]:
    """C_tok and H_seg against the permutation null, per stage; and over the updates."""

    def draw(figure: Figure) -> None:
        concentration, heavy, series = figure.subplots(1, 3)
        rows = study.rows()
        _against_null(concentration, rows, "C_tok", study.stages)
        concentration.set(
            title="C_tok: tail tokens in the top 5 % of segments", ylabel="share of the tail tokens"
        )
        _against_null(heavy, rows, "H_seg", study.stages)
        heavy.set(title="H_seg: segments with more than 10 % tail", ylabel="share of the segments")
        for key, color, label in (
            ("C_tok", BLUE, "C_tok"),
            ("H_seg", ORANGE, "H_seg"),
            ("r_amp", GREEN, "r_amp, tail tokens"),
        ):
            _curve(series, study.series, key, color, label)
        series.set(title="Over the updates, A < 0 responses", xlabel="step", ylabel="share")
        series.set_ylim(0, 1.35 * series.get_ylim()[1])  # the legend's place
        _dress(series, study.stages)

    return draw


def _against_null(axis: Axes, rows: Series, key: str, stages: Sequence[Stage]) -> None:
    for place, row in enumerate(rows):
        low, high = row[f"{key}/null_low"], row[f"{key}/null_high"]
        first = place == 0
        axis.plot(
            [place, place],
            [low, high],
            color=LIGHT,
            linewidth=7,
            solid_capstyle="butt",
            label="null, middle 95 %" if first else None,
        )
        axis.plot(
            place,
            row[f"{key}/null_mean"],
            "_",
            color="black",
            markersize=14,
            label="null, mean" if first else None,
        )
        axis.plot(place, row[key], "D", color=BLUE, markersize=6, label="observed" if first else None)
    axis.set_xticks(range(len(rows)), [stage.name for stage in stages])
    axis.set_xlim(-0.6, len(rows) - 0.4)
    axis.set_ylim(0, 1.12 * axis.get_ylim()[1])
    axis.set_xlabel("stage (end of the window)")
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8)


def remedies(study: Study) -> Callable[[Figure], None]:
    """What each correction leaves of each class of tokens, in the last stage."""

    def draw(figure: Figure) -> None:
        axis = figure.subplots()
        pool = study.pools[-1]
        weights = pool.remedies.mean_weights()
        mass = pool.remedies.mass / max(float(pool.remedies.mass.sum()), 1e-300)
        picture = axis.imshow(
            weights, cmap=MAP, vmin=0, vmax=max(1.0, float(np.nanmax(weights, initial=1))), aspect="auto"
        )
        for (i, j), weight in np.ndenumerate(weights):
            text = "-" if np.isnan(weight) else f"{weight:.2f}"
            dark = np.isnan(weight) or weight < 0.55
            axis.text(
                j,
                i,
                text,
                ha="center",
                va="center",
                fontsize=9,
                color="white" if dark and text != "-" else "black",
            )
        axis.set_xticks(
            range(len(CLASSES)),
            [f"{name}\n{share:.1%} of the mass" for name, share in zip(CLASSES, mass, strict=True)],
        )
        axis.set_yticks(range(len(REMEDIES)), REMEDIES)
        axis.tick_params(length=0, labelsize=9)
        axis.axvline(2.5, color="white", linewidth=3)
        axis.set_title(
            f"Mean weight, weighed by |A| ({study.stages[-1].title}); amplifying left, contracting right",
            fontsize=10,
        )
        figure.colorbar(picture, ax=axis, label="mean weight", pad=0.01)

    return draw


def _curve(axis: Axes, rows: Series, key: str, color: str, label: str | None, line: str = "-") -> None:
    points = [(row["step"], row[key]) for row in rows if np.isfinite(row[key])]
    if points:
        x, y = zip(*points, strict=True)
        marker = "o" if len(points) < 30 else ""
        axis.plot(x, y, line, color=color, label=label, linewidth=1.3, marker=marker, markersize=3)


def _dress(axis: Axes, stages: Sequence[Stage]) -> None:
    if len(stages) > 1:
        for stage in stages[::2]:
            axis.axvspan(stage.steps[0] - 0.5, stage.steps[-1] + 0.5, color=LIGHTER, linewidth=0, zorder=0)
    axis.grid(alpha=0.25)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=8)
