"""Time and memory of `token_logprobs` against the plain form, forward and backward, in BF16.

    python scripts/benchmark/token_logprobs.py [--tokens 4096] [--vocab 151936] [--width 1024] [--json FILE]

Every form runs in a process of its own. Extra memory is what one call needs on top of its inputs and its
outputs, which all forms share (the gradient of the head alone is vocab * width * 4 bytes): once as XLA
plans it (`temp_size_in_bytes`) and once as the kernel saw it (peak resident set of the first call, less the
resident set before it and the outputs).
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

FORMS = {
    "tiled": "token_logprobs",
    "plain": "BF16 logits, float32 log_softmax",
    "plain-f32": "float32 logits and log_softmax",
}
MEMORY_BOUND, TIME_BOUND = 1 / 20, 1.1


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
    fastest = min(results[form]["seconds"] for form in FORMS if form != "tiled")
    leanest = {key: min(results[form][key] for form in FORMS if form != "tiled") for key in MEMORY}
    report = {
        "tokens": arguments.tokens,
        "vocab": arguments.vocab,
        "width": arguments.width,
        "device": results["tiled"]["device"],
        "forms": results,
        "time_ratio": results["tiled"]["seconds"] / fastest,
        "memory_ratio": {key: results["tiled"][key] / least for key, least in leanest.items()},
    }
    report["within_bounds"] = report["time_ratio"] <= TIME_BOUND and all(
        ratio <= MEMORY_BOUND for ratio in report["memory_ratio"].values()
    )
    show(report)
    print(json.dumps(report))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


MEMORY = ("planned_extra_bytes", "resident_extra_bytes")


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
            logp = plain(hidden, head, targets, jnp.bfloat16 if arguments.form == "plain" else jnp.float32)
        return (weights * logp).sum()

    step = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(hidden, head).compile()
    before = reset_peak()
    outputs = jax.block_until_ready(step(hidden, head))
    peak = resident("VmHWM")
    seconds = []
    for _ in range(arguments.repeats):
        start = time.perf_counter()
        jax.block_until_ready(step(hidden, head))
        seconds.append(time.perf_counter() - start)
    return {
        "device": jax.devices()[0].device_kind,
        "seconds": min(seconds),
        "tokens_per_second": arguments.tokens / min(seconds),
        "loss": float(outputs[0]),
        "planned_extra_bytes": step.memory_analysis().temp_size_in_bytes,
        "resident_extra_bytes": peak - before - sum(leaf.nbytes for leaf in jax.tree.leaves(outputs)),
    }


def plain(hidden: Array, head: Array, targets: Array, logits_dtype: Any) -> Array:
    logits = jnp.einsum(
        "btd,vd->btv", hidden, head.astype(hidden.dtype), preferred_element_type=logits_dtype
    ).astype(jnp.float32)
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
    table = Table("form", "seconds", "tokens/s", "planned extra MB", "resident extra MB", title=title)
    for form, result in report["forms"].items():
        megabytes = [f"{result[key] / 1e6:,.0f}" for key in MEMORY]
        table.add_row(
            FORMS[form], f"{result['seconds']:.2f}", f"{result['tokens_per_second']:,.0f}", *megabytes
        )
    ratios = ", ".join(f"1/{1 / ratio:.0f}" for ratio in report["memory_ratio"].values())
    console = Console(stderr=True)
    console.print(table)
    console.print(f"time {report['time_ratio']:.2f}x the faster plain form (bound {TIME_BOUND})")
    console.print(f"memory {ratios} of the leaner plain form (bound 1/{1 / MEMORY_BOUND:.0f})")


if __name__ == "__main__":
    main()
