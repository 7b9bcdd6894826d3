"""Time of the emulated NVFP4 product against the plain BF16 product of the same shape.

    python scripts/benchmark/quantized_dot.py [--size 2048] [--repeats 30] [--bound 1.3] [--json FILE]

Both products take a BF16 activation [size, size] to a BF16 result; the weight is quantised beforehand, the
activation within the measured time. Calls alternate (order reversed every round), so that other work on the
machine meets both alike; the verdict is the median over rounds of emulated / BF16, for the slower activation
scope. CPU seconds of the process stand beside wall-clock ones: they hardly notice other processes. Exits 1
beyond the bound.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
from jaxtyping import Array
from rich.console import Console
from rich.table import Table

from triage_jax.nvfp4 import DotRecipe, QuantSpec, quantized_dot, to_operand

type Clocks = tuple[float, float]

WEIGHT = QuantSpec(tile="16x16")
SCOPES = ("tensor", "row")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=int, default=2048, help="M = N = K, a multiple of 16")
    parser.add_argument("--repeats", type=int, default=30, help="rounds; each calls every form once")
    parser.add_argument("--bound", type=float, default=1.3, help="largest ratio that passes")
    parser.add_argument("--json", type=Path, help="also write the result here")
    arguments = parser.parse_args()

    forms = compile_forms(arguments.size)
    report = summarise(forms, measure(forms, arguments.repeats)) | {
        "size": arguments.size,
        "repeats": arguments.repeats,
        "bound": arguments.bound,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }
    report["passed"] = report["ratio"] <= arguments.bound
    show(report)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(0 if report["passed"] else 1)


def compile_forms(size: int) -> dict[str, Callable[[], Array]]:
    """Every form as a call without arguments, compiled and run once."""
    x, w = (jax.random.normal(jax.random.key(seed), (size, size), jnp.bfloat16) for seed in (0, 1))
    weight = jax.block_until_ready(jax.jit(to_operand, static_argnums=1)(w, WEIGHT))
    dot = jax.jit(quantized_dot, static_argnums=(2, 3))
    quantise = jax.jit(to_operand, static_argnums=1)
    forms: dict[str, Callable[[], Array]] = {"bf16": lambda: dot(x, w, None, "bf16")}
    for scope in SCOPES:
        spec = QuantSpec(scope=scope)
        recipe = DotRecipe(weight=WEIGHT, activation=spec)
        forms[f"emulated, {scope}"] = lambda recipe=recipe: dot(x, weight, recipe, "emulated")
        forms[f"quantise, {scope}"] = lambda spec=spec: quantise(x, spec).values
    for call in forms.values():
        jax.block_until_ready(call())
    return forms


def measure(forms: dict[str, Callable[[], Array]], repeats: int) -> dict[str, list[Clocks]]:
    times: dict[str, list[Clocks]] = {name: [] for name in forms}
    order = list(forms)
    for _ in range(repeats):
        for name in order:
            wall, cpu = time.perf_counter(), time.process_time()
            jax.block_until_ready(forms[name]())
            times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
        order.reverse()
    return times


def summarise(forms: dict[str, Callable[[], Array]], times: dict[str, list[Clocks]]) -> dict:
    def statistics_of(name: str) -> dict[str, float]:
        wall, cpu = zip(*times[name], strict=True)
        base_wall, base_cpu = zip(*times["bf16"], strict=True)
        return {
            "min_ms": min(wall) * 1e3,
            "median_ms": statistics.median(wall) * 1e3,
            "cpu_median_ms": statistics.median(cpu) * 1e3,
            "ratio": statistics.median(a / b for a, b in zip(wall, base_wall, strict=True)),
            "ratio_of_min": min(wall) / min(base_wall),
            "cpu_ratio": statistics.median(a / b for a, b in zip(cpu, base_cpu, strict=True)),
        }

    rows = {name: statistics_of(name) for name in forms}
    return {"forms": rows, "ratio": max(rows[f"emulated, {scope}"]["ratio"] for scope in SCOPES)}


def show(report: dict) -> None:
    verdict = "pass" if report["passed"] else "FAIL"
    table = Table(
        title=f"{report['size']}³ on {report['device']}, JAX {report['jax']}, {report['repeats']} rounds",
        caption=f"ratio {report['ratio']:.2f}, bound {report['bound']}: {verdict}",
    )
    columns = {
        "min_ms": "min ms",
        "median_ms": "median ms",
        "cpu_median_ms": "CPU ms",
        "ratio": "ratio",
        "ratio_of_min": "of minima",
        "cpu_ratio": "of CPU time",
    }
    table.add_column("form")
    for title in columns.values():
        table.add_column(title, justify="right")
    for name, row in report["forms"].items():
        table.add_row(name, *(f"{row[key]:.2f}" for key in columns))
    Console().print(table)


if __name__ == "__main__":
    main()
