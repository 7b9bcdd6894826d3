"""Two-level NVFP4: E2M1 codes, an E4M3 scale per block of 16, one float32 scale per tensor or row."""

from typing import no_type_check

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Float, Float32, UInt8

from triage_jax.nvfp4.formats import (
    E2M1_MAX,
    E4M3_MAX,
    e2m1_decode,
    e2m1_encode,
    e4m3_decode,
    e4m3_encode,
    e4m3_round,
)
from triage_jax.nvfp4.spec import BLOCK, QuantSpec

FLT_MAX = np.finfo(np.float32).max
RANGE = np.float32(E2M1_MAX * E4M3_MAX)
SIXTH = np.float32(1 / 6)
SMALLEST_SCALE = np.float32(2.0**-9)


@no_type_check  # the same tree also carries shardings, shapes and masks
@struct.dataclass
class QuantizedTensor:
    """x ≈ e2m1(codes) · e4m3(scales) · global_scale, in the serving layout: a 16×16 scale is repeated over its rows."""

    codes: UInt8[Array, "... K"]
    scales: UInt8[Array, "... blocks"]
    global_scale: Float32[Array, "..."]


@struct.dataclass
class BlockScales:
    """Per block: `decode` (on the E4M3 grid) and, under rule "te", the factor `encode` that codes are rounded from.

    Under rule "modelopt" `encode` is a divisor. `global_scale` is A/2688.
    """

    decode: Float32[Array, "... blocks"]
    encode: Float32[Array, "... blocks"]
    global_scale: Float32[Array, "..."]


def block_scales(x: Float[Array, "... K"], spec: QuantSpec) -> BlockScales:
    """Scales of every 1×16 block of x.

    Rule "te", each line one float32 rounding, with A the largest |x| of the scope and b of the block:
        S = min(2688/A, FLT_MAX), 1 where A or S is 0;  s = E4M3(b·(S·⅙));  e = min(1/(s·(1/S)), FLT_MAX)
    Rule "modelopt": s₂ = A/2688;  s = E4M3(clip(b/(6·s₂), 2⁻⁹, 448)), 1 where b is 0;  divisor s·s₂.
    Sources: TransformerEngine common/cast/nvfp4/core_nvfp4.cuh; Model-Optimizer qtensor/nvfp4_tensor.py.
    """
    amax = block_amax(x, spec)
    if spec.scope == "static":
        tensor_amax = jnp.float32(spec.static_amax)
    elif spec.scope == "row":
        tensor_amax = amax.max(axis=-1, keepdims=True)
    else:
        tensor_amax = amax.max()
    # Behind a barrier, because XLA turns a division by a known constant into a multiplication.
    global_scale = tensor_amax / lax.optimization_barrier(RANGE)
    if spec.rule == "modelopt":
        divisor = jnp.where(global_scale == 0, 1, global_scale)
        ratio = amax / (6 * divisor)
        decode = e4m3_round(
            jnp.where(ratio == 0, 1, jnp.where(ratio < SMALLEST_SCALE, SMALLEST_SCALE, ratio))
        )
        return BlockScales(decode, decode * divisor, global_scale)
    encode = jnp.minimum(RANGE / tensor_amax, FLT_MAX)
    encode = jnp.where((tensor_amax == 0) | (encode == 0), 1, encode)
    decode = e4m3_round(amax * (encode * SIXTH))
    return BlockScales(decode, jnp.minimum(1 / (decode * (1 / encode)), FLT_MAX), global_scale)


def block_amax(x: Float[Array, "... K"], spec: QuantSpec) -> Float32[Array, "... blocks"]:
    """Largest |x| of each block; NaN where the block holds one. Rows beyond the last full 16×16 tile count as zeros."""
    if x.ndim == 0 or x.shape[-1] % BLOCK or x.size == 0:
        raise ValueError(
            f"NVFP4 blocks are {BLOCK} wide: the last axis must be a positive multiple of it; got shape {x.shape}"
        )
    # As integers, magnitudes keep their order and every NaN lies above infinity.
    unsigned = jnp.uint16 if x.dtype == jnp.bfloat16 else jnp.uint32
    if x.dtype != jnp.bfloat16:
        x = x.astype(jnp.float32)
    magnitude = lax.bitcast_convert_type(x, unsigned) & unsigned(np.iinfo(unsigned).max >> 1)
    amax = magnitude.reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK).max(axis=-1)
    amax = lax.bitcast_convert_type(amax, x.dtype).astype(jnp.float32)
    if spec.tile == "1x16":
        return amax
    if x.ndim < 2:
        raise ValueError(f"tile '16x16' needs at least two axes; got shape {x.shape}")
    rows = x.shape[-2]
    padded = jnp.pad(amax, [(0, 0)] * (x.ndim - 2) + [(0, -rows % BLOCK), (0, 0)])
    tiles = padded.reshape(*x.shape[:-2], -1, BLOCK, amax.shape[-1]).max(axis=-2)
    return jnp.repeat(tiles, BLOCK, axis=-2)[..., :rows, :]


def spread(blocks: Float[Array, "... blocks"]) -> Float[Array, "... K"]:
    """Each block's number on its 16 elements."""
    return jnp.repeat(blocks, BLOCK, axis=-1)


def scaled(x: Float[Array, "... K"], scales: BlockScales, spec: QuantSpec) -> Float32[Array, "... K"]:
    """What E2M1 rounds."""
    x, encode = x.astype(jnp.float32), spread(scales.encode)
    return x / encode if spec.rule == "modelopt" else x * encode


def quantize(x: Float[Array, "... K"], spec: QuantSpec) -> QuantizedTensor:
    """Codes and scales of x; see `block_scales` for the rule. Raises ValueError unless K is a multiple of 16."""
    x = lax.stop_gradient(x)
    scales = block_scales(x, spec)
    return QuantizedTensor(
        codes=e2m1_encode(scaled(x, scales, spec)),
        scales=e4m3_encode(scales.decode),
        global_scale=scales.global_scale,
    )


def dequantize(q: QuantizedTensor, dtype: jnp.dtype = jnp.float32) -> Float[Array, "... K"]:
    """(code · block scale) · global scale, the first product exact, cast to `dtype`."""
    values = e2m1_decode(q.codes) * spread(e4m3_decode(q.scales))
    return (values * q.global_scale).astype(dtype)
