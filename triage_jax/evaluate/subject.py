"""What is evaluated on what: model, tokenizer, benchmarks and prompts, read and checked up front."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from triage_jax.config import ConfigError
from triage_jax.evaluate.benchmarks import Benchmark, check_distinct, load_benchmark, read_benchmark
from triage_jax.evaluate.config import EvaluateConfig
from triage_jax.evaluate.engines import check_sampling
from triage_jax.model import ModelConfig
from triage_jax.model.load import load_config
from triage_jax.run import resolve_model
from triage_jax.tasks.jsonl import DataError
from triage_jax.tasks.prompts import encode_prompt
from triage_jax.tasks.protocol import Problem
from triage_jax.tasks.tokenizer import TextCodec, load_tokenizer


@dataclass(frozen=True, kw_only=True)
class Subject:
    """An evaluation's inputs."""

    config: EvaluateConfig
    path: Path
    model: ModelConfig
    codec: TextCodec
    benchmarks: Sequence[Benchmark]
    prompts: Mapping[str, tuple[int, ...]]
    """Token ids by problem"""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Every token that ends a response, by config.json or by the tokenizer."""
        return tuple(dict.fromkeys((*self.model.eos_token_ids, *self.codec.eos_ids)))

    @property
    def total(self) -> int:
        """Samples in all."""
        return len(self.prompts) * self.config.samples

    def check_context(self, context: int) -> None:
        """Raise ConfigError unless every prompt and its response fit into so many tokens."""
        uid, longest = max(self.prompts.items(), key=lambda item: len(item[1]))
        width = len(longest) + self.config.max_new_tokens
        if width > context:
            raise ConfigError(
                f"max_new_tokens = {self.config.max_new_tokens}: with the {len(longest)} tokens of {uid} that is "
                f"{width}, and the context holds {context}; accepted: at most {context - len(longest)}"
            )


def read_subject(config: EvaluateConfig) -> Subject:
    """Raises ConfigError, ModelError or DataError for anything that would fail later."""
    check_sampling(config)
    path = resolve_model(config.model.path)
    try:
        codec = load_tokenizer(path)
    except (ValueError, FileNotFoundError) as error:
        raise ConfigError(f"model.path: {error}") from error
    benchmarks = read_benchmarks(config)
    prompts = {
        problem.uid: _encode(config, codec, benchmark, problem)
        for benchmark in benchmarks
        for problem in benchmark.problems
    }
    subject = Subject(
        config=config,
        path=path,
        model=load_config(path, quantized=True),
        codec=codec,
        benchmarks=benchmarks,
        prompts=prompts,
    )
    subject.check_context(subject.model.max_position_embeddings)
    return subject


def read_benchmarks(config: EvaluateConfig) -> list[Benchmark]:
    """Those of --data, then own files; raises ConfigError where there are none, DataError for a bad file."""
    if config.data is None and not config.own.files:
        raise ConfigError(
            "nothing to evaluate on: give --data DIR with the benchmarks' files, or --own.files FILE.jsonl"
        )
    found: list[Benchmark] = []
    if config.data is not None:
        directory = Path(config.data).expanduser()
        found += [load_benchmark(name, directory, limit=config.limit) for name in config.benchmarks]
    for file in config.own.files:
        path = Path(file).expanduser()
        found.append(read_benchmark(path.stem, path, config.own.fields, config.own.match, limit=config.limit))
    check_distinct(found)
    if not found:
        raise ConfigError("benchmarks is empty, and so is own.files: nothing to evaluate on")
    return found


def _encode(
    config: EvaluateConfig, codec: TextCodec, benchmark: Benchmark, problem: Problem
) -> tuple[int, ...]:
    codec = codec if config.model.chat_template else replace(codec, chat_template=None)
    thinking = config.model.enable_thinking if codec.chat_template else None
    try:
        ids = encode_prompt(problem, codec, system=config.model.system_prompt, enable_thinking=thinking)
    except ValueError as error:
        raise DataError(f"{benchmark.file}: problem {problem.uid}: {error}") from error
    return tuple(ids)
