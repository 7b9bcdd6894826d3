"""Command lines of `python -m triage_jax.evaluate`: tyro over the configuration dataclasses, YAML files as defaults."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from triage_jax.cli import yaml_defaults
from triage_jax.config import ConfigError, from_dict
from triage_jax.evaluate.config import EvaluateConfig

PROGRAM = "python -m triage_jax.evaluate"
DESCRIPTION = """Evaluate a model on AIME24, AIME25, MATH500, AMC23 and GSM8K as reported: six samples per problem,
temperature 0.7, top-p 1, 20,480 tokens, thinking on.

Every finished sample is on disk at once: the same command again, after whatever ended the last one, goes on where it
was. --config FILE.yaml takes its fields as defaults (given several times, each file overrides those before it).

Also: `compare RUN_A RUN_B` tests the difference of two evaluations; `rescore RUN` repeats the verdicts of one."""


@dataclass(frozen=True, kw_only=True)
class Invocation:
    """What the command line asks for."""

    config: EvaluateConfig
    overwrite: bool
    dry_run: bool


@dataclass(frozen=True, kw_only=True)
class _Evaluate:
    run: Annotated[EvaluateConfig, tyro.conf.arg(name="")]
    config: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """YAML file with defaults for the fields below; several are laid over each other"""
    overwrite: bool = False
    """Delete the evaluation at --out and start it anew"""
    dry_run: bool = False
    """Print settings, prompts and sizes, and stop"""


@dataclass(frozen=True, kw_only=True)
class Compare:
    """Two finished evaluations."""

    first: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_A")]
    """Directory of the one that is subtracted"""
    second: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_B")]
    """Directory of the other"""
    out: Path | None = None
    """Also write the table to this file"""


@dataclass(frozen=True, kw_only=True)
class Rescore:
    """An evaluation whose responses were kept."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Its directory"""
    data: Path | None = None
    """Directory of the benchmarks' files, where it has moved"""


def parse(arguments: Sequence[str]) -> Invocation:
    """Flags over the YAML files they name; raises ConfigError for a bad file, exits with status 2 for a bad flag."""
    default = from_dict(EvaluateConfig, *yaml_defaults(arguments))
    try:
        command = tyro.cli(
            _Evaluate,
            prog=PROGRAM,
            description=DESCRIPTION,
            args=list(arguments),
            default=_Evaluate(run=default),
        )
    except ValueError as error:
        raise ConfigError(f"command line: {error}") from error
    return Invocation(config=command.run, overwrite=command.overwrite, dry_run=command.dry_run)


def parse_compare(arguments: Sequence[str]) -> Compare:
    text = "B minus A, per benchmark and on average: difference, 95 % interval over problems, paired test."
    return tyro.cli(Compare, prog=f"{PROGRAM} compare", description=text, args=list(arguments))


def parse_rescore(arguments: Sequence[str]) -> Rescore:
    text = "Repeat the verdicts of an evaluation on the responses it kept; samples nothing."
    return tyro.cli(Rescore, prog=f"{PROGRAM} rescore", description=text, args=list(arguments))
