"""Time and memory of `token_logprobs` against the plain form, forward and backward, in BF16.

    python scripts/benchmark/token_logprobs.py [--tokens 4096] [--vocab 151936] [--width 1024] [--json FILE]

Each form runs in a process of its own. Extra memory is what one call needs on top of its inputs and its
outputs, which both forms share (the gradient of the head alone is vocab * width * 4 bytes): once as XLA
plans it (`temp_size_in_bytes`) and once as the kernel saw it (peak resident set of the first call, less the
resident set before it and the outputs). CPU seconds, of all threads, tell a slow form from a busy machine.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array
from rich.console import Console
from rich.table import Table

from triage_jax.model.logprobs import token_logprobs

FORMS = {"tiled": "token_logprobs", "plain": "plain"}
MEMORY = ("planned_extra_bytes", "resident_extra_bytes")
MEMORY_BOUND, TIME_BOUND = 1 / 20, 1.1  # at the default size


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--chunk", type=int, help="vocabulary rows a tile; default: the library's choice")
    parser.add_argument("--repeats", type=int, default=3, help="timed calls after the first; the best counts")
    parser.add_argument("--json", type=Path, help="also write the result here")
    parser.add_argument("--form", choices=FORMS, help="measure this form alone, in this process")
    arguments = parser.parse_args()
    if arguments.form:
        print(json.dumps(measure(arguments)))
        return

    results = {form: in_subprocess(form, sys.argv[1:]) for form in FORMS}
    tiled, plain = results["tiled"], results["plain"]
    report = {
        "tokens": arguments.tokens,
        "vocab": arguments.vocab,
        "width": arguments.width,
        "device": tiled["device"],
        "forms": results,
        "time_ratio": tiled["seconds"] / plain["seconds"],
        "memory_ratio": {key: tiled[key] / plain[key] for key in MEMORY},
    }
    report["within_bounds"] = report["time_ratio"] <= TIME_BOUND and all(
        ratio <= MEMORY_BOUND for ratio in report["memory_ratio"].values()
    )
    show(report)
    print(json.dumps(report))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


def in_subprocess(form: str, arguments: list[str]) -> dict[str, Any]:
    command = [sys.executable, __file__, *arguments, "--form", form]
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(result.stdout.splitlines()[-1])


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), 4)
    shape = (1, arguments.tokens, arguments.width)
    hidden = jax.random.normal(keys[0], shape, jnp.bfloat16)
    head = jax.random.normal(keys[1], (arguments.vocab, arguments.width)) * arguments.width**-0.5
    targets = jax.random.randint(keys[2], shape[:2], 0, arguments.vocab)
    weights = jax.random.normal(keys[3], shape[:2])  # stands for the advantages

    def loss(hidden: Array, head: Array) -> Array:
        if arguments.form == "tiled":
            logp = token_logprobs(hidden, head, targets, chunk=arguments.chunk).logp
        else:
            logp = plain_logprobs(hidden, head, targets)
        return (weights * logp).sum()

    step = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(hidden, head).compile()
    before = reset_peak()
    outputs = jax.block_until_ready(step(hidden, head))
    peak = resident("VmHWM")
    seconds, cpu_seconds = [], []
    for _ in range(arguments.repeats):
        start, cpu_start = time.perf_counter(), time.process_time()
        jax.block_until_ready(step(hidden, head))
        seconds.append(time.perf_counter() - start)
        cpu_seconds.append(time.process_time() - cpu_start)
    return {
        "device": jax.devices()[0].device_kind,
        "seconds": min(seconds),
        "cpu_seconds": min(cpu_seconds),
        "tokens_per_second": arguments.tokens / min(seconds),
        "loss": float(outputs[0]),
        "planned_extra_bytes": step.memory_analysis().temp_size_in_bytes,
        "resident_extra_bytes": peak - before - sum(leaf.nbytes for leaf in jax.tree.leaves(outputs)),
    }


def plain_logprobs(hidden: Array, head: Array, targets: Array) -> Array:
    """BF16 product, float32 softmax. Float32 logits out of the product would take longer (2.2 times, at a
    ninth of the vocabulary) and more memory: their backward pass multiplies float32 by BF16."""
    logits = jnp.einsum("btd,vd->btv", hidden, head.astype(hidden.dtype)).astype(jnp.float32)
    return jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]


def reset_peak() -> int:
    """Make the present resident set the peak from here on, and return it in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def resident(field: str) -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))


def show(report: dict[str, Any]) -> None:
    title = f"{report['tokens']} tokens, vocabulary {report['vocab']}, width {report['width']}"
    table = Table(
        "form", "seconds", "CPU seconds", "tokens/s", "planned extra MB", "resident extra MB", title=title
    )
    for form, result in report["forms"].items():
        megabytes = [f"{result[key] / 1e6:,.0f}" for key in MEMORY]
        table.add_row(
            FORMS[form],
            f"{result['seconds']:.2f}",
            f"{result['cpu_seconds']:.2f}",
            f"{result['tokens_per_second']:,.0f}",
            *megabytes,
        )
    ratios = ", ".join(f"1/{1 / ratio:.0f}" for ratio in report["memory_ratio"].values())
    console = Console(stderr=True)
    console.print(table)
    console.print(f"time {report['time_ratio']:.2f}x the plain form (bound {TIME_BOUND})")
    console.print(f"memory {ratios} of the plain form (bound 1/{1 / MEMORY_BOUND:.0f})")


if __name__ == "__main__":
    main()
