"""Memory of one learner update on GPUs that are not here, read from the program that XLA compiles for them.

    JAX_PLATFORMS=cpu python scripts/aot_memory.py configs/qwen3_4b_nvfp4.yaml --model qwen3-4b --target b300

Takes the update of a configuration (mesh, micro-batch, numerics, token limits) and a model's sizes, no weights. Needs
jax-cuda13-plugin, jax-cuda13-pjrt and ptxas (`triage_jax/aot.py`), no GPU. A full-size model takes a minute or two of
one CPU core. Exits 1 when the program does not fit into the GPU's memory.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax
from rich.console import Console
from rich.table import Table

from triage_jax.aot import TARGETS, collectives, compile_update, custom_calls, device_memory
from triage_jax.config import TrainConfig, from_dict, load_yaml
from triage_jax.model import ModelConfig
from triage_jax.run import make_learner

# Sizes as their `config.json` states them.
MODELS = {
    "qwen3-4b": ModelConfig(
        architecture="qwen3",
        vocab_size=151_936,
        hidden_size=2560,
        intermediate_size=9728,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        tie_embeddings=True,
        qk_norm=True,
        max_position_embeddings=40_960,
    ),
    "qwen3-30b-a3b": ModelConfig(
        architecture="qwen3_moe",
        vocab_size=151_936,
        hidden_size=2048,
        intermediate_size=768,
        num_layers=48,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        tie_embeddings=False,
        qk_norm=True,
        max_position_embeddings=40_960,
        num_experts=128,
        experts_per_token=8,
        norm_topk_prob=True,
    ),
}


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    arguments = parse(sys.argv[1:])
    report = measure(arguments)
    show(report)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    if report["bytes_per_device"]["total"] > report["device_bytes"]:
        sys.exit(f"does not fit: {report['device_bytes'] / 2**30:.1f} GiB on a device")


def parse(command_line: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path)
    parser.add_argument("--model", required=True, help=f"{', '.join(MODELS)}, or a config.json")
    parser.add_argument("--target", choices=sorted(TARGETS), default="b300")
    parser.add_argument("--execution", help="in place of the configuration's")
    parser.add_argument("--rows", type=int, help="responses of the update, in place of the configuration's")
    parser.add_argument("--micro-batch", type=int)
    parser.add_argument("--new-tokens", type=int)
    parser.add_argument(
        "--capacity", type=float, help="numerics.learner.expert_capacity, in place of the configuration's"
    )
    parser.add_argument("--json", type=Path, help="also write the result here")
    return parser.parse_args(command_line)


def measure(arguments: argparse.Namespace) -> dict:
    config = from_dict(TrainConfig, load_yaml(arguments.config), str(arguments.config))
    model = MODELS.get(arguments.model)
    if model is None:
        model = ModelConfig.from_hf(json.loads(Path(arguments.model).read_text()))
    learner = make_learner(config, model)
    if arguments.execution:
        learner = replace(learner, numerics=replace(learner.numerics, execution=arguments.execution))
    if arguments.capacity is not None:
        learner = replace(learner, numerics=replace(learner.numerics, expert_capacity=arguments.capacity))
    if arguments.micro_batch is not None:
        learner = replace(learner, settings=replace(learner.settings, micro_batch=arguments.micro_batch))
    target = TARGETS[arguments.target]
    shapes = {
        "rows": arguments.rows or config.rollout.rows,
        "prompt_tokens": config.rollout.max_prompt_tokens,
        "new_tokens": arguments.new_tokens or config.rollout.max_new_tokens,
    }
    started, cpu = time.perf_counter(), time.process_time()
    compiled = compile_update(learner, target, **shapes)
    return {
        "model": arguments.model,
        "target": f"{learner.settings.mesh.data * learner.settings.mesh.fsdp} x {target.name}",
        "mesh": f"data {learner.settings.mesh.data} x fsdp {learner.settings.mesh.fsdp}",
        "numerics": learner.numerics.describe(),
        "micro_batch": learner.settings.micro_batch or shapes["rows"],
        **shapes,
        "compile_seconds": round(time.perf_counter() - started, 1),
        "compile_cpu_seconds": round(time.process_time() - cpu, 1),
        "device_bytes": target.memory,
        "bytes_per_device": device_memory(compiled),
        "collectives": dict(collectives(compiled)),
        "library_calls": dict(custom_calls(compiled)),
    }


def show(report: dict) -> None:
    table = Table(
        "", "GiB", title=f"{report['model']} on {report['target']}, per device", title_justify="left"
    )
    for name, size in report["bytes_per_device"].items():
        table.add_row(name, f"{size / 2**30:,.2f}")
    table.add_row("on the device", f"{report['device_bytes'] / 2**30:,.2f}")
    console = Console(highlight=False)
    console.print(table)
    for name in ("numerics", "mesh", "rows", "micro_batch", "prompt_tokens", "new_tokens", "collectives"):
        console.print(f"{name:14}{report[name]}")
    console.print(f"{'library calls':14}{report['library_calls']}")
    console.print(f"{'compiled in':14}{report['compile_seconds']} s, {report['compile_cpu_seconds']} CPU s")


if __name__ == "__main__":
    main()
