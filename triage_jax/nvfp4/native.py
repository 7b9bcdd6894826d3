"""The product of two NVFP4 tensors as one primitive: cuDNN's FP4 GEMM where there is one, its exact value elsewhere."""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float8e4m3fn, Float32, UInt8

from triage_jax.nvfp4.global_product import factor, joined
from triage_jax.nvfp4.quantize import QuantizedTensor
from triage_jax.nvfp4.spec import BLOCK, GlobalProduct


def block_scaled_product(
    a: QuantizedTensor, b: QuantizedTensor, form: GlobalProduct = "decode"
) -> Float32[Array, "... N"]:
    """y[..., m, n] = fl(g_a·g_b) · Σₖ (codeₐ·scaleₐ)[..., m, k] · (code_b·scale_b)[..., n, k] in float32.

    `form` "encode" multiplies by fl(1/fl(S_a·S_b)) instead, of the operands' encode scales.

    b [N, K] serves every row of a [..., K]; b [..., N, K] and a [..., M, K] are paired along their leading axes
    (experts). A global scale is a scalar, one per leading index, or broadcasts against the operand with K = 1.
    Carries no gradient.

    One `jax.nn.scaled_matmul`: cuDNN's FP4 GEMM from compute capability 10.0 on, dequantise and dot elsewhere.
    Both sum exact products in float32, so devices differ in the order of addition only (a block's partial sum
    has 20 significant bits).
    Raises ValueError on shapes that do not contract.
    """
    _check(a, b)
    lead = b.codes.shape[:-2]
    batch = math.prod(lead)

    def flat(x: Array) -> Array:
        return x.reshape(batch, -1, x.shape[-1])

    y = jax.nn.scaled_matmul(
        flat(e2m1_array(a.codes)),
        flat(e2m1_array(b.codes)),
        flat(e4m3_array(a.scales)),
        flat(e4m3_array(b.scales)),
    )
    shape = (*a.codes.shape[:-1], b.codes.shape[-2])
    left = _column(factor(a, form), a.codes.ndim)
    right = jnp.swapaxes(_column(factor(b, form), b.codes.ndim), -1, -2)
    # Of an unbatched b only [1, N] is left to broadcast; ranks are kept equal, as strict promotion wants them.
    right = right.reshape((1,) * (len(shape) - right.ndim) + right.shape) if len(shape) > 1 else right[0]
    return lax.stop_gradient(y.reshape(shape) * joined(left, right, form))


def e2m1_array(codes: UInt8[Array, "..."]) -> Array:
    """Codes as an array of `float4_e2m1fn`, which XLA packs two to a byte."""
    return lax.bitcast_convert_type(codes.astype(jnp.uint4), jnp.float4_e2m1fn)


def e4m3_array(bits: UInt8[Array, "..."]) -> Float8e4m3fn[Array, "..."]:
    """Block scales as an array of `float8_e4m3fn`."""
    return lax.bitcast_convert_type(bits, jnp.float8_e4m3fn)


def _column(scale: Float32[Array, "..."], ndim: int) -> Float32[Array, "..."]:
    """A global scale as it multiplies [..., rows, 1]: one per leading index where `vmap` left it so."""
    if scale.ndim == ndim:
        return scale
    return (
        scale.reshape(scale.shape + (1,) * (ndim - scale.ndim)) if scale.ndim else scale.reshape((1,) * ndim)
    )


def _check(a: QuantizedTensor, b: QuantizedTensor) -> None:
    left, right = a.codes.shape, b.codes.shape
    if len(right) < 2 or not left or left[-1] != right[-1] or (len(right) > 2 and left[:-2] != right[:-2]):
        raise ValueError(
            f"block_scaled_product: a [..., K] with b [N, K], or a [..., M, K] with b [..., N, K] over the same "
            f"leading axes; got {left} and {right}"
        )
    for name, operand in (("a", a), ("b", b)):
        shape, scale = operand.codes.shape, operand.global_scale.shape
        if operand.scales.shape != (*shape[:-1], shape[-1] // BLOCK) or shape[-1] % BLOCK:
            raise ValueError(
                f"block_scaled_product: {name} has codes {shape} and scales {operand.scales.shape}; "
                f"a scale per {BLOCK} codes of the last axis is needed"
            )
        whole = (
            len(scale) == len(shape)
            and scale[-1] == 1
            and all(size in (1, full) for size, full in zip(scale[:-1], shape[:-1], strict=True))
        )
        if scale and not whole and scale != shape[:-2]:
            raise ValueError(
                f"block_scaled_product: {name} has codes {shape} and a global scale of shape {scale}; accepted: (), "
                f"{shape[:-2]} or one that broadcasts to {(*shape[:-1], 1)}"
            )
