"""Dumps of any of the accepted kinds, as a source that is read one update at a time.

| files | content |
| --- | --- |
| `RUN` or `RUN/dumps/*.npz` | this package's dumps |
| `*.jsonl` | a response per line: verl's `rollout_data_dir`, NeMo-RL's `train_data_step*.jsonl`, others with `--map` |
| `*.pt` | slime's and miles' debug files; needs torch, which loads nothing but tensors, arrays and plain values |
| `*.parquet` | one response per row, TRL's completions for one; needs pyarrow |
| `*.npz` | other arrays [B, T], with `--map` |
"""

import contextlib
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from triage_jax.characterize.dumps import FORMAT, Dump, DumpError, checked, read_arrays, read_dump, step_of
from triage_jax.characterize.rows import Row, RowError, Skipped, columns_of, dump_of, parse_row

SUFFIXES = (".npz", ".jsonl", ".pt", ".parquet")
NOT_DUMPS = ("metrics.jsonl",)


@dataclass(frozen=True, kw_only=True)
class FileSource:
    """Files of one run, in the order of the number in their names; those of one step (of several ranks) are joined."""

    files: tuple[Path, ...]
    columns: Mapping[str, str] = field(default_factory=dict)
    """Names chosen with --map"""
    strict: bool = False
    """Stop at the first row that cannot be used, instead of counting it"""
    skipped: Skipped = field(default_factory=Skipped)

    def steps(self) -> list[int]:
        """Every update's number, in order.

        Raises DumpError if the files go back to an earlier one, or if no row of them can be used.
        """
        found: list[int] = []
        problem: str | None = None
        for number, file in enumerate(self.files):
            for step in _steps(file, number, self.columns):
                if isinstance(step, _Problem):
                    problem = problem or str(step)
                    continue
                if found and step < found[-1]:
                    raise DumpError(f"{file}: step {step} after step {found[-1]}; accepted: steps in order")
                if not found or step != found[-1]:
                    found.append(step)
        if not found:
            raise DumpError(f"no usable row; {problem or 'the files are empty'}")
        return found

    def dumps(self, steps: frozenset[int] | None = None) -> Iterator[Dump]:
        """The updates. Raises DumpError if there is no usable row, for a damaged file, or for any row if `strict`."""
        self.skipped.rows, self.skipped.reasons = 0, []
        parts = itertools.chain.from_iterable(
            self._parts(n, file, steps) for n, file in enumerate(self.files)
        )
        empty = True
        for _, same in itertools.groupby(parts, key=lambda dump: dump.step):
            empty = False
            yield _join(self._distinct(list(same)))
        if empty and steps is None:
            raise DumpError("no usable row; " + (self.skipped.reasons or ["the files are empty"])[0])

    def _distinct(self, parts: list[Dump]) -> list[Dump]:
        """Without replicas: every rank of miles writes its own file, those of one tensor-parallel group the same."""
        kept: list[Dump] = []
        for part in parts:
            twin = next((other for other in kept if _equal(part, other)), None)
            if twin is None:
                kept.append(part)
            else:
                self.skipped.add(f"{part.source}: the same responses as {twin.source}", rows=len(part.mask))
        return kept

    def _parts(self, number: int, file: Path, steps: frozenset[int] | None) -> Iterator[Dump]:
        if file.suffix == ".npz":
            if steps is None or next(iter(_steps(file, number, self.columns))) in steps:
                yield _read_npz(file, number, self.columns)
            return
        rows = self._usable(number, file, steps)
        for step, same in itertools.groupby(rows, key=lambda found: found[0]):
            yield dump_of([row for _, row in same], step, str(file))

    def _usable(self, number: int, file: Path, steps: frozenset[int] | None) -> Iterator[tuple[int, Row]]:
        for found in _located(file, number, self.columns):
            if isinstance(found, _Located):
                if steps is not None and found.step not in steps:
                    if found.step > max(steps, default=found.step - 1):
                        return  # steps are in order: the rest is later still
                    continue
                try:
                    yield found.step, parse_row(found.raw, found.columns)
                    continue
                except RowError as error:
                    found = _Problem(found.place, str(error))
            if self.strict:
                raise DumpError(str(found))
            self.skipped.add(str(found))


class _Located(NamedTuple):
    """A row, and where its columns are."""

    place: str
    step: int
    raw: Mapping[str, Any]
    columns: Mapping[str, str]


class _Problem(NamedTuple):
    """A row that cannot be used."""

    place: str
    reason: str

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}"


