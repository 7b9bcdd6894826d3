"""Two-level NVFP4: E2M1 codes, an E4M3 scale per block of 16, one float32 scale per tensor or row."""

from typing import no_type_check

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, UInt8

from triage_jax.nvfp4.formats import E2M1_MAX, e2m1_decode, e2m1_encode, e2m1_round, e4m3_decode, e4m3_encode
from triage_jax.nvfp4.four_over_six import best_scale
from triage_jax.nvfp4.scales import (
    ScopeAmax,
    as_float,
    block_amax,
    divide,
    element_scale,
    global_scales,
    rounded_scale,
    scale_ratio,
    spread,
)
from triage_jax.nvfp4.spec import QuantSpec
from triage_jax.nvfp4.stochastic import e2m1_round_stochastic

_CODE_OF_NAN = {"six": E2M1_MAX, "minus_zero": -0.0}


@no_type_check  # the same tree also carries shardings, shapes and masks
@struct.dataclass
class QuantizedTensor:
    """x ≈ e2m1(codes) · e4m3(scales) · global_scale.

    One code a byte. Scales are in the serving layout, one per 16 codes: a 16×16 tile's is repeated over its
    rows. The global scale is a scalar or [..., 1]; so is encode_scale, S of `rules`, where a product wants it: 1/S is
    not always the global scale's very bits.
    """

    codes: UInt8[Array, "... K"]
    scales: UInt8[Array, "... blocks"]
    global_scale: Float32[Array, "..."]
    encode_scale: Float32[Array, "..."] | None = None


@struct.dataclass
class BlockScales:
    """Per block: `decode` on the E4M3 grid and `encode`, a factor on x or, where the rule divides, a divisor."""

    decode: Float32[Array, "... blocks"]
    encode: Float32[Array, "... blocks"]
    global_scale: Float32[Array, "..."]
    encode_scale: Float32[Array, "..."]


def block_scales(
    x: Float[Array, "... K"], spec: QuantSpec, scope_amax: ScopeAmax | None = None
) -> BlockScales:
    """Scales of every 1×16 block of x by the arithmetic that `rules` defines; see `global_scales` for `scope_amax`."""
    if spec.nan != "spread":
        x = jnp.where(jnp.isnan(x), 0, x)
    # Without the barrier XLA would reduce x a second time for the scope's maximum.
    magnitude = lax.optimization_barrier(block_amax(x, spec))
    scope, amax, arithmetic = global_scales(magnitude, spec, scope_amax), as_float(magnitude), spec.arithmetic
    if spec.four_over_six:
        decode = best_scale(x, amax, scope, spec)
    else:
        ratio = scale_ratio(arithmetic.ratio, amax, scope)
        decode = rounded_scale(arithmetic.scale_floor, ratio, amax)
    encode = element_scale(arithmetic.element, decode, scope)
    # The barrier keeps XLA from computing a block's scales once per element.
    decode, encode = lax.optimization_barrier((decode, encode))
    return BlockScales(decode, encode, scope.decode, scope.encode)


def scaled(x: Float[Array, "... K"], scales: BlockScales, spec: QuantSpec) -> Float32[Array, "... K"]:
    """What E2M1 rounds."""
    x, encode = x.astype(jnp.float32), spread(scales.encode)
    y = divide(x, encode) if spec.arithmetic.divides else x * encode
    return y if spec.nan == "spread" else jnp.where(jnp.isnan(x), np.float32(_CODE_OF_NAN[spec.nan]), y)


def rounded(
    x: Float[Array, "... K"], scales: BlockScales, spec: QuantSpec, key: Array | None
) -> Float32[Array, "... K"]:
    """x on the E2M1 grid of its blocks, to nearest or, given a key, stochastically."""
    y = scaled(x, scales, spec)
    return e2m1_round(y) if key is None else e2m1_round_stochastic(y, key)


def quantize(
    x: Float[Array, "... K"],
    spec: QuantSpec,
    key: Array | None = None,
    scope_amax: ScopeAmax | None = None,
    *,
    keep_encode: bool = False,
) -> QuantizedTensor:
    """Codes and scales of x; with a key the codes are rounded stochastically. Carries no gradient.

    `scope_amax` replaces the scope's largest magnitudes (`scales.global_scales`), `keep_encode` keeps S.

    Subnormal numbers count as zeros on a CPU. A NaN makes NaN what shares a scale with it: its whole scope,
    or its block or tile if the scope is static; unless `spec.nan` gives it a code of its own. An infinity leaves
    nothing finite in its scope; a static one saturates it. Raises ValueError unless K is a multiple of 16, and where
    shards do not divide the rows.
    """
    x = lax.stop_gradient(x)
    scales = block_scales(x, spec, scope_amax)
    return QuantizedTensor(
        codes=e2m1_encode(scaled(x, scales, spec) if key is None else rounded(x, scales, spec, key)),
        scales=e4m3_encode(scales.decode),
        global_scale=scales.global_scale,
        encode_scale=scales.encode_scale if keep_encode else None,
    )


def dequantize(q: QuantizedTensor, dtype: DTypeLike = jnp.float32) -> Float[Array, "... K"]:
    """(code · block scale) · global scale, the first product exact, cast to `dtype`."""
    values = e2m1_decode(q.codes) * spread(e4m3_decode(q.scales))
    return (values * q.global_scale).astype(dtype)
