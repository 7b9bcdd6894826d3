"""`python -m triage_jax.sources MODEL`: where the gap between a learner's and a sampler's numerics comes from.

Responses are drawn with the sampler's recipe. Then the learner scores them: with the sampler's own recipe, with each
switch in which the two recipes differ flipped alone, and with its whole recipe. A switch's share is the difference
that it alone makes, in one forward pass of a fixed padded shape; the shape itself is a source, measured by padding.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from textwrap import wrap

import jax
import jax.numpy as jnp
import numpy as np
import yaml
from rich.console import Console
from rich.table import Table

from triage_jax.config import ConfigError, NumericsSection, from_dict
from triage_jax.learner import RolloutBatch, pack_batch
from triage_jax.model import (
    ModelConfig,
    ModelError,
    Numerics,
    Params,
    head_of,
    load_model,
    token_logprobs,
)
from triage_jax.model.forward import forward_routed
from triage_jax.model.moe import NO_ROOM
from triage_jax.model.presets import PRESETS
from triage_jax.nvfp4.experts import check_count
from triage_jax.report import BLUE, GREY
from triage_jax.rollout import LocalEngine, LocalEngineConfig, Request, SamplingParams
from triage_jax.run import resolve_model
from triage_jax.tasks.arithmetic import ArithmeticConfig, ArithmeticTask
from triage_jax.tasks.prompts import encode_prompt
from triage_jax.tasks.tokenizer import load_tokenizer

SWITCHES: dict[str, tuple[str, ...]] = {
    "execution": ("execution",),
    "quantised layers": ("layers", "high_precision_layers"),
    "activations quantised": ("quantize_activations",),
    "weight tile": ("weight.tile",),
    "weight global scale": ("weight.scope", "weight.static_amax", "weight.shards"),
    "weight arithmetic": ("weight.rule", "weight.chain", "weight.scale_floor"),
    "weight 4-over-6": ("weight.four_over_six", "weight.bound"),
    "weight source dtype": ("weight_source",),
    "fused shards": ("fused_shards",),
    "activation tile": ("activation.tile",),
    "activation global scale": ("activation.scope", "activation.static_amax", "activation.shards"),
    "activation arithmetic": ("activation.rule", "activation.chain", "activation.scale_floor"),
    "activation 4-over-6": ("activation.four_over_six", "activation.bound"),
    "code of a NaN": ("weight.nan", "activation.nan"),
    "SwiGLU output rounding": ("hidden_rounding",),
    "router precision": ("router",),
    "expert weighting": ("expert_weighting",),
    "experts' weight scope": ("expert_scopes.weight",),
    "experts' activation scope": ("expert_scopes.activation", "expert_scopes.static_amax"),
    "experts' capacity": ("expert_capacity",),
    "split-K accumulation": ("split_k",),
    "product of global scales": ("global_product",),
    "KV cache": ("kv_cache",),
}
"""Sources of the gap, and the fields of `Numerics` that only make sense together"""
OF_EXPERTS = (
    "router precision",
    "expert weighting",
    "experts' weight scope",
    "experts' activation scope",
    "experts' capacity",
)
"""Sources that a dense model does not have"""
PADDING = 7
"""More padding columns: models_data.md §5 saw SmolLM2 move by 0.37 nats from as many"""


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one source does to the log-probabilities of the same tokens, nats."""

    source: str
    learner: str
    sampler: str
    mean_abs: float
    k3: float
    """mean of exp(d) - 1 - d"""
    q05: float
    """5 % quantile of d = log-probability with the source minus without"""
    within: float
    """Share of tokens with |d| < 0.05"""
    overflow: float | None = None
    """Share of pairs of token and expert without room, of all layers and valid tokens; None where there is no limit"""


def differences(
    learner: Numerics, sampler: Numerics, *, experts: bool = True
) -> Iterator[tuple[str, str, str, Numerics | None]]:
    """Source, the learner's and the sampler's setting, and the sampler's recipe with that switch of the learner's.

    None for a switch that the sampler's other settings do not allow alone. `experts`: of a mixture, too.
    """
    for source, fields in SWITCHES.items():
        if source in OF_EXPERTS and not experts:
            continue
        ours, theirs = (tuple(_get(side, name) for name in fields) for side in (learner, sampler))
        if ours == theirs:
            continue
        try:
            yield source, _words(ours), _words(theirs), _with(sampler, dict(zip(fields, ours, strict=True)))
        except ValueError:
            yield source, _words(ours), _words(theirs), None


def _get(numerics: Numerics, name: str) -> object:
    outer, _, inner = name.partition(".")
    value = getattr(numerics, outer)
    return getattr(value, inner) if inner else value


