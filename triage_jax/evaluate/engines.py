"""The engine of an evaluation, opened with the model's weights."""

from contextlib import ExitStack
from pathlib import Path

import jax.numpy as jnp

from triage_jax.config import ConfigError
from triage_jax.evaluate.config import EvaluateConfig
from triage_jax.evaluate.served import ServedEngine
from triage_jax.model import ModelConfig, Params, load_dequantized, load_model, load_quantized
from triage_jax.model.load import read_json
from triage_jax.rollout import Engine, LocalEngine
from triage_jax.rollout.sglang import SglangEngine


def check_sampling(config: EvaluateConfig) -> None:
    """Raise ConfigError for what the chosen engine cannot do, before anything is read."""
    if config.engine == "local" and config.top_p != 1.0:
        raise ConfigError(f"top_p = {config.top_p}; the local engine accepts 1, or choose --engine sglang")
    if config.engine == "local" and config.numerics.execution not in ("float32", "bf16", "emulated"):
        raise ConfigError(
            f"numerics.execution = {config.numerics.execution}; the local engine accepts float32, bf16, emulated"
        )


def is_quantised(model_path: Path) -> bool:
    """Whether a checkpoint stores its weights in NVFP4."""
    return read_json(model_path / "config.json").get("quantization_config") is not None


def open_local(config: EvaluateConfig, model: ModelConfig, path: Path, stack: ExitStack) -> Engine:
    """The sampler in this process; raises ModelError for weights that cannot be read or do not fit the numerics.

    ConfigError for numerics that do not fit the model.
    """
    try:
        engine = LocalEngine(model, config.numerics, config.local)
    except ValueError as error:
        raise ConfigError(f"numerics: {error}") from error
    stack.callback(engine.close)
    engine.update_weights(_sampler_params(config, path), 0)
    return engine


def open_servers(
    config: EvaluateConfig, model: ModelConfig, path: Path, directory: Path, stack: ExitStack
) -> ServedEngine | SglangEngine:
    """Servers with the weights they have, or with those of the path; raises ConfigError, ModelError, EngineError."""
    try:
        if config.weights == "served":
            served = ServedEngine(config.sglang, model)
            stack.callback(served.close)
            _ = served.served
            return served
        engine = SglangEngine(config.sglang, model, config.numerics, directory, tokenizer_from=path)
    except ValueError as error:
        raise ConfigError(f"sglang: {error}") from error
    stack.callback(engine.close)
    params, _ = load_dequantized(path) if is_quantised(path) else load_model(path)
    engine.update_weights(params, 0)
    return engine


def _sampler_params(config: EvaluateConfig, path: Path) -> Params:
    if is_quantised(path):
        return load_quantized(path)[0]
    masters = config.numerics.execution == "float32" or config.numerics.weight_source == "float32"
    return load_model(path, jnp.float32 if masters else jnp.bfloat16)[0]
