"""From a task's problems to an update's batch: prompts, requests, rewards, arrays."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from triage_jax.config import TrainConfig
from triage_jax.learner import RolloutBatch, pack_batch
from triage_jax.objective import balance_advantages
from triage_jax.rollout import Request, Sample, SamplingParams
from triage_jax.run import Run
from triage_jax.tasks.jsonl import DataError
from triage_jax.tasks.prompts import encode_prompt, scored_text
from triage_jax.tasks.protocol import Problem, Verdict, stable_hash


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
        max_new_tokens=config.rollout.max_new_tokens,
        temperature=config.rollout.temperature,
        routed_experts=config.rollout.replay_routing,
    )


def reward(run: Run, prompts: Prompts, samples: list[Sample]) -> list[Verdict]:
    group = run.config.rollout.samples_per_prompt
    return run.task.score_batch(
        [
            (_text(run, prompts.ids[index // group], sample), prompts.problems[index // group])
            for index, sample in enumerate(samples)
        ]
    )


def rewards_of(verdicts: list[Verdict], samples: list[Sample]) -> np.ndarray:
    """float64 `[B]`; NaN for a response that the engine cut off, which thus enters neither group nor loss."""
    return np.array(
        [
            np.nan if sample.finish_reason == "abort" else verdict.reward
            for verdict, sample in zip(verdicts, samples, strict=True)
        ],
        np.float64,
    )


def make_batch(
    run: Run, requests: list[Request], samples: list[Sample], advantages: np.ndarray, usable: np.ndarray
) -> RolloutBatch:
    """Arrays of one update, advantages balanced as the objective asks.

    Aborted samples never enter the loss, truncated ones only if the configuration says so.
    """
    settings = run.config.rollout
    kept = {"stop", "length"} if settings.train_truncated else {"stop"}
    usable = usable & np.array([sample.finish_reason in kept for sample in samples])
    bucket = settings.local.prompt_bucket
    widest = max(len(request.prompt_ids) for request in requests)
    batch: Any = pack_batch(
        [request.prompt_ids for request in requests],
        samples,
        advantages,
        usable,
        prompt_width=-(-widest // bucket) * bucket,
        response_width=settings.max_new_tokens,
        replay_routing=settings.replay_routing,
    )
    balanced = balance_advantages(
        batch.advantages, batch.mask.sum(axis=1), settings.samples_per_prompt, run.config.objective.balance
    )
    return batch.replace(advantages=balanced)


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
    alone = replace(sampling(config), routed_experts=False)
    samples = run.engine.generate(requests, alone) if requests else []
    texts = [_text(run, r.prompt_ids, sample) for r, sample in zip(requests, samples, strict=True)]
    verdicts = run.task.score_batch(list(zip(texts, asked, strict=True)))
    right = sum(verdict.reward >= 0.5 for verdict in verdicts)
    return HeldOut(right=right, samples=len(samples), problems=len(fitting))


def _text(run: Run, prompt: Sequence[int], sample: Sample) -> str:
    return scored_text(prompt, sample.token_ids.tolist(), run.codec)
