"""`python -m triage_jax.train`: reinforcement learning with NVFP4 on both sides and the TRIAGE objective."""

import shutil
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from triage_jax import report
from triage_jax.cli import Invocation, parse
from triage_jax.config import ConfigError, TrainConfig
from triage_jax.learner import (
    CheckpointError,
    LearnerState,
    RolloutBatch,
    UpdateReport,
    group_advantages,
    pack_batch,
    score,
    update,
)
from triage_jax.model import ModelError, TokenScores
from triage_jax.objective import finalize
from triage_jax.rollout import Request, Sample, SamplingParams
from triage_jax.run import Paths, Run, Stop, StopSignal, open_run, place_batch
from triage_jax.tasks.jsonl import DataError
from triage_jax.tasks.prompts import encode_prompt
from triage_jax.tasks.protocol import Problem, Verdict, count_statuses, stable_hash

EXIT_FAILED, EXIT_USAGE = 1, 2


class TrainingStopped(RuntimeError):
    """Too many updates in a row were not finite."""


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Rewards on held-out problems."""

    right: int
    samples: int
    problems: int


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """The prompts of one step, and where the next step's begin."""

    problems: list[Problem]
    ids: list[list[int]]
    cursor: int
    too_long: int


def train(run: Run, stop: StopSignal, console: report.Progress) -> LearnerState:
    """The loop: sample, reward, weigh, learn, refit; returns the last state.

    Raises Stop after a signal (with everything saved), TrainingStopped after too many skipped updates.
    """
    config, engine, state, cursor = run.config, run.engine, run.state, run.cursor
    if run.step == 0:
        _log_held_out(run, step=0, console=console)
    try:
        for step in range(run.step, config.steps):
            started = time.perf_counter()
            prompts = take_prompts(run, cursor)
            requests = make_requests(prompts, config, step)
            samples = engine.generate(requests, sampling(config), console.sampling)
            sampled = time.perf_counter()
            stop.check()

            verdicts = reward(run, prompts, samples)
            advantages = group_advantages(
                np.array([verdict.reward for verdict in verdicts]), config.rollout.samples_per_prompt
            )
            host_batch = make_batch(run, requests, samples, advantages.advantages, advantages.usable)
            batch = place_batch(host_batch, run.mesh)
            scores = score(run.learner, state.params, batch)
            state, outcome = jax.block_until_ready(update(run.learner, state, batch, scores.logp))
            learned = time.perf_counter()

            engine.update_weights(state.params, step + 1)
            cursor = prompts.cursor
            row = describe_step(samples, verdicts, advantages.flat_groups, scores, batch, outcome, state)
            row |= timings(started, sampled, learned, time.perf_counter(), samples)
            row["prompts/too_long"] = prompts.too_long
            run.log.log(row, step + 1)
            console.step(step + 1, row)
            _guard(run, host_batch, scores, state, outcome)
            if config.eval.every and (step + 1) % config.eval.every == 0 and step + 1 < config.steps:
                _log_held_out(run, step=step + 1, console=console)
            if config.checkpoint.every and (step + 1) % config.checkpoint.every == 0:
                run.checkpoints.save(step + 1, state, {"cursor": cursor})
            stop.check()
    except Stop:
        run.checkpoints.save(int(state.step), state, {"cursor": cursor})
        raise
    run.checkpoints.save(int(state.step), state, {"cursor": cursor})
    return state


def take_prompts(run: Run, cursor: int) -> Prompts:
    """The next prompts that fit, in the task's order; raises DataError if a whole epoch holds none."""
    config, limit = run.config, run.config.rollout.max_prompt_tokens
    problems: list[Problem] = []
    ids: list[list[int]] = []
    too_long, patience = 0, max(run.task.epoch_size or 0, 10_000)
    while len(problems) < config.rollout.prompts_per_step:
        problem = run.task.problem(cursor)
        cursor += 1
        tokens = encode(run, problem)
        if len(tokens) <= limit:
            problems.append(problem)
            ids.append(tokens)
        else:
            too_long += 1
            if too_long > patience:
                raise DataError(
                    f"{too_long} prompts in a row have more than rollout.max_prompt_tokens = {limit} tokens "
                    f"(the last one has {len(tokens)}); raise it"
                )
    return Prompts(problems=problems, ids=ids, cursor=cursor, too_long=too_long)