def _with(numerics: Numerics, changes: dict[str, object]) -> Numerics:
    specs: dict[str, dict[str, object]] = {}
    plain: dict[str, object] = {}
    for name, value in changes.items():
        outer, _, inner = name.partition(".")
        if inner:
            specs.setdefault(outer, {})[inner] = value
        else:
            plain[outer] = value
    nested = {outer: replace(getattr(numerics, outer), **inner) for outer, inner in specs.items()}
    return replace(numerics, **nested, **plain)


def _words(values: tuple[object, ...]) -> str:
    return " ".join(str(value) for value in values if value is not None)


def share(
    source: str,
    learner: str,
    sampler: str,
    with_source: np.ndarray,
    without: np.ndarray,
    overflow: float | None = None,
) -> Share:
    """Statistics of the difference of two vectors of log-probabilities."""
    d = with_source.astype(np.float64) - without.astype(np.float64)
    return Share(
        source=source,
        learner=learner,
        sampler=sampler,
        mean_abs=float(np.abs(d).mean()),
        k3=float(np.mean(np.expm1(d) - d)),
        q05=float(np.quantile(d, 0.05)),
        within=float(np.mean(np.abs(d) < 0.05)),
        overflow=overflow,
    )


def measure(
    params: Params, config: ModelConfig, batch: RolloutBatch, learner: Numerics, sampler: Numerics
) -> list[Share]:
    """Every source's share, then all of them together, the decode path, and the whole gap."""
    mask = np.asarray(batch.mask)
    score = partial(_score, params, batch, config=config)

    def logp(numerics: Numerics, padding: int = 0) -> tuple[np.ndarray, float | None]:
        # The gradient's settings change no log-probability, and would compile it anew.
        forward_only = replace(numerics, backward="bf16", stochastic_rounding=True, hadamard=True)
        scores, overflow = score(numerics=forward_only, padding=padding)
        return np.asarray(scores)[mask], None if overflow is None else float(overflow)

    (base, lost), (whole, lost_by_learner) = logp(sampler), logp(learner)
    drawn = np.asarray(batch.sampler_logp)[mask]
    rows = []
    for source, ours, theirs, switched in differences(learner, sampler, experts=bool(config.num_experts)):
        if switched is not None:
            scores, overflow = logp(switched)
            rows.append(share(source, ours, theirs, scores, base, overflow))
    rows.sort(key=lambda row: -row.mean_abs)
    padded, lost_by_padded = logp(learner, PADDING)
    return [
        *rows,
        share(f"{PADDING} more padding columns, learner's recipe", "", "", padded, whole, lost_by_padded),
        share("whole rows instead of cached decode", "", "", base, drawn, lost),
        share("all switches together", "", "", whole, base, lost_by_learner),
        share("the gap: learner minus sampler", "", "", whole, drawn, lost_by_learner),
    ]


@partial(jax.jit, static_argnames=("config", "numerics", "padding"))
def _score(
    params: Params, batch: RolloutBatch, *, config: ModelConfig, numerics: Numerics, padding: int
) -> tuple[jax.Array, jax.Array | None]:
    """Log-probabilities, and the share of pairs of token and expert without room where there is a limit."""
    left = ((0, 0), (padding, 0))
    tokens, valid = jnp.pad(batch.tokens, left), jnp.pad(batch.valid, left)
    hidden, routes = forward_routed(params, tokens, valid, config, numerics)
    width = batch.mask.shape[1]
    logp = token_logprobs(hidden[:, -width - 1 : -1], head_of(params), tokens[:, -width:]).logp
    if routes is None or numerics.expert_capacity is None:
        return logp, None
    return logp, jnp.mean(routes == NO_ROOM, where=valid[None, :, :, None])


