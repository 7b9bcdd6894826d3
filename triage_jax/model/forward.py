"""Forward pass of Qwen3, dense or of experts (and Llama, its special case without q/k norm), as pure functions.

Two entries share one layer: `forward` for whole sequences (the learner), `forward_cached` for prefill and decode (the
sampler). Both take left-padded rows; positions count valid tokens only, so padding never shifts a rotary angle.
Architecture: Qwen3 technical report (arXiv 2505.09388) and the reference implementation in `transformers`.
"""

import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from triage_jax.model.activation import swiglu
from triage_jax.model.attention import Attend, causal_attention
from triage_jax.model.config import ModelConfig
from triage_jax.model.layout import gathered, meshed, split_rows
from triage_jax.model.moe import moe_mlp
from triage_jax.model.numerics import ATTENTION, MLP, Numerics, fused_weight, source_dtype, weight_of
from triage_jax.model.params import LayerParams, Params
from triage_jax.nvfp4 import quantized_dot

type Dot = Callable[..., tuple[Array, ...]]
"""`dot(x, *names)`: the products of x with the named weights of a layer"""


@struct.dataclass
class KVCache:
    """Keys and values of the slots written so far, all rows at the same slot; one array per layer.

    Arrays of their own, with heads before slots, are what a decode loop updates in place and what batched products read
    without a copy: on a CPU a third faster than one stacked array.
    """

    keys: tuple[Float[Array, "B K S d"], ...]
    values: tuple[Float[Array, "B K S d"], ...]
    valid: Bool[Array, "B S"]
    slot: Int[Array, ""]
    routes: tuple[Int[Array, "B S k"], ...] = ()
    """Experts that each slot's token went to, one array per layer; empty in a dense model"""

    @classmethod
    def empty(cls, config: ModelConfig, rows: int, slots: int, dtype: jnp.dtype) -> "KVCache":
        shape = (rows, config.num_kv_heads, slots, config.head_dim)
        layers = range(config.num_layers)
        return cls(
            keys=tuple(jnp.zeros(shape, dtype) for _ in layers),
            values=tuple(jnp.zeros(shape, dtype) for _ in layers),
            valid=jnp.zeros((rows, slots), bool),
            slot=jnp.zeros((), jnp.int32),
            routes=tuple(
                jnp.zeros((rows, slots, config.experts_per_token), jnp.int32)
                for _ in (layers if config.num_experts else ())
            ),
        )

    def grown_to(self, slots: int) -> "KVCache":
        """The same with room for `slots` slots; as it is where it has them already."""
        more = slots - self.valid.shape[1]
        if more <= 0:
            return self
        wider = ((0, 0), (0, 0), (0, more), (0, 0))
        return KVCache(
            keys=tuple(jnp.pad(layer, wider) for layer in self.keys),
            values=tuple(jnp.pad(layer, wider) for layer in self.values),
            valid=jnp.pad(self.valid, ((0, 0), (0, more))),
            slot=self.slot,
            routes=tuple(jnp.pad(layer, ((0, 0), (0, more), (0, 0))) for layer in self.routes),
        )


def forward(
    params: Params,
    tokens: Int[Array, "B T"],
    valid: Bool[Array, "B T"],
    config: ModelConfig,
    numerics: Numerics,
    *,
    remat: bool = False,
    routes: Int[Array, "L B T k"] | None = None,
    key: Array | None = None,
) -> Float[Array, "B T D"]:
    """Final hidden states (after the last norm) of whole rows; rows may be padded on either side.

    Values at positions that are not `valid` are finite and mean nothing. `remat` recomputes each layer in the backward
    pass instead of keeping its activations. `routes` replays the experts that another run chose. `key`
    is for gradients that `numerics` round stochastically, which raise ValueError without it.
    """
    return forward_routed(params, tokens, valid, config, numerics, remat=remat, routes=routes, key=key)[0]


