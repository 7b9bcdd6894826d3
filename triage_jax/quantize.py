"""`python -m triage_jax.quantize SRC DST`: a Hugging Face directory in BF16 becomes an NVFP4 one that servers load."""

import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from triage_jax.model import ModelError
from triage_jax.model.load import FLOATS, WeightFiles, read_json
from triage_jax.model.save import TOKENIZER_FILES, atomic_directory
from triage_jax.model.selection import WEIGHT, Group, Selection, ignored_modules
from triage_jax.model.stream import output_plan, write_configs, write_quantized
from triage_jax.model.tensors import Stored
from triage_jax.nvfp4 import QuantSpec

DESCRIPTION = """Quantise the weights of a Hugging Face directory to NVFP4, in the layout of ModelOpt checkpoints.

Reads and writes tensor by tensor: memory holds one group of weights at a time, whatever the model's size. Dense models
and mixtures of experts with Qwen3's or Llama's tensor names. Weights that a server multiplies as one (q/k/v, gate/up)
share a global scale. Head, embedding, router and norms stay as they are. DST appears complete or not at all."""

EXIT_FAILED, EXIT_USAGE = 1, 2
COPIED = (*TOKENIZER_FILES, "tokenizer.model", "generation_config.json")
PADDING = 32
"""Servers pad weights to multiples of this; a padded one cannot be exchanged in place later"""

type Weights = Mapping[str, Stored]


