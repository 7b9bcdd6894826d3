"""`python -m triage_jax.train`: reinforcement learning with NVFP4 on both sides and the TRIAGE objective."""

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from triage_jax import report
from triage_jax.calibrate import GateCalibrator
from triage_jax.characterize.dumps import dump_path, write_dump
from triage_jax.characterize.health import HealthWatch
from triage_jax.cli import Invocation, parse
from triage_jax.collect import held_out, make_batch, reward, rewards_of
from triage_jax.config import ConfigError
from triage_jax.describe import describe_step, gap_split, label_residual, parts_in_force, timings
from triage_jax.learner import (
    CheckpointError,
    LearnerState,
    RolloutBatch,
    UpdateReport,
    group_advantages,
    score,
    update,
)
from triage_jax.metrics import read_metrics
from triage_jax.model import ModelError, Params, TokenScores
from triage_jax.pipeline import Pipeline, drawn_before
from triage_jax.rollout import EngineError
from triage_jax.run import Paths, Run, Stop, StopSignal, open_run, place_batch
from triage_jax.tasks.jsonl import DataError

EXIT_FAILED, EXIT_USAGE = 1, 2


class TrainingStopped(RuntimeError):
    """Too many updates in a row were skipped."""


def train(run: Run, stop: StopSignal, console: report.Progress) -> LearnerState:
    """The loop: sample, reward, weigh, learn, refit; returns the last state.

    Raises, with everything saved, Stop after a signal and EngineError where the engine gave up; TrainingStopped after
    too many skipped updates.
    """
    config, engine, state, cursor = run.config, run.engine, run.state, run.cursor
    calibrator = GateCalibrator(run.learner, run.paths.calibration)
    pipeline, ahead, previous = Pipeline(run, console.sampling), config.rollout.max_staleness, None
    health = HealthWatch(read_metrics(run.paths.metrics))
    if run.step == 0:
        _log_held_out(run, step=0, console=console)
    try:
        for step in range(run.step, config.steps):
            started = time.perf_counter()
            rollout = pipeline.take(step, cursor)
            samples, sampled = rollout.samples, time.perf_counter()
            stop.check()
            if ahead and step + 1 < config.steps:
                pipeline.start(step + 1, rollout.prompts.cursor)

            verdicts = reward(run, rollout.prompts, samples)
            rewards = rewards_of(verdicts, samples)
            advantages = group_advantages(
                rewards,
                config.rollout.samples_per_prompt,
                divide_by_std=config.objective.name != "dr_grpo",
            )
            host_batch = make_batch(run, rollout.requests, samples, advantages.advantages, advantages.usable)
            batch = place_batch(host_batch, run.mesh)
            # One program at a time: two with collectives in flight at once can lock up virtual CPU devices.
            scores = jax.block_until_ready(score(run.learner, state.params, batch))
            at_draw = _logp_at_draw(
                run, scores, previous, batch, drawn_before(step, samples, batch.mask.shape[1])
            )
            previous = jax.tree.map(jax.numpy.copy, state.params) if ahead else None
            state, outcome = jax.block_until_ready(update(calibrator.learner, state, batch, scores.logp))
            in_force = parts_in_force(calibrator.learner.objective)
            calibrator.see(np.asarray(scores.logp), host_batch)
            cursor, learned = rollout.prompts.cursor, time.perf_counter()

            row = describe_step(
                samples, verdicts, rewards, advantages.flat_groups, scores, batch, outcome, state
            )
            row |= in_force | gap_split(np.asarray(scores.logp), at_draw, host_batch)
            row = label_residual(row) if config.rollout.replay_routing else row
            row["prompts/too_long"] = rollout.prompts.too_long
            if config.track.dumps and (step + 1) % config.track.dumps == 0:
                _dump(run, step + 1, host_batch, scores, rewards)
            try:
                engine.update_weights(state.params, step + 1)
            finally:
                # The update is made: its metrics are kept even where no engine takes the weights.
                row |= timings(started, sampled, learned, time.perf_counter(), rollout) | engine.metrics()
                run.log.log(row, step + 1)
            console.step(step + 1, row)
            for warning in health.see({"step": step + 1, **row}):
                console.note(f"warning: {warning}")
            _guard(run, host_batch, scores, state, outcome, row)
            if config.eval.every and (step + 1) % config.eval.every == 0 and step + 1 < config.steps:
                _log_held_out(run, step=step + 1, console=console)
            if config.checkpoint.every and (step + 1) % config.checkpoint.every == 0:
                run.checkpoints.save(step + 1, state, {"cursor": cursor})
            stop.check()
    except (Stop, EngineError):
        run.checkpoints.save(int(state.step), state, {"cursor": cursor})
        raise
    finally:
        pipeline.close()
    run.checkpoints.save(int(state.step), state, {"cursor": cursor})
    return state


def _logp_at_draw(
    run: Run, scores: TokenScores, previous: Params | None, batch: RolloutBatch, stale: np.ndarray
) -> np.ndarray:
    """The learner's log-probabilities `[B, N]` with the weights that drew each token, present or previous."""
    now = np.asarray(scores.logp)
    if previous is None or not stale.any():
        return now
    before = jax.block_until_ready(score(run.learner, previous, batch))
    return np.where(stale, np.asarray(before.logp), now)


def _dump(run: Run, step: int, batch: RolloutBatch, scores: TokenScores, rewards: np.ndarray) -> None:
    write_dump(
        dump_path(run.paths.root, step),
        step=step,
        learner_logp=scores.logp,
        sampler_logp=batch.sampler_logp,
        mask=batch.mask,
        advantages=batch.advantages,
        rewards=np.nan_to_num(rewards),  # of a response that the engine cut off, which the mask leaves out
    )


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
    run: Run,
    batch: RolloutBatch,
    scores: TokenScores,
    state: LearnerState,
    outcome: UpdateReport,
    row: Mapping[str, Any],
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
    skipped, limit = int(state.skipped_in_a_row), run.config.learner.max_skipped
    if skipped >= limit:
        raise TrainingStopped(
            f"step {int(state.step)}: loss {float(outcome.loss)}, gradient norm {float(outcome.grad_norm)}; "
            f"{skipped} updates in a row were skipped, the last one because: {report.why_skipped(row)} "
            f"(learner.max_skipped = {limit}). The last batch is in {path}"
        )


def run_training(invocation: Invocation) -> int:
    """Train as asked; returns the exit status."""
    config, paths = invocation.config, Paths(root=Path(invocation.config.out))
    console = report.Progress(config.steps, config.rollout.rows)
    if invocation.dry_run:
        report.print_plan(config)
        return 0
    if invocation.overwrite and paths.config.exists():
        paths.clear()
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
    except EngineError as error:
        print(f"error: {error}\nNothing is lost: the same command with --resume continues.", file=sys.stderr)
        return EXIT_FAILED
    except (TrainingStopped, CheckpointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