def forward_routed(
    params: Params,
    tokens: Int[Array, "B T"],
    valid: Bool[Array, "B T"],
    config: ModelConfig,
    numerics: Numerics,
    *,
    remat: bool = False,
    routes: Int[Array, "L B T k"] | None = None,
    key: Array | None = None,
) -> tuple[Float[Array, "B T D"], Int[Array, "L B T k"] | None]:
    """`forward`, and the experts of every position: the replayed or the chosen ones; None in a dense model.

    With `numerics.expert_capacity`, `moe.NO_ROOM` where an expert was full, and at padding.
    """
    positions = jnp.maximum(jnp.cumsum(valid, axis=1) - 1, 0)
    rotary = _rotary(positions, config)
    attention = causal_attention(valid)

    def attend(q: Array, k: Array, v: Array) -> Array:
        return attention(q, _cached(k, numerics), _cached(v, numerics))

    def run(hidden: Array, stack: Any, numerics: Numerics) -> tuple[Array, Array | None]:
        def step(hidden: Array, given: tuple[LayerParams, Array | None, Array | None]):
            layer, replayed, layer_key = given
            layer = _gathered(layer, numerics)
            dot = _dots(layer, numerics, layer_key)
            experts = partial(moe_mlp, routes=replayed, valid=valid, key=layer_key)
            hidden, chosen = _layer(hidden, layer, dot, rotary, attend, config, numerics, experts)
            return split_rows(hidden), chosen

        return jax.lax.scan(jax.checkpoint(step) if remat else step, hidden, stack)

    keys = None if key is None else jax.random.split(key, config.num_layers)
    stack: Any = (params.layers, routes, keys)
    hidden = split_rows(_embed(replace(params, embed=gathered(params.embed)), tokens, numerics))
    first_high = config.num_layers - numerics.high_precision_layers
    if not 0 < first_high < config.num_layers:
        hidden, chosen = run(hidden, stack, numerics if first_high > 0 else numerics.unquantised)
    else:
        below, above = (jax.tree.map(lambda leaf, at=at: leaf[at], stack) for at in _halves(first_high))
        hidden, chosen = run(hidden, below, numerics)
        hidden, last = run(hidden, above, numerics.unquantised)
        chosen = None if chosen is None or last is None else jnp.concatenate([chosen, last])
    return _rms_norm(hidden, params.final_norm, config.rms_norm_eps), chosen


def _halves(boundary: int) -> tuple[slice, slice]:
    return slice(None, boundary), slice(boundary, None)


def forward_cached(
    params: Params,
    tokens: Int[Array, "B T"],
    valid: Bool[Array, "B T"],
    cache: KVCache,
    config: ModelConfig,
    numerics: Numerics,
) -> tuple[Float[Array, "B T D"], KVCache]:
    """Hidden states of `tokens` written at the cache's next `T` slots (prefill: T = prompt, decode: T = 1)."""
    count = tokens.shape[1]
    seen = jax.lax.dynamic_update_slice(cache.valid, valid, (0, cache.slot))
    before = jnp.sum(cache.valid, axis=1, keepdims=True)
    positions = jnp.maximum(before + jnp.cumsum(valid, axis=1) - 1, 0)
    slots = jnp.arange(cache.valid.shape[1])
    causal = (cache.slot + jnp.arange(count))[:, None] >= slots[None, :]
    mask = causal[None, None] & seen[:, None, None, :]
    rotary = _rotary(positions, config)

    keys, values, routes = list(cache.keys), list(cache.values), list(cache.routes)

    def attend_at(index: int) -> Attend:
        def attend(q: Array, k: Array, v: Array) -> Array:
            at = (0, 0, cache.slot, 0)
            k, v = _cached(k.swapaxes(1, 2), numerics), _cached(v.swapaxes(1, 2), numerics)
            keys[index] = jax.lax.dynamic_update_slice(keys[index], k, at)
            values[index] = jax.lax.dynamic_update_slice(values[index], v, at)
            return _attend_cache(q, keys[index], values[index], mask)

        return attend

    hidden = _embed(params, tokens, numerics)
    first_high = config.num_layers - numerics.high_precision_layers
    for index, layer in enumerate(unstack_layers(params, config)):
        own = numerics if index < first_high else numerics.unquantised
        hidden, chosen = _layer(hidden, layer, _dots(layer, own), rotary, attend_at(index), config, own)
        if chosen is not None:
            routes[index] = jax.lax.dynamic_update_slice(routes[index], chosen, (0, cache.slot, 0))
    hidden = _rms_norm(hidden, params.final_norm, config.rms_norm_eps)
    after = KVCache(
        keys=tuple(keys),
        values=tuple(values),
        valid=seen,
        slot=cache.slot + count,
        routes=tuple(routes),
    )
    return hidden, after


