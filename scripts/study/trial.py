"""One trial: the real trainer on one arm and seed, and the record that is kept of it."""

import contextlib
import json
import shutil
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from scripts.study.arms import Arm, config_of, fingerprint
from scripts.study.statistics import collapse_step
from triage_jax.characterize import Dump, Measures, Pool, measure
from triage_jax.characterize.files import FileSource, open_source
from triage_jax.characterize.study import frozen_threshold
from triage_jax.cli import Invocation
from triage_jax.config import TrainConfig
from triage_jax.metrics import Row, read_metrics, write_atomically
from triage_jax.run import Paths
from triage_jax.train import TrainingStopped, run_training

FORMAT = "triage_jax stability study 1"
CURVES = {
    "reward": "reward/mean/response",
    "gap": "gap/abs_mean/token",
    "within": "gap/within_0.05/token",
    "rho_asym": "rho_asym/raw",
    "rho_asym_effective": "rho_asym/effective",
    "grad_norm": "optimizer/grad_norm",
    "entropy": "entropy/token",
    "length": "response/length_mean",
    "gate_weight": "gate/weight_mean/token",
    "repair_active": "repair/active_fraction/segment",
}
"""Metrics of every update that are kept, under short names"""
WINDOW = {
    "rho_asym": "rho_asym/raw",
    "rho_asym_length": "rho_asym/length_normalised",
    "C_tok": "C_tok",
    "C_tok_null": "C_tok/null_mean",
    "C_tok_null_low": "C_tok/null_low",
    "C_tok_null_high": "C_tok/null_high",
    "r_amp": "r_amp",
    "H_seg": "H_seg",
    "q05": "gap/q0.05",
    "q01": "gap/q0.01",
}
"""Statistics of a window of updates that are kept"""
WIDTH, SEGMENT, DRAWS = 10, 8, 199
type Record = dict[str, Any]


class Interrupted(Exception):
    """A signal ended the trial; run again, it goes on from its checkpoint."""


def result_path(results: Path, arm: str, seed: int) -> Path:
    return results / f"{arm}-{seed}.json"


def run_trial(arm: Arm, seed: int, *, base: Path, runs: Path, results: Path) -> Record:
    """Train, or go on where it stopped; write the record and delete the run but for metrics and log.

    Raises Interrupted after a signal.
    """
    config = config_of(arm, base, seed=seed, out=runs / f"{arm.name}-{seed}")
    paths = Paths(root=Path(config.out))
    paths.root.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    with (paths.root / "log.txt").open("a") as log, contextlib.redirect_stdout(log):
        stopped = _train(config, paths)
    rows = read_metrics(paths.metrics)
    record = header(arm, seed, base) | summarise(config, rows, open_source([paths.root]), stopped=stopped)
    record["seconds"] = round(time.perf_counter() - started)
    text = json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n"
    write_atomically(result_path(results, arm.name, seed), text)
    for path in (paths.dumps, paths.checkpoints, paths.model):
        shutil.rmtree(path, ignore_errors=True)
    jax.clear_caches()  # many trials in one process; the compilation cache on disk makes up for it
    return record


def _train(config: TrainConfig, paths: Paths) -> bool:
    """Returns whether training stopped for updates that were not finite."""
    go_on = Invocation(config=config, resume=paths.config.exists(), overwrite=False, dry_run=False)
    try:
        run_training(go_on)
    except TrainingStopped:
        return True
    done = updates(read_metrics(paths.metrics))
    if not done or done[-1]["step"] < config.steps:
        raise Interrupted(f"{paths.root}: stopped before step {config.steps}")
    return False


def updates(rows: list[Row]) -> list[Row]:
    """The rows of updates, without those of evaluations."""
    return [row for row in rows if "optimizer/grad_norm" in row]


def header(arm: Arm, seed: int, base: Path) -> Record:
    """Which trial of which configuration."""
    return {
        "format": FORMAT,
        "regime": base.stem,
        "arm": arm.name,
        "seed": seed,
        "fingerprint": fingerprint(arm, base),
    }


def summarise(config: TrainConfig, rows: list[Row], dumps: FileSource, *, stopped: bool) -> Record:
    """What is kept of a run, plain values."""
    steps = updates(rows)
    curves = {name: [_plain(row[key]) for row in steps] for name, key in CURVES.items()}
    curves["passed"] = [_passed(dump, config.rollout.samples_per_prompt) for dump in dumps.dumps()]
    scores = {row["step"]: row["eval/reward/response"] for row in rows if "eval/right" in row}
    collapse = collapse_step(curves["reward"], curves["passed"], curves["grad_norm"])
    return {
        "steps": config.steps,
        "not_finite": stopped,
        "collapse_step": collapse,
        "heldout": {"before": scores.get(0), "after": scores.get(config.steps)},
        "curves": curves,
        "windows": windows(dumps, [row["step"] for row in steps]),
    }


def windows(dumps: FileSource, steps: list[int]) -> dict[str, Any]:
    """Regions, tails and their null in windows of updates, the tail's threshold from the first of them."""
    threshold = frozen_threshold(dumps.dumps(frozenset(steps[:WIDTH])))
    measures = Measures(threshold=threshold, segment=SEGMENT, draws=DRAWS, seed=0)
    pools: dict[int, Pool] = {}
    for place, dump in enumerate(dumps.dumps()):
        pool, index = measure(dump, measures, null=True), place // WIDTH
        pools[index] = pools[index] + pool if index in pools else pool
    found = [pools[index].row(measures) for index in sorted(pools)]
    return {
        "width": WIDTH,
        "segment": SEGMENT,
        "threshold": _plain(threshold),
        **{name: [_plain(row[key]) for row in found] for name, key in WINDOW.items()},
    }


def _passed(dump: Dump, group: int) -> float:
    """Share of the prompts with a right response among their samples."""
    assert dump.rewards is not None
    return _plain(float((dump.rewards.reshape(-1, group) >= 0.5).any(axis=1).mean())) or 0.0


def _plain(value: float | np.floating | None) -> float | None:
    """Five significant digits; None for what is not finite."""
    if value is None or not np.isfinite(value):
        return None
    return float(f"{float(value):.5g}")
