"""`mismatch.html`: the study as one file without scripts, fonts or images from elsewhere."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from triage_jax.characterize import figures
from triage_jax.characterize.figures import svg
from triage_jax.characterize.health import Finding
from triage_jax.characterize.names import our_names
from triage_jax.characterize.rows import Skipped
from triage_jax.characterize.study import Study

STATISTICS: tuple[tuple[str, str, str], ...] = (
    ("updates", "updates", ",.0f"),
    ("responses", "responses", ",.0f"),
    ("valid tokens", "tokens", ",.0f"),
    ("rho_asym, raw", "rho_asym/raw", ".3f"),
    ("rho_asym, length-normalised", "rho_asym/length_normalised", ".3f"),
    ("rho_asym, effective (TIS)", "rho_asym/effective", ".3f"),
    ("amplifying share of the mass", "amplifying_share", ".1%"),
    ("tokens without advantage", "without_advantage/token", ".1%"),
    ("mean |δ|, nats", "gap/abs_mean/token", ".4f"),
    ("mean |p - q|", "gap/prob_difference/token", ".4f"),
    ("|δ| < 0.05", "gap/within_0.05/token", ".1%"),
    ("δ < -6", "gap/below_-6/token", ".4%"),
    ("δ, 5 % quantile, nats", "gap/q0.05", ".4f"),
    ("δ, smallest, nats", "gap/min", ".2f"),
    ("KL(sampler, learner), k3, nats", "gap/k3_sampler_learner/token", ".1e"),
    ("KL(learner, sampler), k3, nats", "gap/k3_learner_sampler/token", ".1e"),
    ("effective sample size", "tis/ess/token", ".1%"),
    ("r_amp, tail tokens", "r_amp", ".2%"),
    ("H_seg, tail-heavy segments", "H_seg", ".2%"),
    ("C_tok, tail tokens in top 5 %", "C_tok", ".2%"),
    ("C_tok, null mean", "C_tok/null_mean", ".2%"),
    ("C_tok, null 2.5 %", "C_tok/null_low", ".2%"),
    ("C_tok, null 97.5 %", "C_tok/null_high", ".2%"),
    ("P_adj", "P_adj", ".2f"),
    ("P_adj, null mean", "P_adj/null_mean", ".2f"),
    ("heavy pairs over chance (order test)", "order/enrichment", ".2f"),
    ("order test, z", "order/z", ".1f"),
    ("hidden from |mean δ| < 0.05", "dilution/mean", ".1%"),
    ("hidden from mean |δ| < 0.05", "dilution/abs_mean", ".1%"),
)
"""Label, key and format of what the table shows"""

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1180px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; }
table { border-collapse: collapse; font-size: 14px; }
th, td { padding: 2px 12px 2px 0; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child, td.text { text-align: left; }
svg { max-width: 100%; height: auto; }
.bad { color: #A04000; } .note { color: #555; max-width: 62em; }
"""


def text_of(value: int | float | None, form: str) -> str:
    """A number as the tables show it; what is undefined is a dash."""
    return "-" if value is None or value != value else format(value, form)


def render(study: Study, *, title: str, skipped: Skipped, findings: Sequence[Finding] = ()) -> str:
    """The page."""
    measures, rows = study.measures, study.rows()
    sections = [
        f"<h1>Mismatch of learner and sampler: {escape(title)}</h1>",
        f"<p class=\"note\">δ is the learner's minus the sampler's log-probability of a sampled token, A its "
        f"advantage. A tail token has A &lt; 0 and δ &lt; {measures.threshold:.5g} nats; segments have "
        f"{measures.segment} tokens; the null has {measures.draws} draws. Sums of a window are pooled before they are "
        "divided.</p>",
        _health(findings),
        _skipped(skipped),
        "<h2>Stages</h2>",
        _table(
            ["", *(stage.title for stage in study.stages)],
            [[label, *(text_of(row.get(key), form) for row in rows)] for label, key, form in STATISTICS],
        ),
        "<h2>Advantage and gap</h2>",
        '<p class="note">Amplifying: Q1 (A &gt; 0, δ &gt; 0) and Q3 (A &lt; 0, δ &lt; 0); one gradient step moves '
        "their gaps away from 0, to first order and for each token by itself. Percentages: shares of the mass |A|. "
        "Dashed: the tail's threshold.</p>",
        svg(figures.heat_map(study), 3.2 * max(len(study.stages), 2) + 1, 3.8),
        "<h2>Over time</h2>",
        svg(figures.over_time(study), 12.0, 4.2),
        "<h2>Where the tail sits</h2>",
        '<p class="note">C_tok rises when the tail gets rarer, without any localisation: only its distance from '
        "the null, tail labels shuffled inside each response, means something.</p>",
        svg(figures.localisation(study), 13.0, 4.0),
        "<h2>What each remedy would weigh</h2>",
        '<p class="note">Published defaults, applied to these tokens; before any renormalisation. A rule that '
        "stabilises takes from the left three columns and leaves the right two.</p>",
        svg(figures.remedies(study), 11.0, 3.8),
        _audit(study),
        "<h2>Responses with the largest gaps</h2>",
        '<p class="note">One response far from the rest is more often a defect (stale weights, another tokenisation, '
        "lost routing) than low precision.</p>",
        _outliers(study),
    ]
    return _document(title, sections)


