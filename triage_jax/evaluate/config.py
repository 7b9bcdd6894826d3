"""Settings of an evaluation: frozen dataclasses = YAML tree = command-line flags, one to one."""

from dataclasses import dataclass, field
from typing import Literal

from triage_jax.config import ModelSection
from triage_jax.evaluate.benchmarks import REPORTED, BenchmarkName, Matching
from triage_jax.model import Numerics
from triage_jax.rollout import LocalEngineConfig, SamplingParams
from triage_jax.rollout.sglang import SglangConfig
from triage_jax.tasks.jsonl import BOXED_INSTRUCTION, JsonlConfig


@dataclass(frozen=True, kw_only=True)
class OwnFiles:
    """Benchmarks of your own: JSON Lines, each named after its file."""

    files: tuple[str, ...] = ()
    """Evaluated after those of --data"""
    prompt_fields: tuple[str, ...] = ("prompt",)
    """Fields of a row that make up the question, joined by a space"""
    answer_field: str = "answer"
    """Field with the gold answer: a string, or a list of exactly one"""
    answer_pattern: str | None = None
    """Regular expression searched in the answer field; its group 1, or all of it, is the gold answer"""
    answer_boxed: bool = False
    """The gold answer is the last \\boxed{...} of the answer field"""
    coerce_numbers: bool = False
    """Accept JSON numbers as answers"""
    prompt: str = BOXED_INSTRUCTION
    """What is asked; {prompt} in it is replaced"""
    match: Matching = "math"
    """math: the last \\boxed{...} or <answer>, by value; exact: the whole completion; last_number: the last number in
    it"""

    @property
    def fields(self) -> JsonlConfig:
        return JsonlConfig(
            prompt_fields=self.prompt_fields,
            answer_field=self.answer_field,
            answer_pattern=self.answer_pattern,
            answer_boxed=self.answer_boxed,
            coerce_numbers=self.coerce_numbers,
            prompt=self.prompt,
            heldout_fraction=1.0,
        )

    def __post_init__(self) -> None:
        _ = self.fields  # refuses what it cannot read with


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """One evaluation. The defaults are the protocol of the reported results."""

    out: str = "runs/evaluate"
    """Directory of everything the evaluation writes; the same command again continues what lies there"""
    data: str | None = None
    """Directory with <benchmark>_test.jsonl files (docs/evaluate.md says where they come from)"""
    benchmarks: tuple[BenchmarkName, ...] = REPORTED
    """Which of them, in the order of the table"""
    own: OwnFiles = field(default_factory=OwnFiles)
    limit: int | None = None
    """Only the first so many problems of each benchmark; the table says so"""
    samples: int = 6
    """Responses per problem"""
    temperature: float = 0.7
    """0 is greedy"""
    top_p: float = 1.0
    """The local engine samples with 1 only"""
    max_new_tokens: int = 20_480
    """Tokens of a response, thinking included; what reaches it is counted as truncated"""
    seed: int = 0
    """With problem and sample number it gives each sample's seed"""
    model: ModelSection = field(default_factory=ModelSection)
    engine: Literal["local", "sglang"] = "local"
    """local: the sampler in this process, with `numerics`; sglang: servers, with the numerics they were started with"""
    numerics: Numerics = field(default_factory=lambda: Numerics(execution="bf16"))
    """Of the local engine"""
    local: LocalEngineConfig = field(
        default_factory=lambda: LocalEngineConfig(batch_size=64, prompt_bucket=128)
    )
    weights: Literal["served", "push"] = "served"
    """With sglang. served: the weights that the servers were started with, model.path gives tokenizer and config.json;
    push: those of model.path are loaded into the servers first"""
    sglang: SglangConfig = field(default_factory=lambda: SglangConfig(request_timeout=7200.0))
    keep_responses: bool = True
    """Keep the text of every response in samples.jsonl; `rescore` needs it"""

    def __post_init__(self) -> None:
        for name in ("samples", "max_new_tokens"):
            _accept(name, getattr(self, name), getattr(self, name) >= 1, "at least 1")
        _accept("limit", self.limit, self.limit is None or self.limit >= 1, "at least 1, or None for all")
        _accept("top_p", self.top_p, 0.0 < self.top_p <= 1.0, "above 0, at most 1")
        _ = self.sampling(())

    def sampling(self, stop_ids: tuple[int, ...]) -> SamplingParams:
        """What an engine is asked for."""
        return SamplingParams(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            stop_ids=stop_ids,
        )


def _accept(name: str, value: object, valid: bool, accepted: str) -> None:
    if not valid:
        raise ValueError(f"{name} is {value!r}; accepted: {accepted}")


MAY_CHANGE = ("out", "data", "own.files", "model.path", "local.", "sglang.", "keep_responses")
"""Fields that a continued evaluation may change: where things lie (their digests are compared), and how fast"""
