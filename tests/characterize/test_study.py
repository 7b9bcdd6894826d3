"""A whole run: windows, pooling, one update in memory, JSON, page and command."""

import json
import math
import re
import weakref
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from tests.characterize.inputs import random_dump
from triage_jax.characterize import (
    DumpError,
    Measures,
    StudyConfig,
    dump_path,
    gap_of,
    localization,
    measure,
    regions,
    stages,
    study,
    tail_segments,
    write_dump,
)
from triage_jax.characterize import __main__ as command
from triage_jax.characterize.page import render
from triage_jax.characterize.rows import Skipped


class Listed:
    """A source from memory that counts the updates alive at once."""

    def __init__(self, dumps):
        self._dumps = dumps
        self.alive, self.most = weakref.WeakSet(), 0

    def steps(self):
        return [dump.step for dump in self._dumps]

    def dumps(self, steps=None):
        for dump in self._dumps:
            if steps is None or dump.step in steps:
                fresh = replace(dump)
                self.alive.add(fresh)
                self.most = max(self.most, len(self.alive))
                yield fresh
                del fresh


def updates(count, **more):
    return [random_dump(seed, step=10 + seed, **more) for seed in range(count)]


@pytest.mark.parametrize(
    ("count", "window", "expected"),
    [
        (1, 25, [[0]]),
        (3, 25, [[0, 1, 2]]),
        (4, 25, [[0], [1], [2], [3]]),
        (10, 2, [[0, 1], [3, 4], [5, 6], [8, 9]]),
        (10, 25, [[0, 1], [2, 3, 4], [5, 6], [7, 8, 9]]),
    ],
)
def test_windows(count, window, expected):
    found = stages(range(count), window)
    assert [list(stage.steps) for stage in found] == expected


def test_windows_of_the_official_study():
    found = stages(range(1, 301))
    assert [(s.steps[0], s.steps[-1]) for s in found] == [(51, 75), (126, 150), (201, 225), (276, 300)]
    with pytest.raises(ValueError, match="windows of 0"):
        stages([1], 0)


@pytest.mark.parametrize("per_token", [False, True])
def test_measure_is_the_parts_together(per_token):
    dump = random_dump(7, per_token=per_token)
    measures = Measures(threshold=-0.25, draws=9)
    pool = measure(dump, measures, null=True)
    gap = gap_of(dump.learner_logp, dump.sampler_logp, dump.mask)
    row = pool.row(measures)
    assert row["rho_asym/raw"] == regions(gap, dump.advantages, dump.mask).rho_asym()
    local = localization(tail_segments(gap, dump.advantages, dump.mask, threshold=-0.25))
    assert (row["C_tok"], row["H_seg"], row["r_amp"]) == (local.concentration, local.heavy_share, local.r_amp)
    assert row["tokens"] == dump.mask.sum()
    assert row["C_tok/null_low"] <= row["C_tok/null_mean"] <= row["C_tok/null_high"]
    difference = np.exp(dump.learner_logp[dump.mask]) - np.exp(dump.sampler_logp[dump.mask])
    assert row["gap/prob_difference/token"] == pytest.approx(np.abs(difference).mean())


def test_blocks_do_not_matter(monkeypatch):
    from triage_jax.characterize import arrays

    dump = random_dump(8)
    measures = Measures(threshold=-0.25, draws=5)
    whole = measure(dump, measures, null=True).row(measures)
    monkeypatch.setattr(arrays, "BLOCK", 700)
    assert measure(dump, measures, null=True).row(measures) == pytest.approx(whole, rel=1e-12, nan_ok=True)


