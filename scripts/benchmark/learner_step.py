"""Time of the quickstart's whole learner step, scoring and update, in emulated NVFP4 against BF16.

    python scripts/benchmark/learner_step.py [--repeats 30] [--bound 1.5] [--json FILE]

Model, shapes, objective and optimiser are those of `configs/quickstart.yaml`; the tokens are drawn at random, which no
operation of the step notices. Forms alternate (order reversed every round), so that other work on the machine meets
both alike; the verdict is the median over rounds of emulated / BF16. CPU seconds of the process stand beside
wall-clock ones: they hardly notice other processes. Exits 1 beyond the bound.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from triage_jax.config import TrainConfig, from_dict, load_yaml
from triage_jax.learner import RolloutBatch, init_state, score, update
from triage_jax.model import Numerics, load_model
from triage_jax.run import make_learner, resolve_model

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.yaml"

type Clocks = tuple[float, float]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=30, help="rounds; each calls both forms once")
    parser.add_argument("--bound", type=float, default=1.5, help="largest ratio that passes")
    parser.add_argument("--json", type=Path, help="also write the result here")
    arguments = parser.parse_args()

    config = from_dict(TrainConfig, load_yaml(CONFIG), str(CONFIG))
    times = measure(steps_of(config), arguments.repeats)
    report = {
        "rows": config.rollout.rows,
        "seconds": {name: summary(clocks) for name, clocks in times.items()},
        "ratio": ratio(times, 0),
        "ratio_cpu": ratio(times, 1),
        "repeats": arguments.repeats,
        "bound": arguments.bound,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }
    show(report)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(0 if report["ratio"] <= arguments.bound else 1)


def steps_of(config: TrainConfig) -> dict[str, Callable[[], None]]:
    """One whole step by form, each with a state of its own that it carries on; compiled and run once."""
    forms = {"bf16": Numerics(execution="bf16"), "emulated": config.numerics.learner}
    steps = {name: step_of(config, numerics) for name, numerics in forms.items()}
    for step in steps.values():
        step()
    return steps


def step_of(config: TrainConfig, numerics: Numerics) -> Callable[[], None]:
    params, model = load_model(resolve_model(config.model.path))
    learner = replace(make_learner(config, model), numerics=numerics)
    batch = random_batch(config, model.vocab_size)
    state = init_state(learner, params)

    def step() -> None:
        nonlocal state
        scores = jax.block_until_ready(score(learner, state.params, batch))
        state, report = jax.block_until_ready(update(learner, state, batch, scores.logp))
        assert bool(report.applied)

    return step


def random_batch(config: TrainConfig, vocab: int) -> RolloutBatch:
    rng = np.random.default_rng(0)
    rows, prompt, response = (
        config.rollout.rows,
        config.rollout.local.prompt_bucket,
        config.rollout.max_new_tokens,
    )
    return RolloutBatch(
        tokens=jnp.asarray(rng.integers(0, vocab, (rows, prompt + response)), jnp.int32),
        valid=jnp.ones((rows, prompt + response), bool),
        mask=jnp.ones((rows, response), bool),
        sampler_logp=jnp.asarray(rng.uniform(-2, 0, (rows, response)), jnp.float32),
        advantages=jnp.asarray(rng.choice([-1.0, 1.0], rows), jnp.float32),
    )


def measure(steps: dict[str, Callable[[], None]], repeats: int) -> dict[str, list[Clocks]]:
    times: dict[str, list[Clocks]] = {name: [] for name in steps}
    order = list(steps)
    for _ in range(repeats):
        for name in order:
            wall, cpu = time.perf_counter(), time.process_time()
            steps[name]()
            times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
        order.reverse()
    return times


def summary(clocks: list[Clocks]) -> dict[str, float]:
    wall, cpu = zip(*clocks, strict=True)
    return {"median": statistics.median(wall), "best": min(wall), "cpu": statistics.median(cpu)}


def ratio(times: dict[str, list[Clocks]], clock: int) -> float:
    """Median over rounds of emulated / BF16, by wall clock (0) or CPU seconds (1)."""
    pairs = zip(times["emulated"], times["bf16"], strict=True)
    return statistics.median(emulated[clock] / bf16[clock] for emulated, bf16 in pairs)


def show(report: dict) -> None:
    console = Console()
    table = Table("learner step", "median ms", "best ms", "CPU ms", title=f"{report['rows']} responses")
    for name, seconds in report["seconds"].items():
        table.add_row(name, *(f"{1e3 * seconds[key]:.1f}" for key in ("median", "best", "cpu")))
    console.print(table)
    console.print(
        f"emulated / BF16: {report['ratio']:.2f} (at most {report['bound']}); CPU {report['ratio_cpu']:.2f}"
    )


if __name__ == "__main__":
    main()
