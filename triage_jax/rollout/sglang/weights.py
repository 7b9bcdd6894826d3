"""Versions of the weights on disk, as servers load them: whole, provably what the learner holds, removed in time."""

import fcntl
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from triage_jax.model import ModelConfig, ModelError, Params, save_model
from triage_jax.model.load import EMBED, FINAL_NORM, HEAD, LAYER, layer_name
from triage_jax.model.save import write_json
from triage_jax.rollout.protocol import EngineError
from triage_jax.rollout.sglang.errors import RefitFailed
from triage_jax.rollout.sglang.wire import version_label

MANIFEST = "manifest.json"
DTYPE = np.dtype(ml_dtypes.bfloat16)
HASHERS = 8
"""Tensors hashed at once, each by a thread that holds one of them"""


class TensorEntry(TypedDict):
    """What the manifest says about one tensor."""

    shape: list[int]
    dtype: str
    sha256: str


type Manifest = Mapping[str, TensorEntry]


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """One version on disk."""

    version: int
    path: Path
    digest: str
    """SHA-256 over all tensors: equal exactly where the rounded weights are equal"""
    size: int
    """Bytes of the tensors"""


class WeightStore:
    """The directory `root`, which holds one subdirectory per version; one process at a time writes into it.

    Raises EngineError where another process does.
    """

    def __init__(self, root: str | Path, keep: int) -> None:
        self._root = Path(root).absolute()
        self._keep = keep
        self._written: dict[int, str] = {}
        """Digest of each version this run has used"""
        self._root.mkdir(parents=True, exist_ok=True)
        self._lock = (self._root / ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise EngineError(
                f"{self._root}: another run writes its weights here, and servers could not tell the two apart; "
                "wait for it or choose another weights_dir"
            ) from None
        for leftover in self._root.glob(".step-*"):  # of a run that was killed while it wrote
            shutil.rmtree(leftover, ignore_errors=True)

    def write(
        self, params: Params, config: ModelConfig, version: int, tokenizer_from: Path | None = None
    ) -> Snapshot:
        """Write the weights, rounded to BF16, with a manifest of what the learner holds.

        The directory appears under its name complete and checked, or not at all; one of an earlier run is replaced.
        Raises RefitFailed for weights that are not finite, a file that does not read back as written, or a disk that
        refuses; EngineError for a version that this run gave to other weights.
        """
        path = self._root / version_label(version)
        manifest = _manifest(params, config)
        snapshot = Snapshot(version=version, path=path, digest=_digest(manifest), size=_size(manifest))
        known = self._written.get(version, snapshot.digest)
        if version in self._written and known == snapshot.digest and path.exists():
            return snapshot
        if known != snapshot.digest:
            raise EngineError(
                f"version {version} names other weights already, and no sample could tell the two apart; "
                f"accepted: a version above {max(self._written)}"
            )
        staging = path.with_name(f".{path.name}.new")
        try:
            shutil.rmtree(staging, ignore_errors=True)
            save_model(staging, params, config, tokenizer_from=tokenizer_from)
            _write_synced(staging / MANIFEST, manifest)
            validate(staging)
            _replace(staging, path)
        except (RefitFailed, ModelError, OSError) as error:
            what = f"the weights of version {version} could not be written: {error}"
            raise RefitFailed(what, url=str(path)) from error
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        self._written[version] = snapshot.digest
        return snapshot

    def versions(self) -> list[int]:
        """Versions on disk, oldest first."""
        found = (re.fullmatch(r"step-(\d+)", path.name) for path in self._root.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def release(self, in_use: Collection[int]) -> None:
        """Remove every version but the newest `keep` and those in use."""
        for version in self.versions()[: -self._keep]:
            if version not in in_use:
                shutil.rmtree(self._root / version_label(version), ignore_errors=True)

    def close(self) -> None:
        self._lock.close()


def validate(path: Path) -> None:
    """Raise RefitFailed, naming tensor and check, unless the files hold exactly what the manifest says, all finite.

    A server dies of a truncated file or a wrong shape, and takes a missing tensor or a NaN for good.
    """
    try:
        manifest: Manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RefitFailed(f"{MANIFEST} cannot be read: {error}", url=str(path)) from error
    files = _files(path)
    for kind, names in (
        ("missing", manifest.keys() - files.keys()),
        ("unexpected", files.keys() - manifest.keys()),
    ):
        if names:
            raise RefitFailed(f"{len(names)} tensors {kind}, first {min(names)}", url=str(path))
    _map(lambda name: _check_tensor(files[name], name, manifest[name]), sorted(manifest))


def _check_tensor(file: Path, name: str, entry: TensorEntry) -> None:
    try:
        with safe_open(file, framework="numpy") as handle:
            tensor = handle.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise RefitFailed(f"{name} cannot be read: {error}", url=str(file)) from error
    found = _entry(tensor)
    for check in ("shape", "dtype", "sha256"):
        if found[check] != entry[check]:
            raise RefitFailed(
                f"{name}: {check} is {found[check]}, the manifest says {entry[check]}", url=str(file)
            )
    if not np.isfinite(tensor).all():
        raise RefitFailed(f"{name} holds a value that is not finite", url=str(file))


def _files(path: Path) -> dict[str, Path]:
    """Which file holds which tensor."""
    found: dict[str, Path] = {}
    for file in sorted(path.glob("*.safetensors")):
        try:
            with safe_open(file, framework="numpy") as handle:
                names = list(handle.keys())
        except (OSError, SafetensorError) as error:
            raise RefitFailed(f"cannot be read as safetensors: {error}", url=str(file)) from error
        for name in names:
            if name in found:
                raise RefitFailed(f"{name} is also in {found[name].name}", url=str(file))
            found[name] = file
    return found


def _tensors(params: Params, config: ModelConfig) -> Iterator[tuple[str, np.ndarray]]:
    """Names in the file and the learner's own values: a second derivation, so that the manifest checks the writer."""
    for name, leaf in ((EMBED, params.embed), (FINAL_NORM, params.final_norm), (HEAD, params.lm_head)):
        if leaf is not None:
            yield name, np.asarray(leaf)
    for field in LAYER:
        if (leaf := getattr(params.layers, field)) is not None:
            stacked = np.asarray(leaf)
            yield from ((layer_name(index, field), stacked[index]) for index in range(config.num_layers))


def _manifest(params: Params, config: ModelConfig) -> Manifest:
    tensors = dict(_tensors(params, config))
    entries = _map(lambda array: _entry(array.astype(DTYPE, copy=False)), tensors.values())
    return dict(zip(tensors, entries, strict=True))


def _entry(array: np.ndarray) -> TensorEntry:
    array = np.ascontiguousarray(array)
    digest = hashlib.sha256(array.view(np.uint8)).hexdigest()
    return TensorEntry(shape=list(array.shape), dtype=array.dtype.name, sha256=digest)


def _size(manifest: Manifest) -> int:
    return sum(DTYPE.itemsize * math.prod(entry["shape"]) for entry in manifest.values())


def _digest(manifest: Manifest) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _map[Item, Result](function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    with ThreadPoolExecutor(HASHERS) as pool:
        return list(pool.map(function, items))


def _write_synced(path: Path, manifest: Manifest) -> None:
    write_json(path, manifest)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _replace(staging: Path, path: Path) -> None:
    """Put `staging` at `path`; what was there goes last, so that a crash leaves one of the two whole."""
    old = path.with_name(f".{path.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    staging.rename(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    shutil.rmtree(old, ignore_errors=True)
