"""Where the recorded reference values lie: `../shared` beside the checkout, else the copies in `tests/data`."""

from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "data"


def shared_path(relative: str) -> Path | None:
    """Path of a file under `../shared`, or None in a clone that stands alone."""
    path = ROOT.parent / "shared" / relative
    return path if path.exists() else None


def golden_path(name: str) -> Path:
    """Path of a golden file or folder; raises FileNotFoundError if neither place has it."""
    for path in (shared_path(f"golden/{name}"), DATA / name):
        if path is not None and path.exists():
            return path
    raise FileNotFoundError(f"golden data {name!r}: neither in ../shared/golden nor in tests/data")


def load(name: str) -> dict[str, np.ndarray]:
    """All arrays of a golden `.npz`."""
    with np.load(golden_path(name), allow_pickle=False) as archive:
        return {key: archive[key] for key in archive.files}
