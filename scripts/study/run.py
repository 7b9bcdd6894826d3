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

import jax
import tyro
from rich.console import Console

from scripts.study.arms import ARMS, BASE, fingerprint
from scripts.study.trial import FORMAT, Interrupted, result_path, run_trial
from triage_jax.config import ConfigError


@dataclass(frozen=True, kw_only=True)
class Queue:
    """Which trials to run, and where their records go."""

    arms: tuple[str, ...] = tuple(ARMS)
    """Arms by name, in this order"""
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    results: Path = Path("docs/study/results")
    """Records of finished trials, versioned"""
    base: Path = BASE
    """What all arms share"""
    runs: Path = Path("runs/study")
    """Runs, the compilation cache and the queue's pid file"""


def is_done(queue: Queue, name: str, seed: int) -> bool:
    """Whether the record is there. Raises ConfigError if it belongs to another configuration of the arm."""
    path = result_path(queue.results, name, seed)
    if not path.exists():
        return False
    record = json.loads(path.read_text(encoding="utf-8"))
    wanted = fingerprint(ARMS[name], queue.base)
    if record.get("format") != FORMAT or record.get("fingerprint") != wanted:
        raise ConfigError(
            f"{path}: made with another configuration ({record.get('fingerprint')}, now {wanted}); "
            "delete it to run the trial anew, or restore the configuration"
        )
    return True


def trials(queue: Queue) -> list[tuple[str, int]]:
    """Arm and seed of what is still to be run. Raises ConfigError for an unknown arm or a stale record."""
    unknown = [name for name in queue.arms if name not in ARMS]
    if unknown:
        raise ConfigError(f"--arms {' '.join(unknown)}: no such arm; accepted: {', '.join(ARMS)}")
    everything = [(name, seed) for seed in queue.seeds for name in queue.arms]
    return [(name, seed) for name, seed in everything if not is_done(queue, name, seed)]


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
    missing = trials(queue)
    for folder in (queue.results, queue.runs):
        folder.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str((queue.runs / "cache").resolve()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    with alone(queue.runs):
        for number, (name, seed) in enumerate(missing, start=1):
            record = run_trial(ARMS[name], seed, runs=queue.runs, results=queue.results, base=queue.base)
            when, collapse = time.strftime("%H:%M:%S"), record["collapse_step"]
            console.print(
                f"{when} {number}/{len(missing)} {name}, seed {seed}: {record['seconds']} s, held out "
                f"{record['heldout']['before']} -> {record['heldout']['after']}"
                + (f", collapsed at {collapse}" if collapse else ""),
                markup=False,
                highlight=False,
                soft_wrap=True,
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
