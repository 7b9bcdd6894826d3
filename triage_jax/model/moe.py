"""The mixture-of-experts MLP of Qwen3-MoE: every token goes to k of E experts.

Source: Qwen3 technical report (arXiv 2505.09388) and the reference implementation in `transformers`.
"""

import zlib
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from triage_jax.model import capacity
from triage_jax.model.activation import swiglu
from triage_jax.model.config import ModelConfig
from triage_jax.model.layout import row_parts
from triage_jax.model.numerics import Numerics, fused_weight, weight_of
from triage_jax.model.params import LayerParams
from triage_jax.nvfp4 import Operand
from triage_jax.nvfp4.grouped import grouped_dot
from triage_jax.nvfp4.stacked import stacked_dot

NO_ROOM = -1
"""In place of an expert, where that expert had no room for the token"""


class _Layout(NamedTuple):
    """How the rows of a batch lie while experts multiply them: sorted, or in one buffer for each expert."""

    rows: Float[Array, "..."]
    dot: Callable[[Array, Array | Operand, str], Array]
    """`dot(rows, weights, name)`"""
    along: Callable[[Array], Array]
    """One number for each pair of token and expert, `[B, T, k]`, on the pair's row"""
    back: Callable[[Array], Array]
    """Rows as `[B, T, k, D]`; zeros where the expert had no room"""
    routes: Int[Array, "B T k"]


def moe_mlp(
    x: Float[Array, "B T D"],
    layer: LayerParams,
    config: ModelConfig,
    numerics: Numerics,
    routes: Int[Array, "B T k"] | None = None,
    *,
    valid: Bool[Array, "B T"] | None = None,
    key: Array | None = None,
) -> tuple[Float[Array, "B T D"], Int[Array, "B T k"]]:
    """y = Σ over the k experts of weight · down(silu(gate(x)) · up(x)), and which experts those were.

    `routes` replays another run's choice: the experts are given, their weights are the router's own. In the capacity
    layout (`Numerics.expert_capacity`) an expert that is full adds nothing to y, the other weights stay as they are,
    and the pair's route is `NO_ROOM`; padding, which takes no room, has it too.
    """
    if layer.router is None:
        raise ValueError("moe_mlp: the layer has no router; a dense layer's MLP is in `forward`")
    # Both sides hold the router in the compute dtype, as checkpoints do, and compute with it in float32.
    weights, routes = route(x, layer.router.astype(numerics.compute_dtype), config, routes, numerics.router)
    native = numerics.execution_of("gate") in ("scaled_matmul", "te")
    if native or numerics.expert_capacity is not None:
        layout = _in_buffers(
            x, routes, jnp.ones(x.shape[:2], bool) if valid is None else valid, config, numerics, key
        )
    else:
        layout = _sorted(x, routes, config, numerics, key)
    gate, up = _gate_and_up(layout, layer, numerics)
    hidden = swiglu(gate, up, jnp.float32 if numerics.hidden_rounding == "none" else x.dtype)
    if numerics.expert_weighting == "before":
        hidden = (hidden * layout.along(weights)).astype(hidden.dtype)
        weights = jnp.ones_like(weights)
    y = layout.back(layout.dot(hidden, weight_of(layer.down, "down", numerics), "down"))
    mixed = jnp.einsum("btk,btkd->btd", weights, y.astype(jnp.float32))
    return mixed.astype(x.dtype), layout.routes


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


def _gate_and_up(layout: _Layout, layer: LayerParams, numerics: Numerics) -> tuple[Array, Array]:
    """Both projections of the rows; of one matrix where `numerics` fuse them, as servers have it."""
    if (fused := fused_weight((layer.gate, layer.up), "gate", numerics)) is not None:
        first, second = jnp.split(layout.dot(layout.rows, fused, "gate"), 2, axis=-1)
        return first, second
    gate, up = (weight_of(getattr(layer, name), name, numerics) for name in ("gate", "up"))
    return layout.dot(layout.rows, gate, "gate"), layout.dot(layout.rows, up, "up")


def _sorted(x: Array, routes: Array, config: ModelConfig, numerics: Numerics, key: Array | None) -> _Layout:
    """Rows sorted by expert, as many as there are pairs: nothing is ever full."""
    chosen = routes.reshape(-1)
    # Stable, so that the rows of an expert stay in the order of the batch.
    order = jnp.argsort(chosen, stable=True)
    sizes = jnp.bincount(chosen, length=config.num_experts)

    def dot(rows: Array, weight: Array | Operand, name: str) -> Array:
        own = _key_of(key, name)
        return grouped_dot(rows, weight, sizes, numerics.recipe, numerics.execution_of(name), own)

    return _Layout(
        rows=x.reshape(-1, x.shape[-1])[order // config.experts_per_token],
        dot=dot,
        along=lambda values: values.reshape(-1, 1)[order],
        back=lambda y: jnp.zeros_like(y).at[order].set(y).reshape(*routes.shape, -1),
        routes=routes,
    )


def _in_buffers(
    x: Array, routes: Array, valid: Array, config: ModelConfig, numerics: Numerics, key: Array | None
) -> _Layout:
    """Each expert's rows in a buffer of its own, of which every device fills its part."""
    groups = row_parts(x.shape[0])

    def grouped(values: Array, *last: int) -> Array:
        return values.reshape(groups, -1, *last)

    rows, k = x.shape[0] * x.shape[1] // groups, config.experts_per_token
    room = capacity.expert_rows(rows, config.num_experts, k, numerics.expert_capacity)
    slots = capacity.assign(grouped(routes, k), grouped(valid), config.num_experts, room)

    def dot(rows: Array, weight: Array | Operand, name: str) -> Array:
        if isinstance(weight, Operand):
            raise ValueError("moe_mlp: a sampler's quantised experts have no capacity; accepted: None")
        own = _key_of(key, name)
        return stacked_dot(rows, weight, numerics.recipe, numerics.execution_of(name), own)

    return _Layout(
        rows=capacity.rows_to_experts(grouped(x, x.shape[2]), slots),
        dot=dot,
        along=lambda values: capacity.pairs_to_experts(grouped(values, k, 1), slots),
        back=lambda y: capacity.experts_to_pairs(y, slots).reshape(*routes.shape, -1),
        routes=jnp.where(slots.kept.reshape(routes.shape), routes, NO_ROOM),
    )


def _key_of(key: Array | None, name: str) -> Array | None:
    """A random key of its own for every product."""
    return None if key is None else jax.random.fold_in(key, zlib.crc32(name.encode()))
