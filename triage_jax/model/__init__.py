"""Qwen3 dense and Llama as pure functions over a parameter pytree."""

from triage_jax.model.config import ModelConfig, ModelError
from triage_jax.model.forward import KVCache, forward, forward_cached, head_of, logits_of, step_logits
from triage_jax.model.load import load_model
from triage_jax.model.logprobs import TokenScores, token_logprobs
from triage_jax.model.numerics import Numerics, serving_params
from triage_jax.model.params import LayerParams, Params
from triage_jax.model.quantized import load_dequantized, load_quantized, save_quantized, served
from triage_jax.model.save import save_model

__all__ = [
    "KVCache",
    "LayerParams",
    "ModelConfig",
    "ModelError",
    "Numerics",
    "Params",
    "TokenScores",
    "forward",
    "forward_cached",
    "head_of",
    "load_dequantized",
    "load_model",
    "load_quantized",
    "logits_of",
    "save_model",
    "save_quantized",
    "served",
    "serving_params",
    "step_logits",
    "token_logprobs",
]
