"""The same tokens' log-probabilities from an SGLang server, the local engine and the learner, all in BF16.

    scripts/serve_sglang.sh cpu quickstart
    python scripts/sglang_cpu/compare_logprobs.py [--url URL] [--prompts 64] [--json FILE] [--bound 0.02]

The server must hold the weights of `--model`, a model that writes sums (the quickstart model does). It draws the tokens
at temperature 1. They are then scored by the learner (the pass that training takes the gap from), by the local engine's
own cached decoding, by the server's prefill, and in float32. Prints a table of differences in nats; exits 1 when the
mean |learner - server| is above the bound. Keys come from SGLANG_API_KEY, as the engine reads them.
"""

import argparse
import json
import os
import sys
from functools import partial
from pathlib import Path

import httpx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from rich.console import Console
from rich.table import Table

from triage_jax.cli import parse
from triage_jax.learner import Learner, RolloutBatch, pack_batch, score
from triage_jax.model import (
    KVCache,
    ModelConfig,
    Numerics,
    Params,
    forward_cached,
    load_model,
    logits_of,
    serving_params,
)
from triage_jax.rollout import Sample
from triage_jax.run import resolve_model
from triage_jax.tasks.arithmetic import ArithmeticTask
from triage_jax.tasks.prompts import encode_prompt
from triage_jax.tasks.tokenizer import load_tokenizer

