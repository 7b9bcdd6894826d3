"""Safetensors files whose tensors are written one at a time, in any order, into room planned beforehand."""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np

from triage_jax.model.load import INDEX, SINGLE
from triage_jax.model.save import write_json
from triage_jax.model.tensors import Stored


class ShardWriter:
    """Files of a model directory, as a context: `write` every tensor of the plan once, then leave.

    Shards hold the tensors in the plan's order and at most `max_shard_bytes` each (one larger tensor has a shard of
    its own); more than one shard gets an index. Nothing is kept in memory. Leaving raises ValueError if a tensor is
    missing.
    """

    def __init__(self, directory: Path, plan: Mapping[str, Stored], max_shard_bytes: int) -> None:
        self._directory, self._plan, self._missing = directory, plan, set(plan)
        self._places: dict[str, tuple[BinaryIO, int]] = {}
        self._files = ExitStack()
        shards = split(plan, max_shard_bytes)
        placed: dict[str, str] = {}
        with ExitStack() as opened:
            for number, names in enumerate(shards, start=1):
                file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
                self._open(opened, directory / file, names)
                placed |= dict.fromkeys(names, file)
            self._files = opened.pop_all()
        if len(shards) > 1:
            total = sum(stored.nbytes for stored in plan.values())
            write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": placed})

    def _open(self, stack: ExitStack, path: Path, names: list[str]) -> None:
        # Widest first keeps every tensor aligned, which readers that map the file rely on.
        ordered = sorted(names, key=lambda name: -self._plan[name].numpy.itemsize)
        entries: dict[str, dict] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in ordered:
            start, end = end, end + self._plan[name].nbytes
            stored = self._plan[name]
            entries[name] = {
                "dtype": stored.dtype,
                "shape": list(stored.shape),
                "data_offsets": [start, end],
            }
        header = json.dumps(entries, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)
        file = stack.enter_context(path.open("w+b"))
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)
        for name in ordered:
            self._places[name] = (file, 8 + len(header) + entries[name]["data_offsets"][0])

    def write(self, name: str, tensor: np.ndarray) -> None:
        """Put a tensor in its place. Raises ValueError for one that is not in the plan, differs or comes twice."""
        if name not in self._missing:
            raise ValueError(f"{name}: {'written twice' if name in self._plan else 'not planned'}")
        stored = self._plan[name]
        if tensor.dtype != stored.numpy or tensor.shape != stored.shape:
            raise ValueError(
                f"{name}: {tensor.dtype} {list(tensor.shape)}, planned was {stored.dtype} {list(stored.shape)}"
            )
        file, offset = self._places[name]
        file.seek(offset)
        file.write(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)
        self._missing.remove(name)

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()
        if kind is None and self._missing:
            raise ValueError(f"{self._directory}: never written: {sorted(self._missing)[:3]}")


def split(plan: Mapping[str, Stored], max_shard_bytes: int) -> list[list[str]]:
    """Names shard by shard, in order."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, stored in plan.items():
        if shards[-1] and filled + stored.nbytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += stored.nbytes
    return shards
