"""What a person sees of a run: the plan before it, a line per step, a figure and a table after it."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from rich import progress as rich_progress
from rich.console import Console
from rich.table import Table

from triage_jax.config import TrainConfig, to_dict
from triage_jax.estimate import memory_estimate
from triage_jax.learner.update import OVERFLOW
from triage_jax.metrics import Row, read_metrics
from triage_jax.model import ModelConfig
from triage_jax.model.load import load_config
from triage_jax.objective import TriageConfig
from triage_jax.run import Paths, resolve_model

# Okabe and Ito's palette: told apart with every common kind of colour blindness.
BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#777777"


class Progress:
    """One line per step; on a terminal also a bar of samples and tokens per second while a rollout runs."""

    def __init__(self, steps: int, rows: int | None = None, console: Console | None = None) -> None:
        """`rows`: samples of one rollout, the length of the bar."""
        self._steps, self._rows = steps, rows
        self._console = console or Console(highlight=False)
        self._bar: rich_progress.Progress | None = None
        self._printed = 0

    def note(self, text: str) -> None:
        self._console.print(text, markup=False)

    def sampling(self, samples: int, tokens: int) -> None:
        if not self._console.is_terminal:
            return
        if self._bar is None:
            self._bar = sampling_bar(self._console)
            self._bar.add_task("sampling", total=self._rows, rate=0.0)
            self._bar.start()
        (task,) = self._bar.tasks
        rate = tokens / task.elapsed if task.elapsed else 0.0
        self._bar.update(task.id, completed=samples, rate=rate)

    def step(self, step: int, row: Mapping[str, Any]) -> None:
        """Print the metrics of one step."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        if self._printed % 20 == 0:
            self._console.print(header_line(self._steps), markup=False, soft_wrap=True, style="bold")
        self._printed += 1
        self._console.print(step_line(step, self._steps, row), markup=False, soft_wrap=True)

    def held_out(self, step: int, right: int, samples: int) -> None:
        self.note(f"held out, step {step}: {_share(right, samples)}")


def sampling_bar(console: Console, *more: str, remaining: bool = False) -> rich_progress.Progress:
    """Samples and tokens per second (field `rate`), `more` columns of text, elapsed or remaining time."""
    time = rich_progress.TimeRemainingColumn() if remaining else rich_progress.TimeElapsedColumn()
    counted = "{task.completed}/{task.total} samples, {task.fields[rate]:,.0f} tokens/s"
    return rich_progress.Progress(
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        *(rich_progress.TextColumn(text) for text in (counted, *more)),
        time,
        console=console,
        transient=True,
    )


COLUMNS = (
    ("reward", "reward/mean/response", ".3f", 6),
    ("|gap|", "gap/abs_mean/token", ".4f", 6),
    ("max", "gap/max_abs", ".2f", 5),
    ("rho", "rho_asym/raw", ".2f", 5),
    ("gated", "gate/damped_fraction/token", ".1%", 6),
    ("repair", "repair/active_fraction/segment", ".0%", 6),
    ("grad", "optimizer/grad_norm", ".2f", 6),
    ("sample", "time/rollout", ".2f", 6),
    ("learn", "time/learner", ".2f", 6),
    ("refit", "time/refit", ".2f", 5),
    ("tok/s", "throughput/tokens_per_second", ".0f", 6),
)
"""Columns of the progress lines: title, metric, format, width. Times are seconds"""


def header_line(steps: int) -> str:
    """Titles above the progress lines."""
    return " ".join(["step".rjust(_place_width(steps)), *(title.rjust(w) for title, _, _, w in COLUMNS)])


def step_line(step: int, steps: int, row: Mapping[str, Any]) -> str:
    """The progress line of one step."""
    place = f"{step}/{steps}".rjust(_place_width(steps))
    skipped = "" if row["optimizer/applied"] else f"  SKIPPED: {why_skipped(row)}"
    return (
        " ".join([place, *(_number(_value(row, key), form).rjust(w) for _, key, form, w in COLUMNS)])
        + skipped
    )


def why_skipped(row: Mapping[str, Any]) -> str:
    """The reason for which an update was left out, from its metrics."""
    if math.isfinite(row["loss"]) and math.isfinite(row["optimizer/grad_norm"]):
        return (
            f"experts had no room for {row[OVERFLOW]:.2%} of their tokens (learner.max_overflow, "
            "numerics.learner.expert_capacity)"
        )
    return "loss or gradient not finite"