def unstack_layers(params: Params, config: ModelConfig) -> tuple[LayerParams, ...]:
    """The layers one by one; a tuple, as `serving_params` makes it, stays as it is."""
    if isinstance(params.layers, tuple):
        return params.layers
    return tuple(jax.tree.map(lambda leaf, i=i: leaf[i], params.layers) for i in range(config.num_layers))


def head_of(params: Params) -> Float[Array, "V D"]:
    """The output projection: the embedding where the two are tied."""
    return params.embed if params.lm_head is None else params.lm_head


def logits_of(params: Params, hidden: Float[Array, "*B D"], numerics: Numerics) -> Float[Array, "*B V"]:
    """Float32 logits in full; for few positions only, `token_logprobs` is the way for whole sequences."""
    head = head_of(params).astype(numerics.compute_dtype)
    return jnp.einsum("...d,vd->...v", hidden, head, preferred_element_type=jnp.float32)


def step_logits(params: Params, hidden: Float[Array, "B D"], numerics: Numerics) -> Float[Array, "V B"]:
    """`logits_of` one position per row, vocabulary first: XLA:CPU packs a product's right operand at every call, and
    here that is the rows and not the head.
    """
    head = head_of(params).astype(numerics.compute_dtype)
    return jnp.einsum("vd,bd->vb", head, hidden, preferred_element_type=jnp.float32)


def _attend_cache(
    q: Float[Array, "B T H d"],
    keys: Float[Array, "B K S d"],
    values: Float[Array, "B K S d"],
    mask: Bool[Array, "B 1 T S"],
) -> Float[Array, "B T H d"]:
    """Grouped-query attention over a cache that has heads before slots; scores and softmax in float32."""
    rows, count, heads, size = q.shape
    groups = heads // keys.shape[1]
    # Queries of one kv head side by side, query position outermost: one product per (row, kv head).
    q = q.reshape(rows, count, -1, groups, size).transpose(0, 2, 1, 3, 4)
    q = q.reshape(rows, -1, count * groups, size)
    scores = jnp.einsum("bkqd,bksd->bkqs", q, keys, preferred_element_type=jnp.float32) * size**-0.5
    allowed = jnp.repeat(mask, groups, axis=2)
    weights = jax.nn.softmax(jnp.where(allowed, scores, jnp.finfo(jnp.float32).min), axis=-1)
    # Accumulated in float32 all the same, and rounded where it is written.
    mixed = jnp.einsum("bkqs,bksd->bkqd", weights.astype(values.dtype), values)
    mixed = mixed.reshape(rows, -1, count, groups, size)
    return mixed.transpose(0, 2, 1, 3, 4).reshape(rows, count, heads, size)


def _embed(params: Params, tokens: Array, numerics: Numerics) -> Array:
    return jnp.take(params.embed, tokens, axis=0).astype(numerics.compute_dtype)


def _layer(
    hidden: Array,
    layer: LayerParams,
    dot: Dot,
    rotary: tuple[Array, Array],
    attend: Attend,
    config: ModelConfig,
    numerics: Numerics,
    experts: Callable[..., tuple[Array, Array]] = moe_mlp,
) -> tuple[Array, Array | None]:
    """A layer's hidden states, and in a mixture the experts that its positions went to."""
    x = _rms_norm(hidden, layer.input_norm, config.rms_norm_eps)
    q, k, v = (_heads(y, config.head_dim) for y in dot(x, "q", "k", "v"))
    if layer.q_norm is not None and layer.k_norm is not None:
        q = _rms_norm(q, layer.q_norm, config.rms_norm_eps)
        k = _rms_norm(k, layer.k_norm, config.rms_norm_eps)
    mixed = attend(_rotate(q, rotary), _rotate(k, rotary), v)
    hidden = hidden + dot(mixed.reshape(*mixed.shape[:2], -1), "o")[0]
    x = _rms_norm(hidden, layer.post_norm, config.rms_norm_eps)
    if config.num_experts:
        y, routes = experts(x, layer, config, numerics)
        return hidden + y, routes
    if numerics.execution == "bf16" and numerics.split_k == 1 and x.shape[1] == 1:
        return hidden + _mlp_of_step(x, layer), None
    gate, up = dot(x, "gate", "up")
    return hidden + dot(swiglu(gate, up, _hidden_dtype(numerics, x)), "down")[0].astype(x.dtype), None


