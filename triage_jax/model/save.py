"""Saving `Params` as a Hugging Face model directory."""

import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from safetensors.numpy import save_file

from triage_jax.model.config import ModelConfig, ModelError
from triage_jax.model.load import EMBED, FINAL_NORM, HEAD, INDEX, LAYER, SINGLE, layer_tensors, tensor_names
from triage_jax.model.params import Params, abstract_params

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)


def save_model(
    path: str | Path,
    params: Params,
    config: ModelConfig,
    dtype: DTypeLike = jnp.bfloat16,
    *,
    tokenizer_from: str | Path | None = None,
    max_shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
) -> None:
    """Write `config.json`, `generation_config.json` and the weights, rounded to `dtype`, at `path`.

    The directory appears complete or not at all. Weights above `max_shard_bytes` are split into shards with
    an index; one shard at a time is held in memory. `tokenizer_from` is a model directory whose tokenizer
    files are copied. Raises FileExistsError for an existing target unless `overwrite`, and ModelError for a
    leaf whose shape contradicts `config` or that holds a value which is not finite in `dtype`.
    """
    dtype = np.dtype(dtype)
    if dtype.name not in ("float32", "float16", "bfloat16"):
        raise ModelError(f"dtype = {dtype.name}: accepted are float32, float16 and bfloat16")
    tensors = _unstacked(params, config)
    with atomic_directory(path, overwrite=overwrite) as directory:
        _save_weights(directory, tensors, dtype, max_shard_bytes)
        write_json(directory / "config.json", config.to_hf(dtype.name))
        write_json(directory / "generation_config.json", config.generation_to_hf())
        if tokenizer_from is not None:
            copy_tokenizer(Path(tokenizer_from), directory)


@contextmanager
def atomic_directory(path: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A temporary directory that becomes `path` when the block ends well, and vanishes when it does not.

    Its files and itself are flushed to disk before the rename. With `overwrite` an existing model directory
    (one with a `config.json`) is first renamed to `.<name>.old`, and removed last: a crash leaves at least
    one of the two whole. Raises FileExistsError otherwise.
    """
    target = Path(path).absolute()
    if target.exists() and not (overwrite and (target / "config.json").is_file()):
        accepted = "only a directory with a config.json is replaced" if overwrite else "pass overwrite=True"
        raise FileExistsError(f"{target} exists: {accepted}")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    temporary.mkdir()
    try:
        yield temporary
        for file in temporary.iterdir():
            file.chmod(temporary.stat().st_mode & 0o666)  # safetensors writes 0600 whatever the umask
            _fsync(file)
        _fsync(temporary)
        old = target.with_name(f".{target.name}.old")
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
            target.rename(old)
        temporary.rename(target)
        _fsync(target.parent)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unstacked(params: Params, config: ModelConfig) -> dict[str, np.ndarray]:
    """File name of each tensor to its (view of the) array, in reading order; checks every shape."""
    found: dict[str, np.ndarray] = {}
    expected = abstract_params(config, jnp.float32)

    def host(label: str, leaf: Any, spec: Any) -> np.ndarray | None:
        shapes = (getattr(leaf, "shape", None), getattr(spec, "shape", None))
        if shapes[0] != shapes[1]:
            raise ModelError(f"params.{label} has shape {shapes[0]}, the settings imply {shapes[1]}")
        return None if leaf is None else np.asarray(leaf)

    for field, name in (("embed", EMBED), ("final_norm", FINAL_NORM), ("lm_head", HEAD)):
        if (array := host(field, getattr(params, field), getattr(expected, field))) is not None:
            found[name] = array
    layers = {
        field: host(f"layers.{field}", getattr(params.layers, field), getattr(expected.layers, field))
        for field in LAYER
    }
    for name, field, place in layer_tensors(config):
        array = layers[field]
        assert array is not None, "layer_tensors names only leaves that the settings imply"
        found[name] = array[place]
    return {name: found[name] for name in tensor_names(config)}


def _save_weights(
    directory: Path, tensors: Mapping[str, np.ndarray], dtype: np.dtype, max_shard_bytes: int
) -> None:
    shards: list[list[str]] = [[]]
    filled = 0
    for name, array in tensors.items():
        size = array.size * dtype.itemsize
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size

    placed: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(
            {name: _rounded(name, tensors[name], dtype) for name in names},
            directory / file,
            metadata={"format": "pt"},
        )
        placed |= dict.fromkeys(names, file)
    if len(shards) > 1:
        total = sum(array.size for array in tensors.values()) * dtype.itemsize
        write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": placed})


def _rounded(name: str, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    with np.errstate(over="ignore"):  # reported below, by name
        rounded = np.ascontiguousarray(array.astype(dtype, copy=False))
    if not np.isfinite(rounded).all():
        raise ModelError(f"{name} holds a value that is not finite as {dtype.name}; nothing was written")
    return rounded


def copy_tokenizer(source: Path, directory: Path) -> None:
    if not (source / "tokenizer.json").is_file():
        raise ModelError(f"{source}: no tokenizer.json to copy")
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)
