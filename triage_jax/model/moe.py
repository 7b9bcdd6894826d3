"""The mixture-of-experts MLP of Qwen3-MoE: every token goes to k of E experts.

Source: Qwen3 technical report (arXiv 2505.09388) and the reference implementation in `transformers`.
"""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from triage_jax.model.activation import swiglu
from triage_jax.model.config import ModelConfig
from triage_jax.model.numerics import Numerics, weight_of
from triage_jax.model.params import LayerParams
from triage_jax.nvfp4.grouped import grouped_dot


def moe_mlp(
    x: Float[Array, "B T D"],
    layer: LayerParams,
    config: ModelConfig,
    numerics: Numerics,
    routes: Int[Array, "B T k"] | None = None,
) -> tuple[Float[Array, "B T D"], Int[Array, "B T k"]]:
    """y = Σ over the k experts of weight · down(silu(gate(x)) · up(x)), and which experts those were.

    `routes` replays another run's choice: the experts are given, their weights are the router's own.
    """
    if layer.router is None:
        raise ValueError("moe_mlp: the layer has no router; a dense layer's MLP is in `forward`")
    # Both sides hold the router in the compute dtype, as checkpoints do, and compute with it in float32.
    weights, routes = route(x, layer.router.astype(numerics.compute_dtype), config, routes, numerics.router)
    rows = x.reshape(-1, x.shape[-1])
    chosen = routes.reshape(-1)
    # Stable, so that the rows of an expert stay in the order of the batch.
    order = jnp.argsort(chosen, stable=True)
    sizes = jnp.bincount(chosen, length=config.num_experts)
    dot = partial(_expert_dot, layer=layer, sizes=sizes, numerics=numerics)
    sorted_rows = rows[order // config.experts_per_token]
    gate, up = (dot(sorted_rows, name) for name in ("gate", "up"))
    hidden = swiglu(gate, up, jnp.float32 if numerics.hidden_rounding == "none" else x.dtype)
    if numerics.expert_weighting == "before":
        hidden = (hidden * weights.reshape(-1, 1)[order]).astype(hidden.dtype)
        weights = jnp.ones_like(weights)
    y = dot(hidden, "down")
    y = jnp.zeros_like(y).at[order].set(y).reshape(*weights.shape, -1)
    mixed = jnp.einsum("btk,btkd->btd", weights, y.astype(jnp.float32))
    return mixed.astype(x.dtype), routes


def route(
    x: Float[Array, "B T D"],
    router: Float[Array, "E D"],
    config: ModelConfig,
    routes: Int[Array, "B T k"] | None = None,
    precision: Literal["float32", "bf16"] = "float32",
) -> tuple[Float32[Array, "B T k"], Int[Array, "B T k"]]:
    """Weights and indices of each position's experts; logits in `precision`, the rest in float32.

    The weights are the softmax over all experts at the chosen ones, which `norm_topk_prob` scales to a sum of one.
    """
    dtype = jnp.float32 if precision == "float32" else jnp.bfloat16
    logits = jnp.einsum(
        "btd,ed->bte", x.astype(dtype), router.astype(dtype), precision=jax.lax.Precision.HIGHEST
    ).astype(jnp.float32)
    probabilities = jax.nn.softmax(logits, axis=-1)
    if routes is None:
        routes = jax.lax.top_k(jax.lax.stop_gradient(logits), config.experts_per_token)[1]
    weights = jnp.take_along_axis(probabilities, routes, axis=-1)
    if config.norm_topk_prob:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return weights, routes


def _expert_dot(
    x: Float[Array, "M K"], name: str, *, layer: LayerParams, sizes: Int[Array, "E"], numerics: Numerics
) -> Float[Array, "M N"]:
    weight = weight_of(getattr(layer, name), name, numerics)
    return grouped_dot(x, weight, sizes, numerics.recipe, numerics.execution_of(name))
