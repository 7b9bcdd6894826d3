"""The per-token dump of one update: `RUN/dumps/step_000123.npz`, written without pickle and checked when read.

| array | shape | |
| --- | --- | --- |
| `learner_logp` | [B, T] float32 | log-probabilities of the sampled tokens under the learner, just before the update |
| `sampler_logp` | [B, T] float32 | the same, recorded at generation |
| `mask` | [B, T] bool | valid completion tokens |
| `advantages` | [B] or [B, T] float32 | |
| `lengths` | [B] int32 | completion tokens of each response, masked ones inside it included |
| `rewards` | [B] float32, may be absent | |
| `learner_logp_after` | [B, T] float32, may be absent | the learner's just after the update, for the sign audit |
| `step`, `format` | scalars | the update's number; "triage_jax dump 1" |

Position 0 is the first completion token. Masked positions may hold anything.
"""

import os
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from triage_jax.characterize.arrays import Advantages, Gap, Mask

FORMAT = "triage_jax dump 1"
ABOVE_ZERO = 1e-3
"""How far rounding may lift a log-probability above 0"""


class DumpError(ValueError):
    """A file that cannot be used; the message names file, line or array, and what is accepted."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Dump:
    """The tokens of one update."""

    step: int
    learner_logp: Gap
    sampler_logp: Gap
    mask: Mask
    advantages: Advantages
    rewards: Float[np.ndarray, " B"] | None = None
    learner_logp_after: Gap | None = None
    source: str = ""
    """Where it came from, for messages"""


def dump_path(run: Path, step: int) -> Path:
    """Where a run keeps the dump of a step."""
    return run / "dumps" / f"step_{step:06d}.npz"


def write_dump(
    path: Path,
    *,
    step: int,
    learner_logp: Any,
    sampler_logp: Any,
    mask: Any,
    advantages: Any,
    rewards: Any = None,
    learner_logp_after: Any = None,
    compress: bool = False,
) -> None:
    """Write a dump that appears complete or not at all; arrays of any library, JAX's included.

    Trailing positions that no response fills are cut off. `compress` saves a third of the space and costs about two
    seconds per five million tokens. Raises DumpError for arrays that `read_dump` would not take.
    """
    mask = np.asarray(mask) != 0
    if mask.ndim != 2:
        raise DumpError(f"{path}: mask has shape {mask.shape}; accepted: [B, T]")
    lengths = np.where(mask.any(axis=1), mask.shape[1] - mask[:, ::-1].argmax(axis=1), 0)
    width = int(lengths.max(initial=1))
    floats = {
        "learner_logp": np.asarray(learner_logp, np.float32),
        "sampler_logp": np.asarray(sampler_logp, np.float32),
        "advantages": np.asarray(advantages, np.float32),
    }
    optional = {"rewards": rewards, "learner_logp_after": learner_logp_after}
    floats |= {name: np.asarray(x, np.float32) for name, x in optional.items() if x is not None}
    checked(floats | {"mask": mask}, step, str(path))
    arrays = {name: x[:, :width] if x.ndim == 2 else x for name, x in (floats | {"mask": mask}).items()}
    arrays |= {"lengths": lengths.astype(np.int32), "step": np.int64(step), "format": np.array(FORMAT)}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        (np.savez_compressed if compress else np.savez)(file, allow_pickle=False, **arrays)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def read_arrays(path: Path, names: set[str] | None = None) -> dict[str, np.ndarray]:
    """Arrays of an npz, all or those with these names; nothing is unpickled. Raises DumpError for a damaged file."""
    try:
        with path.open("rb") as file:
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise DumpError(f"{path}: one array; accepted: an npz with named arrays")
            return {
                name: archive[name] for name in (archive.files if names is None else names & {*archive.files})
            }
    except (zipfile.BadZipFile, ValueError, EOFError, KeyError, OSError) as error:
        if isinstance(error, DumpError | FileNotFoundError):
            raise
        raise DumpError(
            f"{path}: not a readable npz ({error}); objects that need pickle are not accepted"
        ) from None


def read_dump(path: Path) -> Dump:
    """Read and check one dump. Raises DumpError naming the array."""
    arrays = read_arrays(path)
    found = str(arrays.get("format", "no `format`"))
    if found != FORMAT:
        raise DumpError(f"{path}: format is {found!r}; accepted: {FORMAT!r} (for other npz files use --map)")
    return checked(arrays, int(arrays["step"]), str(path))


def checked(arrays: Mapping[str, np.ndarray], step: int, source: str) -> Dump:
    """A dump of these arrays. Raises DumpError for one that is missing, has another shape or is not finite."""
    for name in ("learner_logp", "sampler_logp", "mask", "advantages"):
        if name not in arrays:
            raise DumpError(f"{source}: `{name}` is missing; found: {', '.join(sorted(arrays))}")
    mask = arrays["mask"] != 0
    if mask.ndim != 2 or not mask.size:
        raise DumpError(f"{source}: `mask` has shape {mask.shape}; accepted: [B, T], neither of them 0")
    shapes = {"learner_logp": (mask.shape,), "sampler_logp": (mask.shape,)}
    shapes |= {"advantages": (mask.shape, mask.shape[:1])}
    optional = {"rewards": (mask.shape[:1],), "learner_logp_after": (mask.shape,)}
    shapes |= {name: accepted for name, accepted in optional.items() if name in arrays}
    for name, accepted in shapes.items():
        if arrays[name].shape not in accepted:
            choices = " or ".join(map(str, accepted))
            raise DumpError(f"{source}: `{name}` has shape {arrays[name].shape}; accepted: {choices}")
        if arrays[name].dtype.kind not in "fiu":
            raise DumpError(f"{source}: `{name}` has dtype {arrays[name].dtype}; accepted: numbers")
    floats = {name: _as_float(arrays[name]) for name in shapes}
    for name in floats.keys() - {"rewards"}:
        _check_values(floats[name], mask, name, source)
    if "lengths" in arrays:
        _check_lengths(arrays["lengths"], mask, source)
    return Dump(step=step, mask=mask, source=source, **floats)


def _as_float(x: np.ndarray) -> Float[np.ndarray, "..."]:
    return x if x.dtype in (np.float32, np.float64) else x.astype(np.float32)


def _check_values(
    x: Float[np.ndarray, "B *T"], mask: Bool[np.ndarray, "B T"], name: str, source: str
) -> None:
    valid = mask if x.ndim == 2 else mask.any(axis=1)
    bad = ~np.isfinite(x) & valid
    accepted = "finite numbers on valid tokens"
    if name != "advantages" and not bad.any():
        bad, accepted = (x > ABOVE_ZERO) & valid, "log-probabilities, at most 0"
    if bad.any():
        place = tuple(int(i) for i in np.argwhere(bad)[0])
        where = f"response {place[0]}" + (f", token {place[1]}" if len(place) > 1 else "")
        raise DumpError(
            f"{source}: `{name}` is {x[place]:g} at {where} ({np.count_nonzero(bad)} such); accepted: {accepted}"
        )


def _check_lengths(lengths: np.ndarray, mask: Bool[np.ndarray, "B T"], source: str) -> None:
    if lengths.shape != mask.shape[:1]:
        raise DumpError(f"{source}: `lengths` has shape {lengths.shape}; accepted: {mask.shape[:1]}")
    if (mask & (np.arange(mask.shape[1]) >= lengths[:, None])).any():
        raise DumpError(f"{source}: `mask` marks tokens beyond `lengths`")


def step_of(path: Path) -> int | None:
    """The number in a file name, `step_000123.npz`, `7.jsonl`, `train_data_step7.jsonl`; the first, if several."""
    match = re.search(r"\d+", path.stem)
    return int(match.group()) if match else None
