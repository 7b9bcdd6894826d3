"""The queue of trials: `python -m scripts.study.run --arms bf16 naive triage --seeds 0 1`.

Skips what `--results` holds already and goes on with what was interrupted, so that the same command may be given again
at any time. One seed of every arm comes before the next seed.
"""

import fcntl
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax
import tyro
from rich.console import Console

from scripts.study.arms import ARMS, REGIMES, belongs, fingerprint, regime_path
from scripts.study.trial import FORMAT, Interrupted, Record, result_path, run_trial
from triage_jax.config import ConfigError


@dataclass(frozen=True, kw_only=True)
class Queue:
    """Which trials to run, and where their records go."""

    arms: tuple[str, ...] = tuple(ARMS)
    """Arms by name, in this order"""
    regimes: tuple[str, ...] = REGIMES
    """Regimes by name; sources and variants are run where NVFP4 falls only"""
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    results: Path = Path("docs/study/results")
    """Records of finished trials, versioned"""
    runs: Path = Path("runs/study")
    """Runs, the compilation cache and the queue's pid file"""


class Trial(NamedTuple):
    """One entry of the queue."""

    regime: str
    arm: str
    seed: int


def is_done(results: Path, trial: Trial) -> bool:
    """Whether the record is there. Raises ConfigError if it belongs to another configuration of the arm."""
    path = result_path(results / trial.regime, trial.arm, trial.seed)
    if not path.exists():
        return False
    record = json.loads(path.read_text(encoding="utf-8"))
    wanted = fingerprint(ARMS[trial.arm], regime_path(trial.regime))
    if record.get("format") != FORMAT or record.get("fingerprint") != wanted:
        raise ConfigError(
            f"{path}: made with another configuration ({record.get('fingerprint')}, now {wanted}); "
            "delete it to run the trial anew, or restore the configuration"
        )
    return True


def missing_trials(queue: Queue) -> list[Trial]:
    """What is still to be run. Raises ConfigError for an unknown arm or regime, or a stale record."""
    for field, given, known in (("arms", queue.arms, ARMS), ("regimes", queue.regimes, REGIMES)):
        if unknown := [name for name in given if name not in known]:
            raise ConfigError(f"--{field} {' '.join(unknown)}: not known; accepted: {', '.join(known)}")
    everything = [
        Trial(regime, name, seed)
        for seed in queue.seeds
        for regime in queue.regimes
        for name in queue.arms
        if belongs(ARMS[name], regime)
    ]
    return [trial for trial in everything if not is_done(queue.results, trial)]


@contextmanager
def alone(runs: Path) -> Iterator[None]:
    """One queue at a time, its process id in `runs/queue.pid`. Raises ConfigError if another one runs."""
    path = runs / "queue.pid"
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"{path}: another queue is running; accepted: one at a time") from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def run_queue(queue: Queue, console: Console) -> None:
    """Run every trial that is missing."""
    missing = missing_trials(queue)
    for folder in (queue.runs, *(queue.results / regime for regime in queue.regimes)):
        folder.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str((queue.runs / "cache").resolve()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    with alone(queue.runs):
        for number, trial in enumerate(missing, start=1):
            record = run_trial(
                ARMS[trial.arm],
                trial.seed,
                base=regime_path(trial.regime),
                runs=queue.runs / trial.regime,
                results=queue.results / trial.regime,
            )
            console.print(f"{number}/{len(missing)} {_line(record)}", markup=False, soft_wrap=True)


def _line(record: Record) -> str:
    before, after = record["heldout"].values()
    collapsed = f", collapsed at {record['collapse_step']}" if record["collapse_step"] else ""
    return (
        f"{time.strftime('%H:%M:%S')} {record['regime']}, {record['arm']}, seed {record['seed']}: "
        f"{record['seconds']} s, held out {before} -> {after}{collapsed}"
    )


def main() -> int:
    queue = tyro.cli(Queue, description=__doc__)
    try:
        run_queue(queue, Console())
    except Interrupted as stop:
        print(f"{stop}; the same command goes on")
        return 1
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
