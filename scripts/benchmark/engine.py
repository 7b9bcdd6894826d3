"""Sampling speed of the local engine against `transformers.generate`, same weights, same prompts, on the CPU.

    python scripts/benchmark/engine.py MODEL --torch-python PYTHON [--batch 64] [--new-tokens 64] [--json FILE]

MODEL is a Hugging Face directory (`scripts/smollm2.py` makes one). PYTHON is the interpreter of an environment with
torch and transformers (`scripts/peers_env.sh` makes one); the peer runs there as a process of its own, with every
thread count asked for, and its best setting counts. Ours decodes the batch whole and cut into parts at the same time
(`LocalEngineConfig.parallel_batches`), and its best counts too. No stop token is honoured on either side, so that
each response has exactly `--new-tokens` tokens. Our compilation is not timed, nor is the peer's warm-up. Exits 1 when
the ratio is below the bound.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from triage_jax.model import Numerics, load_model
from triage_jax.nvfp4 import QuantSpec
from triage_jax.rollout import LocalEngine, LocalEngineConfig, Request, SamplingParams

PEER = Path(__file__).parent / "peers" / "generate_transformers.py"
PROMPT_TOKENS = 24
NO_STOP = (-1,)
"""An id no token has, so that no response ends early"""
NUMERICS = {
    "bf16": Numerics(execution="bf16"),
    "float32": Numerics(execution="float32"),
    "emulated NVFP4": Numerics(activation=QuantSpec(scope="row")),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--torch-python", type=Path, help="without it only our own rates are printed")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument(
        "--parallel-batches",
        type=int,
        nargs="+",
        default=[1, 2],
        help="ours: parts that the batch is cut into",
    )
    parser.add_argument(
        "--numerics", nargs="+", default=list(NUMERICS), choices=NUMERICS, help="ours to measure"
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="thread counts of the peer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--bound", type=float, default=3.0, help="smallest ratio that passes")
    parser.add_argument("--json", type=Path, help="also write the result here")
    arguments = parser.parse_args()

    vocab = json.loads((arguments.model / "config.json").read_text())["vocab_size"]
    prompts = np.random.default_rng(0).integers(vocab, size=(arguments.batch, PROMPT_TOKENS)).tolist()
    rates = {
        f"ours, {name}, {parts} at once": ours(arguments, prompts, NUMERICS[name], parts)
        for name in arguments.numerics
        for parts in arguments.parallel_batches
    }
    if arguments.torch_python:
        rates |= peer(arguments, prompts)
    report = {"batch": arguments.batch, "new_tokens": arguments.new_tokens, "tokens_per_second": rates}
    best_peer, best = best_of(rates, "transformers"), best_of(rates, "ours, bf16")
    if best_peer and best:
        report |= {"ratio": best / best_peer, "bound": arguments.bound}
    show(report)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(0 if report.get("ratio", arguments.bound) >= arguments.bound else 1)


def best_of(rates: dict[str, float], side: str) -> float:
    return max((rate for name, rate in rates.items() if name.startswith(side)), default=0.0)


def ours(arguments: argparse.Namespace, prompts: list[list[int]], numerics: Numerics, parts: int) -> float:
    """Tokens per second of the best repeat, prefill included."""
    params, config = load_model(arguments.model)
    settings = LocalEngineConfig(
        batch_size=-(-arguments.batch // parts), prompt_bucket=PROMPT_TOKENS, parallel_batches=parts
    )
    engine = LocalEngine(config, numerics, settings)
    engine.update_weights(params, 0)
    del params
    requests = [
        Request(uid=str(index), prompt_ids=tuple(ids), seed=index) for index, ids in enumerate(prompts)
    ]
    sampling = SamplingParams(max_new_tokens=arguments.new_tokens, stop_ids=NO_STOP)
    seconds = []
    for _ in range(arguments.repeats + 1):
        started = time.perf_counter()
        samples = engine.generate(requests, sampling)
        seconds.append(time.perf_counter() - started)
    assert all(len(sample.token_ids) == arguments.new_tokens for sample in samples)
    return arguments.batch * arguments.new_tokens / min(seconds[1:])


def peer(arguments: argparse.Namespace, prompts: list[list[int]]) -> dict[str, float]:
    """Tokens per second of the peer, by dtype and thread count."""
    rates = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "prompts.json"
        file.write_text(json.dumps(prompts))
        for threads in arguments.threads:
            command = [
                *(str(arguments.torch_python), str(PEER), str(arguments.model), str(file)),
                *("--new-tokens", str(arguments.new_tokens), "--threads", str(threads)),
                *("--repeats", str(arguments.repeats)),
            ]
            run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            for dtype, result in json.loads(run.stdout)["runs"].items():
                rates[f"transformers, {dtype}, {threads} threads"] = result["tokens_per_second"]
    return rates


def show(report: dict) -> None:
    console = Console()
    shape = f"batch {report['batch']}, {report['new_tokens']} new tokens, {jax.devices()[0].device_kind}"
    table = Table("sampler", "tokens/s", title=shape)
    for name, rate in report["tokens_per_second"].items():
        table.add_row(name, f"{rate:,.0f}")
    console.print(table)
    if "ratio" in report:
        console.print(f"ours in BF16 / the peer's best: {report['ratio']:.2f} (at least {report['bound']})")


if __name__ == "__main__":
    main()
