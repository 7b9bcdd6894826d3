"""A model small enough that a whole run takes seconds, written as an ordinary Hugging Face directory."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from triage_jax.model import ModelConfig, Params, save_model
from triage_jax.model.params import abstract_params
from triage_jax.tasks.tokenizer import char_codec, save_tokenizer

CHARACTERS = "0123456789+-*= "


def tiny_config(**changes) -> ModelConfig:
    settings = {
        "architecture": "qwen3",
        "vocab_size": 32,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_layers": 2,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 16,
        "rope_theta": 10_000.0,
        "rms_norm_eps": 1e-6,
        "tie_embeddings": True,
        "qk_norm": True,
        "max_position_embeddings": 64,
        "eos_token_ids": (1,),
        "pad_token_id": 0,
    }
    return ModelConfig(**(settings | changes))


def tiny_params(config: ModelConfig, seed: int = 0) -> Params:
    """Random weights: unit norm gains, rows of matrices of norm about one, so that logits are of order one."""
    rng = np.random.default_rng(seed)

    def draw(path: tuple[jax.tree_util.GetAttrKey, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if path[-1].name.endswith("norm"):
            return jnp.ones(leaf.shape, jnp.float32)
        return jnp.asarray(rng.normal(0.0, 1.5 / np.sqrt(leaf.shape[-1]), leaf.shape), jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, abstract_params(config, jnp.float32))


def tiny_model(directory: Path, seed: int = 0) -> Path:
    """Write the tiny model and its character tokenizer; returns the model's directory."""
    config, tokenizer = tiny_config(), directory / "tokenizer"
    save_tokenizer(char_codec(CHARACTERS), tokenizer)
    save_model(directory / "model", tiny_params(config, seed), config, tokenizer_from=tokenizer)
    return directory / "model"
