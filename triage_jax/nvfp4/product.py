"""The product of two quantised operands: emulated in BF16, or the native primitive."""

from typing import Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Float, Float32

from triage_jax.nvfp4.global_product import factor, joined
from triage_jax.nvfp4.native import block_scaled_product
from triage_jax.nvfp4.operand import Operand, to_operand
from triage_jax.nvfp4.quantize import QuantizedTensor, dequantize, quantize
from triage_jax.nvfp4.scales import ScopeAmax
from triage_jax.nvfp4.spec import GlobalProduct, QuantSpec
from triage_jax.nvfp4.split import split_sum

Execution = Literal["float32", "bf16", "emulated", "scaled_matmul", "te"]


def quantised(
    x: Float[Array, "... K"],
    spec: QuantSpec,
    execution: Execution,
    key: Array | None = None,
    scope_amax: ScopeAmax | None = None,
    *,
    keep_encode: bool = False,
) -> Operand | QuantizedTensor:
    """x as the execution's product takes it; both forms stand for the same numbers."""
    quantiser = quantize if execution == "scaled_matmul" else to_operand
    return quantiser(x, spec, key, scope_amax, keep_encode=keep_encode)


def product(
    a: Operand | QuantizedTensor,
    b: Operand | QuantizedTensor,
    *,
    split_k: int = 1,
    form: GlobalProduct = "decode",
) -> Float32[Array, "... N"]:
    """y[..., n] = s·Σₖ a[..., k]·b[n, k], accumulated in float32; two operands of one form.

    s is fl(Dₐ·D_b), or of the form "encode" fl(1/fl(Sₐ·S_b)). Stacks a [E, M, K] and b [E, N, K] are paired, with
    global scales that broadcast against them. `split_k` as in `DotRecipe`, of two `Operand`s.
    Raises TypeError on a pair of different forms.
    """
    if isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor):
        return block_scaled_product(a, b, form)
    if isinstance(a, Operand) and isinstance(b, Operand):
        ndim, left, right = a.values.ndim, factor(a, form), factor(b, form)
        if b.values.ndim == 3:
            scale = joined(left, jnp.swapaxes(right, 1, 2) if right.ndim else right, form)
            return stack_product(a.values, b.values, split_k) * scale
        scale = joined(left, along_output(right, ndim), form)
        return bf16_product(a.values, ndim - 1, b.values, 1, split_k) * scale
    raise TypeError(f"product: operands of two forms, {type(a).__name__} and {type(b).__name__}")


def dense(a: Operand | QuantizedTensor) -> BFloat16[Array, "... K"]:
    """An operand's numbers, rounded to BF16 after the product with the global scale."""
    if isinstance(a, QuantizedTensor):
        return dequantize(a, jnp.bfloat16)
    return (a.values.astype(jnp.float32) * a.scale).astype(jnp.bfloat16)


def along_output(scale: Float32[Array, "..."], ndim: int) -> Float32[Array, "..."]:
    """A weight's scale, a scalar or [N, 1], as it multiplies the product's last axis."""
    return scale.reshape((1,) * (ndim - 1) + (-1,)) if scale.ndim else scale


def bf16_product(a: Array, a_axis: int, b: Array, b_axis: int, split_k: int = 1) -> Float32[Array, "..."]:
    """Operands cast to BF16, contracted over one axis each, accumulated in float32, in `split_k` runs."""
    a, b, dtype = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), jnp.dtype(jnp.float32)
    if split_k == 1:
        return contract(a, a_axis, b, b_axis, dtype)

    def run(at: slice) -> Array:
        left = lax.slice_in_dim(a, at.start, at.stop, axis=a_axis)
        return contract(left, a_axis, lax.slice_in_dim(b, at.start, at.stop, axis=b_axis), b_axis, dtype)

    return split_sum(run, a.shape[a_axis], split_k)


def stack_product(
    a: Float[Array, "E M K"], b: Float[Array, "E N K"], split_k: int = 1
) -> Float32[Array, "E M N"]:
    """a[e] · b[e]ᵀ of every expert, as `bf16_product`."""
    if split_k == 1:
        return bf16_stack("emk,enk->emn", a, b)
    return split_sum(lambda at: bf16_stack("emk,enk->emn", a[..., at], b[..., at]), a.shape[-1], split_k)


def bf16_stack(pairs: str, a: Float[Array, "E _ _"], b: Float[Array, "E _ _"]) -> Float32[Array, "E _ _"]:
    """An einsum over experts of operands cast to BF16, accumulated in float32."""
    a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
    return jnp.einsum(pairs, a, b, preferred_element_type=jnp.float32)


def contract(
    a: Array, a_axis: int, b: Array, b_axis: int, dtype: jnp.dtype, precision: lax.Precision | None = None
) -> Array:
    axes = (((a_axis,), (b_axis,)), ((), ()))
    return lax.dot_general(a, b, axes, precision=precision, preferred_element_type=dtype)