def _located(file: Path, number: int, chosen: Mapping[str, str]) -> Iterator[_Located | _Problem]:
    """Rows of a file; what holds which column is looked up once per set of fields."""
    default = _default_step(file, number)
    known: dict[frozenset[str], Mapping[str, str] | str] = {}
    for place, raw in _raw_rows(file):
        if isinstance(raw, str):
            yield _Problem(place, raw)
            continue
        names = frozenset(raw)
        if names not in known:
            try:
                known[names] = columns_of(names, chosen)
            except DumpError as error:
                known[names] = str(error)
        columns = known[names]
        if isinstance(columns, str):
            yield _Problem(place, columns)
        else:
            yield _Located(place, _step(raw, columns, default), raw, columns)


def open_source(
    paths: list[Path], *, columns: Mapping[str, str] | None = None, strict: bool = False
) -> FileSource:
    """The files that the paths name: a run, a directory of dumps, or files, all parts of one run.

    Raises DumpError for a path without any, and FileNotFoundError.
    """
    files = sorted({file for path in paths for file in _files(path)}, key=_order)
    return FileSource(files=tuple(files), columns=columns or {}, strict=strict)


def _files(path: Path) -> list[Path]:
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise DumpError(f"{path}: unknown kind of file; accepted: {', '.join(SUFFIXES)}")
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: no such file or directory")
    inside = path / "dumps" if (path / "dumps").is_dir() else path
    files = [f for f in inside.iterdir() if f.suffix in SUFFIXES and f.name not in NOT_DUMPS]
    if not files:
        hint = " (a run writes them with track.dumps set)" if (path / "metrics.jsonl").exists() else ""
        raise DumpError(f"{inside}: no dump found{hint}; accepted: {', '.join(SUFFIXES)}")
    return files


def _order(file: Path) -> tuple[int | float, str]:
    step = step_of(file)
    return (float("inf") if step is None else step, str(file))


def _default_step(file: Path, number: int) -> int:
    found = step_of(file)
    return number if found is None else found


def _step(raw: Mapping[str, Any], columns: Mapping[str, str], default: int) -> int:
    value = raw.get(columns["step"]) if "step" in columns else None
    return int(value) if isinstance(value, int | float) else default


def _steps(file: Path, number: int, chosen: Mapping[str, str]) -> Iterator[int | _Problem]:
    """Numbers of the updates of one file, without looking at its tokens."""
    if file.suffix == ".npz":
        yield _npz_step(file, chosen.get("step", "step"), _default_step(file, number))
        return
    for found in _located(file, number, chosen):
        yield found.step if isinstance(found, _Located) else found


def _read_npz(file: Path, number: int, chosen: Mapping[str, str]) -> Dump:
    arrays = read_arrays(file)
    if not chosen and str(arrays.get("format")) == FORMAT:
        return read_dump(file)
    try:
        columns = columns_of(frozenset(arrays), chosen)
    except DumpError as error:
        raise DumpError(f"{file}: {error}") from None
    if "advantages" not in columns:
        raise DumpError(f"{file}: no array for advantages; found: {', '.join(sorted(arrays))}")
    named = {column: arrays[name] for column, name in columns.items() if column not in ("group", "step")}
    named.setdefault("mask", np.ones(named["learner_logp"].shape, bool))
    if "kept" in named:
        named["mask"] = (named["mask"] != 0) & (named.pop("kept") != 0)[:, None]
    step = _npz_step(file, columns.get("step", "step"), _default_step(file, number))
    return checked(named, step, str(file))


def _npz_step(file: Path, name: str, default: int) -> int:
    """The scalar of that name, read without the large arrays."""
    found = read_arrays(file, {name}).get(name)
    if found is None:
        return default
    if found.ndim or found.dtype.kind not in "iuf":
        raise DumpError(f"{file}: `{name}` has shape {found.shape}, {found.dtype}; accepted: one number")
    return int(found)


def _raw_rows(file: Path) -> Iterator[tuple[str, Mapping[str, Any] | str]]:
    """Place and content of each row; a string says why it has none."""
    if file.suffix == ".jsonl":
        yield from _json_rows(file)
    elif file.suffix == ".pt":
        yield from _torch_rows(file)
    else:
        yield from _parquet_rows(file)


def _json_rows(file: Path) -> Iterator[tuple[str, Mapping[str, Any] | str]]:
    with file.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                yield f"{file}:{number}", f"not JSON ({error.msg} at column {error.colno})"
                continue
            yield f"{file}:{number}", row if isinstance(row, dict) else "not a JSON object"