def draw(path: Path, params: Params, config: ModelConfig, sampler: Numerics, options: argparse.Namespace):
    """A batch of responses to sums, drawn with the sampler's recipe at temperature 1.

    Without its limit of the experts' rows, which the local engine does not have: it counts where rows are scored.
    """
    codec = load_tokenizer(path)
    task = ArithmeticTask(ArithmeticConfig(digits=options.digits, terms=options.terms))
    prompts = [tuple(encode_prompt(task.problem(index), codec)) for index in range(options.prompts)]
    requests = [
        Request(uid=str(index), prompt_ids=ids, seed=options.seed * 2**20 + index)
        for index, ids in enumerate(prompts)
    ]
    unlimited = replace(sampler, expert_capacity=None)
    engine = LocalEngine(config, unlimited, LocalEngineConfig(batch_size=options.prompts))
    engine.update_weights(params, 0)
    samples = engine.generate(requests, SamplingParams(max_new_tokens=options.new_tokens))
    engine.close()
    bucket = LocalEngineConfig().prompt_bucket
    width = -(-max(map(len, prompts)) // bucket) * bucket
    ones = np.ones(len(samples))
    return pack_batch(
        prompts, samples, ones, ones.astype(bool), prompt_width=width, response_width=options.new_tokens
    )


def show(rows: Sequence[Share], console: Console | None = None) -> None:
    """The table; the last four rows are no switches. A column for experts without room where any has a limit."""
    limited = any(row.overflow is not None for row in rows)
    table = Table(title="difference d of log-probabilities, nats per token", title_justify="left")
    for heading in ("source", "learner", "sampler"):
        table.add_column(heading, no_wrap=True)
    for heading in ("mean |d|", "k3", "q05", "|d|<0.05", *(["no room"] if limited else [])):
        table.add_column(heading, no_wrap=True, justify="right")
    for index, row in enumerate(rows):
        if index == len(rows) - 4:
            table.add_section()
        numbers = [f"{row.mean_abs:.4f}", f"{row.k3:.5f}", f"{row.q05:+.4f}", f"{row.within:.1%}"]
        if limited:
            numbers.append("" if row.overflow is None else f"{row.overflow:.2%}")
        table.add_row(row.source, row.learner, row.sampler, *numbers)
    (console or Console(highlight=False)).print(table)


def overflow_warning(rows: Sequence[Share]) -> str | None:
    """What to say where experts lacked room: that difference is not one of rounding."""
    lost = max((row.overflow for row in rows if row.overflow is not None), default=0.0)
    if not lost:
        return None
    return (
        f"warning: experts had no room for up to {lost:.2%} of their tokens (expert_capacity), whose outputs are "
        "missing there: a row that has a share in the column 'no room' measures that loss too; raise expert_capacity"
    )


def draw_figure(rows: Sequence[Share], learner: str, sampler: str, path: Path) -> None:
    """Bars of mean |d|, the switches above the rest, under the two recipes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.5 + 0.34 * len(rows)), layout="constrained")
    axis = figure.subplots()
    colours = [BLUE] * (len(rows) - 4) + [GREY] * 4
    bars = axis.barh([row.source for row in rows], [row.mean_abs for row in rows], color=colours)
    axis.bar_label(bars, fmt="%.4f", padding=3, fontsize=8)
    axis.invert_yaxis()
    axis.margins(x=0.12)
    axis.set(xlabel="mean |difference of log-probability|, nats per token")
    title = [line for side in (f"learner: {learner}", f"sampler: {sampler}") for line in wrap(side, 120)]
    figure.suptitle("\n".join(title), fontsize=9, x=0.01, ha="left")
    figure.savefig(path, dpi=130)


def recipe_of(side: str, text: str) -> Numerics:
    """A recipe by its name or as YAML; raises ConfigError naming the side for anything else."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--{side}: not valid YAML: {error}") from None
    return getattr(from_dict(NumericsSection, {side: value}, "command line", "--"), side)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 0 measured, 2 wrong usage."""
    parser = argparse.ArgumentParser(
        prog="python -m triage_jax.sources",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model", nargs="?", default="quickstart", help="Hugging Face directory, or quickstart"
    )
    for side, default in (("learner", "te_default"), ("sampler", "sglang_per_token")):
        parser.add_argument(
            f"--{side}",
            default=default,
            help=f"recipe: {', '.join(PRESETS)}; or YAML as in a configuration, such as "
            f"'{{preset: {default}, split_k: 4}}' (default: {default})",
        )
    parser.add_argument("--prompts", type=int, default=64, help="sums to answer (default: 64)")
    parser.add_argument("--digits", type=int, default=1, help="of each number (default: 1)")
    parser.add_argument("--terms", type=int, default=5, help="of each sum (default: 5)")
    parser.add_argument("--new-tokens", type=int, default=32, help="longest response (default: 32)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--figure", type=Path, help="also draw a bar chart here (PNG)")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    options = parser.parse_args(arguments)
    try:
        learner, sampler = (recipe_of(side, getattr(options, side)) for side in ("learner", "sampler"))
        path = resolve_model(options.model)
        params, config = load_model(path)
        for numerics in (learner, sampler):
            check_count(numerics.expert_scopes, config.num_experts)
        batch = draw(path, params, config, sampler, options)
    except (ConfigError, ModelError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    rows = measure(params, config, batch, learner, sampler)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    console.print(f"learner  {learner.describe()}\nsampler  {sampler.describe()}", soft_wrap=True)
    console.print(
        f"{int(np.asarray(batch.mask).sum())} tokens of {options.prompts} responses, {options.model}"
    )
    show(rows, console)
    if warning := overflow_warning(rows):
        console.print(warning, style="yellow", soft_wrap=True)
    for source, ours, theirs, switched in differences(learner, sampler, experts=bool(config.num_experts)):
        if switched is None:
            console.print(f"not alone: {source} ({ours} against {theirs})")
    if options.figure:
        draw_figure(rows, options.learner, options.sampler, options.figure)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