def _mlp_of_step(x: Float[Array, "B 1 D"], layer: LayerParams) -> Float[Array, "B 1 D"]:
    """The BF16 MLP of a decode step, features before rows and weights as the left operands.

    XLA:CPU packs the right operand of a product at every call; here that is the few rows and not the weights, which
    makes the whole decode step a sixth faster.
    """
    gate, up, down = (weight.astype(x.dtype) for weight in (layer.gate, layer.up, layer.down))
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)
    wide = (product("fd,bd->fb", weight, x[:, 0]).astype(x.dtype) for weight in (gate, up))
    return product("df,fb->db", down, swiglu(*wide)).astype(x.dtype).T[:, None]


def _gathered(layer: LayerParams, numerics: Numerics) -> LayerParams:
    """A layer's weights whole on every device of a mesh, cast before they travel; without a mesh as they are."""
    if not meshed():
        return layer
    names = [name for name in (*ATTENTION, *MLP, "router") if getattr(layer, name) is not None]
    cast = {name: getattr(layer, name).astype(source_dtype(name, numerics)) for name in names}
    return gathered(replace(layer, **cast), layer=True)


def _dots(layer: LayerParams, numerics: Numerics, key: Array | None = None) -> Dot:
    """The products of one layer; weights that share an input are one product where `numerics` fuse them."""

    def dot(x: Array, *names: str) -> tuple[Array, ...]:
        leaves = [getattr(layer, name) for name in names]
        # A key of its own for every product: q, o, gate, down, or each name.
        own = None if key is None else jax.random.fold_in(key, zlib.crc32(names[0].encode()))
        product = partial(quantized_dot, recipe=numerics.recipe, execution=numerics.execution_of(names[0]))
        if (fused := fused_weight(leaves, names[0], numerics)) is not None:
            y = product(x, fused, key=own)
            return tuple(jnp.split(y, np.cumsum([len(leaf) for leaf in leaves[:-1]]), axis=-1))
        weights = [weight_of(leaf, name, numerics) for leaf, name in zip(leaves, names, strict=True)]
        keys = [None if own is None else jax.random.fold_in(own, index) for index in range(len(names))]
        return tuple(product(x, weight, key=k) for weight, k in zip(weights, keys, strict=True))

    return dot


def _hidden_dtype(numerics: Numerics, x: Array) -> jnp.dtype:
    """What SwiGLU's output is rounded to on its way into the down projection."""
    return jnp.dtype(jnp.float32) if numerics.hidden_rounding == "none" else x.dtype


def _cached(x: Array, numerics: Numerics) -> Array:
    """Keys or values as the cache holds them."""
    if numerics.kv_cache == "bf16":
        return x
    limit = float(jnp.finfo(jnp.float8_e4m3fn).max)
    rounded = jnp.clip(x, -limit, limit).astype(jnp.float8_e4m3fn).astype(x.dtype)
    # The rounded value, with the gradient of x.
    return jax.lax.stop_gradient(rounded) + (x - jax.lax.stop_gradient(x))


def _heads(x: Array, head_dim: int) -> Array:
    return x.reshape(*x.shape[:-1], -1, head_dim)


# The functions below compute in float32 and round once, as the fused kernels of both sides do.


def _rms_norm(x: Array, scale: Array, eps: float) -> Array:
    wide = x.astype(jnp.float32)
    normal = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    gain = scale.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
    return (normal * gain).astype(x.dtype)


def _rotary(positions: Array, config: ModelConfig) -> tuple[Array, Array]:
    """Cosine and sine `[B, T, 1, d/2]`, float32."""
    frequency = _inverse_frequencies(config)[None, None, None, :]
    angle = positions[..., None, None].astype(jnp.float32) * frequency
    # Behind a barrier: XLA would otherwise compute sines anew in every layer and for every head.
    return jax.lax.optimization_barrier((jnp.cos(angle), jnp.sin(angle)))


def _inverse_frequencies(config: ModelConfig) -> np.ndarray:
    """theta^(-2i/d), computed in float64 on the host: XLA's float32 power is an ulp or two off."""
    return (config.rope_theta ** -(np.arange(0, config.head_dim, 2) / config.head_dim)).astype(np.float32)


def _rotate(x: Array, rotary: tuple[Array, Array]) -> Array:
    """Rotate the halves of each head (the Hugging Face layout): (a, b) -> (a cos - b sin, b cos + a sin)."""
    cos, sin = rotary
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