def render_metrics(rows: Sequence[Mapping[str, Any]], *, title: str, findings: Sequence[Finding]) -> str:
    """The page of a run that has metrics and no dumps."""
    numbers = [
        {key: value for key, value in our_names(row).items() if isinstance(value, int | float)}
        for row in rows
    ]
    sections = [
        f"<h1>Mismatch of learner and sampler: {escape(title)}</h1>",
        '<p class="note">From metrics alone: the heat map, the quantiles, the segments and the remedies need per-token '
        "dumps.</p>",
        _health(findings),
        "<h2>Over time</h2>",
        svg(figures.from_metrics([row for row in numbers if "step" in row]), 12.0, 4.2),
    ]
    return _document(title, sections)


def _document(title: str, sections: Sequence[str]) -> str:
    body = "\n".join(section for section in sections if section)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>Mismatch: {escape(title)}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return "<table>\n" + "\n".join([line(head, "th"), *(line(row, "td") for row in rows)]) + "\n</table>"


def _health(findings: Sequence[Finding]) -> str:
    if not findings:
        return ""
    items = "".join(
        f'<li class="{"" if finding.healthy else "bad"}">{escape(finding.text)}</li>' for finding in findings
    )
    return f"<h2>Health</h2><ul>{items}</ul>"


def _skipped(skipped: Skipped) -> str:
    if not skipped.rows:
        return ""
    reasons = "".join(f"<li>{escape(reason)}</li>" for reason in skipped.reasons)
    return f'<p class="bad">{skipped.rows} rows were left out; the first reasons:</p><ul>{reasons}</ul>'


def _audit(study: Study) -> str:
    """Agreement of the sign rule with what the updates did, where the dumps allow it."""
    rows = [
        [
            stage.title,
            f"{found.depth:g}",
            f"{found.tokens:,}",
            text_of(found.share, ".1%"),
            text_of(found.weighted_share, ".1%"),
        ]
        for stage, pool in zip(study.stages, study.pools, strict=True)
        for found in pool.audit
    ]
    if not rows:
        return ""
    note = (
        '<p class="note">Tokens with A &lt; 0 and δ &lt; 0 whose gap moved away from 0 in the update, as the rule of '
        "the diagonal says. 50 % is a coin; the official runs had 38.9 % and 33.7 % over all depths.</p>"
    )
    return (
        "<h2>Sign audit</h2>" + note + _table(["", "|δ| above", "tokens", "agree", "agree, by |δ A|"], rows)
    )


def _outliers(study: Study) -> str:
    rows: list[list[Any]] = [
        [
            str(o.step),
            str(o.response),
            f"{o.tokens:,}",
            f"{o.advantage:.2f}",
            f"{o.mean_size:.4f}",
            text_of(o.times_median, ".1f"),
            f"{o.worst_gap:.2f}",
            f"{o.worst_position:,}",
            text_of(o.share, ".1%"),
        ]
        for o in study.outliers
    ]
    head = [
        "step",
        "response",
        "tokens",
        "A",
        "mean |δ|, nats",
        "over median",
        "worst δ",
        "at token",
        "share of Σ|δ|",
    ]
    return _table(head, rows)