@dataclass(frozen=True, kw_only=True)
class QuantizeConfig:
    """How a checkpoint is quantised."""

    select: Annotated[Selection, tyro.conf.arg(name="")] = field(default_factory=Selection)
    rule: Literal["modelopt", "te"] = "modelopt"
    """Arithmetic: modelopt (divides; what Model-Optimizer writes) or te (Transformer Engine's, as learners quantise)"""
    tile: Literal["1x16", "16x16"] = "1x16"
    """What shares a block scale; that of a 16x16 tile is repeated over its rows, which servers read as 1x16"""
    input_scale: float = 1.0
    """Static decode scale of all activations, largest |activation|/2688; servers with a scale per token ignore it"""
    max_shard_bytes: int = 5_000_000_000
    """Largest file of weights"""

    def __post_init__(self) -> None:
        if not 0 < self.input_scale < float("inf"):
            raise ValueError(f"input_scale is {self.input_scale}; accepted: a positive finite number")
        if self.max_shard_bytes < 1:
            raise ValueError(f"max_shard_bytes is {self.max_shard_bytes}; accepted: at least 1")

    @property
    def spec(self) -> QuantSpec:
        return QuantSpec(tile=self.tile, rule=self.rule)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What will be written, known before any weight is read."""

    config: Mapping[str, Any]
    weights: Weights
    groups: Sequence[Group]
    output: Weights
    ignore: Sequence[str]

    @property
    def source_bytes(self) -> int:
        return sum(stored.nbytes for stored in self.weights.values())

    @property
    def output_bytes(self) -> int:
        return sum(stored.nbytes for stored in self.output.values())

    @property
    def padded(self) -> list[str]:
        """Modules that a server pads."""
        modules = (module for group in self.groups for module in group)
        return [m for m in modules if any(size % PADDING for size in self.weights[m + WEIGHT].shape)]


def quantize_checkpoint(
    source: str | Path,
    target: str | Path,
    config: QuantizeConfig | None = None,
    *,
    overwrite: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Plan:
    """Write `target`, the NVFP4 checkpoint of the directory `source`; returns what was done.

    progress: is told the bytes of the source that are done since it was last told. Raises ModelError for a source that
    is damaged, already quantised or does not fit the selection; FileExistsError for an existing target unless
    `overwrite`; OSError for a disk without room.
    """
    config = config or QuantizeConfig()
    source, target = Path(source), Path(target)
    with opened(source, config.select) as (plan, files):
        if target.resolve() == source.resolve():
            raise ModelError(f"{target}: is the source itself; another directory is needed")
        with atomic_directory(target, overwrite=overwrite) as directory:
            _check_room(directory, plan)
            write_quantized(
                directory,
                plan.weights,
                plan.groups,
                files.raw,
                config.spec,
                input_scale=config.input_scale,
                max_shard_bytes=config.max_shard_bytes,
                progress=progress,
            )
            write_configs(directory, plan.config, plan.ignore)
            for name in COPIED:
                if (source / name).is_file():
                    shutil.copyfile(source / name, directory / name)
    return plan


@contextmanager
def opened(source: Path, selection: Selection) -> Iterator[tuple[Plan, WeightFiles]]:
    """The plan for a directory, and its open files. Raises ModelError as `quantize_checkpoint` does."""
    if not source.is_dir():
        raise ModelError(f"{source}: not a directory; a Hugging Face model directory is required")
    config = read_json(source / "config.json")
    if config.get("quantization_config") is not None or (source / "hf_quant_config.json").exists():
        raise ModelError(
            f"{source}: is quantised already; a directory of BF16, F16 or F32 weights is required"
        )
    with ExitStack() as stack:
        files = WeightFiles(source, stack)
        weights = {name: files.stored(name) for name in files.files}
        shapes = {name: stored.shape for name, stored in weights.items()}
        groups = selection.select(shapes)
        for module in (module for group in groups for module in group):
            if (stored := weights[module + WEIGHT]).dtype not in FLOATS:
                raise ModelError(
                    f"{files.files[module + WEIGHT]}: {module + WEIGHT} has dtype {stored.dtype}, "
                    f"accepted are {', '.join(FLOATS)}"
                )
        yield (
            Plan(
                config=config,
                weights=weights,
                groups=groups,
                output=output_plan(weights, groups),
                ignore=ignored_modules(shapes, groups),
            ),
            files,
        )


def _check_room(directory: Path, plan: Plan) -> None:
    free = shutil.disk_usage(directory).free
    if plan.output_bytes > free:
        raise OSError(
            f"{directory.parent}: {decimal(plan.output_bytes)} are needed, {decimal(free)} are free"
        )


@dataclass(frozen=True, kw_only=True)
class _Command:
    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SRC")]
    """Hugging Face directory with config.json and safetensors"""
    target: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DST")]
    """Directory to write"""
    config: Annotated[QuantizeConfig, tyro.conf.arg(name="")] = field(default_factory=QuantizeConfig)
    overwrite: bool = False
    """Replace a model directory at DST, once the new one is complete"""
    dry_run: bool = False
    """Print what would be quantised, and stop"""


def run(command: _Command, console: Console) -> None:
    """Carry out a command line."""
    with opened(command.source, command.config.select) as (plan, _):
        _print_plan(plan, command.config, console)
    if command.dry_run:
        for module in plan.ignore:
            console.print(f"  stays: {module}", markup=False)
        return
    columns = (*Progress.get_default_columns()[:1], BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("quantising", total=plan.source_bytes)
        quantize_checkpoint(
            command.source,
            command.target,
            command.config,
            overwrite=command.overwrite,
            progress=lambda done: bar.advance(task, done),
        )
    console.print(f"wrote {command.target}", markup=False, soft_wrap=True)


def _print_plan(plan: Plan, config: QuantizeConfig, console: Console) -> None:
    modules = [module for group in plan.groups for module in group]
    layers = {module.split(".")[2] for module in modules}
    console.print(
        f"NVFP4 ({config.rule}, {config.tile}): {len(modules)} weights of {len(layers)} layers in "
        f"{len(plan.groups)} groups; {len(plan.weights) - len(modules)} tensors stay as they are; "
        f"{decimal(plan.source_bytes)} -> {decimal(plan.output_bytes)}",
        markup=False,
        soft_wrap=True,
    )
    if padded := plan.padded:
        console.print(
            f"note: {len(padded)} weights, first {padded[0]}, have sizes that are no multiple of {PADDING}: servers "
            "pad them, and cannot take new weights in their place",
            markup=False,
            soft_wrap=True,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 0 done, 1 failed, 2 wrong usage."""
    try:
        command = tyro.cli(
            _Command,
            prog="python -m triage_jax.quantize",
            description=DESCRIPTION,
            args=list(sys.argv[1:] if arguments is None else arguments),
        )
        run(command, Console(highlight=False))
    except (ModelError, FileExistsError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