def _place_width(steps: int) -> int:
    return max(4, 2 * len(str(steps)) + 1)


def print_plan(config: TrainConfig, model: ModelConfig | None = None, console: Console | None = None) -> None:
    """What will run: numerics, batch arithmetic, memory; with the whole configuration when there is no model yet."""
    console = console or Console(highlight=False)
    dry = model is None
    if dry:
        console.print(yaml.safe_dump(to_dict(config), sort_keys=False), markup=False, soft_wrap=True)
    model = model or load_config(resolve_model(config.model.path))
    table = Table(title="plan", show_header=False, title_justify="left")
    for name, value in _plan_rows(config, model):
        table.add_row(name, value)
    console.print(table)
    memory = Table("memory, per device", "MiB", title="estimate", title_justify="left")
    for name, size in memory_estimate(config, model).items():
        memory.add_row(name, f"{size / 2**20:,.1f}")
    if dry:
        console.print(memory)


def print_summary(paths: Paths, console: Console | None = None) -> None:
    """Before and after, with counts, and where everything lies."""
    console = console or Console(highlight=False)
    rows = read_metrics(paths.metrics)
    evaluations = [row for row in rows if "eval/right" in row]
    steps = [row for row in rows if "reward/mean/response" in row]
    table = Table("", "first", "last", title="summary", title_justify="left")
    if evaluations:
        first, last = (
            _share(row["eval/right"], row["eval/samples"]) for row in (evaluations[0], evaluations[-1])
        )
        table.add_row("held-out reward", first, last)
    window = max(1, len(steps) // 10)
    for label, key, form in (
        ("training reward", "reward/mean/response", ".3f"),
        ("mean |gap|, nats", "gap/abs_mean/token", ".4f"),
        ("rho_asym, raw", "rho_asym/raw", ".2f"),
        ("gradient norm", "optimizer/grad_norm", ".2f"),
        ("response length", "response/length_mean", ".1f"),
    ):
        if steps:
            ends = (_mean(steps[:window], key), _mean(steps[-window:], key))
            table.add_row(label, *(_number(value, form) for value in ends))
    console.print(table)
    if steps:
        seconds = sum(float(row["time/step"] or 0) for row in steps)
        console.print(f"{len(steps)} steps in {seconds:.0f} s; means over {window} steps at either end")
    for name, path in (("metrics", paths.metrics), ("figure", paths.report), ("model", paths.model)):
        if path.exists():
            console.print(f"{name:8}{path}", markup=False, soft_wrap=True)


def write_report(paths: Paths) -> None:
    """`report.png`: reward, gap, rho_asym, and what Gate and Repair did, over the steps."""
    from matplotlib.figure import Figure  # without pyplot, whose backend is the caller's (a notebook's)

    rows = read_metrics(paths.metrics)
    steps = [row for row in rows if "reward/mean/response" in row]
    evaluations = [row for row in rows if row.get("eval/reward/response") is not None]
    figure = Figure(figsize=(11, 7), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True)
    reward, gap, asymmetry, action = axes.flat

    _line(reward, steps, "reward/mean/response", BLUE, "training, mean of the step", alpha=0.35)
    _line(reward, steps, "reward/mean/response", BLUE, "training, moving mean", smooth=True)
    points = [(row["step"], row["eval/reward/response"]) for row in evaluations]
    reward.plot(*zip(*points, strict=True), "o", color=RED, label="held out") if points else None
    reward.set(title="Reward", ylabel="mean reward", ylim=(-0.02, 1.02))

    _line(gap, steps, "gap/abs_mean/token", BLUE, "mean |gap|")
    _line(gap, steps, "gap/max_abs", ORANGE, "max |gap|")
    gap.set(title="Gap: learner minus sampler log-probability", ylabel="nats", yscale="log")

    _line(asymmetry, steps, "rho_asym/raw", BLUE, "raw", smooth=True)
    _line(asymmetry, steps, "rho_asym/length_normalised", ORANGE, "length-normalised", smooth=True)
    _line(asymmetry, steps, "rho_asym/effective", GREEN, "effective (TIS)", smooth=True)
    asymmetry.axhline(1.0, color=GREY, linewidth=0.8)
    asymmetry.set(title="Amplifying mass, A < 0 over A > 0 (moving mean)", ylabel="rho_asym", xlabel="step")

    _line(action, steps, "gate/damped_fraction/token", BLUE, "tokens damped by the Gate")
    _line(action, steps, "repair/active_fraction/segment", ORANGE, "segments under Repair")
    _line(action, steps, "tis/clip_fraction/token", GREEN, "tokens clipped by TIS")
    action.set(title="Gate, Repair, TIS", ylabel="share", xlabel="step")
    action.set_ylim(0.0, max(0.01, action.get_ylim()[1]))
    for axis in axes.flat:
        axis.grid(alpha=0.25)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8)
    figure.suptitle(paths.root.name)
    figure.savefig(paths.report, dpi=130)


