"""Verdicts repeated on kept responses, after the verifier or a gold answer has changed."""

from dataclasses import replace
from pathlib import Path

from triage_jax.config import ConfigError
from triage_jax.evaluate.directory import Directory
from triage_jax.evaluate.records import Record, read_records, rewrite
from triage_jax.evaluate.run import write_result
from triage_jax.evaluate.scores import Result
from triage_jax.evaluate.scoring import Scorer
from triage_jax.evaluate.subject import read_benchmarks
from triage_jax.evaluate.tally import Tally


def rescore(root: Path, data: Path | None = None) -> tuple[Result, int]:
    """The new result, and how many verdicts changed. `data`: where the benchmarks' files are now.

    Raises ConfigError where no responses were kept, or the files are others than those that were asked.
    """
    directory = Directory(root=root)
    config, identity = directory.saved()
    config = config if data is None else replace(config, data=str(data))
    benchmarks = read_benchmarks(config)
    for benchmark in benchmarks:
        if benchmark.sha256 != identity["data"].get(benchmark.name):
            raise ConfigError(f"{benchmark.file}: other bytes than those that {root} was asked")
    scorer, changed = Scorer(benchmarks), 0

    def again(record: Record) -> Record:
        nonlocal changed
        if record.response is None:
            raise ConfigError(f"{directory.samples}: responses were not kept (keep_responses is false)")
        verdict = scorer.score(record.problem, record.response)
        changed += (verdict.status, verdict.parsed) != (record.status, record.answer)
        return replace(record, status=verdict.status, answer=verdict.parsed)

    with directory.locked():
        try:
            rewrite(directory.samples, again)
        finally:
            scorer.close()
        tally = Tally(benchmarks, config.samples)
        tally.add_all(read_records(directory.samples))
        return write_result(directory, benchmarks, tally), changed
