"""An evaluation from its settings to its table."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from triage_jax.evaluate.benchmarks import Benchmark
from triage_jax.evaluate.directory import Directory
from triage_jax.evaluate.draw import draw_at_once, draw_in_batches
from triage_jax.evaluate.engines import open_local, open_servers
from triage_jax.evaluate.identity import identity
from triage_jax.evaluate.plan import print_plan
from triage_jax.evaluate.progress import SampleProgress
from triage_jax.evaluate.records import Record, RecordFile
from triage_jax.evaluate.scores import Result, make_result, markdown, problem_rows, to_json
from triage_jax.evaluate.scoring import Scorer
from triage_jax.evaluate.served import ServedEngine
from triage_jax.evaluate.subject import Subject
from triage_jax.evaluate.tally import Tally
from triage_jax.metrics import write_atomically
from triage_jax.rollout import Engine, EngineError, Request, Sample
from triage_jax.run import Stop, StopSignal
from triage_jax.tasks.prompts import scored_text
from triage_jax.tasks.protocol import stable_hash


def evaluate(subject: Subject, console: Console, stop: StopSignal, *, overwrite: bool = False) -> Result:
    """Draw what is missing, score it, write everything; returns the result.

    Raises Stop after a signal and EngineError where the engine gave up, in both cases with every finished sample on
    disk; ConfigError where another evaluation lies in the directory.
    """
    config, directory = subject.config, Directory(root=Path(subject.config.out))
    with ExitStack() as stack:
        stack.enter_context(directory.locked())
        if overwrite:
            directory.clear()
        engine = _open_servers(subject, directory, stack) if config.engine == "sglang" else None
        served = engine.served if isinstance(engine, ServedEngine) else None
        found = identity(subject.path, subject.codec, subject.benchmarks, served=served)
        found["engine"] = None if engine is None else engine.capabilities.description
        directory.claim(config, found)
        tally = Tally(subject.benchmarks, config.samples)
        records = RecordFile(directory.samples, tally.add)
        stack.callback(records.close)
        _say_what_is_there(tally, records, subject.total, console)
        if tally.finished < subject.total:
            engine = engine or open_local(config, subject.model, subject.path, stack)
            print_plan(subject, console, engine.capabilities.description)
            try:
                _draw(subject, engine, tally, records, console, stop)
            except (Stop, EngineError):
                write_result(directory, subject.benchmarks, tally)  # of what there is, and it says so
                raise
        return write_result(directory, subject.benchmarks, tally)


def write_result(directory: Directory, benchmarks: Sequence[Benchmark], tally: Tally) -> Result:
    """Per-problem rows, scores and table, each replaced whole."""
    result = make_result(benchmarks, tally)
    write_atomically(directory.problems, "".join(problem_rows(benchmarks, tally)))
    write_atomically(directory.result, to_json(result))
    write_atomically(directory.table, markdown(result))
    return result


def _draw(
    subject: Subject, engine: Engine, tally: Tally, records: RecordFile, console: Console, stop: StopSignal
) -> None:
    config = subject.config
    sampling = config.sampling(subject.stop_ids)
    scorer = Scorer(subject.benchmarks)
    progress = SampleProgress(console, subject.total, tally.finished)
    requests = pending(subject, tally)
    try:
        if engine.capabilities.overlaps:
            width = min(config.sglang.concurrency * len(config.sglang.urls), len(requests))
            groups = draw_at_once(engine, requests, sampling, width, stop.check)
        else:
            groups = draw_in_batches(engine, requests, sampling, config.local.batch_size, stop.check)
        seeds = {request.uid: request.seed for request in requests}
        for group in groups:
            found = [_finish(subject, sample, seeds[sample.uid], scorer, records) for sample in group]
            tally.add_all(found)
            progress.add(found)
    finally:
        progress.close()
        scorer.close()


def pending(subject: Subject, tally: Tally) -> list[Request]:
    """What is still to be drawn; per benchmark, longest prompts first, so that rows of a batch are alike.

    A sample's seed depends on the evaluation's seed, the problem's name and the sample's number, nothing else.
    """
    found = []
    for benchmark in subject.benchmarks:
        uids = sorted((p.uid for p in benchmark.problems), key=lambda uid: -len(subject.prompts[uid]))
        found += [
            Request(
                uid=f"{uid}/{sample}",
                prompt_ids=subject.prompts[uid],
                seed=stable_hash("evaluate", subject.config.seed, uid, sample) % 2**32,
            )
            for uid in uids
            for sample in range(subject.config.samples)
            if not tally.has(uid, sample)
        ]
    return found


def _finish(subject: Subject, sample: Sample, seed: int, scorer: Scorer, records: RecordFile) -> Record:
    """Score a sample and write it down."""
    if sample.finish_reason == "abort":
        raise EngineError(f"sample {sample.uid} was cut off by the server again and again")
    uid, _, number = sample.uid.rpartition("/")
    ids = sample.token_ids.tolist()
    response = scored_text(subject.prompts[uid], ids, subject.codec)
    verdict = scorer.score(uid, response)
    record = Record(
        problem=uid,
        sample=int(number),
        seed=seed,
        finish=sample.finish_reason,
        tokens=len(ids),
        status=verdict.status,
        answer=verdict.parsed,
        response=response if subject.config.keep_responses else None,
    )
    records.append(record)
    return record


def _open_servers(subject: Subject, directory: Directory, stack: ExitStack) -> Engine:
    engine = open_servers(subject.config, subject.model, subject.path, directory.weights, stack)
    if isinstance(engine, ServedEngine):
        subject.check_context(engine.context)
    return engine


def _say_what_is_there(tally: Tally, records: RecordFile, total: int, console: Console) -> None:
    if records.repaired:
        console.print(f"cut off a half-written line of {records.repaired} bytes", markup=False)
    if tally.finished:
        console.print(f"{tally.finished} of {total} samples are there already", markup=False)