BF16, FLOAT32 = Numerics(execution="bf16"), Numerics(execution="float32")
PAIRS = (
    ("learner", "server"),
    ("learner", "local engine"),
    ("local engine", "server"),
    ("server, prefill", "server"),
    ("learner", "float32"),
    ("local engine", "float32"),
    ("server", "float32"),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--model", default="quickstart", help="directory of the weights the server holds")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=28)
    parser.add_argument(
        "--bound", type=float, default=0.02, help="largest mean |learner - server| that passes, nats"
    )
    parser.add_argument("--json", type=Path, help="also write the differences here")
    arguments = parser.parse_args()

    directory = resolve_model(arguments.model)
    params, config = load_model(directory)
    prompts = sum_prompts(directory, arguments.prompts)
    key = os.environ.get("SGLANG_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(base_url=arguments.url, timeout=600.0, headers=headers) as client:
        samples = drawn(client, prompts, arguments.new_tokens)
        rescored = prefilled(client, prompts, samples)

    width = max(len(prompt) for prompt in prompts)
    batch = pack_batch(
        prompts,
        samples,
        np.ones(len(samples)),
        np.ones(len(samples), bool),
        prompt_width=width,
        response_width=arguments.new_tokens,
    )
    columns = {
        "server": np.asarray(batch.sampler_logp),
        "server, prefill": padded(rescored, arguments.new_tokens),
        "learner": learner_scores(config, BF16, params, batch),
        "local engine": local_scores(config, params, batch, width),
        "float32": learner_scores(config, FLOAT32, params, batch),
    }
    differences = compare(columns, np.asarray(batch.mask))
    show(differences, samples)
    if arguments.json:
        arguments.json.write_text(json.dumps(differences, indent=2) + "\n", encoding="utf-8")
    if not differences["learner - server"]["mean_abs"] <= arguments.bound:
        sys.exit(f"mean |learner - server| is above the bound of {arguments.bound}")


def sum_prompts(model: Path, count: int) -> list[list[int]]:
    """Token ids of the first training problems of the quickstart."""
    task, codec = ArithmeticTask(parse([]).config.task.arithmetic), load_tokenizer(model)
    return [encode_prompt(task.problem(index), codec) for index in range(count)]


def drawn(client: httpx.Client, prompts: list[list[int]], new_tokens: int) -> list[Sample]:
    """One sample per prompt at temperature 1, with the server's own log-probabilities."""
    answers = generate(client, prompts, max_new_tokens=new_tokens, logprob_start_len=-1)
    return [
        Sample(
            uid=str(index),
            token_ids=np.array(answer["output_ids"], np.int32),
            logprobs=np.array(
                [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]], np.float32
            ),
            finish_reason=answer["meta_info"]["finish_reason"]["type"],
            weight_versions=np.zeros(len(answer["output_ids"]), np.int32),
        )
        for index, answer in enumerate(answers)
    ]


def prefilled(client: httpx.Client, prompts: list[list[int]], samples: list[Sample]) -> list[list[float]]:
    """The responses scored as if they were prompts."""
    whole = [prompt + sample.token_ids.tolist() for prompt, sample in zip(prompts, samples, strict=True)]
    answers = generate(client, whole, max_new_tokens=0, logprob_start_len=0)
    return [
        [entry[0] for entry in answer["meta_info"]["input_token_logprobs"][len(prompt) :]]
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def generate(
    client: httpx.Client, ids: list[list[int]], *, max_new_tokens: int, logprob_start_len: int
) -> list[dict]:
    """Answers to one batched request; raises httpx.HTTPStatusError where the server refuses it."""
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "max_new_tokens": max_new_tokens}
    answer = client.post(
        "/generate",
        json={
            "input_ids": ids,
            "sampling_params": sampling,
            "return_logprob": True,
            "logprob_start_len": logprob_start_len,
        },
    )
    return answer.raise_for_status().json()


def padded(rows: list[list[float]], width: int) -> np.ndarray:
    return np.array([row + [0.0] * (width - len(row)) for row in rows], np.float32)


def learner_scores(
    config: ModelConfig, numerics: Numerics, params: Params, batch: RolloutBatch
) -> np.ndarray:
    return np.asarray(score(Learner(model=config, numerics=numerics), params, batch).logp)


def local_scores(config: ModelConfig, params: Params, batch: RolloutBatch, width: int) -> np.ndarray:
    """What the local engine would have returned, had it drawn these tokens: its prefill and decode steps."""
    weights = serving_params(params, BF16)
    tokens, valid = jnp.asarray(batch.tokens), jnp.asarray(batch.valid)
    return np.asarray(_forced(weights, tokens, valid, config, width))


@partial(jax.jit, static_argnums=(3, 4))
def _forced(
    weights: Params, tokens: Int[Array, "B T"], valid: Bool[Array, "B T"], config: ModelConfig, width: int
) -> Float[Array, "B N"]:
    rows, total = tokens.shape
    cache = KVCache.empty(config, rows, total, BF16.compute_dtype)
    hidden, cache = forward_cached(weights, tokens[:, :width], valid[:, :width], cache, config, BF16)

    def logp(hidden: Array, token: Array) -> Array:
        return jnp.take_along_axis(jax.nn.log_softmax(logits_of(weights, hidden, BF16)), token[:, None], 1)[
            :, 0
        ]

    def step(
        carry: tuple[Array, KVCache], column: tuple[Array, Array]
    ) -> tuple[tuple[Array, KVCache], Array]:
        hidden, cache = carry
        token, keep = column
        out, cache = forward_cached(weights, token[:, None], keep[:, None], cache, config, BF16)
        return (out[:, 0], cache), logp(hidden, token)

    _, scores = jax.lax.scan(step, (hidden[:, -1], cache), (tokens[:, width:].T, valid[:, width:].T))
    return scores.T


def compare(columns: dict[str, np.ndarray], mask: np.ndarray) -> dict[str, dict[str, float]]:
    """Statistics of each pair's difference over the response tokens."""
    found = {}
    for left, right in PAIRS:
        gap = (columns[left].astype(np.float64) - columns[right])[mask]
        found[f"{left} - {right}"] = {
            "mean_abs": float(np.abs(gap).mean()),
            "max_abs": float(np.abs(gap).max()),
            "mean": float(gap.mean()),
        }
    return found


def show(differences: dict[str, dict[str, float]], samples: list[Sample]) -> None:
    tokens = sum(len(sample.token_ids) for sample in samples)
    table = Table(
        "difference, nats", "mean |.|", "max |.|", "mean", title=f"{tokens} tokens of {len(samples)} samples"
    )
    for name, row in differences.items():
        table.add_row(name, *(f"{row[key]:.5f}" for key in ("mean_abs", "max_abs", "mean")))
    Console().print(table)


if __name__ == "__main__":
    main()
