"""What was evaluated, so that two runs can be told apart and one can be continued: digests of model and data."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from triage_jax.evaluate.benchmarks import Benchmark
from triage_jax.evaluate.served import Served
from triage_jax.tasks.tokenizer import TextCodec

WEIGHTS = "*.safetensors"
DESCRIBING = ("config.json", "tokenizer.json")


def identity(
    model: Path, codec: TextCodec, benchmarks: Sequence[Benchmark], *, served: Served | None
) -> dict[str, Any]:
    """Digests (SHA-256) of what decides the samples; of weights here only where they are sampled from here."""
    template = codec.chat_template
    return {
        "model": {name: _digest(model / name) for name in DESCRIBING if (model / name).is_file()}
        | {
            "chat_template": None if template is None else hashlib.sha256(template.encode()).hexdigest(),
            "weights": weights_digest(model) if served is None else None,
            "served": None if served is None else asdict(served),
        },
        "data": {benchmark.name: benchmark.sha256 for benchmark in benchmarks},
    }


def weights_digest(model: Path) -> str:
    """One digest of all safetensors files and their names; reads them whole."""
    files = {file.name: _digest(file) for file in sorted(model.glob(WEIGHTS))}
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
