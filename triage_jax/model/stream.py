"""Quantising a checkpoint tensor by tensor: what is in memory is one group of weights that share a global scale."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.typing import DTypeLike

from triage_jax.model.config import ModelError
from triage_jax.model.save import write_json
from triage_jax.model.selection import WEIGHT, Group
from triage_jax.model.shards import ShardWriter
from triage_jax.model.tensors import Stored
from triage_jax.nvfp4 import QuantSpec
from triage_jax.nvfp4.checkpoint import (
    hf_quant_config,
    quantization_config,
    quantize_together,
    stored_shapes,
    to_tensors,
)

PRODUCER = {"name": "triage_jax", "version": "0.1.0"}
_BF16_EXPONENT = np.uint16(0x7F80)

type Read = Callable[[str], np.ndarray | jax.Array]


def output_plan(source: Mapping[str, Stored], groups: Iterable[Group]) -> dict[str, Stored]:
    """Every tensor of the quantised checkpoint, in the source's order; what is not in a group stays as it is."""
    chosen = {module for group in groups for module in group}
    plan: dict[str, Stored] = {}
    for name, stored in source.items():
        module = name.removesuffix(WEIGHT)
        if module in chosen and name.endswith(WEIGHT):
            rows, columns = stored.shape
            plan |= {key: Stored(*entry) for key, entry in stored_shapes(module, (rows, columns)).items()}
        else:
            plan[name] = stored
    return plan


def write_quantized(
    directory: Path,
    source: Mapping[str, Stored],
    groups: Sequence[Group],
    read: Read,
    spec: QuantSpec,
    *,
    input_scale: float,
    max_shard_bytes: int,
    weight_dtype: DTypeLike = jnp.bfloat16,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Write the weights of a directory: `groups` in ModelOpt's NVFP4 layout, every other tensor of `source` unchanged.

    read: gives a tensor by its name. weight_dtype: what weights are rounded to before they are quantised; BF16, as
    they are in a checkpoint, unless a learner quantises its masters. progress: is told the bytes of `source` that are
    done since it was last told. Raises ModelError for a tensor that holds a value which is not finite.
    """
    group_of = {module: group for group in groups for module in group}
    done: set[str] = set()
    with ShardWriter(directory, output_plan(source, groups), max_shard_bytes) as writer:
        for name in source:
            if name in done:
                continue
            group = group_of.get(name.removesuffix(WEIGHT)) if name.endswith(WEIGHT) else None
            if group is None:
                writer.write(name, _finite(name, np.asarray(read(name))))
                names = (name,)
            else:
                names = tuple(module + WEIGHT for module in group)
                _write_group(
                    writer,
                    group,
                    [_rounded(read(member), weight_dtype) for member in names],
                    spec,
                    input_scale,
                )
            done.update(names)
            if progress is not None:
                progress(sum(source[member].nbytes for member in names))


def _write_group(
    writer: ShardWriter,
    group: Group,
    parts: list[np.ndarray | jax.Array],
    spec: QuantSpec,
    input_scale: float,
) -> None:
    for module, part, q in zip(group, parts, quantize_together(parts, spec), strict=True):
        if not np.isfinite(q.global_scale):
            # The scale is the group's; name the member at fault, or the first if only their range is.
            _finite(module + WEIGHT, np.asarray(part))
            continue
        for name, tensor in to_tensors(module, q, input_scale).items():
            writer.write(name, tensor)


def _rounded(tensor: np.ndarray | jax.Array, dtype: DTypeLike) -> np.ndarray | jax.Array:
    return tensor.astype(dtype, copy=False) if isinstance(tensor, np.ndarray) else tensor.astype(dtype)


def _finite(name: str, tensor: np.ndarray) -> np.ndarray:
    if tensor.dtype == ml_dtypes.bfloat16:
        # Bits rather than `np.isfinite`, which takes as long as quantising does.
        broken = bool(((tensor.view(np.uint16) & _BF16_EXPONENT) == _BF16_EXPONENT).any())
    else:
        broken = jnp.issubdtype(tensor.dtype, jnp.floating) and not np.isfinite(tensor).all()
    if broken:
        raise ModelError(f"{name} holds a value that is not finite; nothing was written")
    return tensor


def write_configs(directory: Path, config: Mapping[str, Any], ignore: Sequence[str]) -> None:
    """`config.json` with its `quantization_config`, and `hf_quant_config.json` for readers that look there."""
    quantization = quantization_config(ignore, PRODUCER)
    write_json(directory / "config.json", {**config, "quantization_config": quantization})
    write_json(directory / "hf_quant_config.json", hf_quant_config(ignore, PRODUCER))