def encode(run: Run, problem: Problem) -> list[int]:
    """Token ids of a prompt; raises DataError where the tokenizer cannot write it."""
    model = run.config.model
    codec = run.codec if model.chat_template else replace(run.codec, chat_template=None)
    thinking = model.enable_thinking if codec.chat_template else None
    try:
        return encode_prompt(problem, codec, system=model.system_prompt, enable_thinking=thinking)
    except ValueError as error:
        raise DataError(f"problem {problem.uid}: {error}") from error


def make_requests(prompts: Prompts, config: TrainConfig, step: int) -> list[Request]:
    """One request per sample; a sample's seed depends on the run's seed, the step and its place, nothing else."""
    return [
        Request(
            uid=f"step{step}/prompt{row}/sample{column}",
            prompt_ids=tuple(ids),
            seed=stable_hash("sample", config.seed, step, row, column) % 2**32,
        )
        for row, ids in enumerate(prompts.ids)
        for column in range(config.rollout.samples_per_prompt)
    ]


def sampling(config: TrainConfig) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=config.rollout.max_new_tokens, temperature=config.rollout.temperature
    )


def reward(run: Run, prompts: Prompts, samples: list[Sample]) -> list[Verdict]:
    group = run.config.rollout.samples_per_prompt
    return run.task.score_batch(
        [
            (run.codec.response_text(sample.token_ids.tolist()), prompts.problems[index // group])
            for index, sample in enumerate(samples)
        ]
    )


def make_batch(
    run: Run, requests: list[Request], samples: list[Sample], advantages: np.ndarray, usable: np.ndarray
) -> RolloutBatch:
    """Arrays of one update. Aborted samples never enter the loss, truncated ones only if the configuration says so."""
    settings = run.config.rollout
    kept = {"stop", "length"} if settings.train_truncated else {"stop"}
    usable = usable & np.array([sample.finish_reason in kept for sample in samples])
    bucket = settings.local.prompt_bucket
    widest = max(len(request.prompt_ids) for request in requests)
    return pack_batch(
        [request.prompt_ids for request in requests],
        samples,
        advantages,
        usable,
        prompt_width=-(-widest // bucket) * bucket,
        response_width=settings.max_new_tokens,
    )


def held_out(run: Run) -> HeldOut:
    """Sample every held-out problem with the weights the engine holds; the same seeds at every call."""
    config = run.config
    problems = run.task.heldout(config.eval.problems)
    encoded = [(problem, encode(run, problem)) for problem in problems]
    fitting = [(p, ids) for p, ids in encoded if len(ids) <= config.rollout.max_prompt_tokens]
    requests, asked = [], []
    for problem, ids in fitting:
        for sample in range(config.eval.samples):
            seed = stable_hash("held out", config.seed, problem.uid, sample) % 2**32
            requests.append(Request(uid=f"{problem.uid}/{sample}", prompt_ids=tuple(ids), seed=seed))
            asked.append(problem)
    samples = run.engine.generate(requests, sampling(config)) if requests else []
    texts = [run.codec.response_text(sample.token_ids.tolist()) for sample in samples]
    verdicts = run.task.score_batch(list(zip(texts, asked, strict=True)))
    right = sum(verdict.reward >= 0.5 for verdict in verdicts)
    return HeldOut(right=right, samples=len(samples), problems=len(fitting))


def describe_step(
    samples: list[Sample],
    verdicts: list[Verdict],
    flat_groups: int,
    scores: TokenScores,
    batch: RolloutBatch,
    outcome: UpdateReport,
    state: LearnerState,
) -> dict[str, Any]:
    """Metrics of one step, without times; keys name the mean they are."""
    lengths = np.array([len(sample.token_ids) for sample in samples])
    rewards = np.array([verdict.reward for verdict in verdicts], np.float64)
    reasons = [sample.finish_reason for sample in samples]
    mask = np.asarray(batch.mask)
    entropy = np.asarray(scores.entropy)[mask]
    on_host = jax.device_get(finalize(outcome.metrics))
    return {
        "reward/mean/response": rewards.mean(),
        "reward/flat_groups": flat_groups,
        **{f"verdict/{status}": count for status, count in count_statuses(verdicts).items()},
        "response/length_mean": lengths.mean(),
        "response/length_max": int(lengths.max()),
        "response/truncated": reasons.count("length"),
        "response/aborted": reasons.count("abort"),
        "entropy/token": entropy.mean() if entropy.size else None,
        **on_host,
        "optimizer/grad_norm": float(outcome.grad_norm),
        "optimizer/update_norm": float(outcome.update_norm),
        "optimizer/param_norm": float(outcome.param_norm),
        "optimizer/applied": int(outcome.applied),
        "optimizer/skipped": int(state.skipped),
        "rollout/weight_version": min(sample.weight_version for sample in samples),
    }


def timings(
    started: float, sampled: float, learned: float, refitted: float, samples: list[Sample]
) -> dict[str, float]:
    tokens = sum(len(sample.token_ids) for sample in samples)
    return {
        "time/rollout": sampled - started,
        "time/learner": learned - sampled,
        "time/refit": refitted - learned,
        "time/step": refitted - started,
        "throughput/rollout_tokens_per_second": tokens / (sampled - started),
        "throughput/tokens_per_second": tokens / (refitted - started),
    }


def _log_held_out(run: Run, *, step: int, console: report.Progress) -> None:
    if run.config.eval.problems == 0 or run.log.has("eval/right", step):
        return
    result = held_out(run)
    row = {
        "eval/reward/response": result.right / result.samples if result.samples else None,
        "eval/right": result.right,
        "eval/samples": result.samples,
        "eval/problems": result.problems,
    }
    run.log.log(row, step)
    console.held_out(step, result.right, result.samples)


def _guard(
    run: Run, batch: RolloutBatch, scores: TokenScores, state: LearnerState, outcome: UpdateReport
) -> None:
    """Keep the batch of a skipped update; stop after too many in a row."""
    if bool(outcome.applied):
        return
    run.paths.skipped.mkdir(exist_ok=True)
    path = run.paths.skipped / f"step_{int(state.step):06d}.npz"
    np.savez_compressed(
        path,
        tokens=batch.tokens,
        valid=batch.valid,
        mask=batch.mask,
        sampler_logp=batch.sampler_logp,
        learner_logp=np.asarray(scores.logp),
        advantages=batch.advantages,
    )
    row, limit = int(state.skipped_in_a_row), run.config.learner.max_skipped
    if row >= limit:
        raise TrainingStopped(
            f"step {int(state.step)}: loss {float(outcome.loss)}, gradient norm {float(outcome.grad_norm)}; "
            f"{row} updates in a row were not finite (learner.max_skipped = {limit}). The last batch is in {path}"
        )


def run_training(invocation: Invocation) -> int:
    """Train as asked; returns the exit status."""
    config, paths = invocation.config, Paths(root=Path(invocation.config.out))
    console = report.Progress(config.steps)
    if invocation.dry_run:
        report.print_plan(config)
        return 0
    if invocation.overwrite and paths.config.exists():
        shutil.rmtree(paths.root)
    stop = StopSignal()
    with open_run(config, resume=invocation.resume) as run, stop.installed():
        report.print_plan(config, run.model)
        if run.step:
            console.note(f"resumed at step {run.step}")
        try:
            state = train(run, stop, console)
        except Stop as signal:
            console.note(
                f"{signal}: saved step {run.checkpoints.steps[-1]} of {config.steps} to {paths.root}; "
                "the same command with --resume continues"
            )
            return 0
        _log_held_out(run, step=config.steps, console=console)
        if config.checkpoint.export:
            run.export(state.params)
    report.write_report(paths)
    report.print_summary(paths)
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status: 0 done or stopped by a signal, 1 failed, 2 wrong usage."""
    try:
        return run_training(parse(sys.argv[1:] if arguments is None else arguments))
    except (ConfigError, DataError, ModelError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except (TrainingStopped, CheckpointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
