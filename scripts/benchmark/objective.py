"""Time the objective at the size of the reported runs, and compare it with a per-segment loop in PyTorch.

    python scripts/benchmark/objective.py --torch-python PATH/TO/python

Prints a table and writes the same as JSON. The loop (`peers/objective_torch.py`) runs in the given
interpreter, of an environment that has torch, on the same arrays; its loss and gradient are compared too, and
a difference makes the exit status 1. Both use their default number of threads. Compilation is timed apart.
"""

import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from triage_jax.objective import TokenBatch, TriageConfig, gate_weights, mismatch_metrics, triage_loss

PEER = Path(__file__).parent / "peers" / "objective_torch.py"
CONFIG = TriageConfig()
TOLERANCE = 1e-4  # float32 sums of five million terms in two orders


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Size of the batch and what to run."""

    responses: int = 256
    """Responses in the batch."""
    tokens: int = 20_480
    """Completion positions of each response."""
    repeats: int = 3
    """Runs of each function; the fastest counts."""
    torch_python: Path | None = None
    """Interpreter with torch for the peer; without it the peer is left out."""
    output: Path = Path("objective_benchmark.json")
    """JSON file to write."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    name: str
    compile_s: float
    run_s: float
    temporary_mb: float


def make_arrays(responses: int, tokens: int) -> dict[str, np.ndarray]:
    """Gaps of an unhealthy run: Laplace noise, a drifting mean per response, a few very deep tokens."""
    rng = np.random.default_rng(0)
    shape = (responses, tokens)
    sampler = -rng.exponential(1.0, shape)
    gap = rng.laplace(0.0, 0.05, shape) + rng.normal(-0.2, 0.4, (responses, 1))
    gap -= 7.0 * (rng.random(shape) < 0.003)
    old = sampler + gap
    live = old + rng.normal(0.0, 0.1, shape)
    floats = {"live": live, "old": old, "sampler": sampler, "advantages": rng.normal(size=responses)}
    mask = np.arange(tokens) < rng.integers(tokens // 2, tokens + 1, (responses, 1))
    return {name: array.astype(np.float32) for name, array in floats.items()} | {"mask": mask}


def measure(name: str, function: Callable, arguments: tuple, repeats: int) -> tuple[Timing, object]:
    begin = time.perf_counter()
    compiled = jax.jit(function).lower(*arguments).compile()
    compile_s = time.perf_counter() - begin
    result = jax.block_until_ready(compiled(*arguments))
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        result = jax.block_until_ready(compiled(*arguments))
        seconds.append(time.perf_counter() - begin)
    memory = compiled.memory_analysis()
    temporary = memory.temp_size_in_bytes / 1e6 if memory else float("nan")
    return Timing(name=name, compile_s=compile_s, run_s=min(seconds), temporary_mb=temporary), result


def run_peer(python: Path, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "inputs.npz"), Path(folder, "outputs.npz")
        np.savez(source, **arrays)
        subprocess.run([python, PEER, source, target], check=True)
        with np.load(target) as archive:
            return dict(archive)


def loss_and_gradient(live: jax.Array, batch: TokenBatch) -> tuple[jax.Array, jax.Array]:
    return jax.value_and_grad(lambda live: triage_loss(live, batch, CONFIG)[0])(live)


def with_metrics(live: jax.Array, batch: TokenBatch) -> tuple:
    return jax.value_and_grad(lambda live: triage_loss(live, batch, CONFIG), has_aux=True)(live)


def measure_ours(arrays: dict[str, np.ndarray], repeats: int) -> tuple[list[Timing], jax.Array, jax.Array]:
    """Timings, the one to compare first; its loss and gradient."""
    live = jnp.asarray(arrays["live"])
    batch = TokenBatch(*(jnp.asarray(arrays[name]) for name in ("old", "sampler", "advantages", "mask")))

    def weights(batch: TokenBatch) -> jax.Array:
        return gate_weights(batch.old_logp - batch.sampler_logp, batch.advantages, batch.mask, CONFIG)

    first, (loss, gradient) = measure("loss and gradient", loss_and_gradient, (live, batch), repeats)
    others = [
        measure("loss, gradient and metrics", with_metrics, (live, batch), repeats)[0],
        measure("mismatch metrics", mismatch_metrics, (batch,), repeats)[0],
        measure("gate weights", weights, (batch,), repeats)[0],
    ]
    return [first, *others], loss, gradient


def compare(
    peer: dict[str, np.ndarray], ours: Timing, loss: jax.Array, gradient: jax.Array
) -> dict[str, float]:
    difference = np.abs(np.asarray(gradient) - peer["gradient"]).max() / np.abs(peer["gradient"]).max()
    return {
        "run_s": float(peer["seconds"]),
        "speed_up": float(peer["seconds"]) / ours.run_s,
        "loss": float(loss),
        "peer_loss": float(peer["loss"]),
        "gradient_difference": float(difference),
        "agrees": bool(np.isclose(loss, peer["loss"], rtol=TOLERANCE) and difference < TOLERANCE),
    }


def show(settings: Settings, timings: list[Timing], peer: dict[str, float] | None) -> None:
    device = jax.devices()[0].device_kind
    table = Table(title=f"TRIAGE objective, {settings.responses} × {settings.tokens}, {device}")
    for column in ("", "compile [s]", "run [s]", "temporaries [MB]"):
        table.add_column(column, justify="right" if column else "left")
    for timing in timings:
        table.add_row(
            timing.name, f"{timing.compile_s:.1f}", f"{timing.run_s:.3f}", f"{timing.temporary_mb:.0f}"
        )
    if peer:
        table.add_row("PyTorch loop: loss and gradient", "", f"{peer['run_s']:.3f}", "")
        table.caption = (
            f"{peer['speed_up']:.0f} times faster than the loop; losses {peer['loss']:.7f} and "
            f"{peer['peer_loss']:.7f}; gradients differ by {peer['gradient_difference']:.1e} of the largest"
        )
    Console().print(table)


def main(settings: Settings) -> int:
    arrays = make_arrays(settings.responses, settings.tokens)
    timings, loss, gradient = measure_ours(arrays, settings.repeats)
    peer = None
    if settings.torch_python:
        peer = compare(run_peer(settings.torch_python, arrays), timings[0], loss, gradient)
    show(settings, timings, peer)
    report = {
        "responses": settings.responses,
        "tokens": settings.tokens,
        "device": jax.devices()[0].device_kind,
        "machine": platform.machine(),
        "jax": jax.__version__,
        "timings": [asdict(timing) for timing in timings],
        "peer": peer,
    }
    settings.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0 if peer is None or peer["agrees"] else 1


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Settings, description=__doc__)))
