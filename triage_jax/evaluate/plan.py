"""What an evaluation will do, before it does it."""

import yaml
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from triage_jax.config import to_dict
from triage_jax.estimate import parameter_count
from triage_jax.evaluate.engines import is_quantised
from triage_jax.evaluate.subject import Subject


def print_plan(subject: Subject, console: Console, sampler: str | None = None) -> None:
    """Model, sampler, protocol, benchmarks; `sampler` is what the opened engine says of itself."""
    config, model = subject.config, subject.model
    table = Table(title="plan", show_header=False, title_justify="left")
    stored = ", weights stored in NVFP4" if is_quantised(subject.path) else ""
    table.add_row(
        "model", f"{subject.path} ({model.architecture}, {parameter_count(model):,} parameters{stored})"
    )
    table.add_row("sampler", sampler or _sampler(subject))
    template = subject.codec.chat_template if config.model.chat_template else None
    thinking = "on" if config.model.enable_thinking else "off"
    table.add_row(
        "prompt",
        f"chat template, told that thinking is {thinking}" if template else "plain text, no chat template",
    )
    table.add_row(
        "protocol",
        f"{config.samples} samples per problem, temperature {config.temperature:g}, top-p {config.top_p:g}, "
        f"at most {config.max_new_tokens:,} tokens, seed {config.seed}",
    )
    table.add_row("samples", f"{subject.total:,}, at most {subject.total * config.max_new_tokens:,} tokens")
    if config.engine == "local":
        table.add_row("KV cache", f"{decimal(cache_bytes(subject))} for {config.local.batch_size} rows")
    table.add_row("out", config.out)
    console.print(table)
    console.print(_benchmarks(subject))


def print_settings(subject: Subject, console: Console) -> None:
    """The whole configuration, as YAML that --config takes."""
    text = yaml.safe_dump(to_dict(subject.config), sort_keys=False)
    console.print(text, markup=False, soft_wrap=True)


def cache_bytes(subject: Subject) -> int:
    """Bytes of the local engine's KV cache at its fullest, in BF16."""
    config, model = subject.config, subject.model
    bucket = config.local.prompt_bucket
    longest = max(map(len, subject.prompts.values()))
    width = -(-longest // bucket) * bucket + config.max_new_tokens
    return 2 * 2 * model.num_layers * config.local.batch_size * width * model.num_kv_heads * model.head_dim


def _sampler(subject: Subject) -> str:
    config = subject.config
    if config.engine == "local":
        return f"local JAX sampler, {config.numerics.describe()}"
    return f"SGLang at {', '.join(config.sglang.urls)}, weights {config.weights}"


def _benchmarks(subject: Subject) -> Table:
    table = Table("benchmark", "problems", "of", "longest prompt", "file", title_justify="left")
    for benchmark in subject.benchmarks:
        longest = max(len(subject.prompts[problem.uid]) for problem in benchmark.problems)
        odd = " (not the documented bytes)" if benchmark.known is False else ""
        table.add_row(
            benchmark.name,
            str(len(benchmark.problems)),
            str(benchmark.rows),
            f"{longest} tokens",
            f"{benchmark.file.name}, SHA-256 {benchmark.sha256[:12]}{odd}",
        )
    return table
