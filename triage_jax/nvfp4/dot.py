"""One product, several executions: y[..., n] = Σₖ x[..., k] · w[n, k]."""

from functools import partial
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from triage_jax.nvfp4.operand import Operand, to_operand
from triage_jax.nvfp4.spec import DotRecipe

Execution = Literal["float32", "bf16", "emulated"]


def quantized_dot(
    x: Float[Array, "... K"],
    w: Float[Array, "N K"] | Operand,
    recipe: DotRecipe | None,
    execution: Execution,
) -> Float[Array, "... N"]:
    """x · wᵀ in x's dtype; w lies output first, as Hugging Face stores it.

    execution
        "float32": the plain product in float32 (float64 if an operand is) at highest precision, with its own
        gradient.
        "bf16": operands cast to BF16, float32 accumulation.
        "emulated": both operands quantised by `recipe` (an `Operand` is taken as it is), the BF16 product of
        code × block scale with float32 accumulation, then times fl(sₓ·s_w) in float32. A native NVFP4 product
        differs from it in the order of accumulation only.

    The last two have a straight-through gradient: dx = g·w, dw = gᵀ·x on the unquantised operands cast to
    BF16, accumulated in float32. An `Operand` weight has no gradient and enters dx dequantised.
    Raises ValueError on an unknown execution, on "emulated" without a recipe, on shapes that do not contract.
    """
    if execution not in get_args(Execution):
        raise ValueError(f"execution is {execution!r}; accepted: {', '.join(get_args(Execution))}")
    shape = w.values.shape if isinstance(w, Operand) else w.shape
    if len(shape) != 2 or x.ndim == 0 or x.shape[-1] != shape[-1]:
        raise ValueError(f"quantized_dot: x [..., K] and w [N, K] must share K; got {x.shape} and {shape}")
    if execution == "float32":
        return _plain(x, w)
    if execution == "emulated" and recipe is None:
        raise ValueError("quantized_dot: execution 'emulated' needs a DotRecipe")
    return _straight_through(x, w, recipe if execution == "emulated" else None)


def _plain(x: Float[Array, "... K"], w: Float[Array, "N K"] | Operand) -> Float[Array, "... N"]:
    if isinstance(w, Operand):
        w = lax.stop_gradient(w.values.astype(jnp.float32) * w.scale)
    dtype = jnp.promote_types(jnp.promote_types(x.dtype, w.dtype), jnp.float32)
    y = _contract(x.astype(dtype), x.ndim - 1, w.astype(dtype), 1, dtype, lax.Precision.HIGHEST)
    return y.astype(x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _straight_through(
    x: Float[Array, "... K"], w: Float[Array, "N K"] | Operand, recipe: DotRecipe | None
) -> Float[Array, "... N"]:
    if recipe is None:
        y = _bf16_product(x, x.ndim - 1, w.values if isinstance(w, Operand) else w, 1)
        y = y * _along_output(w.scale, x.ndim) if isinstance(w, Operand) else y
        return y.astype(x.dtype)
    left = to_operand(x, recipe.activation)
    right = w if isinstance(w, Operand) else to_operand(w, recipe.weight)
    y = _bf16_product(left.values, x.ndim - 1, right.values, 1)
    return (y * (left.scale * _along_output(right.scale, x.ndim))).astype(x.dtype)


def _forward(
    x: Array, w: Array | Operand, recipe: DotRecipe | None
) -> tuple[Array, tuple[Array, Array | Operand]]:
    return _straight_through(x, w, recipe), (x, w)


def _backward(
    recipe: DotRecipe | None, residuals: tuple[Array, Array | Operand], g: Array
) -> tuple[Array, Array | None]:
    x, w = residuals
    last = g.ndim - 1
    if isinstance(w, Operand):
        # One scale leaves the sum afterwards; a scale per output enters it with g.
        if w.scale.ndim:
            dx = _bf16_product(g * _along_output(w.scale, g.ndim), last, w.values, 0)
        else:
            dx = _bf16_product(g, last, w.values, 0) * w.scale
        return dx.astype(x.dtype), None
    dx = _bf16_product(g, last, w, 0)
    dw = _bf16_product(g.reshape(-1, g.shape[-1]), 0, x.reshape(-1, x.shape[-1]), 0)
    return dx.astype(x.dtype), dw.astype(w.dtype)


_straight_through.defvjp(_forward, _backward)


def _along_output(scale: Float32[Array, "..."], ndim: int) -> Float32[Array, "..."]:
    """A weight's scale, a scalar or [N, 1], as it multiplies the product's last axis."""
    return scale.reshape((1,) * (ndim - 1) + (-1,)) if scale.ndim else scale


def _bf16_product(a: Array, a_axis: int, b: Array, b_axis: int) -> Float32[Array, "..."]:
    return _contract(a.astype(jnp.bfloat16), a_axis, b.astype(jnp.bfloat16), b_axis, jnp.dtype(jnp.float32))


def _contract(
    a: Array, a_axis: int, b: Array, b_axis: int, dtype: jnp.dtype, precision: lax.Precision | None = None
) -> Array:
    axes = (((a_axis,), (b_axis,)), ((), ()))
    return lax.dot_general(a, b, axes, precision=precision, preferred_element_type=dtype)
