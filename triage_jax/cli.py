"""Command line of the trainer: tyro over the configuration dataclasses, a YAML file as defaults."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import tyro

from triage_jax.config import ConfigError, TrainConfig, from_dict, laid_over, load_yaml

DESCRIPTION = """Train a language model by reinforcement learning with NVFP4 W4A4 on both sides and TRIAGE.

Without arguments: the embedded quickstart, minutes on two CPU cores. --config FILE.yaml takes its fields as defaults
(given several times, each file overrides those before it); every flag below overrides them. --resume continues a run,
--overwrite starts it anew, --dry-run prints what would be done and stops."""


@dataclass(frozen=True, kw_only=True)
class Invocation:
    """What the command line asks for."""

    config: TrainConfig
    resume: bool
    overwrite: bool
    dry_run: bool


@dataclass(frozen=True, kw_only=True)
class _Command:
    run: Annotated[TrainConfig, tyro.conf.arg(name="")]
    config: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """YAML file with defaults for the fields below; several are laid over each other"""
    resume: bool = False
    """Continue the run at --out from its newest checkpoint"""
    overwrite: bool = False
    """Delete the run at --out and start it anew"""
    dry_run: bool = False
    """Print the resolved configuration, the batch table and the memory estimate, and stop"""


def parse(arguments: Sequence[str]) -> Invocation:
    """Parse flags over the YAML file they name (`configs/quickstart.yaml` without one).

    Raises ConfigError for a bad file; unknown flags end the process with status 2 and a suggestion, as tyro does.
    """
    default = from_dict(TrainConfig, *yaml_defaults(arguments, [packaged_config("quickstart.yaml")]))
    try:
        command = tyro.cli(
            _Command,
            prog="python -m triage_jax.train",
            description=DESCRIPTION,
            args=list(arguments),
            default=_Command(run=default),
        )
    except ValueError as error:
        raise ConfigError(f"command line: {error}") from error
    if command.resume and command.overwrite:
        raise ConfigError("--resume continues a run and --overwrite deletes it: choose one")
    return Invocation(
        config=command.run, resume=command.resume, overwrite=command.overwrite, dry_run=command.dry_run
    )


def yaml_defaults(arguments: Sequence[str], otherwise: Sequence[Path] = ()) -> tuple[dict[str, Any], str]:
    """The YAML files named by --config, or `otherwise`, one laid over the other, read before tyro builds its flags."""
    paths: list[Path] = []
    for index, argument in enumerate(arguments):
        if argument == "--config" and index + 1 < len(arguments):
            paths.append(Path(arguments[index + 1]))
        elif argument.startswith("--config="):
            paths.append(Path(argument.removeprefix("--config=")))
    paths = paths or list(otherwise)
    data: dict[str, Any] = {}
    for path in paths:
        data = laid_over(data, load_yaml(path))
    return data, " + ".join(map(str, paths))


def packaged_config(name: str) -> Path:
    """A file of `configs/`: inside the package when installed, beside it in a checkout."""
    package = Path(str(files("triage_jax")))
    installed = package / "configs" / name
    return installed if installed.exists() else package.parent / "configs" / name
