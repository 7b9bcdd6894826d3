"""Tensors in safetensors files: dtypes by their names there, and the bytes without a copy.

`safetensors.numpy` knows no 8-bit floats, so quantised files are read here; `safe_open` has checked the header before.
"""

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path

import ml_dtypes
import numpy as np

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "I64": np.dtype(np.int64),
    "F32": np.dtype(np.float32),
    "I32": np.dtype(np.int32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
"""Safetensors' name of a dtype to NumPy's"""


@dataclass(frozen=True)
class Stored:
    """Dtype, by its safetensors name, and shape of a tensor in a file. Raises ValueError for an unknown dtype."""

    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype}: accepted are {', '.join(DTYPES)}")

    @property
    def numpy(self) -> np.dtype:
        return DTYPES[self.dtype]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.numpy.itemsize


class MappedFile:
    """The tensors of one file as read-only views of the mapped file: pages are read when they are touched."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            self._entries = json.loads(file.read(length))
        self._start = 8 + length
        self._bytes = np.memmap(path, np.uint8, "r")

    def stored(self, name: str) -> Stored:
        entry = self._entries[name]
        return Stored(entry["dtype"], tuple(entry["shape"]))

    def __getitem__(self, name: str) -> np.ndarray:
        stored = self.stored(name)
        start, end = (self._start + offset for offset in self._entries[name]["data_offsets"])
        return np.asarray(self._bytes[start:end]).view(stored.numpy).reshape(stored.shape)
