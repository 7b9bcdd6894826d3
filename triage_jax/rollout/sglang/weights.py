"""Versions of the weights on disk, as servers load them: whole, provably what the learner holds, removed in time."""

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypedDict

import jax
import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from triage_jax.model import (
    ModelConfig,
    ModelError,
    Numerics,
    Params,
    load_quantized,
    save_model,
    save_quantized,
    serving_params,
)
from triage_jax.model.load import EMBED, FINAL_NORM, HEAD, layer_tensors
from triage_jax.model.save import write_json
from triage_jax.model.tensors import MappedFile
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
    """SHA-256 over the weights rounded to BF16: equal exactly where those are equal"""
    size: int
    """Bytes of the tensors on disk"""


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
        self,
        params: Params,
        config: ModelConfig,
        version: int,
        tokenizer_from: Path | None = None,
        numerics: Numerics | None = None,
    ) -> Snapshot:
        """Write the weights with a manifest: rounded to BF16, or in the very codes that `numerics` multiply.

        The directory appears under its name complete and checked, or not at all; one of an earlier run is replaced.
        Raises RefitFailed for weights that are not finite, a file that does not read back as written, or a disk that
        refuses; EngineError for a version that this run gave to other weights.
        """
        path = self._root / version_label(version)
        manifest = _manifest(_tensors(params, config))
        digest = _digest(manifest)
        known = self._written.get(version, digest)
        if version in self._written and known == digest and path.exists():
            return Snapshot(version=version, path=path, digest=digest, size=_size(path))
        if known != digest:
            raise EngineError(
                f"version {version} names other weights already, and no sample could tell the two apart; "
                f"accepted: a version above {max(self._written)}"
            )
        staging = path.with_name(f".{path.name}.new")
        try:
            shutil.rmtree(staging, ignore_errors=True)
            if numerics is None:
                save_model(staging, params, config, tokenizer_from=tokenizer_from)
            else:
                save_quantized(staging, params, config, numerics, tokenizer_from=tokenizer_from)
                _check_codes(staging, params, numerics)
                manifest = _manifest((name, MappedFile(file)[name]) for name, file in _files(staging).items())
            _write_synced(staging / MANIFEST, manifest)
            validate(staging)
            _replace(staging, path)
        except (RefitFailed, ModelError, OSError) as error:
            what = f"the weights of version {version} could not be written: {error}"
            raise RefitFailed(what, url=str(path)) from error
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        self._written[version] = digest
        return Snapshot(version=version, path=path, digest=digest, size=_size(path))

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
        tensor = MappedFile(file)[name]
    except (OSError, ValueError) as error:
        raise RefitFailed(f"{name} cannot be read: {error}", url=str(file)) from error
    found = _entry(tensor)
    for check in ("shape", "dtype", "sha256"):
        if found[check] != entry[check]:
            raise RefitFailed(
                f"{name}: {check} is {found[check]}, the manifest says {entry[check]}", url=str(file)
            )
    if tensor.dtype != np.uint8 and not np.isfinite(tensor.astype(np.float32)).all():
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
            yield name, np.asarray(leaf).astype(DTYPE, copy=False)
    stacked: dict[str, np.ndarray] = {}
    for name, field, place in layer_tensors(config):
        if field not in stacked:
            stacked[field] = np.asarray(getattr(params.layers, field))
        yield name, stacked[field][place].astype(DTYPE, copy=False)


def _manifest(tensors: Iterable[tuple[str, np.ndarray]]) -> Manifest:
    named = dict(tensors)
    return dict(zip(named, _map(_entry, named.values()), strict=True))


def _check_codes(path: Path, params: Params, numerics: Numerics) -> None:
    """Raise RefitFailed unless the file reads back as the operands that the learner's forward pass multiplies."""
    stored, _ = load_quantized(path)
    expected = serving_params(params, replace(numerics, execution="emulated"))
    for (place, ours), theirs in zip(
        jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(stored), strict=True
    ):
        if not np.array_equal(np.asarray(ours), np.asarray(theirs)):
            what = f"{jax.tree_util.keystr(place)} does not read back as the learner holds it"
            raise RefitFailed(what, url=str(path))


def _entry(array: np.ndarray) -> TensorEntry:
    array = np.ascontiguousarray(array)
    digest = hashlib.sha256(array.view(np.uint8)).hexdigest()
    return TensorEntry(shape=list(array.shape), dtype=array.dtype.name, sha256=digest)


def _size(path: Path) -> int:
    return sum(MappedFile(file).stored(name).nbytes for name, file in _files(path).items())


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