def _line(axis, rows: Sequence[Row], key: str, color: str, label: str, *, smooth=False, alpha=1.0) -> None:
    points = [(row["step"], float(value)) for row in rows if (value := _value(row, key)) is not None]
    if not points:
        return
    x, y = zip(*points, strict=True)
    if smooth:
        window = max(1, len(y) // 20)
        y = [sum(y[max(0, i - window) : i + 1]) / len(y[max(0, i - window) : i + 1]) for i in range(len(y))]
    axis.plot(x, y, color=color, label=label, alpha=alpha, linewidth=1.4)


def _plan_rows(config: TrainConfig, model: ModelConfig) -> list[tuple[str, str]]:
    rollout, rows = config.rollout, config.rollout.rows
    micro = config.learner.micro_batch or rows
    mesh = config.learner.mesh
    return [
        (
            "model",
            f"{config.model.path} ({model.architecture}, {model.num_layers} layers, width {model.hidden_size})",
        ),
        ("learner", config.numerics.learner.describe()),
        ("sampler", _sampler(config)),
        ("objective", _objective(config.objective)),
        (
            "batch",
            f"{rollout.prompts_per_step} prompts x {rollout.samples_per_prompt} samples = {rows} responses a step, "
            f"{rows // micro} micro-batches of {micro}, mesh data {mesh.data} x fsdp {mesh.fsdp}",
        ),
        ("tokens", f"at most {rollout.max_prompt_tokens} prompt + {rollout.max_new_tokens} response"),
        ("steps", f"{config.steps}, learning rate {config.optimizer.learning_rate:g}"),
        ("out", config.out),
    ]


def _objective(objective: TriageConfig) -> str:
    """Its name; of TRIAGE's own family also what takes part."""
    if not objective.name.startswith("triage"):
        return objective.name
    missing = objective.name.removeprefix("triage_no_")
    tis = f"TIS [{objective.tis.low:g}, {objective.tis.high:g}]"
    gate = "calibrated Gate" if objective.name == "triage_calibrated" else f"Gate {objective.gate.scope}"
    parts = {"gate": gate, "repair": f"Repair {objective.repair.scope}", "tis": tis}
    named = [
        text if getattr(objective, part).enabled and part != missing else f"no {text.split()[0]}"
        for part, text in parts.items()
    ]
    return f"{objective.name}: {', '.join(named)}, {objective.reduction} reduction"


def _sampler(config: TrainConfig) -> str:
    if config.rollout.engine == "local":
        text = config.numerics.sampler.describe()
    else:
        text = f"SGLang at {', '.join(config.rollout.sglang.urls)}, with the numerics it was started with"
    return text + (", one step ahead" if config.rollout.max_staleness else "")


def _share(right: Any, samples: Any) -> str:
    return f"{right}/{samples} = {right / samples:.3f}" if samples else "no held-out problems"


def _mean(rows: Sequence[Row], key: str) -> float | None:
    values = [float(value) for row in rows if (value := _value(row, key)) is not None]
    return sum(values) / len(values) if values else None


def _value(row: Mapping[str, Any], key: str) -> Any:
    """A metric of a row; where routing was replayed, the residual gap stands for the gap."""
    return row.get(key, row.get(f"residual_{key}"))


def _number(value: Any, form: str) -> str:
    return "-" if value is None or not math.isfinite(value) else format(float(value), form)
