"""Configuration of a run: frozen dataclasses = YAML tree = command-line flags, one to one."""

import dataclasses
import difflib
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from triage_jax.learner import LearnerConfig, OptimizerConfig
from triage_jax.model import Numerics
from triage_jax.model.presets import PRESETS
from triage_jax.nvfp4 import QuantSpec
from triage_jax.objective import TriageConfig, objective_by_name
from triage_jax.rollout import LocalEngineConfig
from triage_jax.rollout.sglang import SglangConfig
from triage_jax.tasks.arithmetic import ArithmeticConfig
from triage_jax.tasks.jsonl import JsonlConfig

QUICKSTART = "quickstart"


class ConfigError(ValueError):
    """A configuration that cannot be used: the message names file, field and what is accepted."""


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """The policy."""

    path: str = QUICKSTART
    """A Hugging Face directory of a Qwen3 or Llama model, or `quickstart`: the small one in the package"""
    system_prompt: str | None = None
    """System text for the chat template, where the tokenizer has one"""
    chat_template: bool = True
    """Wrap prompts in the tokenizer's chat template, where it has one"""
    enable_thinking: bool = True
    """Handed to the chat template; Qwen3 models think aloud first when it is set"""


@dataclass(frozen=True, kw_only=True)
class TaskSection:
    """Where problems come from."""

    name: Literal["arithmetic", "jsonl"] = "arithmetic"
    """arithmetic: made on the fly; jsonl: files of prompt and answer rows"""
    arithmetic: ArithmeticConfig = field(default_factory=ArithmeticConfig)
    jsonl: JsonlConfig = field(default_factory=JsonlConfig)


@dataclass(frozen=True, kw_only=True)
class RolloutSection:
    """How an update's responses are sampled."""

    prompts_per_step: int = 16
    """Distinct prompts of one update"""
    samples_per_prompt: int = 16
    """Responses per prompt: the group that an advantage is relative to"""
    max_prompt_tokens: int = 64
    """Longer prompts are skipped and counted"""
    max_new_tokens: int = 32
    """Responses that reach this length without a stop token are truncated and counted"""
    temperature: float = 1.0
    train_truncated: bool = True
    """False keeps truncated responses out of the loss (they stay in their group's mean)"""
    engine: Literal["local", "sglang"] = "local"
    """local: the sampler in this process, with numerics.sampler; sglang: servers, with the numerics they were started
    with"""
    max_staleness: Literal[0, 1] = 0
    """1: the responses of a step are drawn while the learner still works on the step before, with weights one update
    old; costs a copy of the weights, which splits the gap into staleness and numerics"""
    replay_routing: bool = False
    """The learner sends every token to the experts that the sampler sent it to (mixture-of-experts models); what is
    left of the gap is logged as residual_gap"""
    local: LocalEngineConfig = field(default_factory=LocalEngineConfig)
    sglang: SglangConfig = field(default_factory=SglangConfig)

    def __post_init__(self) -> None:
        for name in ("prompts_per_step", "samples_per_prompt", "max_prompt_tokens", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"rollout.{name} is {getattr(self, name)}; accepted: at least 1")
        if self.temperature <= 0:
            raise ValueError(f"rollout.temperature is {self.temperature}; training needs a positive one")

    @property
    def rows(self) -> int:
        """Responses per update."""
        return self.prompts_per_step * self.samples_per_prompt


@dataclass(frozen=True, kw_only=True)
class NumericsSection:
    """Forward numerics of the two sides; that they differ is the subject of this package."""

    learner: Numerics = field(
        default_factory=lambda: Numerics(activation=QuantSpec(tile="1x16", scope="tensor"))
    )
    sampler: Numerics = field(
        default_factory=lambda: Numerics(activation=QuantSpec(tile="1x16", scope="row"))
    )


@dataclass(frozen=True, kw_only=True)
class EvalSection:
    """Sampling on held-out problems with the sampler's own numerics, before and after."""

    problems: int = 256
    """Held-out problems; fewer where the task has fewer. 0: no evaluation"""
    samples: int = 1
    """Responses per problem at the rollout temperature"""
    every: int = 0
    """Also evaluate after every so many steps; 0: only before the first and after the last"""


@dataclass(frozen=True, kw_only=True)
class CheckpointSection:
    """What survives a crash."""

    every: int = 50
    """Steps between checkpoints; the last step always has one. 0: only the last"""
    keep: int = 2
    """Newest checkpoints kept"""
    export: bool = True
    """At the end write the policy as a Hugging Face directory, `model/`"""