def _torch_rows(file: Path) -> Iterator[tuple[str, Mapping[str, Any] | str]]:
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise DumpError(
            f"{file}: a torch file, and torch is not installed: install it, or save the same fields as JSONL or npz"
        ) from None
    try:
        # Absent before torch 2.5, which then reads files without numpy values.
        allowed = getattr(torch.serialization, "safe_globals", contextlib.nullcontext)
        with allowed(_numpy_globals()):
            content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises its own, pickle's and zip's errors here
        raise DumpError(
            f"{file}: not a torch file of tensors, arrays and plain values ({type(error).__name__}); other "
            "objects are not unpickled"
        ) from None
    if not isinstance(content, dict) or not ({"samples", "rollout_data"} & content.keys()):
        raise DumpError(
            f"{file}: accepted: slime's or miles' debug files, a dict with `samples` or `rollout_data`"
        )
    step = {"rollout_id": content["rollout_id"]} if "rollout_id" in content else {}
    parts = content.get("cp_size", 1)
    for number, row in enumerate(_samples(content, file)):
        place = f"{file}: sample {number}"
        if parts == 1:
            yield place, row | step
        else:
            yield place, f"one of {parts} pieces of context parallelism (`cp_size`), which are not joined"


def _numpy_globals() -> list[Any]:
    """What makes numpy's arrays and scalars out of bytes; objects inside them stay refused. miles saves both."""
    dtypes = {type(np.dtype(kind)) for kind in ("?", *np.typecodes["AllInteger"], *np.typecodes["Float"])}
    makers = {"_reconstruct": np.zeros(0).__reduce__()[0], "scalar": np.float64(0).__reduce__()[0]}
    named = [  # under numpy 2's name and numpy 1's
        (maker, f"numpy.{core}.multiarray.{name}")
        for name, maker in makers.items()
        for core in ("_core", "core")
    ]
    return [np.ndarray, np.dtype, *dtypes, *named]


def _samples(content: Mapping[str, Any], file: Path) -> Iterator[dict[str, Any]]:
    """One dict per response.

    slime's train data hold them as they are (slime/observability/train_data_utils.py, format_version 2), miles' and
    older slime's as columns of one rank (miles/utils/train_dump_utils.py).
    """
    if "samples" in content:
        yield from content["samples"]
        return
    data = content["rollout_data"]
    count = len(data.get("response_lengths", data.get("log_probs", ())))
    per_sample = {
        name: v for name, v in data.items() if isinstance(v, list | tuple | np.ndarray) and len(v) == count
    }
    if not count:
        raise DumpError(f"{file}: `rollout_data` has no samples; found: {', '.join(sorted(data))}")
    for i in range(count):
        yield {name: values[i] for name, values in per_sample.items()}


def _parquet_rows(file: Path) -> Iterator[tuple[str, Mapping[str, Any] | str]]:
    try:
        from pyarrow import parquet  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise DumpError(
            f"{file}: a Parquet file, and pyarrow is not installed: install it, or save the same columns as JSONL"
        ) from None
    number = 0
    for batch in parquet.ParquetFile(file).iter_batches(batch_size=64):
        for row in batch.to_pylist():
            yield f"{file}: row {number}", row
            number += 1


def _equal(part: Dump, other: Dump) -> bool:
    names = ("mask", "learner_logp", "sampler_logp")
    return all(np.array_equal(getattr(part, name), getattr(other, name)) for name in names)


def _join(parts: list[Dump]) -> Dump:
    """Parts of one update, such as those of several ranks, as one."""
    if len(parts) == 1:
        return parts[0]
    width = max(part.mask.shape[1] for part in parts)
    per_token = any(part.advantages.ndim == 2 for part in parts)

    def joined(name: str) -> np.ndarray:
        arrays = [getattr(part, name) for part in parts]
        if name == "advantages" and per_token:
            arrays = [
                x if x.ndim == 2 else np.broadcast_to(x[:, None], part.mask.shape)
                for x, part in zip(arrays, parts, strict=True)
            ]
        if arrays[0].ndim == 2:
            arrays = [np.pad(x, ((0, 0), (0, width - x.shape[1]))) for x in arrays]
        return np.concatenate(arrays)

    names = ["learner_logp", "sampler_logp", "mask", "advantages"]
    optional = ("rewards", "learner_logp_after")
    names += [name for name in optional if all(getattr(part, name) is not None for part in parts)]
    return Dump(step=parts[0].step, source=parts[0].source, **{name: joined(name) for name in names})