def test_updates_have_draws_of_their_own():
    """Draws that repeat from update to update would widen the interval of a window."""
    dump, measures = random_dump(9), Measures(threshold=-0.25, draws=5)
    first, again, other = (
        measure(replace(dump, step=step), measures, null=True).null.table for step in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_a_study_pools_before_it_divides():
    dumps = updates(8)
    source = Listed(dumps)
    found = study(source, StudyConfig(draws=5))
    assert source.most <= 2  # the one measured, and the next being read
    gaps = [gap_of(d.learner_logp, d.sampler_logp, d.mask) for d in dumps]
    masses = [regions(gap, d.advantages, d.mask).raw for gap, d in zip(gaps, dumps, strict=True)]
    for stage, row, pair in zip(found.stages, found.rows(), (0, 2, 4, 6), strict=True):
        pooled = masses[pair] + masses[pair + 1]
        assert row["rho_asym/raw"] == pytest.approx(pooled[2] / pooled[0])
        assert stage.steps == (10 + pair, 11 + pair)
    first = np.concatenate([gaps[i][dumps[i].mask] for i in (0, 1)])
    assert found.measures.threshold == pytest.approx(np.quantile(first, 0.05), rel=0.02)
    assert [row["step"] for row in found.series] == [d.step for d in dumps]
    sizes = [outlier.mean_size for outlier in found.outliers]
    assert sizes == sorted(sizes, reverse=True)
    assert len(sizes) == 10


def test_a_given_threshold_is_kept_and_the_seed_repeats():
    config = StudyConfig(threshold=-0.4, draws=7, seed=3)
    first, again = (study(Listed(updates(4)), config).to_json() for _ in range(2))
    assert first["measures"]["threshold"] == -0.4
    assert json.dumps(first, allow_nan=False) == json.dumps(again)
    assert first["stages"][0]["remedies"].keys() >= {"TIS", "OPSM", "TRIAGE Gate"}


@pytest.mark.parametrize("advantage", [1.0, 0.0])
def test_a_run_without_negative_advantages_has_a_page(advantage):
    dumps = [replace(dump, advantages=np.full(12, advantage)) for dump in updates(4)]
    found = study(Listed(dumps), StudyConfig(draws=3))
    assert all(math.isnan(row["C_tok"]) and row["segments"] == 0 for row in found.rows())
    assert found.to_json()["stages"][0]["C_tok"] is None
    page = Page()
    page.feed(render(found, title="x", skipped=Skipped()))
    assert page.tags.count("svg") == 4


def test_nothing_to_study():
    with pytest.raises(DumpError, match="no update"):
        study(Listed([]))
    empty = replace(random_dump(1), mask=np.zeros((12, 300), bool))
    with pytest.raises(DumpError, match="no valid token"):
        study(Listed([empty]))
    for bad in ({"draws": 0}, {"segment": 0}, {"window": 0}):
        with pytest.raises(ValueError, match="accepted: at least 1"):
            StudyConfig(**bad)


def test_sign_audit_of_a_study():
    """The gaps of A < 0 move away from 0 in three tokens of four."""
    dumps = []
    for dump in updates(4):
        away = np.random.default_rng(dump.step).random(dump.mask.shape) < 0.75
        gap = gap_of(dump.learner_logp, dump.sampler_logp, dump.mask)
        after = np.where(dump.mask, dump.learner_logp + np.where(away, 0.1, -0.1) * np.sign(gap), np.nan)
        dumps.append(replace(dump, learner_logp_after=after))
    found = study(Listed(dumps), StudyConfig(draws=3))
    for pool, dump in zip(found.pools, dumps, strict=True):
        everything = pool.audit[0]
        gap = gap_of(dump.learner_logp, dump.sampler_logp, dump.mask)
        assert everything.tokens == np.count_nonzero((gap < 0) & (dump.advantages[:, None] < 0))
        assert everything.share == pytest.approx(0.75, abs=0.05)
        assert 0 < pool.audit[3].tokens < everything.tokens
    pooled = found.pools[0] + found.pools[1]
    assert pooled.audit[0].tokens == sum(pool.audit[0].tokens for pool in found.pools[:2])
    assert found.to_json()["stages"][0]["audit"][0]["depth"] == 0
    assert "Sign audit" in render(found, title="x", skipped=Skipped())
    without = study(Listed([replace(dump, learner_logp_after=None) for dump in dumps]), StudyConfig(draws=3))
    assert "Sign audit" not in render(without, title="x", skipped=Skipped())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs") / "a <run> & more"
    for dump in updates(5):
        write_dump(
            dump_path(root, dump.step),
            step=dump.step,
            learner_logp=dump.learner_logp,
            sampler_logp=dump.sampler_logp,
            mask=dump.mask,
            advantages=dump.advantages,
        )
    rows = [{"step": s, "gap/abs_mean/token": 0.9, "rho_asym/raw": 1.2, "loss": 0.1} for s in range(1, 6)]
    (root / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


class Page(HTMLParser):
    """Tags, addresses and text of a page."""

    def __init__(self):
        super().__init__()
        self.tags, self.open, self.addresses, self.text = [], [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag not in ("meta", "br", "use", "path"):
            self.open.append(tag)
        self.addresses += [v for k, v in attributes if k in ("src", "href", "xlink:href") and v]

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.addresses += [v for k, v in attributes if k in ("src", "href", "xlink:href") and v]

    def handle_endtag(self, tag):
        if tag not in ("meta", "br", "use", "path"):
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data.strip())


def test_command_writes_table_json_and_page(run, capsys):
    assert command.main([str(run), "--draws", "9"]) == 0
    out = capsys.readouterr().out
    assert "rho_asym, raw" in out
    assert "mismatch.html" in out
    report = json.loads((run / "mismatch.json").read_text())
    assert [stage["name"] for stage in report["stages"]] == ["25 %", "50 %", "75 %", "100 %"]
    assert report["skipped_rows"] == 0
    assert [f["name"] for f in report["health"] if not f["healthy"]] == ["gap/abs_mean/token (miles)"]
    page = Page()
    text = (run / "mismatch.html").read_text()
    page.feed(text)
    assert page.open == []
    assert page.tags.count("svg") == 4
    assert not {"script", "link", "iframe", "img"} & set(page.tags)
    assert all(a.startswith(("#", "data:")) for a in page.addresses)
    assert not re.search(r"url\((?!#)", text)
    assert "a &lt;run&gt; &amp; more" in text
    shown = " ".join(page.text)
    for words in (
        "gap δ, nats",
        "advantage A",
        "null, middle 95 %",
        "TRIAGE Gate",
        "share of the valid tokens",
    ):
        assert words in shown, words
    for digits in ("nan", "inf%"):
        assert digits not in shown.lower().split()


def test_command_on_a_run_without_dumps(tmp_path, capsys):
    rows = [{"step": s, "rho_asym/raw": 1.2, "gap/abs_mean/token": 0.01, "loss": None} for s in range(1, 9)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert command.main([str(tmp_path)]) == 0
    assert "no dumps: the page shows metrics only" in capsys.readouterr().out.replace("\n", " ")
    page = Page()
    page.feed((tmp_path / "mismatch.html").read_text())
    assert page.tags.count("svg") == 1
    assert "8 of the last 8 updates had a loss or gradient that was not finite" in page.text
    assert not (tmp_path / "mismatch.json").exists()


def test_command_on_foreign_rows_counts_what_it_skips(tmp_path, capsys):
    row = {"lp": [-1.0] * 80, "sp": [-1.1] * 40 + [-0.9] * 40, "adv": -1.0}
    lines = [json.dumps(row)] * 3 + [json.dumps(row | {"lp": [-1.0]}), "{"]
    (tmp_path / "1.jsonl").write_text("\n".join(lines) + "\n")
    maps = ["--map", "learner_logp=lp", "--map", "sampler_logp=sp", "--map", "advantages=adv"]
    arguments = [str(tmp_path / "1.jsonl"), *maps, "--draws", "3", "--out", str(tmp_path / "out")]
    assert command.main(arguments) == 0
    out = capsys.readouterr().out
    assert "2 rows were left out" in out
    assert "1.jsonl:5: not JSON" in out.replace("\n", "")
    assert "2 rows were left out" in (tmp_path / "out" / "mismatch.html").read_text()
    assert command.main([*arguments, "--strict"]) == 2
    assert "1.jsonl:4: `lp` has 1 values" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to read"),
        (["absent"], "no such file or directory"),
        (["absent", "--map", "x=y"], "accepted: COLUMN=NAME"),
        (["absent", "--draws", "0"], "draws is 0"),
    ],
)
def test_command_refuses(arguments, message, capsys):
    try:
        status = command.main(arguments)
    except SystemExit as stop:
        status = stop.code
    captured = capsys.readouterr()
    assert status == 2
    assert message in captured.err + captured.out


def test_watch_says_how_a_run_does(run, capsys):
    assert command.main(["--watch", str(run), "--interval", "0"]) == 1
    out = capsys.readouterr().out
    assert "LOOK  mean |gap|, nats, is 0.9, mean of 5 steps; miles accepts less than 0.03" in out
    assert command.main(["--names"]) == 0
    assert "gen_kl_error" in capsys.readouterr().out
