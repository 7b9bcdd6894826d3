"""`python -m triage_jax.characterize RUN_OR_DUMP...`: the mismatch study of a run as a table, JSON and one page."""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from triage_jax.characterize.dumps import DumpError
from triage_jax.characterize.files import FileSource, open_source
from triage_jax.characterize.health import Finding, assess
from triage_jax.characterize.page import STATISTICS, render, render_metrics, text_of
from triage_jax.characterize.rows import parse_map
from triage_jax.characterize.study import Study, StudyConfig, study
from triage_jax.characterize.watch import metrics_file, print_findings, print_names, read_rows, watch

DESCRIPTION = """Study the gap between learner and sampler of a run, token by token.

Reads this package's runs (RUN/dumps), verl's rollout JSONL, slime's and miles' debug files, NeMo-RL's train data, and
any JSONL, npz or Parquet with per-token log-probabilities (--map names the fields). Several paths are parts of one run.
Writes mismatch.json and mismatch.html. One update is in memory at a time."""

EXIT_UNHEALTHY, EXIT_USAGE = 1, 2


@dataclass(frozen=True, kw_only=True)
class _Command:
    sources: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN_OR_DUMP")] = ()
    """Runs, directories of dumps, or files"""
    map: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="COLUMN=NAME")] = ()
    """Field that holds learner_logp, sampler_logp, mask, advantages, rewards, group or step; may be repeated"""
    out: Path | None = None
    """Directory for mismatch.json and mismatch.html; the first path if it is a directory, else the current one"""
    strict: bool = False
    """Stop at the first row that cannot be used; otherwise such rows are counted and named"""
    study: Annotated[StudyConfig, tyro.conf.arg(name="")] = field(default_factory=StudyConfig)
    watch: Path | None = None
    """Only say how this run does, from its metrics.jsonl (a peer's works too), and again as it goes on"""
    interval: float = 30.0
    """Seconds between looks of --watch; 0 looks once, with exit status 1 if something is wrong"""
    names: bool = False
    """Only print what other frameworks call the metrics"""


def run(command: _Command, console: Console) -> int:
    """Carry out a command line; returns the exit status."""
    if command.names:
        print_names(console)
        return 0
    if command.watch is not None:
        try:
            return 0 if watch(command.watch, command.interval, console) else EXIT_UNHEALTHY
        except KeyboardInterrupt:
            return 0
    if not command.sources:
        raise ValueError("nothing to read; accepted: one or more RUN_OR_DUMP, or --watch RUN, or --names")
    first = command.sources[0]
    out = command.out or (first if first.is_dir() else Path())
    rows = _metrics(first)
    columns = parse_map(command.map)
    try:
        source = open_source(list(command.sources), columns=columns, strict=command.strict)
    except DumpError:
        if not rows or len(command.sources) > 1:
            raise
        _report_metrics(rows, first, out, console)
        return 0
    findings = assess(rows)
    found = _study(source, command.study, console)
    _print_table(found, console)
    _print_skipped(source, console)
    page = render(found, title=first.resolve().name, skipped=source.skipped, findings=findings)
    _write(out / "mismatch.json", _json(found, source, findings), console)
    _write(out / "mismatch.html", page, console)
    return 0


def _report_metrics(rows: list[dict[str, Any]], run: Path, out: Path, console: Console) -> None:
    """What can be said of a run without dumps."""
    findings = assess(rows)
    print_findings(findings, len(rows), console)
    console.print(
        "no dumps: the page shows metrics only (a run writes dumps with track.dumps set)", markup=False
    )
    _write(out / "mismatch.html", render_metrics(rows, title=run.resolve().name, findings=findings), console)


def _study(source: FileSource, config: StudyConfig, console: Console) -> Study:
    with Progress(console=console, disable=not sys.stdout.isatty(), transient=True) as bar:
        task = bar.add_task("updates", total=None)
        return study(source, config, progress=lambda done: bar.update(task, completed=done))


def _metrics(path: Path) -> list[dict[str, Any]]:
    """Rows of metrics of a directory, if it has any."""
    try:
        file = metrics_file(path) if path.is_dir() else None
    except DumpError:
        return []
    return read_rows(file) if file else []


def _json(found: Study, source: FileSource, findings: Sequence[Finding]) -> str:
    report = found.to_json() | {
        "skipped_rows": source.skipped.rows,
        "skipped_reasons": source.skipped.reasons,
        "health": [{"name": f.name, "healthy": f.healthy, "text": f.text} for f in findings],
    }
    return json.dumps(report, indent=1, allow_nan=False) + "\n"


def _print_table(found: Study, console: Console) -> None:
    rows = found.rows()
    table = Table(title="mismatch", title_justify="left")
    table.add_column("", no_wrap=True)
    for stage in found.stages:
        table.add_column(stage.title.replace(": ", "\n"), justify="right")
    for label, key, form in STATISTICS:
        table.add_row(label, *(text_of(row.get(key), form) for row in rows))
    console.print(table)
    console.print(f"tail tokens: A < 0 and gap < {found.measures.threshold:.5g} nats", markup=False)


def _print_skipped(source: FileSource, console: Console) -> None:
    if source.skipped.rows:
        console.print(f"{source.skipped.rows} rows were left out; the first reasons:", markup=False)
        for reason in source.skipped.reasons:
            console.print(f"  {reason}", markup=False, soft_wrap=True)


def _write(path: Path, text: str, console: Console) -> None:
    """Replace a file so that a crash leaves the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    console.print(f"wrote {path}", markup=False, soft_wrap=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 0 done, 1 unhealthy (--watch with --interval 0), 2 wrong usage or input."""
    try:
        command = tyro.cli(
            _Command,
            prog="python -m triage_jax.characterize",
            description=DESCRIPTION,
            args=list(sys.argv[1:] if arguments is None else arguments),
        )
        width = None if sys.stdout.isatty() else 120  # rich takes 80 for a pipe, too few for the table
        return run(command, Console(highlight=False, width=width))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main())
