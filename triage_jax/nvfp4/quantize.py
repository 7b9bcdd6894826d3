"""Two-level NVFP4: E2M1 codes, an E4M3 scale per block of 16, one float32 scale per tensor or row."""

from typing import no_type_check

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, UInt8, UInt32

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
    """x ≈ e2m1(codes) · e4m3(scales) · global_scale.

    One code a byte. Scales are in the serving layout, one per 16 codes: a 16×16 tile's is repeated over its
    rows. The global scale is a scalar or [..., 1].
    """

    codes: UInt8[Array, "... K"]
    scales: UInt8[Array, "... blocks"]
    global_scale: Float32[Array, "..."]


@struct.dataclass
class BlockScales:
    """Per block: `decode` on the E4M3 grid and `encode`, a factor on x (rule "modelopt": a divisor of it)."""

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
    # Without the barrier XLA would reduce x a second time for the scope's maximum.
    amax = lax.optimization_barrier(block_amax(x, spec))
    if spec.scope == "static":
        scope_amax = np.float32(spec.static_amax)
        global_scale = jnp.asarray(scope_amax / RANGE)
    else:
        scope_amax = _float(amax.max(axis=-1, keepdims=True) if spec.scope == "row" else amax.max())
        global_scale = _divide(scope_amax, RANGE)
    amax = _float(amax)
    if spec.rule == "modelopt":
        divisor = jnp.where(global_scale == 0, 1, global_scale)
        ratio = _divide(amax, 6 * divisor)
        ratio = jnp.where(ratio < SMALLEST_SCALE, SMALLEST_SCALE, ratio)
        decode = e4m3_round(jnp.where(amax == 0, 1, ratio))
        encode = decode * divisor
    else:
        encode = jnp.minimum(RANGE / scope_amax, FLT_MAX)
        encode = jnp.where((scope_amax == 0) | (encode == 0), 1, encode)
        decode = e4m3_round(amax * (encode * SIXTH))
        encode = jnp.minimum(1 / (decode * (1 / encode)), FLT_MAX)
    # The barrier keeps XLA from computing a block's scales once per element.
    decode, encode = lax.optimization_barrier((decode, encode))
    return BlockScales(decode, encode, global_scale)


def block_amax(x: Float[Array, "... K"], spec: QuantSpec) -> UInt32[Array, "... blocks"]:
    """float32 bits of each block's largest |x|: as integers, magnitudes keep their order and NaNs come last.

    Rows beyond the last full 16×16 tile count as zeros. (XLA:CPU reduces 32-bit integers three times faster
    than 16-bit ones or floats.)
    """
    if x.ndim == 0 or x.shape[-1] % BLOCK or x.size == 0:
        raise ValueError(f"NVFP4 quantises blocks of {BLOCK} along the last axis; got shape {x.shape}")
    if spec.tile == "16x16" and x.ndim < 2:
        raise ValueError(f"tile '16x16' needs two axes; got shape {x.shape}")
    blocks = x.shape[-1] // BLOCK
    magnitude = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32) & np.uint32(0x7FFFFFFF)
    amax = magnitude.reshape(*x.shape[:-1], blocks, BLOCK).max(axis=-1)
    if spec.tile == "1x16":
        return amax
    *lead, rows, _ = x.shape
    padded = jnp.pad(amax, [(0, 0)] * len(lead) + [(0, -rows % BLOCK), (0, 0)])
    tiles = padded.reshape(*lead, -1, BLOCK, blocks).max(axis=-2)
    return jnp.repeat(tiles, BLOCK, axis=-2)[..., :rows, :]


def _divide(a: Float32[Array, "..."], b: Float32[Array, "..."] | np.float32) -> Float32[Array, "..."]:
    """a / b correctly rounded.

    XLA multiplies by 1/b where it sees that b is one constant or one broadcast number, traced or not. Inside
    a scan a barrier does not keep it from seeing; a divisor that seems to depend on every a does.
    """
    return a / jnp.where(a == a, b, a)


def _float(bits: UInt32[Array, "..."]) -> Float32[Array, "..."]:
    return lax.bitcast_convert_type(bits, jnp.float32)


def spread(blocks: Float[Array, "... blocks"]) -> Float[Array, "... K"]:
    """Each block's number on its 16 elements."""
    return jnp.repeat(blocks, BLOCK, axis=-1)


def scaled(x: Float[Array, "... K"], scales: BlockScales, spec: QuantSpec) -> Float32[Array, "... K"]:
    """What E2M1 rounds."""
    x, encode = x.astype(jnp.float32), spread(scales.encode)
    return _divide(x, encode) if spec.rule == "modelopt" else x * encode


def quantize(x: Float[Array, "... K"], spec: QuantSpec) -> QuantizedTensor:
    """Codes and scales of x by the rule of `block_scales`. Carries no gradient.

    Subnormal numbers count as zeros on a CPU. A NaN makes NaN what shares a scale with it: its whole scope,
    or its block or tile if the scope is static. An infinity leaves nothing finite in its scope; a static one
    saturates it. Raises ValueError unless K is a multiple of 16.
    """
    x = lax.stop_gradient(x)
    scales = block_scales(x, spec)
    return QuantizedTensor(
        codes=e2m1_encode(scaled(x, scales, spec)),
        scales=e4m3_encode(scales.decode),
        global_scale=scales.global_scale,
    )


def dequantize(q: QuantizedTensor, dtype: DTypeLike = jnp.float32) -> Float[Array, "... K"]:
    """(code · block scale) · global scale, the first product exact, cast to `dtype`."""
    values = e2m1_decode(q.codes) * spread(e4m3_decode(q.scales))
    return (values * q.global_scale).astype(dtype)
