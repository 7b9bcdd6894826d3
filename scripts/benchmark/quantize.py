"""Throughput of NVFP4 quantisation, beside torchao, Model-Optimizer and compressed-tensors on the same matrix.

    python scripts/benchmark/quantize.py --torch-python PATH/TO/python [--size 2048] [--repeats 10] [--compile]

One BF16 matrix [size, size] becomes packed codes, block scales and a global scale (the checkpoint's form) by the
rule of each peer; "operand" is the form that the emulated product multiplies. The peers
(`peers/quantize_torch.py`) run in the given interpreter, before and after our own, with their default threads; of
every function the fastest call counts, compilation apart. Gelem/s is 10⁹ elements a second. Shares of different
codes and scales against each peer's are shown too. Exits 1 where ours is not `--bound` times the fastest peer's,
without counting torchao under torch.compile, which `--compile` adds as a row.
"""

import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import tyro
from jaxtyping import Array
from rich.console import Console
from rich.table import Table

from triage_jax.nvfp4 import QuantSpec, pack, quantize, to_operand
from triage_jax.nvfp4.rules import Rule

PEER = Path(__file__).parent / "peers" / "quantize_torch.py"
RULES: tuple[Rule, ...] = ("te", "torchao", "modelopt", "compressed_tensors")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Size of the matrix and what to run."""

    size: int = 2048
    """Rows and columns."""
    repeats: int = 10
    """Calls of each function; the fastest counts."""
    torch_python: Path | None = None
    """Interpreter with the peers; without it they are left out and the exit status is 0."""
    compile: bool = False
    """Also torchao under torch.compile."""
    bound: float = 3.0
    """Smallest ratio to the fastest peer that passes."""
    output: Path = Path("quantize_benchmark.json")
    """JSON file to write."""


@partial(jax.jit, static_argnums=1)
def packed(x: Array, spec: QuantSpec) -> tuple[Array, Array, Array]:
    """A checkpoint's three arrays."""
    q = quantize(x, spec)
    return pack(q.codes), q.scales, q.global_scale


operand = jax.jit(to_operand, static_argnums=1)


def main(settings: Settings) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((settings.size, settings.size)).astype(ml_dtypes.bfloat16)
    peers = run_peers(x, settings)
    seconds = {
        f"{kind}, {rule}": fastest(
            partial(function, jax.device_put(x), QuantSpec(rule=rule)), settings.repeats
        )
        for rule in RULES
        for kind, function in (("packed", packed), ("operand", operand))
    }
    later = run_peers(x, settings)
    for name in peers:
        if name.endswith("/seconds"):
            seconds[name.removesuffix("/seconds")] = float(min(peers[name], later[name]))
    report = summarise(x, seconds, peers, settings)
    show(report)
    settings.output.write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(0 if report["passed"] is not False else 1)


def fastest(call: Callable[[], object], repeats: int) -> float:
    jax.block_until_ready(call())
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def run_peers(x: np.ndarray, settings: Settings) -> dict[str, np.ndarray]:
    if settings.torch_python is None:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        inputs, outputs = Path(folder, "inputs.npz"), Path(folder, "outputs.npz")
        np.savez(inputs, x=x.view(np.uint16))
        command = [str(settings.torch_python), str(PEER), str(inputs), str(outputs)]
        command += ["--repeats", str(settings.repeats)] + ["--compile"] * settings.compile
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        with np.load(outputs) as archive:
            return {name: archive[name] for name in archive.files}


def differences(x: np.ndarray, peers: dict[str, np.ndarray]) -> dict[str, dict[str, float]]:
    """Shares of packed bytes and of scales where the peer's rule, ours, gives another result than the peer."""
    shares = {}
    for rule in RULES[1:]:
        if f"{rule}/packed" in peers:
            ours = packed(jax.device_put(x), QuantSpec(rule=rule))
            theirs = peers[f"{rule}/packed"], peers[f"{rule}/scales"]
            codes, scales = (
                float((np.asarray(a) != b).mean()) for a, b in zip(ours[:2], theirs, strict=True)
            )
            shares[rule] = {"bytes": codes, "scales": scales}
    return shares


def summarise(
    x: np.ndarray, seconds: dict[str, float], peers: dict[str, np.ndarray], settings: Settings
) -> dict:
    rates = {name: x.size / value / 1e9 for name, value in seconds.items()}
    theirs = [rate for name, rate in rates.items() if name in RULES]
    ratio = min(rates[f"packed, {rule}"] for rule in RULES) / max(theirs) if theirs else None
    return {
        "gelem_per_s": rates,
        "ratio": ratio,
        "bound": settings.bound,
        "passed": None if ratio is None else ratio >= settings.bound,
        "different": differences(x, peers),
        "size": settings.size,
        "repeats": settings.repeats,
        "jax": jax.__version__,
        "peers": json.loads(str(peers["versions"])) if peers else None,
        "processor": platform.processor() or platform.machine(),
    }


def show(report: dict) -> None:
    ratio = report["ratio"]
    verdict = (
        "no peer was run"
        if ratio is None
        else f"our slowest packed / the fastest peer = {ratio:.1f}, bound {report['bound']}: "
        + ("pass" if report["passed"] else "FAIL")
    )
    table = Table(title=f"{report['size']}² BF16 to NVFP4, JAX {report['jax']}", caption=verdict)
    table.add_column("form, rule")
    table.add_column("Gelem/s", justify="right")
    for name, rate in report["gelem_per_s"].items():
        table.add_row(name, f"{rate:.3f}")
    console = Console()
    console.print(table)
    for rule, shares in report["different"].items():
        console.print(f"{rule}: {shares['bytes']:.2%} of bytes, {shares['scales']:.2%} of scales differ")
    if report["peers"]:
        console.print(", ".join(f"{name} {version}" for name, version in report["peers"].items()))


if __name__ == "__main__":
    main(tyro.cli(Settings))