@dataclass(frozen=True, kw_only=True)
class TrackSection:
    """Where metrics go besides the JSONL file, which is always written."""

    tensorboard: bool = True
    wandb_project: str | None = None
    """Also log to Weights & Biases (needs the `wandb` extra); no account is ever asked for otherwise"""
    dumps: int = 0
    """Keep the tokens of every so many updates for `python -m triage_jax.characterize`; 0: none"""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One run."""

    out: str = "runs/quickstart"
    """Directory of everything the run writes"""
    steps: int = 100
    """Updates in all"""
    seed: int = 0
    """Decides prompts, sampling and nothing else; one device, same seed: the same bits"""
    model: ModelSection = field(default_factory=ModelSection)
    task: TaskSection = field(default_factory=TaskSection)
    rollout: RolloutSection = field(default_factory=RolloutSection)
    numerics: NumericsSection = field(default_factory=NumericsSection)
    objective: TriageConfig = field(default_factory=TriageConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    eval: EvalSection = field(default_factory=EvalSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    track: TrackSection = field(default_factory=TrackSection)

    def __post_init__(self) -> None:
        objective_by_name(self.objective.name)
        rows, micro = self.rollout.rows, self.learner.micro_batch
        if micro and rows % micro:
            raise ValueError(
                f"learner.micro_batch = {micro} does not divide the {rows} responses of an update "
                f"(rollout.prompts_per_step x rollout.samples_per_prompt)"
            )
        devices = self.learner.mesh.data * self.learner.mesh.fsdp
        if (micro or rows) % devices:
            raise ValueError(
                f"{micro or rows} rows per micro-batch do not divide over the {devices} devices of learner.mesh"
            )
        if self.steps < 0:
            raise ValueError(f"steps is {self.steps}; accepted: 0 or more")


def load_yaml(path: Path) -> dict[str, Any]:
    """A YAML mapping; raises ConfigError naming the file, and the line where YAML can tell."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: a mapping of fields is needed, found {type(data).__name__}")
    return data


def from_dict[Config](kind: type[Config], data: dict[str, Any], source: str, prefix: str = "") -> Config:
    """Build a configuration dataclass; raises ConfigError for unknown fields (with a suggestion) and wrong types."""
    hints = typing.get_type_hints(kind)
    known = [item.name for item in dataclasses.fields(typing.cast(Any, kind))]
    values: dict[str, Any] = {}
    for key, value in data.items():
        where = f"{source}: {prefix}{key}"
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {prefix}{close[0]}? " if close else ""
            raise ConfigError(f"{where}: unknown field; {hint}accepted here: {', '.join(known)}")
        expected = hints[key]
        if expected is Numerics:
            value = _from_preset(value, where)
        if dataclasses.is_dataclass(expected):
            if not isinstance(value, dict):
                raise ConfigError(f"{where}: a mapping of fields is needed, found {value!r}")
            values[key] = from_dict(typing.cast(type, expected), value, source, f"{prefix}{key}.")
        else:
            values[key] = _coerce(expected, value, where)
    try:
        return kind(**values)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{source}: {prefix.rstrip('.') or 'the whole'}: {error}") from None


def _from_preset(value: Any, where: str) -> Any:
    """A recipe's name, or a mapping with `preset` and what differs from it, as the mapping it stands for."""
    name = value.get("preset") if isinstance(value, dict) else value
    if not isinstance(name, str):
        return value
    if name not in PRESETS:
        raise ConfigError(f"{where}: {name!r} is no recipe; accepted: {', '.join(PRESETS)}")
    changes = {key: item for key, item in value.items() if key != "preset"} if isinstance(value, dict) else {}
    return laid_over(to_dict(PRESETS[name]), changes)


def laid_over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """`below` with the leaves of `above` in place of its own."""
    merged = dict(below)
    for key, value in above.items():
        old = below.get(key)
        merged[key] = laid_over(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def to_dict(config: object) -> dict[str, Any]:
    """Plain mapping of a configuration, ready for YAML or JSON."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, tuple | list) else value

    return plain(dataclasses.asdict(typing.cast(Any, config)))


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` to `{"a.b": 1}`."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _coerce(expected: Any, value: Any, where: str) -> Any:
    """`value` as `expected`, with the conversions that YAML makes necessary; raises ConfigError otherwise."""
    if isinstance(expected, typing.TypeAliasType):
        expected = expected.__value__
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if origin is typing.Union or origin is types.UnionType:
        if value is None and type(None) in arguments:
            return None
        return _coerce(next(kind for kind in arguments if kind is not type(None)), value, where)
    if origin is Literal:
        if value in arguments:
            return value
    elif origin is tuple:
        if isinstance(value, list | tuple):
            return tuple(_coerce(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    elif expected is float:
        # YAML 1.1 reads 1e-5 (no dot) as a string.
        if isinstance(value, int | float | str) and not isinstance(value, bool):
            try:
                return float(value)
            except ValueError:
                pass
    elif type(value) is expected:
        return value
    accepted = (
        ", ".join(map(repr, arguments)) if origin is Literal else getattr(expected, "__name__", expected)
    )
    raise ConfigError(f"{where}: {value!r} is not accepted; a value of: {accepted}")
