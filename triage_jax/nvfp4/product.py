"""The product of two quantised operands: emulated in BF16, or the native primitive."""

from typing import Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Float, Float32

from triage_jax.nvfp4.native import block_scaled_product
from triage_jax.nvfp4.operand import Operand, to_operand
from triage_jax.nvfp4.quantize import QuantizedTensor, dequantize, quantize
from triage_jax.nvfp4.spec import QuantSpec

Execution = Literal["float32", "bf16", "emulated", "scaled_matmul", "te"]


def quantised(
    x: Float[Array, "... K"], spec: QuantSpec, execution: Execution, key: Array | None = None
) -> Operand | QuantizedTensor:
    """x as the execution's product takes it; both forms stand for the same numbers."""
    return quantize(x, spec, key) if execution == "scaled_matmul" else to_operand(x, spec, key)


def product(a: Operand | QuantizedTensor, b: Operand | QuantizedTensor) -> Float32[Array, "... N"]:
    """y[..., n] = fl(sₐ·s_b)·Σₖ a[..., k]·b[n, k], accumulated in float32; two operands of one form.

    Stacks a [E, M, K] and b [E, N, K] are paired, with global scales that broadcast against them.
    Raises TypeError on a pair of different forms.
    """
    if isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor):
        return block_scaled_product(a, b)
    if isinstance(a, Operand) and isinstance(b, Operand):
        ndim = a.values.ndim
        if b.values.ndim == 3:
            scale = a.scale * (jnp.swapaxes(b.scale, 1, 2) if b.scale.ndim else b.scale)
            return bf16_stack("emk,enk->emn", a.values, b.values) * scale
        return bf16_product(a.values, ndim - 1, b.values, 1) * (a.scale * along_output(b.scale, ndim))
    raise TypeError(f"product: operands of two forms, {type(a).__name__} and {type(b).__name__}")


def dense(a: Operand | QuantizedTensor) -> BFloat16[Array, "... K"]:
    """An operand's numbers, rounded to BF16 after the product with the global scale."""
    if isinstance(a, QuantizedTensor):
        return dequantize(a, jnp.bfloat16)
    return (a.values.astype(jnp.float32) * a.scale).astype(jnp.bfloat16)


def along_output(scale: Float32[Array, "..."], ndim: int) -> Float32[Array, "..."]:
    """A weight's scale, a scalar or [N, 1], as it multiplies the product's last axis."""
    return scale.reshape((1,) * (ndim - 1) + (-1,)) if scale.ndim else scale


def bf16_product(a: Array, a_axis: int, b: Array, b_axis: int) -> Float32[Array, "..."]:
    """Operands cast to BF16, contracted over one axis each, accumulated in float32."""
    return contract(a.astype(jnp.bfloat16), a_axis, b.astype(jnp.bfloat16), b_axis, jnp.dtype(jnp.float32))


def bf16_stack(pairs: str, a: Float[Array, "E _ _"], b: Float[Array, "E _ _"]) -> Float32[Array, "E _ _"]:
    """An einsum over experts of operands cast to BF16, accumulated in float32."""
    a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
    return jnp.einsum(pairs, a, b, preferred_element_type=jnp.float32)


def contract(
    a: Array, a_axis: int, b: Array, b_axis: int, dtype: jnp.dtype, precision: lax.Precision | None = None
) -> Array:
    axes = (((a_axis,), (b_axis,)), ((), ()))
    return lax.dot_general(a, b, axes, precision=precision, preferred_element_type=dtype)
