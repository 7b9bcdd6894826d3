"""Speed of quantising a checkpoint on the CPU, against copying it on the same disk in the same run.

    python scripts/benchmark/checkpoint.py [--megabytes 500] [--repeats 3] [--folder DIR] [--json FILE]

Makes a random BF16 checkpoint with the names and proportions of Qwen3 in a folder that is removed afterwards. A copy
reads the file and writes it with an fsync; quantising reads it, quantises gate, up and down, and writes with an fsync
too. Rates are bytes of the source per second, the best of the repeats; both read what the page cache holds. Rates per
CPU second, over all threads, mean something on a busy machine as well. The first, untimed pass compiles. The peak
memory of the process is printed too: the file's mapped pages count in it.
"""

import argparse
import json
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from rich.console import Console
from rich.table import Table

from triage_jax.model.shards import ShardWriter
from triage_jax.model.tensors import Stored
from triage_jax.quantize import QuantizeConfig, quantize_checkpoint

WIDTH, FFN, VOCABULARY = 2048, 6144, 16384
CONFIGS = {
    "modelopt, 1x16": QuantizeConfig(rule="modelopt"),
    "te, 1x16": QuantizeConfig(rule="te"),
    "te, 16x16": QuantizeConfig(rule="te", tile="16x16"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--folder", type=Path, help="on the disk to measure; the system's temporary one without it"
    )
    parser.add_argument("--json", type=Path, help="also write the result here")
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        source = make_checkpoint(folder / "source", arguments.megabytes * 10**6)
        size = (source / "model.safetensors").stat().st_size
        seconds = {"copy": best(lambda: copy(source, folder / "copy"), arguments.repeats)}
        for label, config in CONFIGS.items():

            def run(config: QuantizeConfig = config) -> None:
                quantize_checkpoint(source, folder / "out", config, overwrite=True)

            seconds[label] = best(run, arguments.repeats)
    report = {
        "bytes": size,
        "load_average": os.getloadavg()[0],
        "megabytes_per_second": {label: size / 1e6 / spent for label, (spent, _) in seconds.items()},
        "megabytes_per_cpu_second": {label: size / 1e6 / spent for label, (_, spent) in seconds.items()},
        "peak_memory_megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6,
        "device": jax.devices()[0].device_kind,
    }
    show(report)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


def make_checkpoint(directory: Path, size: int) -> Path:
    """Layers of attention and MLP until `size` bytes, and an embedding."""
    layer = {
        "self_attn.q_proj": (WIDTH, WIDTH),
        "self_attn.k_proj": (WIDTH // 2, WIDTH),
        "self_attn.v_proj": (WIDTH // 2, WIDTH),
        "self_attn.o_proj": (WIDTH, WIDTH),
        "mlp.gate_proj": (FFN, WIDTH),
        "mlp.up_proj": (FFN, WIDTH),
        "mlp.down_proj": (WIDTH, FFN),
    }
    plan = {"model.embed_tokens.weight": Stored("BF16", (VOCABULARY, WIDTH))}
    index = 0
    while sum(stored.nbytes for stored in plan.values()) < size:
        plan |= {
            f"model.layers.{index}.{name}.weight": Stored("BF16", shape) for name, shape in layer.items()
        }
        index += 1
    directory.mkdir()
    rng = np.random.default_rng(0)
    with ShardWriter(directory, plan, 10**12) as writer:
        for name, stored in plan.items():
            values = rng.standard_normal(stored.shape, np.float32) * 0.02
            writer.write(name, values.astype(ml_dtypes.bfloat16))
    (directory / "config.json").write_text("{}")
    return directory


def copy(source: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    for file in target.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def best(run: Callable[[], None], repeats: int) -> tuple[float, float]:
    """Seconds, and CPU seconds, of the fastest call but the first."""
    spent = []
    for _ in range(repeats + 1):
        started, busy = time.perf_counter(), time.process_time()
        run()
        spent.append((time.perf_counter() - started, time.process_time() - busy))
    elapsed, on_cpu = zip(*spent[1:], strict=True)
    return min(elapsed), min(on_cpu)


def show(report: dict) -> None:
    rates, per_cpu = report["megabytes_per_second"], report["megabytes_per_cpu_second"]
    title = f"{report['bytes'] / 1e6:.0f} MB of BF16, {report['device']}"
    table = Table("", "MB/s", "of the copy", "MB/CPU s", title=title)
    for label, rate in rates.items():
        table.add_row(label, f"{rate:,.0f}", f"{rate / rates['copy']:.0%}", f"{per_cpu[label]:,.0f}")
    console = Console()
    console.print(table)
    console.print(
        f"peak memory of the process {report['peak_memory_megabytes']:,.0f} MB; "
        f"load average {report['load_average']:.1f} on {os.cpu_count()} CPUs"
    )


if __name__ == "__main__":
    main()
