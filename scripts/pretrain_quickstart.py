"""Trains the small Qwen3-architecture model that comes with the package, from nothing, deterministically.

    python scripts/pretrain_quickstart.py [--out triage_jax/assets/quickstart]

Supervised next-token training on the arithmetic task's own problems and answers (never on held-out ones), under the
same emulated NVFP4 forward pass as the quickstart run, and stopped early on purpose: reinforcement learning then has
room to learn. Two CPU cores need a few minutes.
"""

import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from rich.console import Console

from triage_jax.model import (
    LayerParams,
    ModelConfig,
    Numerics,
    Params,
    forward,
    head_of,
    save_model,
    token_logprobs,
)
from triage_jax.nvfp4 import QuantSpec
from triage_jax.tasks.arithmetic import ArithmeticConfig, ArithmeticTask
from triage_jax.tasks.tokenizer import TextCodec, char_codec, save_tokenizer

CHARACTERS = "0123456789+-*= "


@dataclass(frozen=True, kw_only=True)
class Pretrain:
    """Pretraining of the quickstart model."""

    out: str = "triage_jax/assets/quickstart"
    steps: int = 500
    batch: int = 256
    learning_rate: float = 2e-3
    warmup: int = 50
    seed: int = 7
    width: int = 128
    ffn: int = 384
    layers: int = 4
    mistakes: float = 0.5
    """Share of training answers with one digit replaced: the model learns sums and, as from any corpus, errors"""
    task: ArithmeticConfig = field(
        default_factory=lambda: ArithmeticConfig(digits=1, terms=5, show_sums=True, heldout_fraction=0.1)
    )
    numerics: Numerics = field(
        default_factory=lambda: Numerics(activation=QuantSpec(tile="1x16", scope="tensor"))
    )


def model_config(settings: Pretrain, vocab: int) -> ModelConfig:
    return ModelConfig(
        architecture="qwen3",
        vocab_size=-(-vocab // 16) * 16,
        hidden_size=settings.width,
        intermediate_size=settings.ffn,
        num_layers=settings.layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        rope_theta=10_000.0,
        rms_norm_eps=1e-6,
        tie_embeddings=True,
        qk_norm=True,
        max_position_embeddings=512,
        eos_token_ids=(1,),
        pad_token_id=0,
    )


def init_params(config: ModelConfig, seed: int) -> Params:
    """Normal with standard deviation 1/sqrt(fan in); output projections scaled down by sqrt(2 L)."""
    rng = np.random.default_rng(seed)
    layers, width, ffn = config.num_layers, config.hidden_size, config.intermediate_size
    heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def normal(*shape: int, gain: float = 1.0) -> jax.Array:
        return jnp.asarray(rng.normal(0.0, gain / np.sqrt(shape[-1]), shape), jnp.float32)

    ones, into = partial(jnp.ones, dtype=jnp.float32), 1 / np.sqrt(2 * layers)
    return Params(
        embed=normal(config.vocab_size, width),
        layers=LayerParams(
            input_norm=ones((layers, width)),
            q=normal(layers, heads, width),
            k=normal(layers, kv, width),
            v=normal(layers, kv, width),
            o=normal(layers, width, heads, gain=into),
            q_norm=ones((layers, config.head_dim)),
            k_norm=ones((layers, config.head_dim)),
            post_norm=ones((layers, width)),
            gate=normal(layers, ffn, width),
            up=normal(layers, ffn, width),
            down=normal(layers, width, ffn, gain=into),
        ),
        final_norm=ones((width,)),
        lm_head=None,
    )


def with_mistake(answer: str, rng: np.random.Generator) -> str:
    """The answer with one of its digits replaced by another."""
    place = int(rng.choice([index for index, char in enumerate(answer) if char.isdigit()]))
    digit = (int(answer[place]) + int(rng.integers(1, 10))) % 10
    return f"{answer[:place]}{digit}{answer[place + 1 :]}"


def supervised_batch(
    task: ArithmeticTask, codec: TextCodec, start: int, settings: Pretrain, widths: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, validity and answer mask; prompts left-padded and answers right-padded, as in reinforcement learning."""
    rng = np.random.default_rng((settings.seed, start))
    rows, (prompt_width, answer_width) = settings.batch, widths
    tokens = np.zeros((rows, prompt_width + answer_width), np.int32)
    valid = np.zeros(tokens.shape, bool)
    mask = np.zeros((rows, answer_width), bool)
    for row in range(rows):
        problem = task.problem(start + row)
        prompt = codec.encode(problem.prompt)
        text = problem.answer
        if rng.uniform() < settings.mistakes:
            text = with_mistake(text, rng)
        answer = [*codec.encode(text), *codec.eos_ids]
        tokens[row, prompt_width - len(prompt) : prompt_width + len(answer)] = prompt + answer
        valid[row, prompt_width - len(prompt) : prompt_width + len(answer)] = True
        mask[row, : len(answer)] = True
    return tokens, valid, mask


def main(settings: Pretrain) -> None:
    console = Console()
    task, codec = ArithmeticTask(settings.task), char_codec(CHARACTERS)
    config = model_config(settings, codec.vocab_size)
    params = init_params(config, settings.seed)
    lengths = [(len(p.prompt), len(p.answer) + 1) for p in map(task.problem, range(2000))]
    widths = (max(a for a, _ in lengths) + 1, max(b for _, b in lengths) + 2)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, settings.learning_rate, settings.warmup, settings.steps, settings.learning_rate / 10
    )
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.05))

    @jax.jit
    def step(params: Params, state, tokens, valid, mask):
        def loss_of(params: Params) -> jax.Array:
            hidden = forward(params, tokens, valid, config, settings.numerics)
            width = mask.shape[1]
            scores = token_logprobs(hidden[:, -width - 1 : -1], head_of(params), tokens[:, -width:])
            return -jnp.sum(jnp.where(mask, scores.logp, 0.0)) / jnp.sum(mask)

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state = optimizer.init(params)
    for index in range(settings.steps):
        start = index * settings.batch
        batch = supervised_batch(task, codec, start, settings, widths)
        params, state, loss = step(params, state, *map(jnp.asarray, batch))
        if index % 50 == 0 or index + 1 == settings.steps:
            console.print(f"step {index + 1:5d}/{settings.steps}  loss {float(loss):.4f}")
    out = Path(settings.out)
    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(codec, folder)
        save_model(out, params, config, dtype=jnp.bfloat16, tokenizer_from=folder, overwrite=True)
    console.print(f"wrote {out}")


if __name__ == "__main__":
    main(tyro.cli(Pretrain, description=__doc__))
