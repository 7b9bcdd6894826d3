"""How much memory a run will take, from shapes alone."""

from triage_jax.config import TrainConfig
from triage_jax.model import ModelConfig


def parameter_count(model: ModelConfig) -> int:
    """Number of parameters, tied embeddings once."""
    heads, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    attention = model.hidden_size * (2 * heads + 2 * kv) + (2 * model.head_dim if model.qk_norm else 0)
    mlp = 3 * model.hidden_size * model.intermediate_size
    if model.num_experts:
        mlp = model.num_experts * (mlp + model.hidden_size)
    layer = attention + mlp + 2 * model.hidden_size
    tables = model.vocab_size * model.hidden_size * (1 if model.tie_embeddings else 2)
    return tables + model.num_layers * layer + model.hidden_size


def memory_estimate(config: TrainConfig, model: ModelConfig) -> dict[str, float]:
    """Bytes per device by purpose; of the activations only the largest terms, so a guide rather than a bound."""
    count, rollout, mesh = parameter_count(model), config.rollout, config.learner.mesh
    width = rollout.max_prompt_tokens + rollout.max_new_tokens
    rows = (config.learner.micro_batch or rollout.rows) / (mesh.data * mesh.fsdp)
    act = 4 if config.numerics.learner.execution == "float32" else 2
    stream = rows * width * model.hidden_size * act
    inner = rows * width * act * (3 * model.intermediate_size + 4 * model.num_heads * model.head_dim)
    scores = 2 * rows * model.num_heads * width * width * 4
    kept = stream * model.num_layers + (inner + scores) * (1 if config.learner.remat else model.num_layers)
    cache = 2 * model.num_layers * rollout.local.batch_size * width * model.num_kv_heads * model.head_dim * 2
    parts = {
        "master weights, float32": 4 * count / mesh.fsdp,
        "Adam moments, float32": 8 * count / mesh.fsdp,
        "gradient, float32": 4 * count / mesh.fsdp,
        "learner activations": kept,
    }
    if config.rollout.max_staleness:
        parts["previous weights, float32"] = 4 * count / mesh.fsdp
    if config.rollout.engine == "local":
        parts |= {"sampler weights, BF16": 2.0 * count, "sampler KV cache": float(cache)}
    return parts | {"total": sum(parts.values())}
