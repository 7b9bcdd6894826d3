"""The queue of trials: `python -m scripts.study.run --arms bf16 naive triage --seeds 0 1`.

Skips what `--results` holds already and goes on with what was interrupted, so that the same command may be given again
at any time. One seed of every arm comes before the next seed. Several queues may run at once, each on a core of its own
(`--core 0`, `--core 1`): none takes a trial that another one is at, and two small trials side by side are faster than
one after the other on both cores.
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
    """Runs, the compilation cache and the pid file of each trial that is running"""
    core: int | None = None
    """The CPU core to stay on; all of them where it is not given"""


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
def taken(runs: Path, trial: Trial) -> Iterator[bool]:
    """Whether the trial is this queue's until the end; its process id is in `REGIME/ARM-SEED.pid` while it is."""
    path = runs / trial.regime / f"{trial.arm}-{trial.seed}.pid"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        try:
            yield True
        finally:
            file.truncate(0)


def run_queue(queue: Queue, console: Console) -> None:
    """Run every trial that is missing."""
    missing = missing_trials(queue)
    for folder in (queue.runs, *(queue.results / regime for regime in queue.regimes)):
        folder.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str((queue.runs / "cache").resolve()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    for number, trial in enumerate(missing, start=1):
        with taken(queue.runs, trial) as ours:
            if not ours or is_done(queue.results, trial):
                continue
            record = run_trial(
                ARMS[trial.arm],
                trial.seed,
                base=regime_path(trial.regime),
                runs=queue.runs / trial.regime,
                results=queue.results / trial.regime,
            )
        console.print(f"{number}/{len(missing)} {_line(record)}", markup=False, soft_wrap=True)


def stay_on(core: int) -> None:
    """Bind this process to a core, before JAX makes its threads. Raises ConfigError for one that is not there."""
    cores = sorted(os.sched_getaffinity(0))
    if core not in cores:
        raise ConfigError(f"--core {core}: not one of this machine's; accepted: {', '.join(map(str, cores))}")
    os.sched_setaffinity(0, {core})


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
        if queue.core is not None:
            stay_on(queue.core)
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
