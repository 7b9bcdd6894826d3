"""The parameter pytree: one struct for the model, one for all its layers stacked."""

from typing import Any

import flax.struct
import jax

from triage_jax.model.config import ModelConfig

# An array, or what stands for one inside a tree map (a sharding, a shape, a prequantised operand). Checked
# shapes here would refuse those, and a layer sliced out of the stack by `lax.scan`.
Leaf = Any


@flax.struct.dataclass
class LayerParams:
    """All layers, stacked on a leading axis L. Matrices are [out, in] as in Hugging Face files: y = x Wᵀ."""

    input_norm: Leaf  # [L, D]
    q: Leaf  # [L, H*hd, D]
    k: Leaf  # [L, K*hd, D]
    v: Leaf  # [L, K*hd, D]
    o: Leaf  # [L, D, H*hd]
    q_norm: Leaf | None  # [L, hd]; None without query/key normalisation
    k_norm: Leaf | None  # [L, hd]
    post_norm: Leaf  # [L, D]
    gate: Leaf  # [L, F, D]; of a mixture [L, E, F, D]
    up: Leaf  # as gate
    down: Leaf  # [L, D, F]; [L, E, D, F]
    router: Leaf | None = None  # [L, E, D]; None in a dense model


@flax.struct.dataclass
class Params:
    """A whole model."""

    embed: Leaf  # [V, D]
    layers: LayerParams | tuple[LayerParams, ...]  # stacked; a tuple, one per layer, in a sampler's weights
    final_norm: Leaf  # [D]
    lm_head: Leaf | None  # [V, D]; None when tied to `embed`


def abstract_params(config: ModelConfig, dtype: jax.typing.DTypeLike) -> Params:
    """Shapes without memory: a Params of `jax.ShapeDtypeStruct`, the one place that states every shape."""

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    L, D, F, V = config.num_layers, config.hidden_size, config.intermediate_size, config.vocab_size
    hd = config.head_dim
    experts = (config.num_experts,) if config.num_experts else ()
    queries, keys = config.num_heads * hd, config.num_kv_heads * hd
    return Params(
        embed=array(V, D),
        layers=LayerParams(
            input_norm=array(L, D),
            q=array(L, queries, D),
            k=array(L, keys, D),
            v=array(L, keys, D),
            o=array(L, D, queries),
            q_norm=array(L, hd) if config.qk_norm else None,
            k_norm=array(L, hd) if config.qk_norm else None,
            post_norm=array(L, D),
            gate=array(L, *experts, F, D),
            up=array(L, *experts, F, D),
            down=array(L, *experts, D, F),
            router=array(L, *experts, D) if experts else None,
        ),
        final_norm=array(D),
        lm_head=None if config.tie_embeddings else array(V, D),
    )
