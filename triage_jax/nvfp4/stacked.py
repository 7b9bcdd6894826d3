"""The product of a stack of experts, each with as many rows as any other: y[e, m] = x[e, m] · w[e]ᵀ.

What a mixture runs natively: `jax.nn.scaled_matmul` has a batched product, and no ragged one.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from triage_jax.nvfp4.backward import rounding_keys, whole
from triage_jax.nvfp4.experts import buffers_amax, check_experts
from triage_jax.nvfp4.hadamard import rotate
from triage_jax.nvfp4.operand import Operand
from triage_jax.nvfp4.product import Execution, bf16_stack, dense, product, quantised, stack_product
from triage_jax.nvfp4.quantize import QuantizedTensor
from triage_jax.nvfp4.spec import BLOCK, DotRecipe, QuantSpec
from triage_jax.nvfp4.split import split_of
from triage_jax.nvfp4.te import te_dot

type Quantised = Operand | QuantizedTensor
type Gradients = tuple[Float32[Array, "E M K"], Float32[Array, "E N K"]]


def stacked_dot(
    x: Float[Array, "E M K"],
    w: Float[Array, "E N K"],
    recipe: DotRecipe | None,
    execution: Execution,
    key: Array | None = None,
) -> Float[Array, "E M N"]:
    """x[e] · w[e]ᵀ for every expert e, in x's dtype. Rows of zeros change no other row.

    Executions and gradients as in `quantized_dot`; "te" multiplies one expert after the other. `recipe.experts` says
    which experts share a global scale: by default each expert's weight has its own, and the activations of all are one
    array, and so one scope "tensor" (with "te", each expert's are). In a gradient's products that quantise afresh that
    is so whatever the recipe says. `key` is for stochastic rounding, one per product and step.
    Raises ValueError as `quantized_dot` does, on scopes of experts that the execution would not follow, and on the
    activation scope "shard", which splits a batch and not the experts ("te" takes it).
    """
    if x.ndim != 3 or w.ndim != 3 or x.shape[0] != w.shape[0] or x.shape[2] != w.shape[2]:
        raise ValueError(f"stacked_dot: x [E, M, K] and w [E, N, K] must agree; got {x.shape} and {w.shape}")
    split_k = split_of(recipe, execution)
    if execution == "float32":
        return _plain(x, w)
    if execution == "bf16":
        return _dot(x, w, None, None, execution, split_k)
    if recipe is None:
        raise ValueError(f"stacked_dot: execution {execution!r} needs a DotRecipe")
    check_experts(recipe, execution)
    if execution == "te":
        return _one_by_one(x, w, recipe, key)
    if recipe.activation.scope == "shard":
        raise ValueError(
            "stacked_dot: activation.scope is 'shard'; accepted with experts: tensor, row, static"
        )
    return _dot(x, w, key, recipe, execution, split_k)


def quantised_stack(
    w: Float[Array, "E N K"], spec: QuantSpec, execution: Execution, *, keep_encode: bool = False
) -> Quantised:
    """Every expert's matrix quantised by itself; global scales `[E, 1, 1]` or `[E, N, 1]`."""
    each = jax.vmap(lambda matrix: quantised(matrix, spec, execution, keep_encode=keep_encode))(w)
    return _by_expert(each, lambda scale: scale.reshape(len(w), -1, 1))


def _by_expert(operand: Quantised, turn: Callable[[Array], Array]) -> Quantised:
    """The operand with its global scales turned."""
    if isinstance(operand, Operand):
        return replace(operand, scale=turn(operand.scale), encode=_maybe(turn, operand.encode))
    return replace(
        operand,
        global_scale=turn(operand.global_scale),
        encode_scale=_maybe(turn, operand.encode_scale),
    )


def _maybe(turn: Callable[[Array], Array], scale: Array | None) -> Array | None:
    return None if scale is None else turn(scale)


def stacked_nvfp4_gradients(
    x: Float[Array, "E M K"],
    w: Float[Array, "E N K"],
    g: Float[Array, "E M N"],
    recipe: DotRecipe,
    execution: Execution,
    key: Array | None,
) -> Gradients:
    """dx = g·w and dw = gᵀ·x of every expert, operands quantised afresh along their contraction.

    As `nvfp4_gradients` does for one product, wᵀ[e] with a global scale each. The tokens of an expert are rotated in
    groups of 16 of its own rows. Raises ValueError on stochastic rounding without a key.
    """
    for_outputs, for_tokens = rounding_keys(recipe, key)
    outputs = quantised(_fill(g), recipe.gradient, execution, for_outputs)
    dx = product(outputs, quantised_stack(_fill(_turned(w)), whole(recipe.weight), execution))
    gradient, activation = _fill(_turned(g)), _fill(_turned(x))
    if recipe.hadamard:
        gradient, activation = rotate(gradient), rotate(activation)
    tokens = quantised(gradient, recipe.gradient, execution, for_tokens)
    dw = product(tokens, quantised(activation, whole(recipe.activation), execution))
    return dx, dw


def _plain(x: Array, w: Array) -> Array:
    dtype = jnp.promote_types(jnp.promote_types(x.dtype, w.dtype), jnp.float32)
    y = jnp.einsum("emk,enk->emn", x.astype(dtype), w.astype(dtype), precision=lax.Precision.HIGHEST)
    return y.astype(x.dtype)


def _one_by_one(x: Array, w: Array, recipe: DotRecipe, key: Array | None) -> Array:
    """Transformer Engine has no batched NVFP4 product in JAX: a loop, whose body is compiled once."""
    if key is None:
        return lax.map(lambda given: te_dot(given[0], given[1], recipe), (x, w))
    keys = jax.random.split(key, len(w))
    return lax.map(lambda given: te_dot(given[0], given[1], recipe, given[2]), (x, w, keys))


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _dot(
    x: Array,
    w: Array,
    key: Array | None,
    recipe: DotRecipe | None,
    execution: Execution,
    split_k: int,
) -> Array:
    if recipe is None:
        return stack_product(x, w, split_k).astype(x.dtype)
    return _product(*_operands(x, w, recipe, execution), recipe).astype(x.dtype)


def _operands(x: Array, w: Array, recipe: DotRecipe, execution: Execution) -> tuple[Quantised, Quantised]:
    keep = recipe.keeps_encode
    left = quantised(
        x, recipe.activation, execution, scope_amax=buffers_amax(recipe, len(x)), keep_encode=keep
    )
    if recipe.experts.weight == "expert":
        return left, quantised_stack(w, recipe.weight, execution, keep_encode=keep)
    # One array, and so one scope "tensor"; tiles span no two experts all the same.
    shared = quantised(w, recipe.weight, execution, keep_encode=keep)
    return left, _by_expert(shared, lambda scale: jnp.broadcast_to(scale, (len(w), 1, 1)))


def _product(a: Quantised, b: Quantised, recipe: DotRecipe) -> Float32[Array, "E M N"]:
    return product(a, b, split_k=recipe.split_k, form=recipe.global_product)


type _Saved = tuple[Array | Quantised, Array | Quantised, Array | None, Array]
"""What the gradients are products of, the key, and no elements of w's dtype"""


def _forward(
    x: Array,
    w: Array,
    key: Array | None,
    recipe: DotRecipe | None,
    execution: Execution,
    split_k: int,
) -> tuple[Array, _Saved]:
    like_w = jnp.zeros(0, w.dtype)
    if recipe is not None and recipe.backward == "dequantized":
        left, right = _operands(x, w, recipe, execution)
        return _product(left, right, recipe).astype(x.dtype), (left, right, key, like_w)
    return _dot(x, w, key, recipe, execution, split_k), (x, w, key, like_w)


def _backward(
    recipe: DotRecipe | None, execution: Execution, split_k: int, saved: _Saved, g: Array
) -> tuple[Array, Array, None]:
    x, w, key, like_w = saved
    if isinstance(x, Operand | QuantizedTensor):
        x = dense(x)
    if isinstance(w, Operand | QuantizedTensor):
        w = dense(w)
    if recipe is not None and recipe.backward == "nvfp4":
        dx, dw = stacked_nvfp4_gradients(x, w, g, recipe, execution, key)
    else:
        dx, dw = bf16_stack("emn,enk->emk", g, w), bf16_stack("emn,emk->enk", g, x)
    return dx.astype(g.dtype), dw.astype(like_w.dtype), None


_dot.defvjp(_forward, _backward)


def _turned(x: Float[Array, "E M K"]) -> Float[Array, "E K M"]:
    return jnp.swapaxes(x, 1, 2)


def _fill(x: Float[Array, "E M K"]) -> Float[Array, "E M filled"]:
    return jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % BLOCK)))
